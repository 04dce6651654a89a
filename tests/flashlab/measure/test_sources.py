"""Evidence knows its kernel: digests of sources, and the ticks that they decide."""

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kernels_cu
from docs._site import evidence, readme
from flashlab.base.files import plain
from flashlab.measure import results, sources
from simulator.catalogue import CATALOGUE
from simulator.errors import UsageError

FEW = ("memory.cuh", "wgmma.cuh", "drafts.cuh")
HEADERS = [
    pytest.param(path.name, marks=[] if path.name in FEW else pytest.mark.long)
    for path in sorted(kernels_cu.include_dir().glob("*.cuh"))
]
WITH_KERNELS = {name: row for name, row in CATALOGUE.items() if row.kernels}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the kernels that a test may change."""
    return Path(
        shutil.copytree(
            kernels_cu.include_dir().parent, tmp_path / "kernels_cu", ignore=shutil.ignore_patterns("emulator")
        )
    )


def all_tokens() -> dict[str, str]:
    return {name: sources.digest_of_tokens(row) for name, row in WITH_KERNELS.items()}


@given(st.lists(st.sampled_from(["x", "y1", "+", "=", "{", "}", '"// no"', "0.5f"]), max_size=20), st.data())
def test_comments_and_white_space_are_no_tokens(words: list[str], data: st.DataObject):
    between = st.sampled_from([" ", "\n", "\t", " /* a comment */ ", " // another\n"])
    text = "".join(word + data.draw(between) for word in words)
    assert sources.tokens(text) == sources.tokens(" ".join(words))


@pytest.mark.alike(1)
@pytest.mark.parametrize("header", HEADERS)
def test_a_header_that_changes_names_what_it_reaches(header: str, copy: Path):
    """A comment names nothing; a token names the algorithms whose sources include the header, at any depth, and no other."""
    before, path = all_tokens(), copy / "include" / header
    text = path.read_text(encoding="utf-8")
    with kernels_cu.sources_in(copy):
        path.write_text(f"// a comment\n{text}", encoding="utf-8")
        assert all_tokens() == before
        path.write_text(f"{text}\nstruct Seeded {{}};\n", encoding="utf-8")
        changed = {name for name, digest in all_tokens().items() if digest != before[name]}
    assert changed == {name for name, row in WITH_KERNELS.items() if includes(row.kernels, header)}


def includes(kernels: tuple[object, ...], header: str) -> bool:
    """By following `#include` alone, from a kernel's file on."""
    reached = {f"{kernel.source}.cu" for kernel in kernels if kernel.language == "cuda"}  # type: ignore[attr-defined]
    while True:
        folders = [kernels_cu.include_dir().parent, kernels_cu.include_dir()]
        files = [folder / name for name in reached for folder in folders if (folder / name).is_file()]
        more = {found for path in files for found in re.findall(r'#include "(.+?)"', path.read_text(encoding="utf-8"))}
        if more <= reached:
            return header in reached
        reached |= more


@pytest.mark.alike(1)
@pytest.mark.parametrize("header", ["wgmma.cuh", "drafts.cuh"])
def test_a_changed_header_turns_exactly_its_ticks_to_circles(header: str, copy: Path):
    before = {(x.algorithm, x.column): x.state for x in evidence.evidence()}
    path = copy / "include" / header
    path.write_text(f"{path.read_text(encoding='utf-8')}\nstruct Seeded {{}};\n", encoding="utf-8")
    with kernels_cu.sources_in(copy):
        after = {(x.algorithm, x.column): x.state for x in evidence.evidence()}
    reached = {name for name, row in WITH_KERNELS.items() if includes(row.kernels, header)}
    was_todays = {key for key, state in before.items() if state == "today's" and key[0] in reached}
    assert was_todays and {key for key in before if after[key] != before[key]} == was_todays
    assert {after[key] for key in was_todays} == {"older"}


def test_the_digests_in_the_file_are_todays():
    kept = {name: x.digest.tokens for name, x in sources.known(evidence.FOLDER).items()}
    assert kept == all_tokens(), "run python -m docs._site.evidence renew"


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", ["flash1", pytest.param("flash3", marks=pytest.mark.long)])
def test_the_ptx_of_the_grid_is_what_the_file_says(name: str):
    found = sources.known(evidence.FOLDER)[name]
    assert sources.digest_of_ptx(found.grid) == found.digest.ptx


@pytest.mark.nvrtc
def test_ptx_tells_a_change_of_code_from_one_of_words(copy: Path):
    """A name may change, an instruction may not."""
    found, path = sources.known(evidence.FOLDER)["flash1"], copy / "flash1.cu"
    text = path.read_text(encoding="utf-8")
    local = re.search(r"const float (\w+) = ", text)
    assert local
    with kernels_cu.sources_in(copy):
        path.write_text(re.sub(rf"\b{local[1]}\b", f"{local[1]}_renamed", text), encoding="utf-8")
        renamed = sources.Digest(sources.digest_of_tokens(CATALOGUE["flash1"]), sources.digest_of_ptx(found.grid))
        path.write_text(text.replace(f"const float {local[1]} = ", f"const float {local[1]} = 1 + "), encoding="utf-8")
        changed = sources.Digest(sources.digest_of_tokens(CATALOGUE["flash1"]), sources.digest_of_ptx(found.grid))
    assert renamed.tokens != found.digest.tokens and renamed.same(found.digest)
    assert not changed.same(found.digest)


@pytest.mark.nvrtc
def test_renewing_compiles_what_changed_alone(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of kernels whose PTX is the same, the day stays; the grid stays anyhow."""
    shutil.copy(evidence.FOLDER / sources.KERNELS, tmp_path / sources.KERNELS)
    before, compiled = sources.known(tmp_path), list[str]()
    real = sources._ptx  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(sources, "_ptx", lambda build: compiled.append(build.source) or real(build))
    path = copy / "flash1.cu"
    path.write_text(f"{path.read_text(encoding='utf-8')}\nstruct Seeded {{}};\n", encoding="utf-8")
    with kernels_cu.sources_in(copy):
        after = sources.renew(tmp_path, "2099-01-01")
    assert set(compiled) == {"flash1"}
    assert after["flash1"].since == before["flash1"].since
    assert after["flash1"].digest.tokens != before["flash1"].digest.tokens
    assert after == sources.known(tmp_path) and after["flash1"].grid == before["flash1"].grid


def test_another_nvrtc_renews_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copy(evidence.FOLDER / sources.KERNELS, tmp_path / sources.KERNELS)
    monkeypatch.setattr(sources.nvrtc, "release", lambda: "V99.9.9")
    with pytest.raises(UsageError, match=r"NVRTC = 'V99\.9\.9': expected V12"):
        sources.renew(tmp_path, "2099-01-01")


# -- what is shown ----------------------------------------------------------------------------------------------------


def of(name: str, date: str, equal: bool, *, today: bool = True) -> results.Result:
    """A made-up counter result of one algorithm, beside another that is right."""
    kernels = {name: asdict(sources.today(evidence.FOLDER)[name] if today else sources.Digest("older"))}
    launches = [
        {"algorithm": name, "rows": [{"verdict": "equal" if equal else "differs"}]},
        {"algorithm": "flash1", "rows": [{"verdict": "equal"}]},
    ]
    data = {"launches": launches, "errors": []}
    content = {"kind": "counters", "algorithms": [name, "flash1"], "condition": None, "date": date}
    path = evidence.FOLDER / "counters" / f"{name}_{date}.jsonl"
    return results.Result(path, plain({**content, "kernels": kernels, "data": data}))


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        ([], ""),
        ([("01", True, True)], "✓01"),
        ([("01", True, False)], "○01"),
        ([("01", True, True), ("02", True, False)], "✓01"),
        ([("01", True, False), ("02", False, True)], "○01 ✗02"),
        ([("01", False, True), ("02", True, True)], "✓02"),
        ([("02", False, True)], "✗02"),
    ],
)
def test_a_row_shows_the_newest_of_todays_kernels_and_no_failure_is_passed_over(
    found: list[tuple[str, bool, bool]], shown: str, monkeypatch: pytest.MonkeyPatch
):
    files = tuple(of("flash2", f"2026-11-{day}", equal, today=today) for day, equal, today in found)
    monkeypatch.setattr(evidence, "measured", lambda kind: files)  # pyright: ignore
    cell = readme.tick(evidence.COLUMNS["bytes = counters"](CATALOGUE["flash2"]))
    assert re.sub(r"\[(.)\]\([^ )]*-(\d\d)\.jsonl[^)]*\)", r"\1\2", cell) == shown


def test_one_failed_algorithm_hides_no_other(monkeypatch: pytest.MonkeyPatch):
    """A file is judged by algorithm: flash1's launches are right in a file in which flash2's differ."""
    file = of("flash2", "2026-11-28", equal=False)
    kernels = {**file.content["kernels"], "flash1": asdict(sources.today(evidence.FOLDER)["flash1"])}
    file = results.Result(file.path, {**file.content, "kernels": kernels})
    monkeypatch.setattr(evidence, "measured", lambda kind: (file,))  # pyright: ignore
    found = {name: evidence.COLUMNS["bytes = counters"](CATALOGUE[name]).state for name in ("flash1", "flash2")}
    assert found == {"flash1": "today's", "flash2": "failed"}


def test_what_is_stale_has_its_command():
    listed = [line for _, lines in evidence.stale() for line in lines]
    wanted = [x for x in evidence.evidence() if x.state in ("older", "failed")]
    assert len(listed) == len(wanted)
    assert all(any(line.startswith(f"{x.algorithm}: {x.column}") for line in listed) for x in wanted)


def test_a_changed_checkout_saves_nothing_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(results, "_commit", lambda: "abc1234-dirty")
    kind = results.kinds()["verify"]
    with pytest.raises(
        UsageError, match="commit = 'abc1234-dirty': expected sources as they were committed, or --dirty"
    ):
        results.place(kind, ["flash2"], folder=tmp_path)
    assert results.place(kind, ["flash2"], folder=tmp_path, dirty=True).parent == tmp_path / "verify"


def test_a_result_is_of_the_kernels_that_measured_it():
    """Each file in the tree says which they were, but those whose commit isn't to be had."""
    for result in results.find(evidence.FOLDER):
        commit = str(result.content["commit"])
        known = result.content.get("kernels", {})
        if commit.endswith("-dirty") or commit == "e86db53":
            assert known == {}, result.path
        else:
            assert set(known) >= {name for name in result.algorithms if name in WITH_KERNELS}, result.path
    assert json.dumps(known)
