"""What a page holds of a trace: its bytes, its values to four digits, within its limit."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import flashlab as fl
from flashlab.player import INLINE_LIMIT, LIMIT
from flashlab.player.pack import THINNINGS, Thinning, document, float24, kept
from flashlab.player.page import Part, attribute, build
from tests.flashlab.player.traces import LESSON, SMALL, lesson, long, record, small
from tests.simulator.problems import taken_by


class Parts(HTMLParser):
    """The elements of a page: scripts and styles with their text, and every attribute that names an address."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.text: list[tuple[str, dict[str, str | None], str]] = []
        self.addresses: list[str] = []
        self.policy = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.text.append((tag, given, ""))
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"] or ""

    def handle_endtag(self, tag: str) -> None:
        self.text.append(("", {}, ""))  # what follows is not of the element that just ended

    def handle_data(self, data: str) -> None:
        if self.text:
            tag, given, text = self.text[-1]
            self.text[-1] = tag, given, text + data

    def blobs(self) -> list[bytes]:
        packed = [text for tag, given, text in self.text if tag == "script" and given.get("class") == "data"]
        return [gzip.decompress(base64.b64decode(text.strip())) for text in packed]

    def data(self) -> Any:
        """The settings of the page, with its traces."""
        settings, *blobs = self.blobs()
        return {**json.loads(settings), "traces": [json.loads(blob) for blob in blobs[::2]]}


def decoded(planes: bytes) -> np.ndarray:
    """What the page makes of the three planes."""
    high, middle, low = np.frombuffer(planes, np.uint8).reshape(3, -1).astype(np.uint32)
    return ((high << 24) | (middle << 16) | (low << 8)).view(np.float32)


@given(arrays.arrays(np.float32, st.integers(0, 50), elements=st.floats(width=32)))
def test_values_keep_four_digits(x: np.ndarray) -> None:
    back = decoded(float24(x))
    finite = np.isfinite(x)
    assert (np.isnan(back) == np.isnan(x)).all() and (back[np.isinf(x)] == x[np.isinf(x)]).all()
    assert np.isfinite(back[finite]).all()
    tiny = np.finfo(np.float32).tiny
    assert (np.abs(back[finite].astype(float) - x[finite]) <= np.maximum(np.abs(x[finite]), tiny) * 2.0**-15).all()


@given(st.integers(0, 200), st.integers(0, 50))
def test_kept_are_spread_over_all(n: int, most: int) -> None:
    indices = kept(n, most).tolist()
    assert len(indices) == min(n, most) == len(set(indices)) and indices == sorted(indices)
    assert all(0 <= index < n for index in indices)
    assert len(indices) < 2 or max(np.diff(indices)) - min(np.diff(indices)) <= 1


def test_thinnings_fall() -> None:
    x = np.zeros((128, 64), np.float32)
    sizes = [thinning.of(x).size for thinning in THINNINGS]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == x.size and sizes[-1] == 0
    assert Thinning(4, 4).of(np.zeros((128, 1), np.float32)).shape == (128, 1)


@pytest.mark.parametrize("algorithm", fl.catalogue.of())
def test_the_document_holds_the_counts(algorithm: str) -> None:
    """The bytes on the page are those of the formula for one head."""
    packed = document(lesson(algorithm))
    sums: dict[tuple[str, str], int] = {}
    for event in packed["events"]:
        for tensor, _, _, _, *moved in event[4]:
            for kind, n in zip(moved[::2], moved[1::2], strict=True):
                key = packed["names"][tensor], packed["names"][kind]
                sums[key] = sums.get(key, 0) + n
    counts = fl.count(algorithm, taken_by(algorithm, LESSON).replace(heads=1), tile=(32, 32), device="a100")
    for tensor, moved in counts.by_tensor.items():
        for kind in ("hbm_read", "hbm_write", "sram_read", "sram_write"):
            assert sums.get((tensor, kind.replace("_", ".")), 0) == getattr(moved, kind), (tensor, kind)
    assert packed["sram_limit"] == fl.DEVICES["a100-40"].sram_per_block
    assert max(sum(n for _, n in alive) for alive in packed["srams"]) == counts.sram.peak


def test_what_an_author_says_of_a_step_is_kept() -> None:
    @fl.program
    def told(m: Any, q: Any, k: Any, v: Any, problem: Any, tile: Any) -> Any:
        out = m.output("out")
        for block in m.launch("told", rows=problem.row_tiles(tile), warps=1):
            block.step("fetch")  # V's own rows: "<b>" & so on
            x = block.fetch(v, block.i, tile.rows)
            block.step("store")
            block.store(out, x, block.i, tile.rows)
        return out

    (source,) = document(record(told, SMALL, (16, 16)))["sources"]
    first, second = source["steps"].items()
    assert first[1] == (first[0] + 1, 'V\'s own rows: "<b>" & so on') and second[1] == (second[0] + 1, "")


def test_the_page_holds_every_value_of_a_small_trace() -> None:
    trace = small("flash2")
    parts = Parts(fl.player(trace).html())
    assert parts.data()["thinning"] == [None, None, None]
    everything = np.concatenate([x.ravel() for event in trace.events for x in event.values.values()])
    assert np.allclose(decoded(parts.blobs()[2]), everything, rtol=2.0**-15, atol=0, equal_nan=True)


def test_sizes() -> None:
    """A lesson's page stays under 1 MB with every value, even of two traces; a frame under 300 KB, whatever is traced."""
    for traces in ([lesson("flash2")], [lesson("standard"), lesson("flash2")], [lesson("flash1"), lesson("flash2")]):
        player = fl.player(*traces)
        page = player.html()
        assert len(page.encode()) <= LIMIT == 1_000_000
        assert Parts(page).data()["thinning"] == [None, None, None]
        assert len(player.frame().encode()) <= INLINE_LIMIT == 300_000


@pytest.mark.long
def test_a_long_trace_is_thinned() -> None:
    player = fl.player(long())
    for page, limit in ((player.html(), LIMIT), (Parts(player.frame()).text[0][1]["srcdoc"] or "", INLINE_LIMIT)):
        assert len(page.encode()) <= limit
        data = Parts(page).data()
        assert data["thinning"][0] is not None and len(data["traces"][0]["events"]) == len(long().events)
    assert len(player.frame().encode()) <= INLINE_LIMIT


@pytest.mark.long
@pytest.mark.parametrize("limit", [123_000, 128_000])
def test_what_no_thinning_helps_is_cut(limit: int) -> None:
    parts = [Part(long()), Part(small("flash2"))]
    assert len(attribute(build(parts, step=1, limit=limit, cut=False, escaped=True))) > limit
    page = build(parts, step=1, limit=limit, cut=True, escaped=True)
    assert 0.9 * limit < len(attribute(page).encode()) <= limit
    first, second = Parts(page).data()["traces"]
    assert 800 < len(first["events"]) < first["all"] == len(long().events)
    assert first["blocks"][-1][3] == first["launches"][-1]["stop"] == len(first["events"])
    assert len(second["events"]) == second["all"]


HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><!--<script>"


def hostile() -> fl.Trace:
    """A trace whose every text is an attack, from a file as a stranger would send it."""
    given = small("flash2").to_dict()
    text = json.dumps(given)
    for name in ("flash2", "load_k", "scores", "acc", "a100-40", "lse"):
        text = text.replace(json.dumps(name), json.dumps(name + HOSTILE))
    given = json.loads(text)
    for source in given["sources"].values():
        source["text"] = HOSTILE + "\n" + source["text"] + HOSTILE
    given["events"][3]["step"] = "constructor"
    given["events"][4]["step"] = "__proto__"
    given["events"][4]["values"] = {
        "__proto__": given["events"][5]["values"]["m_i"],
        "constructor": given["events"][5]["values"]["l_i"],
    }
    return fl.Trace.from_dict(given)


def test_nothing_of_a_trace_is_markup_and_nothing_is_loaded() -> None:
    page = fl.player(hostile(), small("standard")).html()
    parts = Parts(page)
    assert HOSTILE not in page and "<img" not in page and "<!--" not in page
    assert parts.addresses == []
    tags = [tag for tag, _, _ in parts.text]
    assert tags.count("script") == 6 and "img" not in tags  # five of data, one of code
    assert "://" not in re.sub(r"<script type=\"text/plain\".*?</script>", "", page)
    assert HOSTILE in json.dumps(parts.data(), ensure_ascii=False).replace('\\"', '"')


def test_the_policy_allows_the_pages_own_script_and_style_only() -> None:
    parts = Parts(fl.player(small("flash2")).html())
    for tag in ("script", "style"):
        (text,) = (text for name, given, text in parts.text if name == tag and given.get("class") != "data")
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in parts.policy
    assert "default-src 'none'" in parts.policy and "unsafe" not in parts.policy


def test_a_page_is_the_same_every_time() -> None:
    assert fl.player(small("flash1")).html() == fl.player(small("flash1")).html()
