"""The emulator against the GPU: what was measured still holds, and a disagreement would be seen."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

import flashlab as fl
from flashlab.measure import agreement, emulated, results
from flashlab.measure.agreement import Agreement, Row
from flashlab.measure.problems import matrix
from flashlab.measure.workload import Case
from simulator.devices import DEVICES
from tests.tiers import one_of_each

MEASURED = results.find(Path(__file__).resolve().parents[3] / results.FOLDER, kind="agreement")
GPU: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
for measured in MEASURED:
    for row in measured.data["rows"]:
        GPU[row["case"], row["launch"]][row["what"]] = row["gpu"]

ALGORITHMS = sorted({case.split()[0] for case, _ in GPU})
"""Those that were measured."""


def changed_since(case: Case) -> bool:
    """Was the kernel of a case another one when it was measured?

    Hopper's 16-bit kernels multiplied the columns that pad a box, too. And under a causal mask the blocks of flash3 and
    flash3_fp8 took pairs of row tiles; now they draw them. Their newest counters hold the bytes.
    """
    p, row = case.problem, fl.CATALOGUE[case.algorithm]
    columns = row.name in ("flash3_1", "flash3_2", "flash3_3", "flash3") and p.head_dim % 64 != 0
    return columns or (p.causal and case.algorithm in ("flash3", "flash3_fp8"))


@pytest.mark.long
@pytest.mark.compiler
@pytest.mark.parametrize("algorithm", one_of_each(reversed(ALGORITHMS), lambda name: fl.CATALOGUE[name].dtypes))
def test_counts_are_those_that_the_gpu_had(algorithm: str) -> None:
    """Bytes, sectors and wavefronts of the ragged problems, where lanes part, as a GPU counted them."""
    measured = {name for name, _ in GPU}
    cases = [
        c
        for c in matrix([algorithm])
        if c.name in measured
        and any(part in c.name for part in ("ragged", "more", "odd-rows"))
        and not changed_since(c)
    ]
    compared = 0
    for launch in emulated.run(cases, device=DEVICES["h200"]).launches:
        counted = GPU[launch.case.name, launch.launch]
        mine = {**{check.what: check.measured for check in launch.checks}, **launch.extras}
        judged = {what: n for what, n in mine.items() if what in counted and what not in agreement.REPORTED}
        assert judged == {what: counted[what] for what in judged}, launch.case.name
        compared += len(judged)
    assert compared >= 5 * len(cases) >= 5


def test_all_algorithms_of_the_spine_were_measured() -> None:
    assert {"standard", "online_softmax", "flash1", "flash2"} <= set(ALGORITHMS)
    spine = next(
        r for r in MEASURED if "flash2" in r.data["summary"]["by_quantity"] or "flash2" in r.content["algorithms"]
    )
    assert spine.data["passed"]
    assert spine.data["summary"]["worst_output"] <= agreement.HALF


AGREED = Agreement("h200", (Row("flash2 a", "flash2", "hbm.read", 5, 5),), {"flash2 a": 0.4}, (), ())


@pytest.mark.parametrize(
    "wrong",
    [
        replace(AGREED, rows=(Row("flash2 a", "flash2", "hbm.read", 5, 6),)),
        replace(AGREED, rows=(Row("flash2 a", "flash2", "wavefronts_ldsm", 5, 6),)),
        replace(AGREED, outputs={"flash2 a": 0.51}),
        replace(AGREED, outputs={"flash2 a": float("nan")}),
        replace(AGREED, findings=("flash2 a: race",)),
        replace(AGREED, errors=("flash2: ncu ended with 1",)),
        replace(AGREED, rows=()),
    ],
)
def test_what_disagrees_fails(wrong: Agreement) -> None:
    assert AGREED.passed
    assert not wrong.passed


def test_copies_wavefronts_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    report = replace(AGREED, rows=(*AGREED.rows, Row("flash2 a", "flash2", "wavefronts_ldgsts", 5, 4)))
    assert report.passed
    assert report.summary["by_quantity"] == {"hbm.read": [1, 1], "wavefronts_ldgsts": [0, 1]}
    report.print()
    assert "wavefronts_ldgsts: not judged" in capsys.readouterr().out
