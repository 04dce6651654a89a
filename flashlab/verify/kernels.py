"""A kernel of anybody's `.cu` file as attention: which parameter is what, and how the launch follows from the problem.

The emulator runs it. So whatever it finds (a race, an access out of bounds) is a failed check, with its line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import numpy as np

from flashlab.base.files import path_of
from flashlab.verify.adapter import (
    PER_HEAD,
    TOLD,
    Adapter,
    CallableTarget,
    Failure,
    Layout,
    Raised,
    Refused,
    TileShape,
    named,
)
from flashlab.verify.domain import Domain
from flashlab.verify.expressions import array, calculated
from simulator import Problem, UsageError
from simulator.dtypes import Array, as_numpy
from simulator.operations.attention import ATTENTION
from simulator.problem import FIELDS, Masks, spell_masks

if TYPE_CHECKING:
    from flashlab.emulator import FileRun
    from flashlab.emulator.source import Kernel

__all__ = ["FileKernel", "KernelTarget", "is_kernel", "kernel", "kernel_named"]

Size = int | str | Sequence[int] | Callable[[Problem], Any]
"""A number, an expression of a problem's fields such as "cdiv(len_q, 64), batch * heads", or a function of a problem."""
Arguments = Mapping[str, Any] | Callable[..., Mapping[str, Any]]

USUAL = {
    "q": ("q", "query", "queries"),
    "k": ("k", "key", "keys"),
    "v": ("v", "value", "values"),
    "out": ("o", "out", "output"),
    "lse": ("lse", "softmax_lse", "logsumexp"),
    "batch": ("b", "batch", "batch_size", "bsz"),
    "heads": ("h", "heads", "nh", "nheads", "n_heads", "num_heads"),
    "kv_heads": ("kv_heads", "nheads_k", "n_kv_heads", "num_kv_heads"),
    "len_q": ("n", "len_q", "q_len", "seq_len", "seqlen", "seq_len_q", "seqlen_q"),
    "len_kv": ("len_k", "len_kv", "kv_len", "seq_len_k", "seq_len_kv", "seqlen_k", "seqlen_kv"),
    "head_dim": ("d", "dim", "head_dim", "headdim", "head_size"),
    **{name: (name, *FIELDS[name].aliases) for name in ("causal", "scale", "soft_cap")},
    **{operand.name: (operand.name, *FIELDS[name].aliases) for name, operand in PER_HEAD.items()},
    **{side: (side,) for side in ("window_left", "window_right")},
}
"""The names, in small letters, under which a kernel usually takes what. A name that means anything else is said."""
_MEANING = {own: name for name, owns in USUAL.items() for own in owns}
PAIRS = 1 << 15
"""The most (query, key) pairs of a problem, over batch and heads, unless the domain says it. The emulator takes a second
or two for as many, if a kernel's loops read shared memory one element at a time."""


class Attended(NamedTuple):
    """A launch, `out` with the layout's axes, and the LSE (batch, heads, len_q) if the kernel has one."""

    run: FileRun
    out: Array
    lse: Array | None


@dataclass(frozen=True)
class FileKernel:
    """A kernel of a `.cu` file, as attention. `fl.kernel` makes one, and says what the fields are.

    >>> _ = Path("zero.cu").write_text("__global__ void zero(float* O) { O[threadIdx.x] = 0; }")
    >>> zero = kernel("zero.cu", grid=1, block="len_q * head_dim")
    >>> p = Problem(batch=1, heads=1, len_q=4, head_dim=32, dtype="float32")
    >>> zero.run(p).launched.total("hbm.write")
    512
    """

    file: Path
    name: str
    arguments: Any
    grid: Any
    block: Any
    sram: Any
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @spell_masks
    def __call__(
        self, q: Any, k: Any, v: Any, *, sinks: Any = None, alibi_slopes: Any = None, **masks: Unpack[Masks]
    ) -> Array:
        """`out` for q (batch, heads, len_q, head_dim), k and v (batch, kv_heads, len_kv, head_dim). Misuse is no error."""
        arrays = _given(q=q, k=k, v=v, sinks=sinks, alibi_slopes=alibi_slopes)
        problem = ATTENTION.problem(arrays, **masks)
        return self.attend(problem, arrays).out

    def run(
        self, problem: Problem, q: Any = None, k: Any = None, v: Any = None, *, sinks: Any = None,
        alibi_slopes: Any = None, **options: Any,
    ) -> FileRun:  # fmt: skip
        """One launch on the emulator: its arrays, findings and counts. Without q, k and v, on random ones.

        `options` are those of `fl.emulate_file`. Raises `UsageError` for arguments that don't fit the kernel, and
        `BuildError` for a file that doesn't compile.
        """
        drawn = ATTENTION.draw(problem) if q is None else {}
        arrays = _given(q=q, k=k, v=v, sinks=sinks, alibi_slopes=alibi_slopes)
        return self.attend(problem, drawn | arrays, **options).run

    def attend(
        self, problem: Problem, arrays: Mapping[str, Any], *, layout: Layout = "bhsd", **options: Any
    ) -> Attended:
        """One launch, and what it returned. q, k, v and out have the layout's axes.

        A kernel always gets the numbers per head that it has a parameter for. What the problem lacks changes nothing.
        """
        from flashlab.emulator import emulate_file  # only where something is emulated

        given = {name: np.ascontiguousarray(as_numpy(name, x)) for name, x in arrays.items()}
        per_head = {name: x for name, x in given.items() if name not in "qkv"}
        said: Mapping[str, Any] = _of(self.arguments, problem, *(given[name] for name in "qkv"), **per_head)
        none = {x.name: np.full(x.shape(problem), x.default, np.float32) for x in PER_HEAD.values()}
        operands = none | given
        usual = {own: meaning for own in self.declared().parameters if (meaning := _MEANING.get(own.lower()))}
        shapes = _outputs(problem, layout)
        told = {own: _argument(own, x, problem, operands, shapes) for own, x in {**usual, **said}.items()}
        sizes = {"grid": self.grid, "block": self.block, "sram": self.sram}
        launch = {name: _size(name, value, problem) for name, value in sizes.items() if value is not None}
        launch |= {name: _of(value, problem) for name, value in {**self.options, **options}.items()}
        run = emulate_file(self.file, told, kernel=self.instance(problem) or None, **launch)
        found: dict[str, Array] = {}
        for name, (shape, _) in shapes.items():
            own = _output(name, said, usual)
            if own not in run.arrays:
                continue
            if run.arrays[own].size != np.prod(shape):
                raise UsageError(own, run.arrays[own], f"as many elements as {name} has, {shape}")
            found[name] = run.arrays[own].reshape(shape)
        if "out" not in found:
            accepted = 'the parameter that is the output as "out", as in {"y": "out"}'
            raise UsageError("arguments", ", ".join(run.arrays), accepted)
        return Attended(run, found["out"], found.get("lse"))

    def instance(self, problem: Problem) -> str:
        """The kernel's name; of a template such as `flash<{head_dim}>`, with the problem's numbers in it."""
        return re.sub(r"\{([^{}]*)\}", lambda found: str(calculated("kernel", found[1], problem)), self.name)

    def takes(self, feature: str) -> bool:
        """Can it be told of this feature: by a parameter of a usual name, or in an expression?"""
        names = ("window_left", "window_right") if feature == "window" else (FIELDS[feature].operand or feature,)
        said: Mapping[str, Any] = {} if callable(self.arguments) else self.arguments
        words = {word for text in said.values() if isinstance(text, str) for word in re.findall(r"\w+", text)}
        return bool(words & set(names)) or any(_MEANING.get(own.lower()) in names for own in self.declared().parameters)

    def declared(self) -> Kernel:
        """The kernel as the source declares it: its file and line, its parameters' names. Raises `UsageError`."""
        from flashlab.emulator.build import survey
        from flashlab.emulator.strings import located

        macros = self.options.get("macros")
        plain: Mapping[str, Any] = {} if callable(macros) else macros or {}
        others: dict[str, Any] = {name: self.options[name] for name in ("includes", "std") if name in self.options}
        source = located(self.file, self.name or None)
        found = survey(self.file, [f"-D{name}={value}" for name, value in plain.items()], text=source.text, **others)
        if name := source.kernel:
            return found.kernel(name)
        names = [each.name for each in found.kernels]
        if len(names) != 1:
            known = ", ".join(names) or "no __global__ function"
            raise UsageError("name", None, f"one of {self.file.name}'s: {known} (a template as flash<{{head_dim}}>)")
        return found.kernels[0]

    def limits(self) -> dict[str, Any]:
        """How long one launch may take, in `seconds`, and how much `memory` the process that runs it may use, in bytes."""
        from flashlab.emulator.apart import MEMORY, patience

        said = self.options.get("time_limit", 60)
        return {"seconds": math.inf if callable(said) else patience(said), "memory": MEMORY}

    def source(self) -> str | None:
        """Python that makes it, or None where functions are part of it that have no name to import."""
        texts: list[str] = []
        for name in ("grid", "block", "sram", "arguments"):
            value = getattr(self, name)
            if not value:
                continue
            text = named(value) if callable(value) else repr(value)
            if text is None:
                return None
            texts.append(f"{name}={text}")
        options = [f"{name}={value!r}" for name, value in self.options.items()]
        own = [repr(self.name)] if self.name else []
        return f"fl.kernel({', '.join([repr(str(self.file)), *own, *texts, *options])})"


def _outputs(problem: Problem, layout: Layout) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of what may be written."""
    p = problem
    rows = (p.batch, p.heads, p.len_q) if layout == "bhsd" else (p.batch, p.len_q, p.heads)
    return {"out": ((*rows, p.head_dim_v), p.out_dtype), "lse": ((p.batch, p.heads, p.len_q), "float32")}


def _output(name: str, said: Mapping[str, Any], usual: Mapping[str, str]) -> str:
    """The parameter that is an output: the one that was said to be it, or else one of a usual name."""
    for own, value in said.items():
        if isinstance(value, str) and value.strip().partition(":")[0] == name:
            return own
    return next((own for own, meaning in usual.items() if meaning == name), "")


def _given(**arrays: Any) -> dict[str, Array]:
    """Those arrays that there are, as NumPy's."""
    return {name: as_numpy(name, x) for name, x in arrays.items() if x is not None}


def _of(value: Any, *given: Any, **named: Any) -> Any:
    """What a function returns for what is given; anything else is itself."""
    return value(*given, **named) if callable(value) else value


def _size(name: str, value: Size, problem: Problem) -> Any:
    found = _of(value, problem)
    return calculated(name, found, problem) if isinstance(found, str) else found


def _argument(own: str, value: Any, problem: Problem, operands: Mapping[str, Array], outputs: Any) -> Any:
    """A parameter's value: an operand by name, an array or a number that a text describes, or what was given."""
    if not isinstance(value, str):
        return value
    if value in operands:
        return operands[value]
    described = array(own, value, problem, outputs)
    return calculated(own, value, problem) if described is None else described


def kernel(
    file: Path | str, name: str | None = None, *, grid: Size | None = None, block: Size | None = None,
    sram: Size | None = None, arguments: Arguments | None = None, **options: Any,
) -> FileKernel:  # fmt: skip
    """A kernel of a `.cu` file, or of a string in a `.py` file, as an attention function for `Adapter`. The emulator runs it.

    `name` may be left out if the file has one kernel. A template's may hold a problem's numbers: "flash<{head_dim}>".
    `grid` (blocks), `block` (threads per block) and `sram` (bytes per block) are numbers, expressions of a problem's
    fields such as "cdiv(len_q, 64), batch * heads", or functions of a `Problem`. What is left out is that of the file's
    own launches, where they say it in constants.

    Parameters of usual names (Q, K, V, O, lse, N, head_dim, scale, causal, ...) need no word. `arguments` says the
    others, by name: a number, an array, or text: a name of an operand ("q", "k", "v", "sinks", "alibi_slopes", "out",
    "lse"), an expression, or an array as in "float32[batch, heads, len_q]:full(-inf)" (or `:zeros`, or `:out` for the
    kernel to fill). "out:zeros" is an output that starts as 0. Where the arrays are to be made from q, k and v (pages,
    other layouts), `arguments` is a function of (problem, q, k, v) that returns them; it may raise
    `NotImplementedError`. Of a problem with sinks or ALiBi it is given these
    too, as keywords. Masks that no parameter's name and no expression tells of are said by `Domain(masks=...)`. `options` go to
    `fl.emulate_file`: `macros`, `device`, `time_limit` and so on, or functions of a `Problem` that return them.

    >>> source = '''__global__ void mean(const float* V, float* O, int N, int d) {
    ...   const int head = blockIdx.x * N * d;  // a softmax of equal scores
    ...   float sum = 0;
    ...   for (int i = 0; i < N; ++i) sum += V[head + i * d + threadIdx.x];
    ...   for (int i = 0; i < N; ++i) O[head + i * d + threadIdx.x] = sum / N;
    ... }'''
    >>> _ = Path("mean.cu").write_text(source)
    >>> mean = kernel("mean.cu", grid="batch * heads", block="head_dim")
    >>> run = mean.run(Problem(batch=1, heads=2, len_q=8, head_dim=32, dtype="float32"))
    >>> run.passed, run.launched.total("hbm.read") == 2 * 8 * 32 * 4
    (True, True)
    """
    said: Any = arguments
    if not isinstance(name, str | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError("name", name, "a kernel's name, or None for a file with one kernel")
    if said is not None and not isinstance(said, Mapping) and not callable(said):
        raise UsageError("arguments", said, "a dictionary, or a function that returns one")
    given = arguments if callable(arguments) else dict(arguments or {})
    return FileKernel(path_of("file", file), name or "", given, grid, block, sram, options)


class KernelTarget(CallableTarget):
    """A kernel of a `.cu` file behind an `Adapter`. What the emulator finds is a failure."""

    backend = "emulator"
    layouts = ("plain",)  # the emulator's arena is where arrays lie
    head_dims = (32, 64, 128)
    longest = 128
    examples = 50
    watched = True

    def __init__(self, adapter: Adapter, kernel: FileKernel) -> None:
        self.kernel, self.attend = kernel, partial(attended, kernel)
        super().__init__(adapter)
        self.name = adapter.name or f"{kernel.file.name}:{kernel.name or kernel.declared().name}"
        self.dtypes = self.domain.dtypes or ()

    def _domain(self) -> Domain:
        own = self.adapter.domain
        return replace(super()._domain(), layouts="plain", pairs=PAIRS if own.pairs is None else own.pairs)

    def keyword(self, name: str) -> str | None:
        said = self.adapter.domain.masks
        return name if (name in TOLD and ((said is not None and name in said) or self.kernel.takes(name))) else None

    def call(
        self,
        problem: Problem,
        arrays: Mapping[str, Any],
        *,
        out: Any = None,
        tile: TileShape = None,
        scales: Any = None,
    ) -> tuple[Any, Any]:
        swap = self.adapter.layout == "bshd"
        given = {name: x.swapaxes(1, 2) if swap and name in "qkv" else x for name, x in arrays.items()}
        got, lse = self.attend(problem, given, self.adapter.layout)
        if self.lse and lse is None:
            accepted = 'None, or the parameter that is the LSE as "lse" in `arguments`'
            raise UsageError("lse", self.adapter.lse, accepted)
        return (got.swapaxes(1, 2) if swap else got), (lse if self.lse else None)

    def argument_error(self, problem: Problem, error: BaseException) -> Exception | None:
        """A file that doesn't compile is bad input, not a verdict."""
        from flashlab.emulator import BuildError

        if isinstance(error, Raised) and error.of == "BuildError":
            return BuildError(str(error))
        return error if isinstance(error, BuildError) else None

    def place(self) -> tuple[str, int] | None:
        declared = self.kernel.declared()
        return declared.file, declared.line

    def source(self) -> str | None:
        made = self.kernel.source()
        return made and f"fl.Adapter({made}{self._conventions()})"


def attended(
    kernel: FileKernel, problem: Problem, arrays: Mapping[str, Array], layout: Layout
) -> tuple[Array, Array | None]:
    """The output and the LSE of one launch, in the layout. Raises `Failure` for what the emulator finds, and `Refused`."""
    try:
        run, got, lse = kernel.attend(problem, arrays, layout=layout)
    except NotImplementedError as refusal:
        raise Refused.by(refusal) from None
    if not run.passed:
        first, *others = run.complaints()
        more = f" (and {len(others)} more)" if others else ""
        raise Failure(f"{first}{more}", _line(run))
    return got, lse


def _line(run: FileRun) -> tuple[str, int] | None:
    """The file and line of the first finding."""
    lines = [where for finding in run.launched.findings if (where := finding.at or finding.line) is not None]
    return (lines[0].file, lines[0].number) if lines else None


def is_kernel(target: str) -> bool:
    """Does it name a kernel of a CUDA source: flash.cu, flash.cu:forward, or flash.py:forward, which stands in a string there?"""
    if match := re.search(r"^(.+\.py):(\w[^:]*)$", target):
        from flashlab.emulator.strings import names_a_kernel  # only where something is emulated

        return names_a_kernel(Path(match[1]), match[2])
    return re.search(r"\.cuh?(:[^:].*)?$", target) is not None


def kernel_named(target: str, launch: Mapping[str, Any]) -> FileKernel:
    """The kernel of "flash.cu:forward", launched as `launch` says. Raises `UsageError`."""
    file, _, name = target.partition(":")
    return kernel(file, name or None, **launch)
