"""Counters: what ncu prints is read right, and a single byte of difference is a failure."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashlab.base import host
from flashlab.measure import counters, emulated, metrics, ncu, problems, workload
from flashlab.measure.counter_report import (
    DRAM_SLACK,
    EXP_FACTOR,
    EXP_PER_THREAD,
    CountersReport,
    LaunchReport,
    ModelCheck,
)
from flashlab.measure.ncu import Measured
from flashlab.measure.workload import Case
from flashlab.run.emulated import emulate_problem
from flashlab.run.plan import _bound
from simulator import CATALOGUE, Problem, Tile, count, shape_run
from simulator.catalogue import get, with_kernels
from simulator.config import features
from simulator.errors import Unavailable

DATA = Path(__file__).parents[2] / "data"
CASE = Case(
    "flash2 float16", "flash2", Problem(batch=1, heads=2, len_q=2048, head_dim=64, dtype="float16"), Tile(64, 64)
)
COUNTS = count("flash2", CASE.problem, tile=CASE.tile, device="h200")


def reading(**changes: float) -> Measured:
    """What ncu would have read of flash2, if all is well; by quantity, with changes."""
    launch = COUNTS.launches[0]
    values = {what: float(launch.bytes(what)) for what in metrics.BYTES}
    values |= {"dram": float(COUNTS.compulsory_read), "exp": 1.1 * launch.exp / 32, "ops": float(launch.flops_matmul)}
    values |= changes
    found = {f"{metrics.BYTES[what][0]}.sum": values[what] for what in metrics.BYTES}
    found |= {
        f"{metrics.DRAM_READ}.sum": values["dram"],
        f"{metrics.DRAM_WRITE}.sum": 0.0,
        f"{metrics.EXP}.sum": values["exp"],
        f"{metrics.TENSOR_OPS['float16'][0]}.sum": values["ops"],
    }
    return Measured("flash2", found)


def compared(measured: Measured) -> LaunchReport:
    simulated = shape_run("flash2", CASE.problem, tile=CASE.tile, device="h200")
    return counters.compare(CASE, simulated, COUNTS, 0, measured)


def test_equal_is_equal() -> None:
    launch = compared(reading())
    assert launch.failures == []
    assert {check.verdict for check in launch.checks} == {"equal"}
    assert CountersReport("h200", (launch,)).passed


@pytest.mark.parametrize("what", [*metrics.BYTES, "ops"])
def test_one_byte_more_is_a_failure(what: str) -> None:
    expected = COUNTS.launches[0].flops_matmul if what == "ops" else COUNTS.launches[0].bytes(what)
    launch = compared(reading(**{what: expected + 1.0}))
    assert len(launch.failures) == 1
    assert f"{expected + 1:,}" in launch.failures[0]
    assert not CountersReport("h200", (launch,)).passed


def test_what_waits_read_is_not_judged() -> None:
    """But the bytes that such a launch writes are, and those that the one before it reads."""
    name, p = "flash2_backward_deterministic", CASE.problem.replace(len_q=64)
    formula = count(name, p, tile=(64, 64), device="h200")
    delta, main = (
        {
            x.what: x.verdict
            for x in counters.compare(Case(name, name, p, Tile(64, 64)), None, formula, i, reading()).checks
        }
        for i in (0, 1)
    )
    assert (delta["hbm.read"], main["hbm.read"], main["hbm.write"]) == ("differs", "not measured", "differs")


def test_sectors_of_atomics_are_counted_together_and_those_of_a_wait_are_not() -> None:
    counted = {f"{metrics.SECTORS['sectors_ld']}.sum": 5.0, **{f"{x}.sum": 2.0 for x in metrics.EXTRAS["sectors_red"]}}
    name, p = "flash2_backward_deterministic", CASE.problem.replace(len_q=64)
    formula = count(name, p, tile=(64, 64), device="h200")
    seen = Measured("x", reading().metrics | counted)
    delta, main = (counters.compare(Case(name, name, p, Tile(64, 64)), None, formula, i, seen).extras for i in (0, 1))
    assert (delta["sectors_ld"], delta["sectors_red"]) == (5, 4)
    assert main == {x: n for x, n in delta.items() if x != "sectors_ld"}


def test_a_simulator_that_differs_from_its_formula_is_a_failure() -> None:
    other = shape_run("flash2", CASE.problem, tile=(128, 64), device="h200")
    assert counters.compare(CASE, other, COUNTS, 0, reading()).failures


@pytest.mark.parametrize(
    ("read", "inside"),
    [
        (COUNTS.compulsory_read - DRAM_SLACK, True),
        (COUNTS.compulsory_read - DRAM_SLACK - 1, False),
        (COUNTS.hbm.read + DRAM_SLACK, True),
        (COUNTS.hbm.read + DRAM_SLACK + 1, False),
    ],
)
def test_dram_reads_lie_between_compulsory_and_requested(read: int, inside: bool) -> None:
    launch = compared(reading(dram=float(read)))
    assert launch.dram and launch.dram.judged
    assert (not launch.failures) is inside


def test_special_functions_agree_within_the_stated_factor() -> None:
    (launch,) = COUNTS.launches
    low, high = (
        EXP_FACTOR[0] * launch.exp,
        EXP_FACTOR[1] * launch.exp + EXP_PER_THREAD * 32 * launch.warps * launch.blocks,
    )
    assert [bool(compared(reading(exp=n / 32)).failures) for n in (0.99 * low, 1.01 * low, 0.99 * high, 1.01 * high)] == [
        True, False, False, True,
    ]  # fmt: skip


def test_what_ncu_prints_is_read() -> None:
    launches = ncu.parse((DATA / "ncu_standard_float16.csv").read_text())
    assert [x.kernel for x in launches] == ["standard_scores", "standard_softmax", "standard_output"]
    problem = Problem(batch=1, heads=4, len_q=512, head_dim=64, dtype="float16")
    formula = count("standard", problem, tile=(64, 64), device="h200")
    for measured, launch in zip(launches, formula.launches, strict=True):
        for what in ("hbm.read", "hbm.write", "hbm.atomic", "sram.read"):
            assert measured.total(metrics.BYTES[what]) == launch.bytes(what)
    assert launches[1].metrics["lts__t_sector_hit_rate.pct"] == 38.43


def test_counters_of_one_quantity_are_summed_and_missing_ones_are_none() -> None:
    measured = Measured("x", {"a__b.sum": 3.0, "a__c.sum": 4.0})
    assert measured.total(["a__b", "a__c", "a__not_on_this_gpu"]) == 7
    assert measured.total(["a__not_on_this_gpu"]) is None


def test_a_report_without_measurements_has_not_passed() -> None:
    assert not CountersReport("h200", ()).passed
    assert not CountersReport("h200", (compared(reading()),), errors=("flash1: ncu ended with 1",)).passed


def test_a_report_is_json_and_prints(capsys: pytest.CaptureFixture[str]) -> None:
    model = ModelCheck(CASE.name, 110, 100, large=True)
    report = CountersReport("h200", (compared(reading()),), (model,))
    said = json.loads(json.dumps(report.to_dict()))
    assert said["passed"] is True
    assert said["summary"]["equal"] == said["summary"]["compared"] == 6
    assert said["summary"]["model_worst_error"] == pytest.approx(0.1)
    report.print()
    printed = capsys.readouterr().out
    assert f"{COUNTS.hbm.read:,}" in printed
    assert "+10.0%" in printed
    replace(report, launches=report.launches * 5).print()
    assert f"= {COUNTS.hbm.read:,}" in capsys.readouterr().out


def test_the_matrix_has_what_it_must() -> None:
    matrix = problems.matrix(with_kernels())
    written = {name for name in with_kernels() if CATALOGUE[name].operation.in_place}  # they see no pairs
    for algorithm in written:
        mine = [c.problem for c in matrix if c.algorithm == algorithm]
        assert {p.dtype for p in mine} == set(CATALOGUE[algorithm].dtypes)
        assert {p.kv_dtype for p in mine} > {"int8", "float8_e4m3fn"} and len({p.page_size for p in mine}) > 1
    for algorithm in set(with_kernels()) - written:
        for dtype in CATALOGUE[algorithm].dtypes:
            for causal in (False, True):
                mine = [
                    c.problem
                    for c in matrix
                    if (c.algorithm, c.problem.dtype, c.problem.causal) == (algorithm, dtype, causal)
                ]
                assert any(p.len_q % 16 for p in mine)
                assert any(p.queries_per_kv > 1 for p in mine)
                assert any(p.len_q < p.len_kv for p in mine)
                assert any(p.len_q > p.len_kv for p in mine) or CATALOGUE[algorithm].support.queries == 1
        for feature in {"sinks", "soft_cap"} & set(CATALOGUE[algorithm].support.masks):
            assert any(getattr(c.problem, feature) for c in matrix if c.algorithm == algorithm), (algorithm, feature)
    assert len({case.name for case in matrix}) == len(matrix)


def test_half_of_the_l2_problems_share_over_30_mb() -> None:
    chosen = problems.l2_problems()
    assert len(chosen) >= 8
    shared = 0
    for case in chosen:
        counts = count(case.algorithm, case.problem, device="h200")
        assert counts.hbm.peak > counts.device.l2 / 2
        p = case.problem
        pairs = -(-counts.launches[0].heads_together // p.queries_per_kv)
        much = pairs * p.len_kv * 2 * p.head_dim * p.itemsize > 30e6
        shared += much
        assert much or "shared" not in case.name
    assert 2 * shared >= len(chosen)


def test_cases_come_back_from_their_file_as_they_were(tmp_path: Path) -> None:
    window = Case("w", "flash1", Problem(batch=1, heads=1, len_q=5, head_dim=8, dtype="float32", window=(3, None)))
    assert workload.read(workload.write([CASE, window], tmp_path)) == [CASE, window]
    assert window.entries == ("flash1",)


def test_every_case_is_drawn_with_all_that_its_plan_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "from_numpy", lambda x, _: x)
    seen = dict[Any, Case]()  # a small one of each kind
    for case in sorted(problems.matrix(with_kernels()), key=lambda case: case.problem.len_kv):
        seen.setdefault((case.algorithm, features(case.problem), case.problem.lengths is None), case)
    for case in seen.values():
        operation, drawn = CATALOGUE[case.algorithm].operation, workload.inputs(case.algorithm, case.problem)
        assert _bound(operation, case.problem, drawn).keys() == drawn.keys(), case.name
    assert any("dlse" in case.name for case in seen.values()), "a gradient of the LSE is among them"


@pytest.mark.alike("flash2-bits", "flash3-blocks")
@pytest.mark.compiler
@pytest.mark.parametrize("form", ["dense", "bits", "blocks"])
@pytest.mark.parametrize("algorithm", ["flash2", "flash3"])
def test_counts_are_those_of_the_mask_that_is_drawn(algorithm: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU's counters are held to, and what the emulator's are, is what a kernel moves on the inputs of that run."""
    monkeypatch.setattr(host, "from_numpy", lambda x, _: x)
    p = Problem(batch=1, heads=2, len_q=300, head_dim=64, dtype="float16", causal=True, mask=form)
    case = Case(algorithm, algorithm, p, lse=True)
    expected = workload.counted(case, COUNTS.device)
    ran = emulate_problem(get(algorithm), p, workload.inputs(algorithm, p), device=COUNTS.device, lse=True)
    assert [launch.ledger for launch in expected.launches] == [launch.ledger for launch in ran.counts.launches]
    assert ran.passed
    shown = count(algorithm, p, device=COUNTS.device, lse=True)
    assert (expected.hbm.read < shown.hbm.read) == (form == "blocks"), "whose tiles are no mixture"
    assert counters._simulated(case, expected, 0) is expected
    report = emulated.run([case], device=COUNTS.device)
    assert report.passed, report.launches


def test_what_a_failed_program_said_last_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "Traceback\nflashlab.errors.UsageError: dlse = None: expected an array\n"
    monkeypatch.setattr(ncu.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="", stderr=said, returncode=1))
    monkeypatch.setattr(ncu, "program", lambda: "ncu")
    with pytest.raises(RuntimeError, match="ncu ended with 1: .*dlse = None"):
        counters._profile([CASE], ["dram__bytes_read.sum"], 10)


def test_no_ncu_is_one_line_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    ncu.known.cache_clear()
    with pytest.raises(Unavailable, match="install Nsight Compute") as missing:
        metrics.asked()
    assert "\n" not in str(missing.value)


@pytest.mark.parametrize(
    ("printed", "remedy"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "NVreg_RestrictProfilingToAdminUsers=0"),
        ("==ERROR== Failed to initialize the profiler: LibraryNotLoaded", "container"),
    ],
)
def test_no_permission_is_one_line_with_the_remedy(printed: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = SimpleNamespace(stdout="", stderr=printed, returncode=1)
    monkeypatch.setattr(ncu.subprocess, "run", lambda *_, **__: done)
    monkeypatch.setattr(ncu, "program", lambda: "ncu")
    with pytest.raises(Unavailable, match=remedy) as refused:
        counters._profile([CASE], ["dram__bytes_read.sum"], 10)
    assert "\n" not in str(refused.value)


def test_one_algorithm_that_fails_leaves_the_others_standing(monkeypatch: pytest.MonkeyPatch) -> None:
    flash1 = Case("flash1", "flash1", CASE.problem)

    def profile(batch: list[Case], *_: Any) -> str:
        if batch[0].algorithm == "flash1":
            raise RuntimeError("ncu ended with 9: out of memory")
        names = list(reading().metrics)
        rows = [["ID", "Kernel Name", *names], ["", "", *[""] * len(names)]]
        rows.append(["0", "flash2", *(str(round(x)) for x in reading().metrics.values())])
        return "==PROF== Connected\n" + "\n".join(",".join(f'"{cell}"' for cell in row) for row in rows) + "\n"

    monkeypatch.setattr(counters, "_profile", profile)
    monkeypatch.setattr(metrics, "asked", lambda: ())
    report = counters.run([flash1, CASE], device=COUNTS.device)
    assert [launch.case for launch in report.launches] == [CASE]
    assert report.launches[0].failures == []
    assert report.errors == ("flash1: ncu ended with 9: out of memory",)
    assert not report.passed


@pytest.mark.gpu
def test_simulated_formula_and_measured_are_equal_on_this_gpu() -> None:
    try:
        report = counters.run(
            [case for case in problems.matrix(with_kernels()) if "float16 ragged causal" in case.name]
        )
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert report.passed, [launch.failures for launch in report.launches] + list(report.errors)
