"""What the counters of TMA show: the prediction from shapes is what was measured, and what the emulator finds box by box."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flashlab as fl
from flashlab.measure import counters, emulated, metrics, results, sectors
from flashlab.measure.counter_report import CountersReport
from flashlab.measure.workload import Case
from simulator import Problem, count, shape_run
from simulator.counts import Book, Box, Counts, LaunchCounts, Spec
from simulator.problem import FP8

ODD = Case(
    "rows of 2,000 keys", "flash3_fp8", Problem(batch=1, heads=4, len_q=2000, head_dim=128, dtype=FP8, causal=True)
)
"""V lies transposed, in rows of 2,000 bytes: every other one starts in the middle of a sector."""
BYTES, MEASURED = 18_911_232, 20_033_536
"""What it reads, and what an H200's counters showed of it."""


def of_one_box(rows: int, columns: int, box: Box) -> int:
    """What the counters show of one box of halves."""
    problem = Problem(batch=1, heads=1, len_q=1, head_dim=8, dtype="float16")
    book = Book("mine", problem, fl.Tile(16, 16), fl.DEVICES["h200"], None)
    book.tensor(Spec("x", 1, rows, columns, "float16", "input"))
    book.launch("mine", blocks=1, warps=1)
    book.add("load", "x", hbm_read=2 * box.rows * box.columns)
    book.box(box, 1)
    counts = book.close()
    return sectors.shown(counts, counts.launches[0])


def test_boxes_that_were_measured() -> None:
    """One box of 64 x 64 halves on an H200, 8,192 bytes: rows outside, rows of 80 bytes, rows of 144 from byte 16 on."""
    assert of_one_box(36, 64, Box("x", 0, 0, 64, 64)) == 8192
    assert of_one_box(64, 40, Box("x", 0, 0, 64, 64)) == 10240
    assert of_one_box(64, 72, Box("x", 0, 8, 64, 64)) == 9216


def run_and_launch(case: Case) -> tuple[Counts, LaunchCounts]:
    run = shape_run(case.algorithm, case.problem, tile=case.tile, device="h200", lse=case.lse)
    return run, run.launches[-1]


def test_a_problem_that_was_measured() -> None:
    run, launch = run_and_launch(ODD)
    assert launch.bytes("hbm.read") == BYTES
    assert sectors.shown(run, launch) == MEASURED


@pytest.mark.long
def test_where_rows_are_whole_the_counters_show_the_bytes() -> None:
    """In every launch of Hopper's kernels that was measured, the prediction is what ncu read."""
    compared, seen = 0, set[object]()
    for result in results.find(Path(__file__).resolve().parents[3] / results.FOLDER, kind="counters"):
        for launch in result.data["launches"]:
            problem = Problem(**launch["problem"])
            read = next(row for row in launch["rows"] if row["what"] == "hbm.read")
            same = (launch["launch"], problem, str(launch["tile"]), launch["lse"], read["measured"], read["formula"])
            if same in seen:  # in a file of another day or GPU
                continue
            seen.add(same)
            if fl.CATALOGUE[launch["algorithm"]].arch is None or problem.len_q * problem.len_kv > 1 << 20:
                continue
            run = shape_run(launch["algorithm"], problem, device="h200", tile=launch["tile"], lse=launch["lse"])
            mine = next(x for x in run.launches if x.name == launch["launch"])
            if read["measured"] is None or read["formula"] != mine.bytes("hbm.read"):
                continue  # blocks wait there; or the algorithm has taken another way since, as parts of a group
            assert sectors.shown(run, mine) == read["measured"], launch["case"]
            compared += 1
    assert compared > 100


def boxed(counts: Counts) -> dict[str, LaunchCounts]:
    """The launches that load boxes."""
    return {launch.name: launch for launch in counts.launches if launch.boxes}


@pytest.mark.parametrize("algorithm", [name for name, row in fl.CATALOGUE.items() if row.arch])
def test_boxes_of_a_run_are_its_bytes(algorithm: str) -> None:
    """On data, on shapes, and in the formula's ledger: the boxes of each tensor make up the bytes read of it."""
    row = fl.CATALOGUE[algorithm]
    dtype = row.dtypes[0]
    p = row.fitted(Problem(batch=2, heads=4, kv_heads=2, len_q=150, len_kv=277, head_dim=72, dtype=dtype, causal=True))
    shapes = boxed(shape_run(algorithm, p, tile=(64, 64), device="h200"))
    arrays: dict[str, Any] = row.operation.draw(p)
    data = boxed(fl.simulate(algorithm, **arrays, causal=True, tile=(64, 64)).counts)
    assert {name: launch.boxes for name, launch in data.items()} == {
        name: launch.boxes for name, launch in shapes.items()
    }
    formula = {launch.name: launch for launch in count(algorithm, p, tile=(64, 64), device="h200").launches}
    for launch, run in shapes.items():
        for name in {box.tensor for box in run.boxes}:
            width = 1 if dtype == FP8 else 2
            moved = sum(n * box.rows * box.columns * width for box, n in run.boxes.items() if box.tensor == name)
            assert moved == formula[launch].bytes("hbm.read", name)
        assert not formula[launch].boxes


ODD_SHAPES = {
    "rows of 80 bytes": {"float16": {"head_dim": 40}, FP8: {"head_dim": 80}},
    "two panels": {"float16": {"head_dim": 72}, FP8: {"head_dim": 144}},
    "no whole 16 bytes": {"float16": {"head_dim": 33}, FP8: {"head_dim": 72}},
    "odd keys": {"float16": {"head_dim": 40, "len_kv": 97}, FP8: {"head_dim": 128, "len_kv": 97}},
}


@pytest.mark.compiler
@pytest.mark.parametrize("shape", ODD_SHAPES)
@pytest.mark.parametrize(("algorithm", "dtype"), [("flash3", "float16"), ("flash3_fp8", FP8)])
def test_the_emulator_finds_the_same(algorithm: str, dtype: str, shape: str) -> None:
    """It has addresses, and adds up sectors box by box. Its bytes are the contract's."""
    fields = {"batch": 2, "heads": 2, "kv_heads": 1, "len_q": 70, "len_kv": 145, **ODD_SHAPES[shape][dtype]}
    case = Case("odd", algorithm, Problem(**fields, dtype=dtype, causal=True))
    done = emulated.emulated(case, fl.DEVICES["h200"])
    assert done.complaints() == []
    (*_, launch) = emulated.launches(case, done)
    assert launch.failures == []
    read = launch.checks[0]
    assert read.sectors == read.measured == done.launches[-1].shown("hbm.read")
    assert read.formula == done.launches[-1].counted("hbm.read") < read.measured


# What `flashlab counters` makes of it


def printed(case: Case, boxes: int) -> str:
    """What ncu prints of the launches of a case; of the last one, boxes show so many bytes."""
    counts = count(case.algorithm, case.problem, tile=case.tile, device="h200")
    loads, _, box_loads = metrics.BYTES["hbm.read"]
    rows: list[dict[str, int]] = []
    for launch in counts.launches:
        last = launch is counts.launches[-1]
        scales = sum(launch.bytes("hbm.read", f"{name}_scale") for name in "qkv")
        values = {metrics.BYTES[what][0]: launch.bytes(what) for what in metrics.BYTES}
        values |= {loads: scales if last else launch.bytes("hbm.read"), box_loads: boxes if last else 0}
        rows.append({**values, metrics.TENSOR_OPS[FP8][0]: launch.flops_matmul})
    header = ["ID", "Kernel Name", *(f"{name}.sum" for name in rows[0])]
    lines = [header, [""] * len(header)]
    lines += [
        [str(i), x.name, *map(str, row.values())] for i, (x, row) in enumerate(zip(counts.launches, rows, strict=True))
    ]
    return "\n".join(",".join(f'"{cell}"' for cell in line) for line in lines)


def report(monkeypatch: pytest.MonkeyPatch, read: int) -> CountersReport:
    """What the command reports if the counters show so many bytes read."""
    _, launch = run_and_launch(ODD)
    by_lanes = sum(launch.bytes("hbm.read", f"{name}_scale") for name in "qkv")
    monkeypatch.setattr(counters, "_profile", lambda *_: printed(ODD, read - by_lanes))
    monkeypatch.setattr(metrics, "asked", lambda: ())
    return counters.run([ODD], device=fl.DEVICES["h200"], simulate_up_to=0)


def test_whole_sectors_are_equal_again(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(monkeypatch, MEASURED)
    assert found.passed, [launch.failures for launch in found.launches]
    read = found.launches[-1].to_dict()["rows"][0]
    assert (read["what"], read["simulated"], read["formula"]) == ("hbm.read", BYTES, BYTES)
    assert (read["sectors"], read["measured"], read["verdict"]) == (MEASURED, MEASURED, "equal")
    assert [row["sectors"] for row in found.launches[0].to_dict()["rows"]] == [None] * 6
    found.print()
    assert "= in sectors" in capsys.readouterr().out


@pytest.mark.parametrize("read", [BYTES, MEASURED - 32, MEASURED + 32])
def test_other_sectors_are_a_failure(monkeypatch: pytest.MonkeyPatch, read: int) -> None:
    found = report(monkeypatch, read)
    assert not found.passed
    assert found.launches[-1].failures == [
        f"hbm.read: simulated {BYTES:,}, formula {BYTES:,}, in sectors {MEASURED:,}, measured {read:,}"
    ]
