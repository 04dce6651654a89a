"""The zoo: seeded faults in .cu sources, and what must catch each: a sanitiser with its line, or a check of numbers or counts.

A mutant is a patch of real source text: one of the algorithms' kernels, a header, or a plain kernel of kernels/. `blind` says
that the usual test, `allclose(1e-2)` on an aligned problem without a mask, doesn't see it when its numbers are the
emulator's. `tool`: the tool of compute-sanitizer that should see it on a GPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import flashlab as fl
import kernels_cu
from flashlab.base import cache
from simulator.counts import Counts
from tests.flashlab.emulator.run import PLAIN, Job, attention_job, plain_job
from tests.patches import patched

CHECKS = ("numbers", "bytes", "ledger", "wavefronts", "sectors", "plain")
"""What kills a mutant that misuses nothing: the rule, bytes by the formula, the same by step, passes over SRAM's banks,
sectors of HBM, accesses that bypass the primitives."""

ALIGNED = fl.Problem(batch=1, heads=2, len_q=128, head_dim=64, dtype="float16")
RAGGED = fl.Problem(batch=2, heads=2, kv_heads=1, len_q=97, len_kv=113, head_dim=40, dtype="float16", causal=True)
FULL = RAGGED.replace(causal=False, window=None)
NO_KEYS = fl.Problem(batch=1, heads=1, len_q=100, len_kv=30, head_dim=64, dtype="float16", causal=True)
ONE_STAGE = fl.Problem(batch=1, heads=1, len_q=64, len_kv=200, head_dim=256, dtype="float16")
NARROW = fl.Problem(batch=1, heads=2, len_q=128, head_dim=48, dtype="float16")
SIZES = {"block_sum": 1000, "transpose": 64, "warp_sums": 128, "axpy": 1000, "histogram": 500, "hand_over": 32}
ALIGNED_SIZES = {**SIZES, "block_sum": 1024, "axpy": 1024, "histogram": 512}


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """`old`, code that occurs once in `file` (None: the kernel's own .cu), becomes `new`; `sees` must see it then.

    `within`: the step in whose region `old` is looked for (None: anywhere). `step`, `tensor`: what the finding names.
    `at`, `via`, `other`: code of the kernel's line, of a header's line, of the other party's, as far as they are named.
    `also`: kinds of findings that come along. How code is found: tests/patches.py.
    """

    mechanism: str
    kernel: str
    old: str
    new: str
    sees: str
    blind: bool
    file: str | None = None
    within: str | None = None
    at: str = ""
    via: str = ""
    other: str = ""
    step: str = ""
    tensor: str = ""
    also: tuple[str, ...] = ()
    problem: fl.Problem = RAGGED
    tool: str | None = None
    hangs: bool = False

    @property
    def name(self) -> str:
        return self.mechanism.replace(" ", "-").replace(",", "").replace("'", "")

    @property
    def is_plain(self) -> bool:
        return self.kernel in SIZES

    @property
    def real(self) -> Path:
        """The file that is patched, as it is."""
        if self.file is None:
            return PLAIN / f"{self.kernel}.cu" if self.is_plain else kernels_cu.source(self.kernel)
        return kernels_cu.include_dir().parent / self.file

    @cached_property
    def text(self) -> str:
        """The patched text."""
        return patched(self.real.read_text(encoding="utf-8"), self.old, self.new, step=self.within)

    @cached_property
    def source(self) -> Path:
        """The patched file, in a folder of its own; a header with all the others beside it."""
        beside = sorted(kernels_cu.include_dir().glob("*.cuh")) if self.real.suffix == ".cuh" else []
        files = {**{header.name: header.read_text(encoding="utf-8") for header in beside}, self.real.name: self.text}
        return kept(files) / self.real.name

    def job(self, problem: fl.Problem | None = None, *, aligned: bool = False, device: str = "h200") -> Job:
        """What a run of it launches, on its own problem or an aligned one."""
        if self.is_plain:
            return plain_job(self.kernel, (ALIGNED_SIZES if aligned else SIZES)[self.kernel], self.source)
        return self._attention(self.aligned if aligned else problem or self.problem, device)[0]

    @property
    def aligned(self) -> fl.Problem:
        """The problem of the usual test: whole tiles, no mask; with one stage where the mutant's own has one."""
        return ONE_STAGE.replace(len_kv=192) if self.problem is ONE_STAGE else ALIGNED

    def counts(self) -> Counts:
        """The formula's, of an algorithm's mutant."""
        return self._attention(self.problem, "h200")[1]

    def _attention(self, problem: fl.Problem, device: str) -> tuple[Job, Counts]:
        header = self.real.suffix == ".cuh"
        sources = {} if header else {self.real.stem: self.source}
        includes = (f"-I{self.source.parent}",) if header else ()
        tile = tile_of(problem)
        watch = self.sees == "plain"
        return attention_job(
            self.kernel, problem, tile=tile, sources=sources, includes=includes, watch=watch, device=device
        )


def kept(files: Mapping[str, str]) -> Path:
    """A folder of its own with these texts, by name of file; the same texts have the same folder."""
    folder = cache.folder() / "zoo" / hashlib.sha256("\0".join([*files, *files.values()]).encode()).hexdigest()[:16]
    if not folder.is_dir():  # written once and as a whole: tests beside this one read it, too
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch, contextlib.suppress(OSError):
            whole = Path(scratch) / "whole"
            whole.mkdir()
            for name, text in files.items():
                (whole / name).write_text(text, encoding="utf-8")
            whole.rename(folder)
    return folder


def tile_of(problem: fl.Problem) -> tuple[int, int] | None:
    """Small tiles, so that a small problem has several; at head dim 256 the default, for it has one stage."""
    return None if problem.head_dim > 128 else (32, 32)


def sound_job(mutant: Mutant) -> Job:
    """The same launches from the real sources."""
    if mutant.is_plain:
        return plain_job(mutant.kernel, SIZES[mutant.kernel])
    return attention_job(mutant.kernel, mutant.problem, tile=tile_of(mutant.problem), watch=mutant.sees == "plain")[0]
