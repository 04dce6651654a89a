"""Flash-Decoding: its configuration, the player's words, and its row of the catalogue."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from simulator.algorithm import Algorithm, Kernel
from simulator.algorithms.common import FORWARD, TREE
from simulator.config import Config, features, padded, warps_for
from simulator.devices import Device
from simulator.errors import SramOverflow
from simulator.formulas import flash_decoding as formula
from simulator.formulas.flash_decoding import sram_bytes
from simulator.problem import COMMON_MASKS, OF_CACHES, Problem, Tile
from simulator.programs.flash_decoding import FRAGMENT, TILES_PER_CHUNK, Splits, flash_decoding
from simulator.programs.quantized import query_parts
from simulator.support import Support, few_rows
from simulator.time.schedules import flash_decoding as schedule

WALKS = 2
"""How often a block walks over its units where sequences have lengths, per warp that computes: to find keys, and another one to
merge. To copy and to compute, a warp has told itself in SRAM."""
MOST_APART = 8
"""The most chunks of a run where sequences have lengths. The device alone may know them, and many short runs come out even."""
FEW_ROWS = 8
"""Up to so many rows, queries are few in float32 and on other GPUs than Hopper's: no more were timed."""
MOST_PACKED = 16
"""The most rows of a tile that is chosen here."""
SORTED = 32
"""Requests whose last runs are sorted by their lengths. Of more requests, there are `CLASSES` of last runs, the long ones first."""
CLASSES = 4
_REGISTERS, _REGISTERS_APART = 96, 64  # of a thread, for results that wait for their neighbours
READ_SHARE, ONE_SM = 0.92, 36e9
"""Share of DRAM's bandwidth that a plain read reaches, and bytes per second of a block that has DRAM nearly to itself."""
BOUNDARY, WHOLE_BOUNDARY, MERGE, MERGE_ROW = 2.0e-6, 0.9e-6, 1.9e-6, 1.5e-6
"""Seconds: of a boundary for each row of a warp that merges, where units have parts of row tiles; of a boundary where they have
whole ones; of the last merge across blocks, and of each of its rows. All were set on 15 times of an H100, before the drawn shapes
of docs/results/runs were timed. A fit to half of those was no better in the other half."""


def run_for(problem: Problem, tile: Tile, warps: int, device: Device) -> int:
    """How many chunks a block computes before it moves on, a power of two: what takes least by `seconds_of`.

    >>> from simulator.devices import DEVICES
    >>> decode = Problem(batch=64, heads=32, kv_heads=8, len_q=1, len_kv=4096, head_dim=128, dtype="float16")
    >>> [run_for(decode.replace(batch=n), Tile(16, 128), 4, DEVICES["h200"]) for n in (1, 3, 64)]
    [1, 2, 8]
    """

    def units(run: int) -> int:
        def of(one: Problem) -> int:
            s = Splits(one, tile, run)
            return s.runs * s.row_tiles * one.batch * one.kv_heads

        return problem.total(of)

    longest = Splits(problem.padded, tile, 1).most
    return best_run({run: units(run) for run in runs_of(problem, tile, warps)}, longest, problem, tile, warps, device)


def runs_of(problem: Problem, tile: Tile, warps: int) -> list[int]:
    """How many chunks a run may have. Results that wait for their neighbours fill registers: a lane has four columns of its warp's
    rows."""
    registers = _rows(tile, warps) * (4 * -(-padded(problem.head_dim_v) // 128) + 2)
    room, most = (_REGISTERS_APART, MOST_APART) if problem.apart else (_REGISTERS, inf)
    return [2**n for n in range(room // registers + 1) if 2**n <= most]


def _rows(tile: Tile, warps: int) -> int:
    """Rows of a warp that merges."""
    return -(-padded(tile.rows, FRAGMENT) // warps)


def best_run(units: Mapping[int, int], longest: int, problem: Problem, tile: Tile, warps: int, device: Device) -> int:
    """The run to choose, where so many units of each length of run are dealt out, and no row tile sees over `longest` chunks.

    Of runs that take about as long, it is the longest: it has the fewest partial results in HBM. No run is longer than it needs to
    be for all chunks of a row tile.
    """
    width = problem.head_dim + problem.head_dim_v
    nbytes = TILES_PER_CHUNK * tile.cols * width * problem.kv_itemsize
    useful = {run: n for run, n in units.items() if run < 2 * longest}
    took = {run: seconds_of(run, n, units[1], longest, nbytes, _rows(tile, warps), device) for run, n in useful.items()}
    return max(run for run, time in took.items() if time <= 1.01 * min(took.values()))


def seconds_of(run: int, units: int, chunks: int, longest: int, nbytes: int, rows: int, device: Device) -> float:
    """About how long `units` of up to `run` chunks take, beyond what all ways to divide keys take.

    All SMs share DRAM, so what one leaves idle the others use. It only matters that the block with the most to do has its bytes in
    time. A boundary between units costs time, and so does a merge across blocks at the end: `rows` of a warp, one after the other.

    There are `chunks` of `nbytes` in all, and up to `longest` of a row tile.
    """
    rounds, split = max(1, -(-units // device.sms)), run < longest
    alone = rounds * min(run, longest) * nbytes / ONE_SM
    streamed = max(chunks * nbytes / (READ_SHARE * device.bandwidth), alone)
    return streamed + (rounds - 1) * (rows * BOUNDARY if split else WHOLE_BOUNDARY) + split * (MERGE + rows * MERGE_ROW)


def pays(problem: Problem, device: Device) -> bool:
    """Is it faster than what has tiles of one head's rows?

    On Hopper that is `flash3`. A tile of that has 128 rows of one head, and a block all keys of a tile. Here a tile has 16 rows of
    a group's heads, and all SMs share its keys. Both take about as long for a tile's keys, so what counts is how many tiles the
    busiest SM has.

    The rule was chosen on an H100: 1 to 64 requests with up to 128 queries each, in groups of 1, 4 and 8 heads. More queries
    weren't tried. Of float32, and of other GPUs, eight rows are few.

    >>> from simulator.devices import DEVICES
    >>> decode = Problem(batch=1, heads=32, kv_heads=8, len_q=1, len_kv=4096, head_dim=128, dtype="float16")
    >>> [pays(decode.replace(len_q=n), DEVICES["h100"]) for n in (1, 16, 64, 128)]
    [True, True, True, False]
    >>> [pays(decode.replace(len_q=n, batch=16), DEVICES["h100"]) for n in (1, 16, 32)]
    [True, True, False]
    >>> [pays(decode.replace(len_q=n), DEVICES["a100-80"]) for n in (1, 2, 3)]
    [True, True, False]
    """
    problem = problem.padded
    rows = problem.len_q * problem.queries_per_kv
    if problem.dtype == "float32" or device.compute_capability != (9, 0) or rows <= FEW_ROWS:
        return rows <= FEW_ROWS
    of_a_head = -(-problem.batch * problem.heads // device.sms)
    packed = problem.batch * problem.kv_heads * -(-rows // MOST_PACKED) / device.sms
    return problem.len_q <= 128 and packed <= of_a_head


def passes(problem: Problem, run: int) -> int:
    """How often a walk over the units of sequences goes through the lengths: once for the runs that others follow, and once for the
    last runs. Of more than `SORTED` requests it does so for each class of last runs. Runs of one chunk are alike.

    >>> decode = Problem(batch=64, heads=32, kv_heads=8, len_q=1, len_kv=4096, head_dim=128, dtype="float16", page_size=16)
    >>> passes(decode, 8), passes(decode, 1), passes(decode.replace(batch=32), 8)
    (5, 2, 2)
    """
    return 1 + (CLASSES if run > 1 and problem.padded.batch > SORTED else 1)


@flash_decoding.configured
def configure(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """As many rows as a group of heads has, 8 or 16, and as many keys as leave room for two stages, up to 128. More rows are
    several tiles: with 32 in one, 64 keys are all that registers have room for, and one tile takes longer than several.
    Neighbouring blocks have a tile each of the same keys, so DRAM brings them once.

    A chunk is four tiles, whatever the device has. Four warps split a tile's keys. Bytes in flight are all that counts, so the
    ring is as deep as there is room for.
    """
    d, half = padded(max(problem.head_dim, problem.head_dim_v)), problem.itemsize == 2
    if tile is not None:
        candidates = [Tile.parse(tile)]
    else:
        packed = problem.padded.len_q * problem.queries_per_kv
        candidates = [Tile(8 if packed <= 8 else MOST_PACKED, cols) for cols in (128, 64, 32, 16)]
    depths = (6, 5, 4, 3, 2, 1) if device.compute_capability >= (8, 0) else (1,)  # 1: there is no cp.async
    ways = [(chosen, stages) for chosen in candidates for stages in depths]
    needed = 0
    for chosen, stages in sorted(ways, key=lambda way: way[1] == 1 and way[1] < depths[0]):
        warps = warps_for(chosen.cols)
        needed = sram_bytes(problem, chosen, warps, stages)
        if needed <= device.sram_per_block:
            run = run_for(problem, chosen, warps, device)
            return Config(
                tile=chosen,
                warps=warps,
                stages=stages,
                q_in_registers=half
                and padded(chosen.rows, FRAGMENT) * d * max(2, query_parts(problem)) <= 2 * 16 * 128,
                blocks_per_sm=1,
                persistent=True,
                walks=passes(problem, run) * WALKS * warps if problem.apart else 0,
                fragment_rows=FRAGMENT,
                constants=(("RUN", run), *features(problem)),
            )
    raise SramOverflow("tile", str(candidates[-1]), needed=needed, limit=device.sram_per_block, device=device.name)


ABOUT = {
    "flash_decoding": {
        "load_q": "Fetch the queries of all heads that share this KV head: they are rows of one tile.",
        "load_k": "Fetch the next tile of this chunk's keys. Each warp fetches its share for itself, well ahead.",
        "scores": "Multiply the queries by the keys. Each warp has all rows, and its own keys.",
        "mask": "Set the scores that the mask hides to −∞, so that their exponential is 0.",
        "softmax": "The new row maximum m, and P = exp(S − m). Each warp has its own m and ℓ.",
        "rescale": "Where the maximum rose, what was summed up before shrinks: ℓ and the accumulator times α.",
        "load_v": "Fetch the values of the same keys.",
        "output": "Weigh the values with P, and add them to the warp's accumulator.",
        "join": "The warps tell each other their maxima. What each has of O and ℓ, relative to the highest, goes through SRAM to "
        "the warps that merge, and is added up.",
        "merge_run": "Merge the chunks of this run two by two, as they come. Each pair is weighed by its maxima.",
        "store_partial": "Write what this run has to HBM, where the block that comes last will find it.",
        "arrive": "Count up, by an atomic. A warp that isn't the last one is done, and the last one sets the counter back to 0.",
        "merge": "Read the partial results of up to 32 siblings, and merge them two by two.",
        "store_o": "A sink joins here, once. Divide by ℓ, and write the finished rows of the output to HBM.",
        "store_lse": "Write each row's log-sum-exp to HBM.",
    },
}
"""What each step of each launch is for, in a sentence or two: the player's words."""


def launch(scales: bool, ragged: bool) -> Kernel:
    """The launch, with scales of quantised K and V or without, for a ragged batch or a plain one."""
    further = (*FORWARD, "sinks", *("k_scale", "v_scale") * scales, *("offsets_kv",) * ragged, *TREE)
    return Kernel(
        "flash_decoding",
        "flash_decoding",
        further,
        persistent=True,
        when=lambda p: (p.quantized, p.ragged) == (scales, ragged),
    )


ROW = Algorithm(
    "flash_decoding",
    flash_decoding,
    formula.flash_decoding,
    schedule=schedule.launches,
    kernels=tuple(launch(scales, ragged) for scales in (False, True) for ragged in (False, True)),
    support=Support(
        masks=(*COMMON_MASKS, "soft_cap", "sinks", "lengths", *OF_CACHES),
        tile=few_rows,
        tiles=(None, Tile(16, 16), Tile(32, 32)),
        few_queries=True,
        same_queries="use flash2 or flash3",
    ),
    about=ABOUT,
    follows="flash_decoding_2",
    rank=3,
    pays=pays,
    shown={"len_q": 2, "len_kv": 256, "tile": "16x16"},
)
