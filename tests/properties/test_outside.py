"""What lies outside the problem doesn't matter, bit for bit.

Outside of a row's attention lie the padding of rows, what surrounds the arrays, other sequences, and the keys that masks hide
from it. The first two may hold any bits. Sequences and keys are inside the problem: they are finite (docs/architecture.md).
Other rows of a sequence may matter in the last bit: `flash3` rescales the rows of a warp together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import flashlab as fl
import kernels_cu
from flashlab.emulator.library import Arena
from simulator import CATALOGUE, Problem, catalogue
from simulator.dtypes import Array
from simulator.operations.attention import ATTENTION
from simulator.operations.pairs import visible_pairs
from tests.flashlab.emulator.mutant import kept
from tests.patches import patched
from tests.simulator.masks import blocky
from tests.simulator.problems import taken_by
from tests.tiers import examples

ALGORITHMS = [name for name in catalogue.of(ATTENTION) if "float16" in CATALOGUE[name].dtypes]
ON_A_CPU = ["flash2", *(pytest.param(name, marks=pytest.mark.long) for name in ("standard", "flash1", "flash3"))]
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")

Outcome = tuple[Array, Array]
Arrays = dict[str, Any]
Run = Callable[[Problem, Arrays], Outcome]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Few shapes, so that few kernels are built: rows with and without padding, every kind of mask, several sequences."""
    side = st.none() | st.integers(0, 60)
    hides = draw(st.sampled_from(["causal", "window", "mask", "lengths"]))
    ragged = draw(st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70)), min_size=2, max_size=3))
    return Problem(
        batch=1, heads=2, kv_heads=draw(st.sampled_from([1, 2])), head_dim=draw(st.sampled_from([36, 64])), dtype="float16",
        len_q=None if hides == "lengths" else draw(st.integers(1, 100)),
        len_kv=None if hides == "lengths" else draw(st.integers(1, 150)),
        lengths=ragged if hides == "lengths" else None,
        causal=draw(st.booleans()) or hides == "causal",
        window=draw(st.tuples(side, side)) if hides == "window" else None,
        mask="dense" if hides == "mask" else None,
    )  # fmt: skip


def finite(shape: tuple[int, ...], random: np.random.Generator) -> Array:
    """Random bits that are a number."""
    x = random.integers(0, 1 << 16, shape, np.uint16).view(np.float16)
    return np.where(np.isfinite(x), x, np.float16(-65504))


def depends(run: Run, problem: Problem, seed: int) -> bool:
    """Does a row change with other sequences, or with keys that it doesn't see?"""
    random, p = np.random.default_rng(seed), problem
    arrays: Arrays = dict(ATTENTION.draw(p, seed))
    if p.mask:
        arrays["mask"] = blocky(p, seed=seed, density=0.5, block=40)
    row = int(random.integers(p.len_q))
    hidden = ~visible_pairs(p, arrays)[row]
    own = next(rows for rows, _ in p.spans if row in rows)
    others = ~np.isin(np.arange(p.len_q), own)
    changed: Arrays = {**arrays, **{name: arrays[name].copy() for name in "qkv"}}
    for name, which in (("q", others), ("k", hidden), ("v", hidden)):
        x = changed[name]
        x[:, :, which] = finite(x[:, :, which].shape, random)
    before, after = (run(p, given) for given in (arrays, changed))
    return any(x[:, :, row].tobytes() != y[:, :, row].tobytes() for x, y in zip(before, after, strict=True))


def laid(x: Array, random: np.random.Generator) -> Array:
    """The same values in the middle of a larger array of random bits, in strides that kernels take as they are."""
    if x.ndim != 4:
        return x
    around = random.integers(0, 256, (*(n + 2 for n in x.shape[:3]), 2 * x.shape[3] + 16 & ~7, 2), np.uint8)
    view = around.view(np.float16)[..., 0][1:-1, 1:-1, 1:-1, 8 : 8 + x.shape[3]]
    view[...] = x
    return view


def with_other_bits(monkeypatch: pytest.MonkeyPatch, random: np.random.Generator) -> None:
    """Fill what the emulator's memory holds before a kernel writes it, and what surrounds its arrays, with random bits."""
    new = Arena.new

    def litter(arena: Arena, name: str, nbytes: int) -> Array:
        data = new(arena, name, nbytes)
        whole: Any = data.base
        whole[:] = random.integers(0, 256, len(whole), np.uint8)
        return data

    monkeypatch.setattr(Arena, "new", litter)


def simulated(algorithm: Any) -> Run:
    def run(p: Problem, arrays: Arrays) -> Outcome:
        done = fl.simulate(algorithm, **arrays, **p.masks, lse=True, tile=(32, 32))
        assert done.lse is not None
        return done.out, done.lse

    return run


def emulated(algorithm: str, source: Any = None) -> Run:
    def run(p: Problem, arrays: Arrays) -> Outcome:
        done = fl.emulate(algorithm, **arrays, **p.masks, lse=True, sanitize=False, source=source)
        assert done.lse is not None
        return done.out, done.lse

    return run


def taken(algorithm: str, p: Problem) -> Problem:
    p = taken_by(algorithm, p)
    assume(CATALOGUE[algorithm].refusal(p) is None and p.len_q > 0)
    return p


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(p=problems(), seed=st.integers(0, 99))
@examples(25)
def test_hidden_keys_and_other_sequences_in_the_simulator(algorithm: str, p: Problem, seed: int) -> None:
    p = taken(algorithm, p)
    assert not depends(simulated(algorithm), p, seed)


@pytest.mark.long
@pytest.mark.compiler
@pytest.mark.parametrize("algorithm", ON_A_CPU)
@given(p=problems(), seed=st.integers(0, 99))
@settings(max_examples=10)
def test_hidden_keys_and_other_sequences_on_the_emulator(algorithm: str, p: Problem, seed: int) -> None:
    p = taken(algorithm, p)
    assert not depends(emulated(algorithm), p, seed)


def littered(run: Run, p: Problem, seed: int) -> bool:
    """Does anything change with the bits of padding, of workspaces, and of what surrounds arrays?"""
    arrays: Arrays = dict(ATTENTION.draw(p, seed))
    if p.mask:
        arrays["mask"] = blocky(p, seed=seed, density=0.5, block=40)
    found = list[bytes]()
    for which in range(3):
        random = np.random.default_rng(1000 * which + seed)
        with pytest.MonkeyPatch.context() as patches:
            with_other_bits(patches, random)
            given = {name: laid(x, random) if which else x for name, x in arrays.items()}
            found.append(b"".join(x.tobytes() for x in run(p, given)))
    return len(set(found)) > 1


@pytest.mark.long
@pytest.mark.compiler
@pytest.mark.parametrize("algorithm", ON_A_CPU)
@given(p=problems(), seed=st.integers(0, 99))
@settings(max_examples=10)
def test_padding_and_surroundings_on_the_emulator(algorithm: str, p: Problem, seed: int) -> None:
    p = taken(algorithm, p)
    assert not littered(emulated(algorithm), p, seed)


@given(p=problems(), seed=st.integers(0, 99))
@examples(10)
def test_surroundings_in_the_simulator(p: Problem, seed: int) -> None:
    p = taken("flash2", p)
    assert not littered(simulated("flash2"), p, seed)


# ----------------------------------------------------------------------------- each of them can fail

CAUSAL = Problem(batch=1, heads=2, len_q=100, head_dim=64, dtype="float16", causal=True)


def test_a_program_that_looks_at_hidden_keys_is_found() -> None:
    @fl.program
    def future(m: Any, q: Any, k: Any, v: Any, problem: Any, tile: Any) -> Any:
        """Masks the scores, and then divides by a sum over all keys."""
        for block in m.launch("future", rows=problem.row_tiles(tile), warps=4):
            block.step("all")
            q_i, out, total = block.load(q, block.i, tile.rows), block.full(tile.rows, v.cols, 0.0), 0.0
            for j in range(problem.key_tiles(tile)):
                s = block.matmul(q_i, block.load(k, j, tile.cols).T, split=("rows", "none"), scale=problem.scale)
                total = block.exp(s * 1e-5).sum() + total
                p = block.exp(block.mask(s, block.i, j)).round(problem.dtype)
                out = block.matmul(p, block.load(v, j, tile.cols), split=("rows", "none"), acc=out)
            block.store(m.output("out"), out / total, block.i, tile.rows)
        return m.output("out")

    def run(p: Problem, arrays: Arrays) -> Outcome:
        out = fl.simulate(future, **arrays, **p.masks, tile=(32, 32)).out
        return out, out

    assert any(depends(run, CAUSAL, seed) for seed in range(3))


@pytest.mark.compiler
def test_a_kernel_that_looks_at_hidden_keys_is_found() -> None:
    headers = {x.name: x.read_text(encoding="utf-8") for x in sorted(kernels_cu.include_dir().glob("*.cuh"))}
    headers["mask.cuh"] = patched(
        headers["mask.cuh"],
        "(visible_keys(shape, first_row).last + 1) / columns - 1}",
        "visible_keys(shape, last_row).last / columns}",
    )
    own = kernels_cu.source("flash2")
    folder = kept({**headers, own.name: own.read_text(encoding="utf-8")})
    assert any(depends(emulated("flash2", folder / own.name), CAUSAL, seed) for seed in range(3))


@pytest.mark.compiler
def test_a_kernel_that_reads_padding_is_found() -> None:
    """P's padding is never written, so the last products are with whatever lies there."""
    own = kernels_cu.source("standard")
    text = patched(
        own.read_text(encoding="utf-8"),
        "for (int key = first; key < round_up(shape.len_kv, CHUNK_ELEMENTS); key += WARP_COLUMNS) {",
        "for (int key = first; key < shape.len_kv; key += WARP_COLUMNS) {",
        step="store_p",
    )
    run = emulated("standard", kept({own.name: text}) / own.name)
    assert any(littered(run, CAUSAL.replace(len_q=97, causal=False), seed) for seed in range(3))
