"""The kernels on ragged batches, on the emulator: numbers, bytes, findings, neighbours' rows; and faults seeded in them."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import flashlab as fl
import kernels_cu
from flashlab.verify import CHECKS
from flashlab.verify.bench import Bench
from flashlab.verify.rule import expect, judge
from flashlab.verify.targets import target_of
from simulator.operations.attention import ATTENTION
from tests.patches import patched
from tests.tiers import examples, one_of_each

pytestmark = pytest.mark.compiler

P = fl.Problem(batch=1, heads=2, kv_heads=1, lengths=[1], head_dim=40, dtype="float16")
TILES = {"flash2": [(64, 32), (32, 80), None], "flash3": [(64, 32), (128, 48), (192, 32), None]}
"""Of one warpgroup that computes, of two and of three; and the default."""
SCORES: dict[str, Any] = {"soft_cap": 5.0, "sinks": True, "alibi": True}


def complaints(algorithm: str, p: fl.Problem, tile: Any, littered: int | None = None) -> list[str]:
    """What is wrong with a run: findings, bytes other than the formula's, numbers off by the rule. With `littered`, also
    whether that sequence changes when the others hold NaN and inf."""
    arrays = ATTENTION.draw(p)
    run = fl.emulate(algorithm, **arrays, **p.masks, tile=tile, lse=True, time_limit=20)
    message = judge(expect(p, **arrays), run.out, run.lse).message
    found = run.complaints() + [message] * (message is not None)
    if littered is None or found:
        return found
    rows, keys = (slice(x.start, x.stop) for x in p.spans[littered])
    for garbage in (math.nan, math.inf):
        loud = dict(arrays)
        for name, place in (("q", rows), ("k", keys), ("v", keys)):
            loud[name] = np.full_like(arrays[name], garbage)
            loud[name][:, :, place] = arrays[name][:, :, place]
        again = fl.emulate(algorithm, **loud, **p.masks, tile=tile, lse=True, time_limit=20)
        assert run.lse is not None and again.lse is not None
        for a, b in ((run.out, again.out), (run.lse, again.lse)):
            if a[:, :, rows].tobytes() != b[:, :, rows].tobytes():
                found.append(f"{garbage} in the neighbours' rows changes a bit")
    return found


@pytest.mark.parametrize(
    "case", one_of_each([(a, t) for a, tiles in TILES.items() for t in tiles], lambda case: case[0])
)
@examples(8, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_kernels_equal_the_judge_and_the_formula(case: tuple[str, Any], data: st.DataObject) -> None:
    algorithm, tile = case
    length, side = st.integers(0, 3) | st.integers(0, 140), st.none() | st.integers(0, 100)
    lengths = data.draw(st.lists(length | st.tuples(length, length), min_size=1, max_size=5))
    p = P.replace(
        lengths=lengths, causal=data.draw(st.booleans()), window=data.draw(st.none() | st.tuples(side, side)),
        scale=data.draw(st.sampled_from([None, -0.2])),
    )  # fmt: skip
    assert complaints(algorithm, p, tile, data.draw(st.integers(0, len(lengths) - 1))) == []


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("algorithm", TILES)
def test_with_all_that_changes_the_scores(algorithm: str, head_dim: int, dtype: str) -> None:
    """One long sequence among many short ones, of lengths that fill no tile, and some that are empty."""
    if algorithm == "flash3" and dtype == "float32":
        dtype = "float16"
    lengths = [3, 0, (201, 333), 1, 64, (0, 7), 17, (40, 0), (9, 150)]
    p = P.replace(head_dim=head_dim, dtype=dtype, causal=True, lengths=lengths, **SCORES)
    assert complaints(algorithm, p, None, 2) == []


@pytest.mark.parametrize("algorithm", TILES)
def test_a_batch_without_queries_launches_nothing(algorithm: str) -> None:
    p = P.replace(lengths=[(0, 5), (0, 0)])
    run = fl.emulate(algorithm, **ATTENTION.draw(p), **p.masks)
    assert run.passed and not run.launches and run.out.shape == (1, 2, 0, 40)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`old`, code that occurs once in `file`, becomes `new`: then the algorithm's run must complain, in these words."""

    name: str
    file: str
    old: str
    new: str
    says: str
    algorithm: str = "flash2"
    tile: tuple[int, int] = (64, 32)

    def written(self, folder: Path) -> Path:
        """The kernels with the fault among them, in a folder."""
        copy = shutil.copytree(kernels_cu.include_dir().parent, folder / "kernels_cu")
        path = copy / self.file
        path.write_text(patched(path.read_text(encoding="utf-8"), self.old, self.new), encoding="utf-8")
        return copy


FAULTY = P.replace(lengths=[(70, 41), 0, (3, 100), (64, 64), (130, 75), (33, 7)], causal=True)
"""Row tiles and key tiles that end with their sequence and ones that don't; an empty place behind the fourth."""
SEQUENCES, FLASH3, HEADER = "include/sequences.cuh", "flash3.cu", "include/clear.cuh"
RULE, BYTES, UNWRITTEN = "what the rule allows|NaN", "the formula", "never written"
CLEAR_V = "clear_rows<CONSUMERS>(sram.v(v_ring.slot), own.len_kv - last_key, CLEARED);"
CLEAR_Q = "clear_rows<CONSUMERS>(sram.q(), own.len_q - work.first_row, CLEARED);"
FAULTS = [
    Fault(name="keys where the queries are", file=SEQUENCES, says=RULE,
          old="offsets.kv + own.number), keys", new="offsets.q + own.number), keys"),
    Fault(name="masks aligned with the batch's end", file=SEQUENCES, says=f"{RULE}|{BYTES}",
          old="aligned = keys - (own.end - own.first);", new="aligned = shape.len_kv - shape.len_q;"),
    Fault(name="the next sequence's first key seen", file=SEQUENCES, says=RULE, old="own.len_q = own.len_kv = keys;",
          new="own.len_q = own.len_kv = keys, ++own.len_kv, ++own.len_q;"),
    Fault(name="an empty sequence's place goes to the one before", file=SEQUENCES, says=UNWRITTEN,
          old="+ middle <= place)", new="+ middle < place)"),
    Fault(name="empty sequences have no place", file=SEQUENCES, says=f"{UNWRITTEN}|{RULE}",
          old="begin / ROWS + middle <= place", new="begin / ROWS <= place"),
    Fault(name="tiles shifted by the sequences before", file=SEQUENCES, says=f"{UNWRITTEN}|{BYTES}",
          old="(place - first / ROWS - number) * ROWS", new="(place - first / ROWS) * ROWS"),
    Fault(name="the last sequence cut short", file=SEQUENCES, says=f"{UNWRITTEN}|{RULE}",
          old="end = shape.len_q;", new="end = shape.len_q - 1;"),
    Fault(name="an empty place isn't left", file="flash2.cu", says=BYTES,
          old="if (RAGGED && first_row >= shape.len_q) return;", new=""),
    Fault(name="rows of the next sequence stored", file="flash2.cu", says="race between blocks",
          old="inside = row < shape.len_q;", new="inside = packed_row < batches.len_q;"),
    Fault(name="LSEs as far apart as a sequence is long", file="flash2.cu", says=f"{UNWRITTEN}|race|out of bounds",
          old="* batches.len_q + packed_row", new="* shape.len_q + packed_row"),
    Fault(name="values of the batch's first sequence", file="flash2.cu", says=RULE,
          old="row_address(v, batch, kv_head(shape, head), own.kv)", new="row_address(v, batch, kv_head(shape, head), 0)"),
    Fault(name="neighbours' values weighed with 0", file=FLASH3, algorithm="flash3", says=f"{BYTES}", old=CLEAR_V, new=""),
    Fault(name="neighbours' queries vote", file=FLASH3, algorithm="flash3", says=BYTES, old=CLEAR_Q, new=";"),
    Fault(name="a sequence's last value cleared", file=FLASH3, algorithm="flash3", says=RULE,
          old=CLEAR_V, new=CLEAR_V.replace("last_key,", "last_key - 1,")),
    Fault(name="a neighbour's first value not cleared", file=FLASH3, algorithm="flash3", says=BYTES,
          old=CLEAR_V, new=CLEAR_V.replace("last_key,", "last_key + 1,")),
    Fault(name="zeros not shown to the tensor cores", file=HEADER, algorithm="flash3", says="proxy fence forgotten",
          old="void clear_rows( … fence_async();", new=""),
    Fault(name="zeros not waited for", file=HEADER, algorithm="flash3", tile=(128, 48), says="race",
          old="named_barrier_sync(barrier, CONSUMERS * WARPGROUP);", new=""),
    Fault(name="values cleared before they have come", file=FLASH3, algorithm="flash3", says="wait forgotten|race",
          old=f"mbarrier_wait(sram.v_full(v_ring.slot), v_ring.parity); {CLEAR_V}", new=CLEAR_V),
    Fault(name="a box of keys from the batch's start", file=FLASH3, algorithm="flash3", says=RULE,
          old="work.kv + key_tile(j, next) * BC", new="key_tile(j, next) * BC"),
]  # fmt: skip


@pytest.mark.parametrize(
    "fault", one_of_each(FAULTS, lambda fault: (fault.algorithm, fault.file), lambda fault: fault.name)
)
def test_a_seeded_fault_is_caught(fault: Fault, tmp_path: Path) -> None:
    with kernels_cu.sources_in(fault.written(tmp_path)), np.errstate(all="ignore"):
        found = "\n".join(complaints(fault.algorithm, FAULTY, fault.tile))
    assert any(words in found for words in fault.says.split("|")), found


@pytest.mark.parametrize("case", one_of_each(sorted({(x.algorithm, x.tile) for x in FAULTS}), lambda case: case[0]))
def test_without_a_fault_nothing_complains(case: tuple[str, tuple[int, int]]) -> None:
    assert complaints(case[0], FAULTY, case[1], 4) == []


@pytest.mark.long
@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in FAULTS if fault.tile == (64, 32)])
def test_verification_finds_it(fault: Fault, tmp_path: Path) -> None:
    """By the numbers alone: outsiders' bytes have no formula."""
    bench = Bench(target_of(fault.algorithm, "emulator"), ("float16",), False, 0)
    with kernels_cu.sources_in(fault.written(tmp_path)), np.errstate(all="ignore"):
        rows = [bench.perform("ragged", trial) for trial in CHECKS["ragged"](bench)]
    survives = fault.name in ("an empty place isn't left", "a neighbour's first value not cleared")
    assert any(row.status == "failed" for row in rows) or survives
