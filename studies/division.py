"""How keys are divided: every run of `flash_decoding`, and every chunk of `mla_hopper`, beside what is chosen.

`python -m studies runs [--out docs/results]`, on a GPU with torch. Shapes are drawn by a seed before any is timed. All ways to
divide a shape's keys take turns on the same inputs, in CUDA graphs and on a cold L2, and so do peers.

A way of `flash_decoding` is named by the tiles of a chunk and the chunks of a run: `4x8`. The kernel has chunks of four tiles.
Others are timed to know what they would bring. Ways that differ only in their runs must agree to the last bit. A way of
`mla_hopper` is the number of keys of a chunk.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

from flashlab.run.devices import current_device
from flashlab.run.plan import gpu_plan
from simulator import Problem
from simulator.algorithms import flash_decoding
from simulator.api import count
from simulator.config import Config, features
from simulator.errors import unknown
from simulator.operations.latent import latent_problem
from simulator.programs import flash_decoding as programs
from simulator.programs.flash_decoding import TILES_PER_CHUNK
from simulator.programs.mla_hopper import CHUNK
from simulator.time.prediction import timeline
from studies import contenders
from studies.contenders import HEAD_DIM, Call, Calls, Decode
from studies.rows import data, row
from studies.timed import SERVED, Asked, Row, Study, peers_of, served, served_table

SEED = 52
DRAWN = {"flash_decoding": 30, "mla_hopper": 20}
"""How many shapes are drawn for each algorithm."""
FEWEST_BYTES, MOST_BYTES, MOST_PAIRS = 8e6, 1.5e9, 2**25
"""Bytes of K and V, or of the latent cache, of a shape that is drawn, and the most pairs of a latent row and a head."""
FIRST_CHUNK = 256
_COLD, _MOST_SETS, _CALLS = 300e6, 40, 12  # bytes of all sets of inputs; calls of a graph, about
_BUSY = 3  # a way that leaves over so many times as many SMs idle as have work is left out


def log_uniform(rng: random.Random, least: int, most: int) -> int:
    """A number whose logarithm is as likely anywhere between these."""
    return min(most, round(least * (most / least) ** rng.random()))


def cells(algorithm: str, asked: Asked | None = None) -> list[Decode]:
    """The shapes of an algorithm. Of 200 to 60,000 keys, 1 to 256 requests, and groups of 1 to 16 heads; of latent attention 500
    to 65,536 keys, 1 to 128 requests, and 16 to 128 heads."""
    del asked
    rng, found = random.Random(f"{SEED} {algorithm}"), list[Decode]()
    while len(found) < DRAWN[algorithm]:
        if algorithm == "mla_hopper":
            batch, len_kv = log_uniform(rng, 1, 128), log_uniform(rng, 500, 1 << 16)
            cell = Decode(batch=batch, heads=rng.choice((16, 32, 64, 128)), kv_heads=1, len_kv=len_kv)
            fits = cell.batch * cell.len_kv * cell.heads <= MOST_PAIRS
        else:
            batch, len_kv = log_uniform(rng, 1, 256), log_uniform(rng, 200, 60_000)
            kv_heads, group = rng.choice((1, 2, 4, 8, 16, 32)), rng.choice((1, 2, 4, 8, 16))
            cell = Decode(batch=batch, heads=kv_heads * group, kv_heads=kv_heads, len_kv=len_kv)
            fits = cell.heads <= 128
        if fits and FEWEST_BYTES <= contenders.nbytes(algorithm, cell) <= MOST_BYTES:
            found.append(cell)
    return found


def problem(algorithm: str, cell: Decode, chunk: int | None = None) -> Problem:
    sizes: dict[str, Any] = {"batch": cell.batch, "heads": cell.heads, "len_kv": cell.len_kv}
    if algorithm == "mla_hopper":
        return latent_problem(**sizes, chunk=chunk)
    return Problem(**sizes, kv_heads=cell.kv_heads, len_q=1, head_dim=HEAD_DIM, dtype="bfloat16")


def config_of(algorithm: str, p: Problem) -> Config:
    config = count(algorithm, p, device=current_device()).config
    assert config is not None
    return config


# -- ways to divide keys ----------------------------------------------------------------------------------------------

_RUN: ContextVar[int] = ContextVar("_RUN")


@contextmanager
def chunks_of(tiles: int) -> Generator[None]:
    """Meanwhile chunks of `flash_decoding` have so many tiles, and runs as many chunks as `in_runs` says."""

    def with_tiles(p: Problem) -> tuple[tuple[str, int], ...]:
        return *features(p), ("TILES_PER_CHUNK", tiles)

    def asked_for(*_: Any) -> int:
        return _RUN.get()

    with (
        patch.object(flash_decoding, "run_for", asked_for),
        patch.object(flash_decoding, "features", with_tiles),
        patch.object(programs, "TILES_PER_CHUNK", tiles),
    ):
        yield


def in_runs(run: int, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Calls with runs of so many chunks, inside `chunks_of`."""
    token = _RUN.set(run)
    try:
        return call(*given, **named)
    finally:
        _RUN.reset(token)


def runs(cell: Decode) -> list[tuple[int, int]]:
    """The tiles of a chunk and the chunks of a run, for each way that a cell is timed.

    With chunks as they are, that is every run. Shorter chunks have runs of up to eight tiles where there are few chunks. Chunks of
    one tile also have the longest run everywhere: that tells what it costs to join so often.
    """
    p, device = problem("flash_decoding", cell), current_device()
    config = config_of("flash_decoding", p)
    every = flash_decoding.runs_of(p, config.tile, config.warps)
    found = list[tuple[int, int]]()
    for tiles in (TILES_PER_CHUNK, 2, 1):
        of_a_head = -(-cell.len_kv // (tiles * config.tile.cols))
        whole = next((i for i, run in enumerate(every) if run >= of_a_head), len(every) - 1)
        some = every[: whole + 1]
        few = cell.batch * cell.kv_heads * of_a_head * tiles <= 2 * device.sms * TILES_PER_CHUNK
        found += [
            (tiles, run)
            for run in some
            if tiles == TILES_PER_CHUNK
            or (tiles == 1 and run == some[-1])
            or (few and run * tiles <= 2 * TILES_PER_CHUNK)
        ]
    return found


def chunks(cell: Decode) -> list[int]:
    """Keys of a chunk: those that leave few SMs without work, up to one chunk for each row, and the kernel's own."""
    row_tiles, sms = -(-cell.heads // 64), current_device().sms

    def units(chunk: int) -> int:
        return -(-cell.len_kv // chunk) * row_tiles * cell.batch

    found = [FIRST_CHUNK]
    while found[-1] < cell.len_kv and units(2 * found[-1]) * _BUSY >= min(sms, units(FIRST_CHUNK)):
        found.append(2 * found[-1])
    return sorted({*found, CHUNK})


def chosen(algorithm: str, cell: Decode) -> str:
    """The way that is taken if nobody asks for one."""
    config = config_of(algorithm, problem(algorithm, cell))
    constants = dict(config.constants)
    if algorithm == "mla_hopper":
        return str(constants["TILES_PER_CHUNK"] * config.tile.cols)
    return f"{TILES_PER_CHUNK}x{constants['RUN']}"


def makers(
    torch: Any, algorithm: str, cell: Decode, against: Sequence[str]
) -> tuple[dict[str, Callable[[], Call]], Any]:
    """By way and by peer what makes its call, on inputs that all share; and the arrays that a plain read reads."""
    call_of, read = contenders.drawn(torch, algorithm, cell)
    peers = {name: partial(call_of, name) for name in against}
    if algorithm == "mla_hopper":
        return {str(n): partial(call_of, algorithm, n) for n in chunks(cell)} | peers, read
    arrays = dict(zip("qkv", read, strict=True))
    return {f"{way[0]}x{way[1]}": partial(decoded, cell, way, arrays) for way in runs(cell)} | peers, read


@cache
def planned(p: Problem, way: tuple[int, int]) -> Any:
    """A plan with the chunks and the runs of a way."""
    with chunks_of(way[0]):
        return in_runs(way[1], gpu_plan, "flash_decoding", p)


def decoded(cell: Decode, way: tuple[int, int], arrays: dict[str, Any]) -> Call:
    plan = planned(problem("flash_decoding", cell), way)
    return lambda: plan.run(**arrays)["out"]


@cache
def compile_ahead(algorithm: str) -> None:
    """Compiles the kernels of all ways of all cells, each once, many at a time."""
    every = cells(algorithm)
    with ThreadPoolExecutor() as pool:
        if algorithm == "mla_hopper":
            posed = [problem(algorithm, cell, chunk) for cell in every for chunk in chunks(cell)]
            list(pool.map(partial(gpu_plan, algorithm), {config_of(algorithm, p): p for p in posed}.values()))
            return
        ways = [(cell, way) for cell in every for way in runs(cell)]
        for tiles in (TILES_PER_CHUNK, 2, 1):
            with chunks_of(tiles):
                posed = [(run, problem(algorithm, cell)) for cell, (own, run) in ways if own == tiles]
                kernels = {in_runs(run, config_of, algorithm, p): (run, p) for run, p in posed}.values()
                list(pool.map(in_runs, *zip(*((run, gpu_plan, algorithm, p) for run, p in kernels), strict=True)))


# -- the study --------------------------------------------------------------------------------------------------------

_begun: dict[str, float] = {}


def measure(algorithm: str, cell: Decode, asked: Asked) -> list[Row]:
    """Times a cell. It is left out where `asked.seconds` have gone since the first cell, and where it fails: others are kept."""
    compile_ahead(algorithm)
    begun = _begun.setdefault(algorithm, time.monotonic())
    if asked.seconds is not None and time.monotonic() - begun > asked.seconds:
        asked.not_run.append(f"{cell!r}: no time was left")
        return []
    try:
        return [timed_row(algorithm, cell, asked)]
    except Exception as error:  # of whatever library
        asked.not_run.append(f"{cell!r}: {contenders.reason(error)}")
        return []


def timed_row(algorithm: str, cell: Decode, asked: Asked) -> Row:
    """A cell's row. A way with other outputs isn't timed."""
    torch: Any = import_module("torch")
    own, moved, failed, sets = (
        chosen(algorithm, cell),
        contenders.nbytes(algorithm, cell),
        dict[str, str](),
        list[Calls](),
    )
    for n in range(max(2, min(_MOST_SETS, int(_COLD / moved) + 1))):
        made, read = makers(torch, algorithm, cell, [x for x in asked.against if x not in failed])
        calls = contenders.ready(own, {name: make for name, make in made.items() if name not in failed}, failed)
        if n == 0:
            failed |= differing(torch, calls, own)
        sets.append({name: call for name, call in calls.items() if name not in failed})
        sets[-1]["read"] = contenders.plain_read(torch, *read)
    found = served(own, sets, max(1, _CALLS // len(sets)), asked, failed)
    predicted = 1e6 * timeline(algorithm, problem(algorithm, cell), device=current_device()).seconds
    return {**cell.model_dump(), **found, "chosen": own, "nbytes": moved, "predicted": predicted}


def differing(torch: Any, calls: Calls, own: str) -> dict[str, str]:
    """The calls with another output than the chosen way's: another bit, where they have the same chunks."""
    outs = {name: call() for name, call in calls.items()}
    found = dict[str, str]()
    for name, out in outs.items():
        same_chunks = "x" in name and name.split("x")[0] == own.split("x")[0]
        apart = float((out.float() - outs[own].float()).abs().max())
        if not apart < 0.02 or (same_chunks and not torch.equal(out, outs[own])):
            found[name] = f"its output differs by up to {apart:.3g}"
    return found


def ways_of(r: Any) -> dict[str, float]:
    """The µs of the ways in which a row's cell may be divided today: chunks as they are, every run; or every chunk."""
    today = [name for name in r.microseconds if name.isdigit() or name.startswith(f"{TILES_PER_CHUNK}x")]
    return {name: r.microseconds[name] for name in today}


def over_best(r: Any) -> float:
    """How many times as long the chosen way takes as the fastest."""
    return r.microseconds[r.chosen] / min(ways_of(r).values())


def headline(of: Any) -> str:
    ratios = [over_best(r) for r in of.rows]
    near = sum(x <= 1.05 for x in ratios)
    said = f"within 5 % of the best way in {near} of {len(ratios)} drawn shapes, at most {max(ratios):.2f} ×"
    peers = {name: [r.ratios[name] for r in of.rows if name in r.ratios] for name in peers_of_shapes(of)}
    beside = [f"{min(x):.2f} to {max(x):.2f} × {name}" for name, x in peers.items()]
    apart = statistics.mean(abs(r.predicted / r.microseconds[r.chosen] - 1) for r in of.rows)
    return "; ".join([f"{of.algorithm}: {said}", *beside, f"predicted within {apart:.1%} in the mean"])


def peers_of_shapes(of: Any) -> list[str]:
    """What was timed beside ways and the plain read."""
    return [name for name in peers_of(of) if not name.isdigit() and not name[0].isdigit()]


def table(of: Any) -> str:
    def best(r: Any) -> str:
        found = ways_of(r)
        return min(found, key=lambda name: found[name])

    only_peers = of.model_copy(update={"rows": [
        r.model_copy(update={
            "ratios": {name: x for name, x in r.ratios.items() if name == "read" or name in peers_of_shapes(of)},
            "microseconds": {**r.microseconds, of.algorithm: r.microseconds[r.chosen]},
        })
        for r in of.rows
    ]})  # fmt: skip
    chosen = "chosen | µs=took:.1f | predicted:.1f | best | its µs=least:.1f | of a plain read=share:.0%"
    columns = f"batch | heads=both | keys=len_kv:, | {chosen}"
    return served_table(
        columns, only_peers, micro=True,
        both=lambda r: f"{r.heads}, {r.kv_heads}", best=best, least=lambda r: min(ways_of(r).values()),
        share=lambda r: r.ratios["read"],
    )  # fmt: skip


def peers(algorithm: str, given: Sequence[str] | None) -> Sequence[str]:
    if algorithm not in DRAWN:
        raise unknown("algorithm", algorithm, DRAWN)
    default = {"flash_decoding": ("cudnn",), "mla_hopper": ()}[algorithm]
    return default if given is None else contenders.check(algorithm, given)


RUN_ROW = row(
    "RunsRow", "A drawn shape: µs by way (see `studies/division.py`) and by peer, their time over that of the `chosen` way, and the"
    " µs of that which the model of time predicted, at the commit that measured.",
    Decode, **SERVED, chosen=str, nbytes=int, predicted=float, failed=(dict[str, str], {}),
)  # fmt: skip
RUNS = Study(
    "runs", "Speed: how keys are divided",
    "the time of every run of `flash_decoding` and of every chunk of `mla_hopper` in drawn shapes, in CUDA graphs beside peers",
    "python -m studies runs", data("Runs", "Of one algorithm.", RUN_ROW, algorithm=str), headline, table,
    algorithms=tuple(DRAWN), cells=cells, measure=measure, peers=peers,
)  # fmt: skip
