"""The clock of decoding: its calls agree, bytes and FLOPs are the formulas', and what isn't there is one line."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest

import flashlab as fl
from flashlab.measure import contenders, decoding, paged_peers
from flashlab.measure.contenders import AGAINST, CELLS, Cell
from simulator.errors import Unavailable, UsageError

SMALL = {
    "mla": Cell(batch=2, heads=3, kv_heads=1, len_kv=128),
    "mla_paged": Cell(batch=2, heads=3, kv_heads=1, len_kv=70, page_size=16),
    "mla_hopper": Cell(batch=2, heads=3, kv_heads=1, len_kv=128),
    "mla_hopper_paged": Cell(batch=2, heads=3, kv_heads=1, len_kv=70, page_size=16),
    "cascade": Cell(batch=3, heads=4, kv_heads=2, len_kv=37, len_prefix=48),
    "paged": Cell(batch=2, heads=2, kv_heads=1, len_kv=20, page_size=3, longest=30),
}
OURS = {
    "mla": ["mla_paged"],
    "mla_paged": ["mla"],
    "mla_hopper": ["mla", "mla_hopper_paged"],
    "mla_hopper_paged": ["mla_hopper"],
    "cascade": ["flash_decoding", "paged"],
    "paged": [],
}


def drawn(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The calls of a small cell, on the emulator."""
    monkeypatch.setattr(contenders, "DEVICE", "cpu")
    monkeypatch.setattr(contenders, "BACKEND", "emulator")
    monkeypatch.setattr(contenders, "LONGEST", 30)
    return contenders.contenders(import_module("torch"), algorithm, SMALL[algorithm], OURS[algorithm])


@pytest.mark.torch
@pytest.mark.compiler
@pytest.mark.parametrize("algorithm", SMALL)
def test_contenders_compute_the_same(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(drawn(algorithm, monkeypatch)) == [algorithm, *OURS[algorithm], "read"]


@pytest.mark.torch
@pytest.mark.compiler
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_a_quantised_cache_is_near_what_it_stands_for(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = replace(SMALL["paged"], kv_dtype=dtype)
    monkeypatch.setitem(SMALL, "paged", cell)
    assert list(drawn("paged", monkeypatch)) == ["paged", "bfloat16", "read"]
    assert 2 * contenders.nbytes("paged", cell) == contenders.nbytes("paged", replace(cell, kv_dtype=None))


@pytest.mark.torch
@pytest.mark.compiler
@pytest.mark.parametrize("feature", contenders.FEATURES)
def test_a_feature_is_beside_the_same_call_without(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[dict[str, Any]]()
    right = contenders._attention  # pyright: ignore[reportPrivateUsage]

    def noted(**given: Any) -> Any:
        asked.append(given)
        return right(**given)

    monkeypatch.setattr(contenders, "_attention", noted)
    monkeypatch.setitem(SMALL, "paged", replace(SMALL["paged"], feature=feature))
    assert list(drawn("paged", monkeypatch)) == ["paged", "without", "read"]
    name = "draft_mask" if feature == "drafts" else feature
    has, without = (name in given for given in asked)
    assert (has, without) == (True, False)


@pytest.mark.torch
@pytest.mark.compiler
@pytest.mark.parametrize(("algorithm", "name"), [("mla", "mla"), ("mla_paged", "mla"), ("cascade", "cascade")])
def test_contenders_that_differ_are_no_contenders(algorithm: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(contenders, name)

    def wrong(q: Any, *given: Any, **more: Any) -> Any:
        return right(q if "block_table" in more else 1.5 * q, *given, **more)

    monkeypatch.setattr(contenders, name, wrong)
    with pytest.raises(RuntimeError, match="differ at Cell"):
        drawn(algorithm, monkeypatch)


@pytest.mark.parametrize("algorithm", CELLS)
def test_bytes_and_flops_are_those_of_the_formulas(algorithm: str) -> None:
    cell = CELLS[algorithm][-1]
    sizes: dict[str, Any] = {"batch": cell.batch, "heads": cell.heads, "len_kv": cell.len_kv}
    latent = algorithm.startswith("mla")
    if latent:
        p = fl.latent_problem(**sizes, page_size=cell.page_size)
    else:
        p = fl.Problem(
            **sizes, kv_heads=cell.kv_heads, len_q=1, head_dim=128, dtype="bfloat16", page_size=cell.page_size,
            len_prefix=cell.len_prefix,
        )  # fmt: skip
    counted = fl.count(algorithm, p, device="h200").by_tensor
    read = {name: x.hbm_read for name, x in counted.items() if name in ("k", "v", "k_prefix", "v_prefix", "latent")}
    if cell.len_prefix is not None:  # 128 requests of 4 heads are four tiles of rows, and each reads the prefix
        read |= {name: read[name] // 4 for name in ("k_prefix", "v_prefix")}
    assert sum(read.values()) == contenders.nbytes(algorithm, cell)
    assert contenders.flops(algorithm, cell) == fl.CATALOGUE[algorithm].operation.flops(p)


def result(algorithm: str, **changes: Any) -> decoding.Decoding:
    cell = CELLS[algorithm][0]
    took = {algorithm: 100.0, **dict.fromkeys(AGAINST[algorithm], 150.0), "read": 80.0}
    row: dict[str, Any] = {
        **vars(cell), "nbytes": contenders.nbytes(algorithm, cell), "microseconds": took, "rounds": 15,
        "ratios": {name: took[name] / 100 for name in list(took)[1:]}, "flops": contenders.flops(algorithm, cell),
    }  # fmt: skip
    return decoding.KIND.schema.model_validate({"algorithm": algorithm, "rows": [{**row, **changes}]})


def test_a_table_has_what_was_measured() -> None:
    header, _, row = decoding.table(result("mla")).splitlines()
    assert header == "| batch | heads | keys | µs | TFLOP/s | GB/s | of a plain read | flashinfer µs | × flashinfer |"
    assert row == "| 64 | 128, 1 | 4,096 | 100.0 | 730 | 3,020 | 80% | 150.0 | 1.50 |"
    assert "| 32,768 shared, 256 own |" in decoding.table(result("cascade"))
    assert "| mean 4,096, longest 28,000 | 16 |" in decoding.table(result("paged"))
    assert "TFLOP/s" not in decoding.table(result("mla", flops=None))
    featured = decoding.table(result("paged", feature="drafts"))
    assert "| keys | with | pages of |" in featured and "| 8 drafts | 16 |" in featured
    cells = [result("paged").rows[0], result("paged", ratios={"flashinfer": 1.5, "read": 0.8}).rows[0]]
    header, _, _, row = decoding.table(result("paged").model_copy(update={"rows": cells})).splitlines()
    assert header.endswith("| × flash_decoding | × flashinfer | × flashinfer-batch | × cudnn-paged |")
    assert row.endswith("| – | 1.50 | – | – |"), "a peer that doesn't take a cell"
    assert "1.50 to 1.50 × cudnn-paged" in decoding.headline(result("paged").model_copy(update={"rows": cells}))
    assert "80% to 80% of a plain read" in decoding.headline(result("cascade"))


def test_a_peer_that_is_not_installed_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> Any:
        raise Unavailable("flashinfer cannot be imported")

    monkeypatch.setattr(paged_peers, "flashinfer", missing)
    assert contenders.chosen("mla", None) == ([], ["not run: flashinfer (flashinfer cannot be imported)"])
    assert contenders.chosen("cascade", None)[0] == ["flash_decoding", "paged"]
    assert contenders.chosen("cascade", ["paged"]) == (["paged"], [])
    with pytest.raises(Unavailable):
        contenders.chosen("mla_paged", ["flashinfer"])
    with pytest.raises(UsageError, match="against = 'cudnn': expected"):
        contenders.chosen("cascade", ["cudnn"])
    with pytest.raises(UsageError, match="against = 'cudnn-page': expected one of .*did you mean cudnn-paged"):
        contenders.chosen("paged", ["cudnn-page"])
    with pytest.raises(UsageError, match="against = 'flashinfer-batch': expected"):
        contenders.chosen("flash_decoding", ["flashinfer-batch"])
    monkeypatch.setitem(sys.modules, "cudnn", None)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    found, lines = contenders.chosen("paged", None)
    assert found == ["flash_decoding"]
    assert [line.split(" (")[0] for line in lines] == [
        "not run: flashinfer",
        "not run: flashinfer-batch",
        "not run: cudnn-paged",
    ]
    with pytest.raises(Unavailable, match=r"^cudnn cannot be imported \(.*\): pip install nvidia-cudnn-frontend$"):
        contenders.chosen("paged", ["cudnn-paged"])
    monkeypatch.setattr("sys.argv", ["decoding", "--algorithm", "mla", "--against", "flashinfer"])
    assert decoding.main() == 2
    assert capsys.readouterr().err == "flashinfer cannot be imported\n"
