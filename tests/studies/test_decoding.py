"""The clock of decoding: its calls agree, bytes and FLOPs are the formulas', and what isn't there is one line."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

import flashlab as fl
from simulator.errors import Unavailable, UsageError
from studies import contenders, timed
from studies.contenders import AGAINST, DECODED, Calls, Decode

SMALL = {
    "mla": Decode(batch=2, heads=3, kv_heads=1, len_kv=128),
    "mla_paged": Decode(batch=2, heads=3, kv_heads=1, len_kv=70, page_size=16),
    "mla_hopper": Decode(batch=2, heads=3, kv_heads=1, len_kv=128),
    "mla_hopper_paged": Decode(batch=2, heads=3, kv_heads=1, len_kv=70, page_size=16),
    "cascade": Decode(batch=3, heads=4, kv_heads=2, len_kv=37, len_prefix=48),
    "paged": Decode(batch=2, heads=2, kv_heads=1, len_kv=20, page_size=3, longest=30),
    "flash_decoding_1": Decode(batch=2, heads=4, kv_heads=2, len_kv=37),
}
OURS = {
    "mla": ["mla_paged"],
    "mla_paged": ["mla"],
    "mla_hopper": ["mla", "mla_hopper_paged"],
    "mla_hopper_paged": ["mla_hopper"],
    "cascade": ["flash_decoding", "paged"],
    "paged": [],
    "flash_decoding_1": ["flash_decoding_2", "paged_1"],
}


def drawn(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The calls of a small cell, on the emulator."""
    monkeypatch.setattr(contenders, "DEVICE", "cpu")
    monkeypatch.setattr(contenders, "BACKEND", "emulator")
    monkeypatch.setattr(contenders, "LONGEST", 30)
    return contenders.contenders(import_module("torch"), algorithm, SMALL[algorithm], OURS[algorithm], {})


@pytest.mark.alike(
    "mla", "mla_hopper", "cascade", "paged", "flash_decoding_1"
)  # the first two have the others beside them
@pytest.mark.torch
@pytest.mark.compiler
@pytest.mark.parametrize("algorithm", SMALL)
def test_contenders_compute_the_same(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(drawn(algorithm, monkeypatch)) == [algorithm, *OURS[algorithm], "read"]


@pytest.mark.alike("int8")
@pytest.mark.torch
@pytest.mark.compiler
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_a_quantised_cache_is_near_what_it_stands_for(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = SMALL["paged"].model_copy(update={"kv_dtype": dtype})
    monkeypatch.setitem(SMALL, "paged", cell)
    assert list(drawn("paged", monkeypatch)) == ["paged", "bfloat16", "read"]
    assert 2 * contenders.nbytes("paged", cell) == contenders.nbytes(
        "paged", cell.model_copy(update={"kv_dtype": None})
    )


@pytest.mark.alike("drafts")
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
    monkeypatch.setitem(SMALL, "paged", SMALL["paged"].model_copy(update={"feature": feature}))
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
    with pytest.raises(RuntimeError, match="differ at Decode"):
        drawn(algorithm, monkeypatch)


@pytest.mark.parametrize("algorithm", DECODED)
def test_bytes_and_flops_are_those_of_the_formulas(algorithm: str) -> None:
    cell = DECODED[algorithm][-1]
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


def result(algorithm: str, **changes: Any) -> Any:
    cell = DECODED[algorithm][0]
    took = {algorithm: 100.0, **dict.fromkeys(AGAINST[algorithm], 150.0), "read": 80.0}
    row: dict[str, Any] = {
        **cell.model_dump(), "nbytes": contenders.nbytes(algorithm, cell), "microseconds": took, "rounds": 15,
        "ratios": {name: took[name] / 100 for name in list(took)[1:]}, "flops": contenders.flops(algorithm, cell),
    }  # fmt: skip
    return timed.DECODING.schema.model_validate({"algorithm": algorithm, "rows": [{**row, **changes}]})


def test_a_table_has_what_was_measured() -> None:
    header, _, row = timed.DECODING.table(result("mla")).splitlines()
    assert header == "| batch | heads | keys | µs | TFLOP/s | GB/s | of a plain read | flashinfer µs | × flashinfer |"
    assert row == "| 64 | 128, 1 | 4,096 | 100.0 | 730 | 3,020 | 80% | 150.0 | 1.50 |"
    assert "| 32,768 shared, 256 own |" in timed.DECODING.table(result("cascade"))
    assert "| mean 4,096, longest 28,000 | 16 |" in timed.DECODING.table(result("paged"))
    assert "TFLOP/s" not in timed.DECODING.table(result("mla", flops=None))
    featured = timed.DECODING.table(result("paged", feature="drafts"))
    assert "| keys | with | pages of |" in featured and "| 8 drafts | 16 |" in featured
    cells = [result("paged").rows[0], result("paged", ratios={"flashinfer": 1.5, "read": 0.8}).rows[0]]
    header, _, _, row = timed.DECODING.table(result("paged").model_copy(update={"rows": cells})).splitlines()
    assert header.endswith("| × flash_decoding | × flashinfer | × flashinfer-batch | × cudnn-paged |")
    assert row.endswith("| – | 1.50 | – | – |"), "a peer that doesn't take a cell"
    assert "1.50 to 1.50 × cudnn-paged" in timed.DECODING.headline(result("paged").model_copy(update={"rows": cells}))
    assert "80% to 80% of a plain read" in timed.DECODING.headline(result("cascade"))


def test_a_peer_that_cannot_run_is_left_out_with_its_reason() -> None:
    def missing() -> Any:
        raise Unavailable("flashinfer cannot be imported")

    def refuses() -> Any:
        raise ValueError("no plan:\n block size")

    failed = dict[str, str]()
    makers = {"mla": lambda: list, "flashinfer": missing, "cudnn": lambda: refuses}
    assert contenders.ready("mla", makers, failed) == {"mla": list}
    assert failed == {"flashinfer": "flashinfer cannot be imported", "cudnn": "ValueError: no plan: block size"}
    with pytest.raises(Unavailable):
        contenders.ready("flashinfer", makers, {})
    assert len(contenders.reason(ValueError(1000 * "x"))) == 300


@pytest.mark.parametrize(
    ("algorithm", "name", "said"),
    [
        ("cascade", "cudnn", "against = 'cudnn': expected"),
        ("paged", "cudnn-page", "against = 'cudnn-page': expected one of .*did you mean cudnn-paged"),
        ("flash_decoding", "flashinfer-batch", "against = 'flashinfer-batch': expected"),
    ],
)
def test_an_unknown_peer_is_one_line(algorithm: str, name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        contenders.check(algorithm, [name])
    contenders.check(algorithm, AGAINST[algorithm])


def test_caches_and_features_are_of_paged() -> None:
    asked = timed.Asked(only=("int8", "sinks"))
    cells = timed.decoding_cells("paged", asked)
    assert [(cell.kv_dtype, cell.feature) for cell in cells] == [("int8", None)] * 3 + [(None, "sinks")]
    with pytest.raises(UsageError, match="only = 'int8,sinks': expected the algorithm paged"):
        timed.decoding_cells("mla", asked)


def test_what_only_the_graph_refuses_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def captured(torch: Any, calls: list[Any], repeats: int) -> tuple[Any, list[Any]]:
        return None, [call() for call in calls]

    def replayed(torch: Any, graphs: dict[str, Any], rounds: int) -> dict[str, list[float]]:
        return {name: [8.0 if name == "b" else 4.0] * rounds for name in graphs}

    def wrong() -> None:
        raise RuntimeError("not in a graph")

    monkeypatch.setattr(timed, "captured", captured)
    monkeypatch.setattr(timed, "turns", replayed)
    monkeypatch.setattr(timed, "import_module", lambda _: SimpleNamespace(cuda=SimpleNamespace(empty_cache=list)))
    asked, failed = timed.Asked(against=("b", "c"), rounds=3), {"d": "not installed"}
    sets: list[Calls] = [{"a": list, "b": list, "c": wrong, "read": list}] * 2
    found = timed.served("a", sets, 2, asked, failed)
    assert found["microseconds"] == {"a": 1, "b": 2, "read": 1} and found["ratios"] == {"b": 2, "read": 1}
    assert found["failed"] == failed == {"d": "not installed", "c": "RuntimeError: not in a graph"}
    assert asked.not_run == ["d (not installed)", "c (RuntimeError: not in a graph)"]
    with pytest.raises(RuntimeError, match="not in a graph"):
        timed.served("c", sets, 2, timed.Asked(), {})
