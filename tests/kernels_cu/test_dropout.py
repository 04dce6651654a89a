"""Dropout in the kernels, executed on the CPU: Philox's test vectors, masks read off bit by bit, both passes, any tile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import flashlab as fl
from simulator.operations.attention import ATTENTION
from simulator.operations.backward import BACKWARD
from simulator.philox import is_kept
from tests.simulator.test_dropout import VECTORS, problem
from tests.tiers import one_of_each

pytestmark = pytest.mark.compiler

SOURCE = """
#include "philox.cuh"

extern "C" __global__ void philox(const unsigned* from, unsigned* to, int rounds) {
  const uint4 counter = load_global<uint4>(from);
  const uint2 key = load_global<uint2>(from + 4);
  store_global(to, rounds == 7 ? philox4x32(counter, key) : philox4x32<10>(counter, key));
}
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("philox") / "philox.cu"
    path.write_text(SOURCE, encoding="utf-8")
    return path


@pytest.mark.parametrize(("rounds", "counter", "key", "result"), VECTORS)
def test_philox_is_random123s(source: Path, rounds: int, counter: str, key: str, result: str) -> None:
    words = np.array([int(word, 16) for word in f"{counter} {key} 0 0".split()], np.uint32)
    given = {"from": words, "to": fl.Empty((4,), "uint32"), "rounds": np.int32(rounds)}
    run = fl.emulate_file(source, given, grid=1, block=1)
    assert " ".join(f"{int(word):08x}" for word in run.arrays["to"]) == result


BYTES = """
#include "philox.cuh"

extern "C" __global__ void bytes(unsigned* below, unsigned* pairs) {
  const unsigned byte = threadIdx.x, limit = blockIdx.x;
  const unsigned x = byte << 24 | (byte ^ 255) << 16 | (255 - byte / 2) << 8 | byte / 2;
  const unsigned found = bytes_below(x, limit * 0x01010101);
  store_global(below + limit * 256 + byte, found);
  store_global(pairs + limit * 256 + byte, spread_signs(found, ~found, 0x7213));
}
"""


def test_bytes_are_compared_four_at_a_time(tmp_path: Path) -> None:
    """Of all bytes with all limits, beside any neighbours; and a pattern of the results is spread over the bytes of a word."""
    path = tmp_path / "bytes.cu"
    path.write_text(BYTES, encoding="utf-8")
    to = {name: fl.Empty((256, 256), "uint32") for name in ("below", "pairs")}
    run = fl.emulate_file(path, to, grid=256, block=256)
    byte = np.arange(256)
    x = np.stack([byte // 2, 255 - byte // 2, byte ^ 255, byte], -1)
    below = x[None] < np.arange(256)[:, None, None]
    found, pairs = (np.ascontiguousarray(run.arrays[name]).view(np.uint8).reshape(256, 256, 4) for name in to)
    assert ((found >= 128) == below).all()
    wanted = np.stack([below[..., 3], below[..., 1], below[..., 2], ~below[..., 3]], -1)
    assert (pairs == np.where(wanted, 255, 0)).all()


def mask_of(p: fl.Problem, state: Any) -> Any:
    """Which weights are kept, (batch, heads, len_q, len_kv), by the definition for one pair."""
    kept = np.zeros((p.batch, p.heads, p.len_q, p.len_kv), bool)
    for b, h, i, j in np.ndindex(kept.shape):
        kept[b, h, i, j] = is_kept(p, state, b * p.heads + h, i, j)
    return kept


def by_values(algorithm: str, p: fl.Problem, state: Any, tile: Any) -> Any:
    """The same, read off a forward pass: with equal scores and one-hot values, `out` is P * Z."""
    arrays: dict[str, Any] = {**ATTENTION.draw(p), "rng_state": state}
    arrays["q"][...] = arrays["v"][...] = 0
    arrays["v"][..., np.arange(p.len_kv), np.arange(p.len_kv)] = 1
    run = fl.emulate(algorithm, **arrays, tile=tile, **p.masks)
    assert run.passed, run.complaints()
    found = run.out[..., : p.len_kv].astype(float)
    np.testing.assert_allclose(found[found != 0], 256 / p.kept / p.len_kv, rtol=5e-3)
    return found != 0


def by_gradients(algorithm: str, p: fl.Problem, state: Any, tile: Any) -> Any:
    """The same of a backward pass: with equal scores and one-hot dO, dV is the transpose of P * Z. A query head at a time."""
    arrays: dict[str, Any] = {**BACKWARD.draw(p), "rng_state": state}
    arrays["q"][...] = arrays["out"][...] = 0
    arrays["lse"][...] = np.log(p.len_kv)
    kept = np.zeros((p.batch, p.heads, p.len_q, p.len_kv), bool)
    for member in range(p.queries_per_kv):
        arrays["dout"][...] = 0
        arrays["dout"][:, member :: p.queries_per_kv, np.arange(p.len_q), np.arange(p.len_q)] = 1
        run = fl.emulate(algorithm, **arrays, tile=tile, **p.masks)
        assert run.passed, run.complaints()
        kept[:, member :: p.queries_per_kv] = run.outputs["dv"][..., : p.len_q].swapaxes(-1, -2) != 0
    return kept


def cells() -> Iterator[Any]:
    for algorithm in ("flash2", "standard"):
        for dtype, tile in (
            ("float16", (64, 64)),
            ("float32", (16, 48)),
            ("bfloat16", (128, 16)),
            ("float16", (32, 32)),
        ):
            yield by_values, algorithm, dtype, tile, {}
    for algorithm in ("flash2_backward", "flash1_backward", "standard_backward"):
        for dtype, tile in (
            ("float16", (64, 64)),
            ("float32", (16, 16)),
            ("bfloat16", (32, 48)),
            ("float16", (48, 32)),
        ):
            yield by_gradients, algorithm, dtype, tile, {}
    wide = {"heads": 2, "kv_heads": 1, "len_q": 90, "len_kv": 128, "head_dim": 128}  # several tiles both ways
    for dtype, tile, sizes in (("float16", (64, 64), {}), ("bfloat16", (192, 16), {}), ("bfloat16", (64, 48), wide)):
        yield by_values, "flash3", dtype, tile, sizes
    for dtype, sizes in (("float16", {}), ("bfloat16", wide | {"len_kv": 150})):
        yield by_gradients, "flash3_backward", dtype, None, sizes


@pytest.mark.alike("flash2", "flash3", "flash1_backward", "flash3_backward")
@pytest.mark.parametrize("cell", one_of_each(cells(), lambda cell: cell[1], lambda cell: "-".join(map(str, cell[1:4]))))
def test_every_kernel_has_the_same_mask(cell: tuple[Any, str, str, Any, dict[str, int]]) -> None:
    """And that of the definition, so that the two passes agree at whatever tiles."""
    read_off, algorithm, dtype, tile, sizes = cell
    usual = {"batch": 2, "heads": 4, "kv_heads": 2, "len_q": 50, "len_kv": 61, "head_dim": 64}
    p = problem(**usual | sizes, dtype=dtype, dropout=0.4)
    state = np.array([-(2**62) + 5, 2**63 - 4])  # heads carry into the offset's upper half
    assert (read_off(algorithm, p, state, tile) == mask_of(p, state)).all()


@pytest.mark.alike("flash2", "flash3")
@pytest.mark.parametrize("algorithm", ["flash2", "standard", "flash3"])
@settings(max_examples=4, suppress_health_check=[HealthCheck.too_slow])
@given(
    state=st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1)),
    rate=st.floats(0.01, 0.99), len_q=st.integers(1, 40), len_kv=st.integers(1, 60), causal=st.booleans(),
)  # fmt: skip
def test_outputs_keep_the_rule(
    algorithm: str, state: tuple[int, int], rate: float, len_q: int, len_kv: int, causal: bool
) -> None:
    p = problem(heads=2, len_q=len_q, len_kv=len_kv, causal=causal, dropout=rate, dtype="float16")
    arrays: dict[str, Any] = {**ATTENTION.draw(p), "rng_state": np.array(state)}
    run = fl.emulate(algorithm, **arrays, lse=True, **p.masks)
    assert run.passed, run.complaints()
    truth = ATTENTION.judge(p, arrays)
    bounds = ATTENTION.bounds(p, arrays, truth)
    assert (np.linalg.norm(run.out.astype(float) - truth["out"], axis=-1) <= bounds["out"]).all()
    seen = np.isfinite(truth["lse"])
    assert run.lse is not None and (np.abs(run.lse[seen] - truth["lse"][seen]) <= bounds["lse"][seen]).all()


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["flash2_backward", "flash1_backward", "standard_backward", "flash3_backward"])
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(
    rate=st.floats(0.01, 0.99), len_q=st.integers(0, 70), len_kv=st.integers(0, 70), causal=st.booleans(),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]), seed=st.integers(0, 100),
)  # fmt: skip
def test_gradients_keep_the_rule(
    algorithm: str, rate: float, len_q: int, len_kv: int, causal: bool, dtype: str, seed: int
) -> None:
    assume(dtype in fl.CATALOGUE[algorithm].dtypes)
    p = problem(heads=4, kv_heads=2, len_q=len_q, len_kv=len_kv, causal=causal, dropout=rate, dtype=dtype)
    arrays: dict[str, Any] = dict(BACKWARD.draw(p, seed))
    truth = BACKWARD.judge(p, arrays)
    bounds = BACKWARD.bounds(p, arrays, truth)
    emulated, simulated = fl.emulate(algorithm, **arrays, **p.masks), fl.simulate(algorithm, **arrays, **p.masks)
    assert emulated.passed, emulated.complaints()
    assert simulated.counts == fl.count(algorithm, p) == fl.shape_run(algorithm, p)
    for outputs in (emulated.outputs, simulated.outputs):
        for name, exact in truth.items():
            assert (np.linalg.norm(outputs[name].astype(float) - exact, axis=-1) <= bounds[name]).all(), name
