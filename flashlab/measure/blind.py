"""The model of time beside what was measured: predictions as data, and the errors.

    python -m flashlab.measure.blind predict SET [h100]   # cells not measured yet, into docs/results/blind/predictions
    python -m flashlab.measure.blind measure FILE         # the cells of such a file, on a GPU, into docs/results

Measured cells are those of `flashlab bench`: 16,384 tokens in all, hidden size 2048. `docs/_site/time_model.py` draws
docs/time.md from them.
"""

from __future__ import annotations

import datetime
import statistics
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, cast

from pydantic import Field

import flashlab as fl
from flashlab import jsonlines
from flashlab.files import replace_file
from flashlab.measure import results, speed
from flashlab.measure.results import Data, Kind, markdown_table
from simulator.catalogue import ladder
from simulator.names import DeviceName, DType
from simulator.operations.backward import BACKWARD
from simulator.time import rates

ROOT = Path(__file__).resolve().parents[2]
PREDICTIONS = ROOT / results.FOLDER / "blind" / "predictions"
DEVICE: DeviceName = "h200"

FP8, EIGHT = "flash3_fp8", "float8_e4m3fn"
PREDICTION_FP8 = "fp8_h200_2026-11-21.jsonl"
PREDICTION_BACKWARD = "backward_h200_2026-11-27.jsonl"
PREDICTIONS_OF_GRADIENTS: Mapping[DeviceName, tuple[str, ...]] = {
    "h200": (PREDICTION_BACKWARD, "climb_h200_2026-11-27.jsonl"),
    "h100": ("climb_h100_2026-11-27.jsonl",),
}
"""By device. What a later file says of a cell is of the kernel as it is now."""
SECONDS = 0.35
"""Of a cell that `measure` times, as the ladder's were."""
MEASURED = ("dtype", "head_dim", "causal", "length", "milliseconds", "tflops", "of_matmul", "error", "rounds")
"""What is kept of a row of `flashlab bench`; beside it `predicted`, milliseconds."""
LADDER = tuple(ladder("flash3", "flash3_1"))
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
        return self._cell.problem

    @property
    def tera(self) -> float:
        """TFLOPs by the convention of published tables."""
        return self._cell.flops * speed.trial_of(self.algorithm).PRODUCTS / 1e12

    @property
    def _cell(self) -> speed.Cell:
        return speed.Cell(self.dtype, self.head_dim, self.causal, self.length)

    def predicted(self, device: DeviceName = DEVICE) -> float:
        """Milliseconds; of flash3_fp8 without the transposition of V, as `flashlab fp8` has it."""
        t = fl.timeline(self.algorithm, self.problem, device=device)
        return (t.launches[-1].seconds if self.algorithm == FP8 else t.seconds) * 1e3


@dataclass(frozen=True)
class Beside:
    """A cell predicted and measured, in milliseconds. `source`: the kind of result that measured it."""

    cell: Cell
    predicted: float
    measured: float
    source: str

    @property
    def error(self) -> float:
        """Over 0 where the prediction is too long."""
        return self.predicted / self.measured - 1


def measured() -> list[tuple[Cell, float, str]]:
    """What the ladder and the benchmark of flash2 measured of kernels that the model knows, by kind of result."""
    found: list[tuple[Cell, float, str]] = []
    for result in benchmarks():
        for row in result.data["rows"]:
            name = row["peer"] or result.data["algorithm"]
            if name in fl.CATALOGUE:
                cell = Cell(name, row["dtype"], row["head_dim"], row["causal"], row["length"])
                found.append((cell, row["milliseconds"], result.kind))
    eight = results.latest("fp8", ROOT / results.FOLDER, algorithm=FP8, device=DEVICE)
    if eight is None or not eight.of_today(FP8):
        return found
    for row in eight.data["speed"]:
        cell = Cell(FP8, EIGHT, row["head_dim"], row["causal"], row["length"])
        found.append((cell, cell.tera / row["tflops"] * 1e3, eight.kind))
    return found


def benchmarks() -> list[results.Result]:
    """The newest benchmark of flash2, and of the ladder."""
    found = [
        results.latest(kind, ROOT / results.FOLDER, algorithm=algorithm, device=DEVICE)
        for kind, algorithm in (("bench", "flash2"), ("ladder", "flash3"))
    ]
    assert None not in found, f"flash2's benchmark or the ladder isn't in {results.FOLDER}"
    return [result for result in found if result is not None]


def beside() -> list[Beside]:
    """The model as it is now beside what was measured."""
    return [Beside(cell, cell.predicted(), time, source) for cell, time, source in measured()]


def gradients(device: DeviceName = DEVICE, without: Collection[str] = ()) -> list[Beside]:
    """The model as it is now beside what was measured of the backward passes on a device, `without` some of them."""
    timed = _timed_gradients(device).items()
    return [Beside(cell, cell.predicted(device), *found) for cell, found in timed if cell.algorithm not in without]


def blind_gradients(device: DeviceName = DEVICE) -> list[Beside]:
    """The backward passes as they were predicted before the schedules' author opened their measurements, beside these."""
    before = {cell: time for file in PREDICTIONS_OF_GRADIENTS[device] for cell, time in said(file).items()}
    return [Beside(cell, before[cell], *found) for cell, found in _timed_gradients(device).items() if cell in before]


def _timed_gradients(device: DeviceName) -> dict[Cell, tuple[float, str]]:
    """Milliseconds by benchmarks and the ladder, the newest ones of each cell, and by which kind of result. Those of older kernels,
    which the model no longer has, don't count."""
    found: dict[Cell, tuple[float, str]] = {}
    for kind in ("ladder", "bench"):
        for result in results.find(ROOT / results.FOLDER, kind=kind, device=device):
            if result.condition is not None:
                continue
            for row in result.data["rows"]:
                name = row.get("kernel") or row["peer"] or result.data["algorithm"]
                known = name in fl.CATALOGUE and fl.CATALOGUE[name].operation is BACKWARD
                if known and result.of_today(name):
                    cell = Cell(name, row["dtype"], row["head_dim"], row["causal"], row["length"])
                    found[cell] = row["milliseconds"], kind
    return found


def said(file: str | Path) -> dict[Cell, float]:
    """What a prediction file says: milliseconds by cell."""
    return {cell_of(row): row["milliseconds"] for row in prediction(file)["data"]["rows"]}


def prediction(file: str | Path) -> dict[str, Any]:
    """The content of a prediction file. Older measurements name it as it was called then, `….json`."""
    return jsonlines.joined((PREDICTIONS / file).with_suffix(".jsonl").read_text(encoding="utf-8"))


def blind_ladder() -> list[Beside]:
    """The rungs, and flash3_fp8, as they were predicted before their measurement was made or looked at, beside it."""
    before = {**said("ladder_h200_2026-11-21.jsonl"), **said(PREDICTION_FP8)}
    return [
        Beside(cell, before[cell], time, source)
        for cell, time, source in measured()
        if cell in before and source != "bench"
    ]


def blind(result: results.Result) -> list[Beside]:
    """What `measure` measured, beside what had been predicted before."""
    return [Beside(cell_of(row), row["predicted"], row["milliseconds"], result.kind) for row in result.data["rows"]]


def cell_of(row: Mapping[str, Any]) -> Cell:
    """The cell of a row of a data file."""
    found = Cell(**{name: row[name] for name in Cell.__dataclass_fields__})
    return replace(found, dtype=EIGHT) if found.algorithm == FP8 else found  # a file may name that of its output


def mean_error(cells: Iterable[Beside]) -> float:
    """The mean absolute error, relative to what was measured."""
    return statistics.fmean(abs(cell.error) for cell in cells)


def lengths() -> list[Cell]:
    """Lengths that nothing was measured at when the model got the mechanisms that it has."""
    sets: tuple[tuple[DType, tuple[int, ...], tuple[int, ...], tuple[str, ...]], ...] = (
        ("bfloat16", (64, 128, 256), (256, 768, 1536, 3072, 6144, 12288, 32768), ("flash2", *LADDER)),
        ("float16", (64, 128, 256), (3072,), ("flash2", *LADDER)),
        ("bfloat16", (64, 128), (2048,), ("standard", "online_softmax", "flash1")),
    )
    return [
        Cell(name, dtype, dim, causal, length)
        for dtype, dims, found, names in sets
        for dim in dims
        for causal in (False, True)
        for length in found
        for name in names
    ]


def rungs() -> list[Cell]:
    """The ladder at lengths that nothing was measured at when its warpgroups were let fall in step."""
    return [
        Cell(name, "bfloat16", dim, causal, length)
        for dim in (64, 128, 256)
        for causal in (False, True)
        for length in (640, 1280, 2560, 5120, 10240, 20480)
        for name in LADDER
    ]


def eight() -> list[Cell]:
    """flash3_fp8 where `flashlab fp8` times it, and at head dim 64."""
    return [
        Cell(FP8, EIGHT, dim, causal, length)
        for dim in (64, 128, 256)
        for causal in (False, True)
        for length in (1024, 4096, 16384)
    ]


def drawn(seed: int = 14, number: int = 24) -> list[Cell]:
    """Problems that a seed drew: head dim, mask, dtype and length. Those of flash1, flash2 and each rung are the same."""
    random, found = Random(seed), list[Cell]()
    for _ in range(number):
        dim, causal = random.choice((64, 128, 256)), random.random() < 0.5
        dtype: DType = random.choice(("bfloat16", "float16"))
        length = round(2 ** random.uniform(8, 14.5))
        found += [Cell(name, dtype, dim, causal, length) for name in ("flash1", "flash2", *LADDER)]
    return found


def fresh() -> list[Cell]:
    """Problems of another seed, predicted when the first 24 had been looked at."""
    return drawn(seed=15)


def backward() -> list[Cell]:
    """The backward passes where `flashlab bench` times them, each where its kernel takes the head dim."""
    names = (
        "flash3_backward", "flash3_backward_deterministic", "flash3_backward_wide", "flash2_backward",
        "flash2_backward_deterministic", "standard_backward", "flash1_backward",
    )  # fmt: skip
    return [
        Cell(name, "bfloat16", dim, causal, length)
        for name in names
        for dim in (64, 128, 256)
        if dim in fl.CATALOGUE[name].support.head_dims and (name != "flash3_backward_wide" or dim == 256)
        for causal in (False, True)
        for length in (1024, 4096, 16384)
    ]


def climb() -> list[Cell]:
    """The rungs of the backward pass for Hopper, and the kernel with dQ in one order, where the ladder times them."""
    names = *ladder("flash3_backward", "flash3_backward_1")[:-1], "flash3_backward_deterministic"
    return [
        Cell(name, "bfloat16", dim, causal, length)
        for name in names
        for dim in (64, 128)
        for causal in (False, True)
        for length in (1024, 4096, 16384)
    ]


SETS = {
    "lengths": lengths, "rungs": rungs, "fp8": eight, "drawn": drawn, "fresh": fresh, "backward": backward, "climb": climb,
}  # fmt: skip
"""What `predict` can be asked for."""


def predict(name: str, device: DeviceName = DEVICE) -> dict[str, Any]:
    """The content of a set's prediction file."""
    model = ["git", "-C", str(ROOT), "log", "-1", "--format=%h", "--", "simulator/time"]
    commit = subprocess.run(model, capture_output=True, text=True, check=True).stdout.strip()
    return {
        "schema": 2,
        "kind": "prediction",
        "device": device,
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "command": f"python -m flashlab.measure.blind predict {name}{f' {device}' if device != DEVICE else ''}",
        "constants": {constant: getattr(rates, constant) for constant in CONSTANTS},
        "set_on": SET_ON,
        "data": {
            "rows": [
                {**vars(cell), "milliseconds": (ms := cell.predicted(device)), "tflops": cell.tera / ms * 1e3}
                for cell in SETS[name]()
            ]
        },
    }


def measure(file: str) -> Path:
    """Time the cells of a prediction file; what is predicted of one problem is timed side by side. The path of the result, whose
    condition is the set's name."""
    predicted = said(file)
    together: dict[speed.Cell, list[str]] = {}
    for cell in predicted:
        together.setdefault(speed.Cell(cell.dtype, cell.head_dim, cell.causal, cell.length), []).append(cell.algorithm)
    rows: list[dict[str, Any]] = []
    yardsticks: list[dict[str, Any]] = []
    not_run: list[str] = []
    for names in dict.fromkeys(map(tuple, together.values())):
        cells = [cell for cell, found in together.items() if tuple(found) == names]
        report = speed.run(names[0], names[1:], cells=cells, seconds=SECONDS, progress=_shown)
        for row in report.rows:
            kept = {"algorithm": row.peer or names[0], **{key: x for key, x in asdict(row).items() if key in MEASURED}}
            rows.append({**kept, "predicted": predicted[cell_of(kept)]})
        yardsticks += [asdict(yardstick) for yardstick in report.yardsticks]
        not_run += report.not_run
    data = {"prediction": Path(file).name, "yardsticks": yardsticks, "rows": rows, "not_run": not_run}
    algorithms = list(dict.fromkeys(row["algorithm"] for row in rows))
    return results.save(KIND, algorithms, data, condition=Path(file).name.split("_")[0], replace=True)


class Timed(Data):
    """A cell that was measured, and the milliseconds that had been predicted of it."""

    algorithm: str
    dtype: DType
    head_dim: int
    causal: bool
    length: int
    milliseconds: float
    tflops: float
    of_matmul: float | None
    error: float
    rounds: int
    predicted: float


class Blind(Data):
    """All cells of a prediction, measured. `prediction` is its file in the folder `predictions`."""

    prediction: str
    yardsticks: tuple[speed.Yardstick, ...]
    rows: tuple[Timed, ...]
    not_run: tuple[str, ...]


class Predicted(Data):
    """A cell, and what the model says of it."""

    algorithm: str
    dtype: DType
    head_dim: int
    causal: bool
    length: int
    milliseconds: float
    tflops: float


class PredictedCells(Data):
    """All cells of a set."""

    rows: tuple[Predicted, ...]


class Prediction(Data):
    """What `predict` writes: no measurement, but what one is to be held against. `commit` is the model's."""

    schema_: Annotated[Literal[2], Field(alias="schema")]
    kind: Literal["prediction"]
    device: str
    commit: str
    date: str
    command: str
    constants: dict[str, float]
    set_on: str
    data: PredictedCells


def headline(data: Blind) -> str:
    """The mean error, by kernel."""
    errors: dict[str, list[float]] = {}
    for row in data.rows:
        errors.setdefault(row.algorithm, []).append(abs(row.predicted / row.milliseconds - 1))
    parts = ", ".join(f"{name} {statistics.fmean(found):.1%} ({len(found)} times)" for name, found in errors.items())
    return f"mean error of the time model's predictions made before measuring: {parts}"


def table_of_cells(data: Blind) -> str:
    """A row per cell."""
    header = ("kernel", "dtype", "head dim", "mask", "length", "ms", "predicted", "TFLOP/s")
    return markdown_table(header, [
        (r.algorithm, r.dtype, str(r.head_dim), "causal" if r.causal else "full", str(r.length),
         f"{r.milliseconds:.3f}", f"{r.predicted:.3f}", f"{r.tflops:.0f}")
        for r in data.rows
    ])  # fmt: skip


KIND = Kind(
    "blind",
    "Speed: what had been predicted",
    "times of cells that the time model had predicted before; the predictions lie in `predictions/`",
    "python -m flashlab.measure.blind measure FILE",
    Blind,
    headline,
    table_of_cells,
    {"predictions": Prediction},
)


def _shown(cells: Iterable[speed.Cell]) -> Iterable[speed.Cell]:
    for cell in cells:
        print(datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"), cell, file=sys.stderr, flush=True)
        yield cell


def main(what: str, *files: str) -> None:
    if what == "measure" and len(files) == 1:
        print(measure(files[0]))
    elif what == "predict" and len(files) in (1, 2) and files[0] in SETS:
        content = predict(files[0], *cast("tuple[DeviceName, ...]", files[1:]))
        path = PREDICTIONS / f"{files[0]}_{content['device']}_{content['date'][:10]}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, jsonlines.written(content))
        print(path.relative_to(ROOT))
    else:
        sys.exit(f"usage: python -m flashlab.measure.blind predict {' | '.join(SETS)} [DEVICE]; measure FILE")


if __name__ == "__main__":
    main(*sys.argv[1:] or [""])
