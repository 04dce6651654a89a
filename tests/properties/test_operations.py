"""The design's promise: an operation is one file, an algorithm its own files and a row; nothing else is edited.

A toy operation (four inputs, one of them int32, one optional; two outputs, a workspace, two launches, its `.cu` beside this
file) with a toy algorithm is counted, simulated, verified, traced, played, plotted, swept and emulated. It is in the counter
matrix and in the sanitizers' grid, and "auto" chooses it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import flashlab as fl
from flashlab.measure import problems, sanitizers
from flashlab.player.pack import document
from flashlab.run import choose
from flashlab.run.facade import called
from flashlab.verify.bench import Failure
from simulator import Problem, Tile
from simulator.algorithm import Algorithm, Kernel
from simulator.catalogue import with_kernels
from simulator.config import Config
from simulator.counts import Book, Spec
from simulator.operations.operation import Operand, Operation
from simulator.support import Support

ROWS = "batch", "heads", "len_q"


def doubled(subject: Any, p: Problem, seed: int, by: int = 2) -> None:
    """A law of the toy: twice x and y are twice the outputs, to the bit."""
    arrays = TOY.draw(p, seed)
    once, twice = (subject.run(p, arrays | {name: n * arrays[name] for name in "xy"}) for n in (1, 2))
    for name, x in once.items():
        if not np.array_equal(by * x, twice[name]):
            raise Failure(f"{name} isn't linear")


class Toy(Operation):
    """out = gain (x + y), total = count * rowsum(x + y)."""

    name = "toy"
    probes: ClassVar[Any] = {"doubled": doubled}
    inputs = (
        Operand(name="x", axes=(*ROWS, "head_dim")),
        Operand(name="y", axes=(*ROWS, "head_dim")),
        Operand(name="count", axes=ROWS, dtype="int32"),
        Operand(name="gain", axes=ROWS, dtype="float32", default=1.0),
    )
    outputs = (
        Operand(name="out", axes=(*ROWS, "head_dim"), dtype="out"),
        Operand(name="total", axes=ROWS, dtype="float32"),
    )

    def problem(self, arrays: Mapping[str, Any], **masks: Any) -> Problem:
        batch, heads, rows, cols = arrays["x"].shape
        return Problem(batch=batch, heads=heads, len_q=rows, head_dim=cols, dtype=str(arrays["x"].dtype), **masks)

    def draw(self, problem: Problem, seed: int = 0, kind: str = "normal") -> dict[str, Any]:
        drawn = super().draw(problem, seed, kind)
        shape = self.operand("count").shape(problem)
        return drawn | {"count": np.random.default_rng(seed).integers(-5, 9, shape, np.int32)}

    def judge(self, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
        z = arrays["x"].astype(np.float64) + arrays["y"]
        gain = arrays.get("gain", np.ones(z.shape[:-1]))
        return {"out": z * gain[..., None], "total": arrays["count"] * z.sum(-1)}

    def bounds(self, problem: Problem, arrays: Mapping[str, Any], truth: Mapping[str, Any]) -> dict[str, Any]:
        size = np.abs(arrays["x"]).sum(-1) + np.abs(arrays["y"]).sum(-1)
        return {"out": 1e-6 * (1 + size), "total": 1e-5 * (1 + size) * (1 + np.abs(arrays["count"]))}

    def flops(self, problem: Problem) -> int:
        return 3 * problem.batch * problem.heads * problem.len_q * problem.head_dim


TOY = Toy()


def configure(problem: Problem, device: Any, tile: Any = None) -> Config:
    return Config(tile=Tile(32, 32) if tile is None else Tile.parse(tile), warps=1)


@fl.program(configure=configure, operation=TOY)
def toy(m: Any, x: Any, y: Any, count: Any, problem: Problem, tile: Tile) -> Any:
    """Two launches with z in HBM between them."""
    out, total, gain = m.output("out"), m.output("total"), m.optional("gain")
    z = m.workspace("z", problem.head_dim)
    for block in m.launch("toy_add", rows=problem.row_tiles(tile), warps=1):
        block.step("add")
        z_i = block.fetch(x, block.i, tile.rows) + block.fetch(y, block.i, tile.rows)
        block.step("store_z")
        block.store(z, z_i, block.i, tile.rows)
        block.step("total")
        block.store(total, z_i.sum() * block.fetch(count, block.i, tile.rows), block.i, tile.rows)
    for block in m.launch("toy_scale", rows=problem.row_tiles(tile), warps=1):
        block.step("scale")
        scaled = block.fetch(z, block.i, tile.rows) * block.fetch(gain, block.i, tile.rows)
        block.step("store")
        block.store(out, scaled, block.i, tile.rows)
    return out, total


def formula(book: Book, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    p, t, heads = problem, book.tensors, problem.batch * problem.heads
    z = book.tensor(Spec("z", heads, p.len_q, p.head_dim, "float32", "workspace"))
    gain = book.tensor(TOY.operand("gain").spec(p, tile, "input"))
    blocks = heads * p.row_tiles(tile)
    elements = blocks * tile.rows * p.head_dim
    book.launch("toy_add", blocks, 1)
    for name in ("x", "y"):
        book.add("add", name, hbm_read=t[name].nbytes)
    book.add("store_z", "z", hbm_write=z.nbytes)
    book.add("total", "count", hbm_read=t["count"].nbytes)
    book.add("total", "total", hbm_write=t["total"].nbytes)
    for name, way in (("x", "read"), ("y", "read"), ("count", "read"), ("z", "write"), ("total", "write")):
        book.distinct(name, way, t[name].nbytes)
    book.compute(other=2 * elements + blocks * tile.rows)
    book.launch("toy_scale", blocks, 1)
    book.add("scale", "z", hbm_read=z.nbytes)
    book.add("scale", "gain", hbm_read=gain.nbytes)
    book.add("store", "out", hbm_write=t["out"].nbytes)
    for name, way in (("z", "read"), ("gain", "read"), ("out", "write")):
        book.distinct(name, way, t[name].nbytes)
    book.compute(other=elements)


SOURCE = str(Path(__file__).with_name("toy.cu"))
ROW = Algorithm(
    "toy",
    toy,
    formula,
    kernels=(
        Kernel(SOURCE, "toy_add", ("x", "y", "count", "z", "total")),
        Kernel(SOURCE, "toy_scale", ("z", "gain", "out")),
    ),
    support=Support(dtypes=("float32",)),
    about={"toy_add": {"add": "Add the two."}},
    rank=1,
)
P = Problem(batch=2, heads=3, len_q=75, head_dim=40, dtype="float32")


@pytest.fixture(autouse=True)
def row(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The one edit: a row of the catalogue."""
    monkeypatch.setitem(fl.CATALOGUE, "toy", ROW)
    yield


def right(arrays: dict[str, Any], outputs: Mapping[str, Any]) -> bool:
    truth = TOY.judge(P, arrays)
    bounds = TOY.bounds(P, arrays, truth)
    out = np.linalg.norm(outputs["out"] - truth["out"], axis=-1)
    return bool((out <= bounds["out"]).all() and (np.abs(outputs["total"] - truth["total"]) <= bounds["total"]).all())


@pytest.mark.parametrize("gain", [None, 2.5])
def test_it_is_simulated_and_counted(gain: float | None) -> None:
    arrays = TOY.draw(P, 1)
    if gain is not None:
        arrays["gain"] = np.full(TOY.operand("gain").shape(P), gain, np.float32)
    run = fl.simulate("toy", **arrays)
    assert right(arrays, run.outputs)
    assert run.counts == fl.count("toy", P) == fl.shape_run("toy", P)
    assert run.counts.by_tensor["count"].hbm_read == 4 * P.batch * P.heads * P.len_q
    fl.check_formula("toy", formula, P)


def test_parts_of_it_run_on_several_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr(sys.modules["simulator.simulate"], "_WORTH_A_THREAD", 1)
    arrays = TOY.draw(P, 2)
    run = fl.simulate("toy", **arrays)
    assert right(arrays, run.outputs) and run.counts == fl.count("toy", P)


@pytest.mark.compiler
def test_it_is_emulated_to_the_byte() -> None:
    arrays = TOY.draw(P, 3)
    for more in ({}, {"gain": np.full(TOY.operand("gain").shape(P), -0.5, np.float32)}):
        given = arrays | more
        run = fl.emulate("toy", **given)
        assert run.complaints() == []
        assert right(given, run.outputs)


@pytest.mark.parametrize("backend", ["simulator", pytest.param("emulator", marks=pytest.mark.compiler)])
def test_it_is_planned(backend: str) -> None:
    arrays = TOY.draw(P, 4)
    plan = fl.plan("toy", P, backend=backend)
    assert right(arrays, plan.run(arrays))
    assert plan.counts == fl.count("toy", P)


@pytest.mark.parametrize("backend", ["simulator", pytest.param("emulator", marks=pytest.mark.compiler)])
def test_it_is_verified(backend: str) -> None:
    report = fl.verify("toy", backend=backend)
    assert report.verdict == "passed", report.failed[:3]
    assert len(report.rows) >= 10
    assert {"rule", "determinism", "doubled"} <= {row.check for row in report.rows}


def test_a_broken_law_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeded bug: twice x and y would be thrice the outputs."""
    monkeypatch.setattr(Toy, "probes", {"doubled": partial(doubled, by=3)})
    report = fl.verify("toy", checks=["doubled"])
    assert {row.status for row in report.rows} == {"failed"}


def test_what_the_kernels_refuse_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tile and the device say so before anything is drawn or judged."""
    monkeypatch.setattr(Toy, "draw", lambda *_: pytest.fail("a refused problem was drawn"))
    report = fl.verify("toy", backend="emulator", tile=(24, 24), checks=["rule"])
    assert report.verdict == "nothing run"
    assert {row.detail.partition(":")[0] for row in report.rows} == {"tile = '24x24'"}
    monkeypatch.setitem(fl.CATALOGUE, "toy", replace(ROW, support=Support(dtypes=("float32",), only=(9, 0))))
    with pytest.raises(fl.Unavailable, match="toy needs sm_90a"):
        fl.verify("toy", backend="emulator", device="a100", checks=["rule"])


def test_a_wrong_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeded bug: the judge wants twice the sum."""
    judge = TOY.judge
    monkeypatch.setattr(Toy, "judge", lambda self, p, a: judge(p, a) | {"total": 2 * judge(p, a)["total"]})
    assert fl.verify("toy").verdict == "failed"


def test_it_is_traced_and_played(tmp_path: Path) -> None:
    trace = fl.simulate("toy", **TOY.draw(P, 5), trace=(1, 2)).trace
    assert trace is not None
    assert {event.step for event in trace.events} == {"add", "store_z", "total", "scale", "store"}
    assert fl.player(trace).save(tmp_path / "toy.html").stat().st_size > 10_000
    launch = document(trace)["launches"][0]
    assert launch["about"] == {"add": "Add the two."} and launch["kernel"] is not None


def test_it_is_swept_and_plotted(tmp_path: Path) -> None:
    found = fl.sweep(["toy"], P, len_q=[32, 64, 128])
    assert [row["hbm_read"] for row in found.rows] == sorted(row["hbm_read"] for row in found.rows)
    assert found.plot(path=tmp_path / "toy.png") is not None
    compared = fl.compare(P, algorithms=["toy"])
    assert set(compared.plot(tmp_path)) >= {"bytes"}


def test_it_is_in_the_counter_matrix_and_in_the_sanitizers_grid() -> None:
    for cases in (problems.matrix(with_kernels()), sanitizers.grid()):
        mine = [case for case in cases if case.algorithm == "toy"]
        assert len({case.problem for case in mine}) == len(mine) >= 4
        assert {case.problem.dtype for case in mine} == {"float32"}
        assert {case.problem.causal for case in mine} == {False, True}
        assert not any(ROW.refuses(case.problem, fl.DEVICES["h100"]) or case.problem.sinks for case in mine)


def test_the_operation_says_its_own_matrix_and_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {
        "one row": {"heads": 1, "len_q": 1, "head_dim": 16},
        "capped": {"heads": 1, "len_q": 1, "head_dim": 16, "soft_cap": 1.0},
    }
    monkeypatch.setattr(
        Toy, "matrix", lambda self, support, dtype, *, boxes: {"one row": {"batch": 1, **own["one row"]}}
    )
    monkeypatch.setattr(Toy, "sanitized", own, raising=False)
    assert [case.name for case in problems.matrix(["toy"])] == ["toy float32 one row 1×1×1×16"]
    assert [case.name for case in sanitizers.grid(["toy"])] == ["toy float32 one row"]  # it knows no soft cap


def test_auto_chooses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The highest rank that takes the problem, where it pays."""
    h100 = fl.DEVICES["h100"]
    assert choose.fastest(TOY, P, h100) == choose.elsewhere("auto", TOY) == "toy"
    short = replace(ROW, name="short", rank=2, pays=lambda p, device: p.len_q < 10)
    monkeypatch.setitem(fl.CATALOGUE, "short", short)
    assert [choose.fastest(TOY, p, h100) for p in (P, P.replace(len_q=9))] == ["toy", "short"]
    summed = replace(ROW, name="summed", rank=3, atomics=("total",), support=Support(dtypes=("float32",), only=(9, 0)))
    monkeypatch.setitem(fl.CATALOGUE, "summed", summed)
    assert [choose.fastest(TOY, P, fl.DEVICES[name]) for name in ("h100", "a100-40")] == ["summed", "toy"]
    assert choose.fastest(TOY, P, h100, one_order=True) == "short"  # there, speed isn't asked
    for name in ("toy", "short", "summed"):
        monkeypatch.setitem(fl.CATALOGUE, name, replace(fl.CATALOGUE[name], rank=0))
    with pytest.raises(fl.UsageError, match="algorithm = 'auto': expected one of toy, short, summed"):
        choose.check("auto", TOY)


@pytest.mark.compiler
def test_a_call_of_it_takes_auto() -> None:
    arrays = TOY.draw(P, 7)
    where: dict[str, Any] = {"algorithm": "auto", "tile": None, "backend": "emulator", "device": None}
    out, total = called(TOY, dict(arrays), {}, **where)
    assert right(arrays, {"out": out, "total": total})


def test_bad_input_is_one_line() -> None:
    arrays = TOY.draw(P, 6)
    with pytest.raises(fl.UsageError, match=r"count.dtype = 'int64': expected int32"):
        fl.simulate("toy", **arrays | {"count": arrays["count"].astype(np.int64)})
    with pytest.raises(fl.UsageError, match=r"keyword = 'gian': .*did you mean gain"):
        fl.simulate("toy", **arrays, gian=arrays["count"])
    with pytest.raises(fl.UsageError, match=r"y = None: expected an array: toy takes x, y, count"):
        fl.simulate("toy", x=arrays["x"], count=arrays["count"])
