"""Public tests of attention, put to the test: `python -m studies audited`.

Each is computed on the wrong kernels of the library's zoo, by the test's own inputs, reference and tolerance, as its source has
them at a commit. Nothing of it is copied, and no GPU is needed: kernels and references are NumPy's. Where a test has more sizes
than are worth the time here, `part` says which were computed. So a test may catch more than is counted here, on sizes left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from flashlab.measure import results
from flashlab.measure.results import Kind, markdown_table
from flashlab.verify.audit import ZOO, Replacement
from flashlab.verify.zoo import tiled
from simulator import Problem, naive
from simulator.dtypes import Array, numpy_dtype
from simulator.names import DType
from studies.rows import data, row

Result = tuple[Array, Array]
"""`out` and LSE."""


@dataclass(frozen=True)
class Input:
    """One input of a test."""

    q: Array
    k: Array
    v: Array
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None

    @property
    def masks(self) -> dict[str, Any]:
        return {"causal": self.causal, "window": self.window, "scale": self.scale}

    def exact(self) -> Result:
        """Attention in float64, of the values in float32 or narrower."""
        found = naive(self.q, self.k, self.v, **{name: x for name, x in self.masks.items() if x is not None})
        return found.out, found.lse


Holds = Callable[[Input, Result], bool]


@dataclass(frozen=True)
class Public:
    """A public test: where it is, what it is for, its inputs, and whether a result passes. `knows` are what its inputs can show
    of masks, and whether the LSE is looked at."""

    name: str
    repository: str
    commit: str
    file: str
    command: str
    purpose: str
    tolerance: str
    part: str
    inputs: Callable[[], Iterator[Input]]
    holds: Callable[[Input], Callable[[Result], bool]]
    knows: frozenset[str]


def _drawn(
    p: Problem, rng: np.random.Generator, *, uniform: bool = False, factor: float = 1.0
) -> tuple[Array, Array, Array]:
    shapes = [(p.batch, p.heads, p.len_q, p.head_dim), *[(p.batch, p.kv_heads, p.len_kv, p.head_dim)] * 2]
    of = rng.random if uniform else rng.standard_normal
    q, k, v = ((factor * of(shape)).astype(numpy_dtype(p.dtype)) for shape in shapes)
    return q, k, v


def _problem(heads: tuple[int, int], lengths: tuple[int, int], dim: int, dtype: DType, batch: int = 1) -> Problem:
    return Problem(
        batch=batch, heads=heads[0], kv_heads=heads[1], len_q=lengths[0], len_kv=lengths[1], head_dim=dim, dtype=dtype
    )


def _close(
    atol: float, rtol: float, *, lse: bool = False, exact: bool = False
) -> Callable[[Input], Callable[[Result], bool]]:
    """`torch.allclose` against the reference, in the storage dtype or `exact`, of `out` and perhaps of the LSE."""

    def of(given: Input) -> Callable[[Result], bool]:
        out, log = given.exact()
        out = out if exact else out.astype(given.q.dtype).astype(np.float64)

        def holds(found: Result) -> bool:
            with np.errstate(invalid="ignore"):
                close = np.abs(found[0].astype(np.float64) - out) <= atol + rtol * np.abs(out)
                logs = (found[1] == log) | (np.abs(found[1] - log) <= atol + rtol * np.abs(log))
            return bool(close.all()) and (not lse or bool(logs.all()))

        return holds

    return of


def _kernelbench(dtype: DType) -> Iterator[Input]:
    yield Input(*_drawn(_problem((2, 2), (512, 512), 1024, dtype, 2), np.random.default_rng(42), uniform=True))


def _cs336() -> Iterator[Input]:
    for causal in (False, True):
        yield Input(*_drawn(_problem((1, 1), (128, 128), 64, "float32", 4), np.random.default_rng(0)), causal=causal)


def _flashinfer() -> Iterator[Input]:
    for lengths in ((14, 18), (100, 128), (1, 128)):
        yield Input(*_drawn(_problem((32, 8), lengths, 128, "bfloat16"), np.random.default_rng(0)), causal=True)


def _matched(share: float) -> Callable[[Input], Callable[[Result], bool]]:
    """An element is off if both its absolute and its relative error are over 1e-2; so many may be."""

    def of(given: Input) -> Callable[[Result], bool]:
        out, log = given.exact()
        wanted = out.astype(given.q.dtype).astype(np.float64), log

        def holds(found: Result) -> bool:
            for got, right in zip(found, wanted, strict=True):
                with np.errstate(invalid="ignore"):
                    error = np.abs(got.astype(np.float64) - right)
                    off = (error > 1e-2) & (error / (np.abs(right) + 1e-8) > 1e-2)
                if not np.isfinite(got).all() or 1 - off.mean() < share:
                    return False
            return True

        return holds

    return of


def _flash_attention() -> Iterator[Input]:
    rng = np.random.default_rng(0)
    lengths = (113, 203), (108, 256), (512, 256)
    for pair, dim, kv, causal, local in product(lengths, (59, 64), (6, 2), (False, True), (False, True)):
        p = _problem((6, kv), pair, dim, "float16")
        left, right = (int(n) for n in rng.integers(0, pair[1], 2))
        window = (left, 0 if causal else right) if local else None
        yield Input(*_drawn(p, rng), causal=causal, window=window)


def _twice_the_error(given: Input) -> Callable[[Result], bool]:
    """The largest error is at most twice that of attention in the storage dtype, with the scale on K."""
    out = given.exact()[0].astype(given.q.dtype).astype(np.float64)
    limit = 2 * np.abs(_narrow(given, scale_on_k=True).astype(np.float64) - out).max()
    return lambda found: bool(np.abs(found[0].astype(np.float64) - out).max() <= limit)


def _narrow(given: Input, *, scale_on_k: bool = False) -> Array:
    """Attention whose every step is rounded to the storage dtype."""
    dtype, group = given.q.dtype, given.q.shape[1] // given.k.shape[1]
    k, v = (np.repeat(x, group, 1) for x in (given.k, given.v))
    root = np.float32(given.q.shape[-1] ** 0.5 if given.scale is None else 1 / given.scale)
    if scale_on_k:
        k = (k.astype(np.float32) / root).astype(dtype)
    s = (given.q.astype(np.float32) @ k.astype(np.float32).swapaxes(-1, -2)).astype(dtype).astype(np.float32)
    s = s if scale_on_k else (s / root).astype(dtype).astype(np.float32)
    rows: int = given.q.shape[2]
    keys: int = given.k.shape[2]
    i, j = np.arange(keys - rows, keys)[:, None], np.arange(keys)
    left, right = given.window or (None, None)
    seen = np.ones((rows, keys), bool)
    if given.causal:
        seen &= j <= i
    if left is not None:
        seen &= j >= i - left
    if right is not None:
        seen &= j <= i + right
    s = np.where(seen, s, -np.inf)
    top: Array = s.max(-1, keepdims=True)
    e = np.exp(s - np.where(np.isneginf(top), 0, top))
    total = e.sum(-1, keepdims=True)
    p = (e / np.where(total == 0, 1, total)).astype(dtype).astype(np.float32)
    return (p @ v.astype(np.float32)).astype(dtype)


def _xformers() -> Iterator[Input]:
    rng = np.random.default_rng(0)
    plain = [(rows, keys) for rows in (32, 256) for keys in (32, 64, 256, 1024)]
    odd = [(m, 128) for m in (2, 3, 15, 31, 34, 68, 72, 90, 132, 136)]
    odd += [(256, m) for m in (2, 3, 15, 31, 34, 68, 72, 90, 132, 136)]
    for pair, dim in [
        *product(plain, (32, 128)),
        *product(odd, (32,)),
        *product([(256, 128)], (1, 2, 31, 36, 40, 80, 160)),
    ]:
        for causal in (False, True):
            given = _drawn(_problem((1, 1), pair, dim, "float16"), rng, factor=3.0)
            if not causal:
                yield Input(*given)
            elif pair[0] <= pair[1]:  # aligned bottom-right, as one of its masks is
                yield Input(*given, causal=True)


def _pytorch() -> Iterator[Input]:
    rng = np.random.default_rng(0)
    for rows, keys, dim, scale in product((4, 8, 64, 143, 256), (4, 8, 64, 128, 256, 587), (21, 64), (None, "l1")):
        given = _drawn(_problem((4, 4), (rows, keys), dim, "float16"), rng, uniform=True)
        for causal in (False, True) if rows == keys else (False,):
            yield Input(*given, causal=causal, scale=scale and 1 / dim)


def _of_the_math_path(given: Input) -> Callable[[Result], bool]:
    """Tolerances are what the same computation in the storage dtype is off by, at least 1e-3."""
    exact, narrow = given.exact()[0], _narrow(given).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        atol = max(float(np.abs(exact - narrow).max()), 1e-3)
        rtol = max(float(np.nan_to_num(np.abs((exact - narrow) / exact), nan=1e-3).max()), 1e-3)
    right = exact.astype(given.q.dtype).astype(np.float64)

    def holds(found: Result) -> bool:
        return bool((np.abs(found[0].astype(np.float64) - right) <= atol + rtol * np.abs(right)).all())

    return holds


_KB = "423217d9fda91e0c2d67e4a43bf62f96f6d104f1"
_FIB = "40e6ca7844b514eb4b1c7edba6d6a7377df57870"
_OUT = frozenset[str]()
PUBLIC = (
    Public(
        "KernelBench 97, 16 bits", "ScalingIntelligence/KernelBench", _KB, "KernelBench/level1/97_ScaledDotProductAttention.py",
        "python scripts/run_and_check.py (with precision fp16)", "a benchmark of generated kernels: is one as right as PyTorch, "
        "and faster?", "allclose, atol = rtol = 1e-2", "2 × 2 of its 32 × 32 heads, one of its five draws",
        lambda: _kernelbench("float16"), _close(1e-2, 1e-2), _OUT,
    ),
    Public(
        "KernelBench 97, float32", "ScalingIntelligence/KernelBench", _KB, "KernelBench/level1/97_ScaledDotProductAttention.py",
        "python scripts/run_and_check.py", "the same benchmark in its default precision", "allclose, atol = rtol = 1e-4",
        "2 × 2 of its 32 × 32 heads; one of its five draws", lambda: _kernelbench("float32"), _close(1e-4, 1e-4), _OUT,
    ),
    Public(
        "CS336, assignment 2", "stanford-cs336/assignment2-systems", "9d95f3b5dc4a5fc48c2661b58d2e509bbc904e36",
        "tests/test_attention.py", "pytest tests/test_attention.py -k forward", "a course: has a student's first kernel the "
        "right idea?", "assert_close of out and LSE, atol = rtol = 1e-2", "the whole forward test", _cs336,
        _close(1e-2, 1e-2, lse=True), frozenset({"causal", "lse"}),
    ),
    Public(
        "FlashInfer-Bench, default evaluator", "flashinfer-ai/flashinfer-bench", _FIB, "flashinfer_bench/bench/utils.py",
        "flashinfer-bench run", "a benchmark that puts the fastest kernel into a server", "each element within 1e-2, absolute or "
        "relative", "GQA 32:8 × 128 as its example of a causal prefill has it, 3 requests", _flashinfer, _matched(1.0),
        frozenset({"causal", "lse"}),
    ),
    Public(
        "FlashInfer-Bench, low-bit evaluator", "flashinfer-ai/flashinfer-bench", _FIB,
        "flashinfer_bench/bench/evaluators/lowbit.py", "flashinfer-bench run", "its evaluator of FP8 experts, not of attention; "
        "here for what a share of 95 % lets pass", "95 % of the elements within 1e-2, absolute or relative", "the same inputs",
        _flashinfer, _matched(0.95), frozenset({"causal", "lse"}),
    ),
    Public(
        "flash-attention", "Dao-AILab/flash-attention", "0251105a2fb19d2957484b7f023cd8c115286ced", "tests/test_flash_attn.py",
        "pytest tests/test_flash_attn.py -k test_flash_attn_output", "its own kernels, on every commit", "the largest error is "
        "at most twice that of attention in float16", "3 of its 10 pairs of lengths, 2 of its 11 head dims, one of a batch of 4; "
        "no dropout, soft cap, ALiBi or gradients", _flash_attention, _twice_the_error, frozenset({"causal", "window"}),
    ),
    Public(
        "xformers", "facebookresearch/xformers", "ce4f89d54286ab07b90d0a230561e338eb70bff2",
        "tests/test_mem_eff_attention.py", "pytest tests/test_mem_eff_attention.py -k test_forward", "its operators, on every "
        "commit", "allclose, atol 4e-3, rtol 4e-4 (float16); two calls have the same bits; no NaN", "43 of its shapes of one "
        "head, without a mask and causal", _xformers, _close(4e-3, 4e-4, exact=True), frozenset({"causal", "twice"}),
    ),
    Public(
        "PyTorch, SDPA", "pytorch/pytorch", "00030eb8e81f911c48c4d7634fa6b8bb2fae1a1b", "test/test_transformers.py",
        "python test/test_transformers.py -k test_flash_attention_vs_math_ref_grads", "its flash backend, on every commit",
        "atol and rtol are the errors of the same in float16, at least 1e-3", "60 of its pairs of lengths and head dims (21, "
        "64), batch 1, forward", _pytorch, _of_the_math_path, frozenset({"causal", "scale"}),
    ),
)  # fmt: skip
"""The tests."""


def _mean_of_v(q: Array, k: Array, v: Array, causal: bool = False, **_: Any) -> Result:
    """The mean of the values: neither q nor k is read."""
    group = q.shape[1] // v.shape[1]
    mean = np.repeat(v, group, 1).astype(np.float32).mean(2, keepdims=True)
    return np.broadcast_to(mean, (*q.shape[:3], v.shape[3])).astype(q.dtype), np.zeros(q.shape[:3], np.float32)


def _zeros(q: Array, k: Array, v: Array, **_: Any) -> Result:
    return np.zeros((*q.shape[:3], v.shape[3]), q.dtype), np.zeros(q.shape[:3], np.float32)


BESIDE: dict[str, Callable[..., Result]] = {"the mean of V": _mean_of_v, "zeros": _zeros}
"""Functions that are no attention at all."""


def shows(knows: frozenset[str], fault: str) -> bool:
    """Can a test whose inputs have these masks show a fault at all?"""

    def fn(q: Any, k: Any, v: Any) -> None: ...
    def causal(q: Any, k: Any, v: Any, causal: bool = False) -> None: ...
    def window(q: Any, k: Any, v: Any, causal: bool = False, window: Any = None) -> None: ...
    def scale(q: Any, k: Any, v: Any, causal: bool = False, scale: Any = None) -> None: ...

    of = window if "window" in knows else scale if "scale" in knows else causal if "causal" in knows else fn
    return Replacement(of, lse="e" if "lse" in knows else None).shows(fault)


def audited(test: Public) -> dict[str, Any]:
    """What a test lets pass."""
    alive = {name: tiled(name) for name in ZOO if shows(test.knows, name)}  # type: ignore[arg-type]
    kernels: dict[str, Callable[..., Result]] = {**alive, **BESIDE}
    passes, right, number = dict.fromkeys(kernels, True), tiled(), 0
    for given in test.inputs():
        number += 1
        holds = test.holds(given)

        def called(kernel: Callable[..., Result], given: Input = given) -> Result:
            arrays = (given.q.copy(), given.k.copy(), given.v.copy())
            with np.errstate(all="ignore"):
                return kernel(*arrays, **given.masks)

        if not holds(called(right)):
            raise ValueError(f"{test.name} rejects a right kernel: its reference isn't what this file takes it for")
        for name, kernel in kernels.items():
            if passes[name]:
                found = called(kernel)
                same = "twice" not in test.knows or found[0].tobytes() == called(kernel)[0].tobytes()
                passes[name] = same and holds(found)
    named = [name for name in alive if passes[name]]
    return {
        "test": test.name, "repository": test.repository, "commit": test.commit, "file": test.file, "command": test.command,
        "purpose": test.purpose, "tolerance": test.tolerance, "part": test.part, "inputs": number, "kernels": len(alive),
        "caught": len(alive) - len(named), "passes": named, "no_attention": [name for name in BESIDE if passes[name]],
    }  # fmt: skip


AUDITED = row(
    "AuditedTest", "A public test, and what it lets pass. Of `kernels` wrong ones whose fault its inputs can show, so many are "
    "`caught`, and those in `passes` aren't. `no_attention` are functions that are no attention and pass.",
    test=str, repository=str, commit=str, file=str, command=str, purpose=str, tolerance=str, part=str, inputs=int, kernels=int,
    caught=int, passes=tuple[str, ...], no_attention=tuple[str, ...],
)  # fmt: skip
DATA = data("AuditedTests", "Public tests, put to the test.", AUDITED)


def headline(of: Any) -> str:
    """The range of what tests catch."""
    shares = sorted(each.caught / each.kernels for each in of.rows)
    return f"tests: {len(of.rows)} public ones catch {shares[0]:.0%} to {shares[-1]:.0%} of the wrong kernels that they can see"


def table(of: Any) -> str:
    """A row per test."""
    header = ("test", "what it holds", "caught", "functions that are no attention and pass")
    return markdown_table(
        header,
        ((x.test, x.tolerance, f"{x.caught} of {x.kernels}", ", ".join(x.no_attention) or "none") for x in of.rows),
    )


KIND = Kind(
    "audit", "Tests: what public ones let pass",
    "public tests of attention, by their own inputs and tolerances, on the library's wrong kernels", "python -m studies audited",
    DATA, headline, table,
)  # fmt: skip


def main(words: Sequence[str]) -> None:
    """Audit all tests, or some, and save what was found."""
    parser = argparse.ArgumentParser("python -m studies audited", description=KIND.holds)
    parser.add_argument(
        "--test", action="append", choices=[test.name for test in PUBLIC], help="only these; saves nothing"
    )
    parser.add_argument("--out", default=results.FOLDER, help="folder of the file")
    parser.add_argument("--force", action="store_true", help="replace the file of that name")
    given = parser.parse_args(words)
    rows = list[dict[str, Any]]()
    for test in PUBLIC:
        if not given.test or test.name in given.test:
            rows.append(audited(test))
            print(
                f"{test.name}: {rows[-1]['caught']} of {rows[-1]['kernels']}; passes: {rows[-1]['passes']}", flush=True
            )
            print(f"  no attention: {rows[-1]['no_attention']}", flush=True)
    if not given.test:
        print(results.save(KIND, [], {"rows": rows}, subject="tests", folder=given.out, replace=given.force))
