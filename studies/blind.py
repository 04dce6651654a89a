"""The model of time, blind: predictions as data before anything is measured, and the measurement of what was predicted.

    python -m studies blind predict NAME ALGORITHM… [--device h100] [--seed 16] [--number 6]
    python -m studies blind measure FILE         # the cells of such a file, on a GPU, into docs/results

The first draws cells of `flashlab bench` (16,384 tokens in all, hidden size 2048), the same for all algorithms that take them, and
writes NAME into docs/results/blind/predictions. `docs/_site/time_model.py` shows the errors in docs/time.md.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal

from pydantic import Field
from rich.progress import track

import flashlab as fl
from flashlab.base import jsonlines
from flashlab.base.files import replace_file
from flashlab.measure import results, speed
from flashlab.measure.results import Kind
from simulator.names import DeviceName, DType
from simulator.time import rates
from studies.rows import CELL, data, grouped, row, shown

ROOT = Path(__file__).resolve().parents[1]
PREDICTIONS = ROOT / results.FOLDER / "blind" / "predictions"
FP8, EIGHT = "flash3_fp8", "float8_e4m3fn"
SECONDS = 0.35
"""Of a cell that `measure` times, as the ladder's were."""
MEASURED = (*CELL, "milliseconds", "tflops", "of_matmul", "error", "rounds")
"""What is kept of a row of `flashlab bench`; beside it `predicted`, milliseconds."""
CONSTANTS = ("AT_REST", "DRAWN", "FLOAT16", "MOVED")
SET_ON = (
    "the clocks of the SMs while flash2 and the ladder ran in 36 cells each (rates/machine, clocks), no kernel's time; the "
    "mechanisms that the model has were chosen with an eye on the cycles of these cells (their times by their clocks), on "
    "bench/flash2, ladder/flash3 and fp8/flash3_fp8, and on what predictions/unmeasured, lengths, rungs and drawn met"
)


@dataclass(frozen=True)
class Cell:
    """A kernel in a cell of `flashlab bench`."""

    algorithm: str
    dtype: DType
    head_dim: int
    causal: bool
    length: int

    @property
    def problem(self) -> fl.Problem:
        return self.timed.problem

    @property
    def tera(self) -> float:
        """TFLOPs by the convention of published tables."""
        return self.timed.flops * speed.trial_of(self.algorithm).PRODUCTS / 1e12

    @property
    def timed(self) -> speed.Cell:
        return speed.Cell(self.dtype, self.head_dim, self.causal, self.length)

    def predicted(self, device: DeviceName = "h200") -> float:
        """Milliseconds; of flash3_fp8 without the transposition of V, as `flashlab fp8` has it."""
        t = fl.timeline(self.algorithm, self.problem, device=device)
        return (t.launches[-1].seconds if self.algorithm == FP8 else t.seconds) * 1e3


def cell_of(of: Mapping[str, Any]) -> Cell:
    """The cell of a row of a data file."""
    found = Cell(**{name: of[name] for name in Cell.__dataclass_fields__})
    return replace(found, dtype=EIGHT) if found.algorithm == FP8 else found  # a file may name that of its output


def prediction(file: str | Path) -> dict[str, Any]:
    """The content of a prediction file. Older measurements name it as it was called then, `….json`."""
    return jsonlines.joined((PREDICTIONS / file).with_suffix(".jsonl").read_text(encoding="utf-8"))


def said(file: str | Path) -> dict[Cell, float]:
    """What a prediction file says: milliseconds by cell."""
    return {cell_of(each): each["milliseconds"] for each in prediction(file)["data"]["rows"]}


def drawn(algorithms: Sequence[str], seed: int, number: int, device: DeviceName = "h200") -> list[Cell]:
    """Cells of problems that a seed draws: head dim, mask, dtype and length. Each algorithm has those that it takes."""
    random, found = Random(seed), list[Cell]()
    for _ in range(number):
        dim, causal = random.choice((64, 128, 256)), random.random() < 0.5
        dtype: DType = random.choice(("bfloat16", "float16"))
        length = round(2 ** random.uniform(8, 14.5))
        for name in algorithms:
            cell = Cell(name, EIGHT if name == FP8 else dtype, dim, causal, length)
            if fl.CATALOGUE[name].refuses(cell.problem, fl.Device.named(device)) is None:
                found.append(cell)
    return found


def predict(cells: Iterable[Cell], device: DeviceName, command: str) -> dict[str, Any]:
    """The content of a prediction file."""
    model = ["git", "-C", str(ROOT), "log", "-1", "--format=%h", "--", "simulator/time"]
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    head: dict[str, Any] = {
        "schema": 2,
        "kind": "prediction",
        "device": device,
        "date": date,
        "command": command,
        "set_on": SET_ON,
    }
    head["commit"] = subprocess.run(model, capture_output=True, text=True, check=True).stdout.strip()
    head["constants"] = {constant: getattr(rates, constant) for constant in CONSTANTS}
    times = {cell: cell.predicted(device) for cell in cells}
    return {
        **head,
        "data": {"rows": [{**vars(x), "milliseconds": ms, "tflops": x.tera / ms * 1e3} for x, ms in times.items()]},
    }


def measure(file: str) -> Path:
    """Time the cells of a prediction file, those of one problem side by side. The result's condition is the set's name."""
    predicted = said(file)
    together: dict[speed.Cell, list[str]] = {}
    for cell in predicted:
        together.setdefault(cell.timed, []).append(cell.algorithm)
    found: dict[str, list[Any]] = {"yardsticks": [], "rows": [], "not_run": []}
    for names in dict.fromkeys(map(tuple, together.values())):
        cells = [cell for cell, of in together.items() if tuple(of) == names]
        report = speed.run(names[0], names[1:], cells=cells, seconds=SECONDS, progress=track)
        for each in report.rows:
            kept = {
                "algorithm": each.peer or names[0],
                **{key: x for key, x in asdict(each).items() if key in MEASURED},
            }
            found["rows"].append({**kept, "predicted": predicted[cell_of(kept)]})
        found["yardsticks"] += [asdict(yardstick) for yardstick in report.yardsticks]
        found["not_run"] += report.not_run
    algorithms = list(dict.fromkeys(each["algorithm"] for each in found["rows"]))
    name = Path(file).name
    return results.save(KIND, algorithms, {"prediction": name, **found}, condition=name.split("_")[0], replace=True)


def headline(of: Any) -> str:
    errors = grouped(of.rows, "algorithm", lambda r: abs(r.predicted / r.milliseconds - 1)).items()
    parts = ", ".join(f"{name} {statistics.fmean(found):.1%} ({len(found)} times)" for name, found in errors)
    return f"mean error of the time model's predictions made before measuring: {parts}"


OF_A_KERNEL: Any = {"algorithm": str, **CELL, "dtype": DType, "milliseconds": float, "tflops": float}
PREDICTED = row("Predicted", "A cell, and what the model says of it.", **OF_A_KERNEL)
TIMED = row(
    "Timed", "A cell that was measured, and the milliseconds that had been predicted of it.", **OF_A_KERNEL,
    of_matmul=float | None, error=float, rounds=int, predicted=float,
)  # fmt: skip
PREDICTION = row(
    "Prediction", "What `predict` writes: no measurement, but what one is to be held against. `commit` is the model's.",
    schema_=Annotated[Literal[2], Field(alias="schema")], kind=Literal["prediction"], device=str, commit=str, date=str,
    command=str, constants=dict[str, float], set_on=str, data=data("PredictedCells", "All cells of a set.", PREDICTED),
)  # fmt: skip
KIND = Kind(
    "blind", "Speed: what had been predicted",
    "times of cells that the time model had predicted before; the predictions lie in `predictions/`",
    "python -m studies blind measure FILE",
    data("Blind", "All cells of a prediction, measured. `prediction` is its file in the folder `predictions`.", TIMED,
         prediction=str, yardsticks=tuple[speed.Yardstick, ...], not_run=tuple[str, ...]),
    headline,
    shown("kernel=algorithm | dtype | head dim=head_dim | mask | length | ms=milliseconds:.3f | predicted:.3f"
          " | TFLOP/s=tflops:.0f"),
    beside={"predictions": PREDICTION},
)  # fmt: skip


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("python -m studies blind", description="Predict times before they are measured.")
    parser.add_argument("what", choices=("predict", "measure"))
    parser.add_argument("name", help="of the prediction, or its file")
    parser.add_argument("algorithms", nargs="*", help="that are predicted")
    parser.add_argument("--device", default="h200", choices=fl.DEVICES, help="%(default)s")
    parser.add_argument("--seed", type=int, default=16, help="%(default)s")
    parser.add_argument("--number", type=int, default=6, help="problems that it draws (%(default)s)")
    given = parser.parse_args(words)
    if given.what == "measure":
        print(measure(given.name))
        return
    cells = drawn(given.algorithms, given.seed, given.number, given.device)
    content = predict(cells, given.device, f"python -m studies blind {' '.join(words)}")
    path = PREDICTIONS / f"{given.name}_{given.device}_{content['date'][:10]}.jsonl"
    print(replace_file(path, jsonlines.written(content)).relative_to(ROOT))
