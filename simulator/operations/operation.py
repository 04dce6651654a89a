"""An operation has named operands that a `Problem` sizes, a judge in float64, an error bound, and a count of FLOPs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np

from simulator.counts import Spec
from simulator.dtypes import Array, numpy_dtype
from simulator.errors import Said, UsageError, array_in_words, dtype_name, unknown
from simulator.fields import integer
from simulator.memory import check_memory
from simulator.names import DType
from simulator.operations import problems
from simulator.operations.problems import Problems
from simulator.problem import ITEMSIZE, MASKS, Masks, Problem, Tile
from simulator.support import Support

Arrays = Mapping[str, Array]
"""Arrays by the names of their operands."""

SAID_AS = {"bool": ("bool", "uint8"), "uint32": ("uint32", "int32")}
"""The dtypes of arrays that callers may pass for an operand's, where they are several. Of a byte, any bit says True. Of a word,
the sign is a bit as any other."""

LEADING = ("batch", "rows_batch", "heads", "kv_heads")
"""The axes along which blocks run beside one another, or that have one element. The others of an operand are its rows and
columns."""


def always(problem: Problem) -> bool:
    """The default of `Operand.when`: every problem has the operand."""
    del problem
    return True


@dataclass(frozen=True, kw_only=True)
class Operand:
    """An array that the caller passes or gets back. It has one name in tile program, formula, `.cu`, trace and errors.

    - `axes` are names of sizes of a `Problem` ("batch", "heads", "kv_heads", "len_q", "len_kv", "head_dim",
      "head_dim_v"), of its tiling ("row_tiles", "key_tiles"), of its sequences ("offsets"), of its pages or of its mask
      ("bit_bytes", "row_blocks", "block_list").
    - `dtype` is "storage" (the problem's), "kv" (that of K and V), "out" (the output's for that storage dtype), "sums" (the
      storage dtype, or float32 where sums are left unrounded), or a plain one such as "float32".
    - `when(problem)` says whether a problem has the operand.
    - `default` is the value of every element if callers leave the input out, or a function of the problem that gives them
      all. With None callers may not.
    - `asked`: the output is written on request only.

    An operand that an operation has among its inputs and among its outputs is read and written (`Operation.in_place`): a call
    changes the caller's array. What no block writes stays as it was.

    >>> p = Problem(batch=2, heads=4, kv_heads=2, len_q=10, len_kv=30, head_dim=64, dtype="float16")
    >>> Operand(name="k", axes=("batch", "kv_heads", "len_kv", "head_dim")).shape(p)
    (2, 2, 30, 64)
    """

    name: str
    axes: tuple[str, ...]
    dtype: str = "storage"
    when: Callable[[Problem], bool] = always
    default: float | Callable[[Problem], Any] | None = None
    asked: bool = False

    @property
    def lead(self) -> tuple[str, ...]:
        """Those of its axes that are batch and heads."""
        return tuple(axis for axis in self.axes if axis in LEADING)

    def shape(self, problem: Problem, tile: Tile | None = None) -> tuple[int, ...]:
        """Its shape. An operand with an axis of tiles needs `tile`."""
        return tuple(size_of(axis, problem, tile) for axis in self.axes)

    def left_out(self, problem: Problem, tile: Tile | None = None) -> Array:
        """What stands for an input that the caller leaves out: full of its default."""
        assert self.default is not None, self.name
        values = self.default(problem) if callable(self.default) else self.default
        return np.full(self.shape(problem, tile), values, numpy_dtype(self.dtype_in(problem)))

    def part(self, x: Array, places: Mapping[str, int]) -> Array:
        """What belongs to one batch or head: `places` says which, by axis. The axes stay, with one element."""
        if not self.lead:
            return x
        return x[tuple(slice(places[a], places[a] + 1) if a in places else slice(None) for a in self.axes)]

    def cut(self, x: Array, where: Mapping[str, slice]) -> Array:
        """A view of what lies in slices of some axes, by name."""
        return x[tuple(where.get(axis, slice(None)) for axis in self.axes)]

    def dtype_in(self, problem: Problem) -> str:
        """The name of its dtype in a problem."""
        p = problem
        sums = "float32" if p.partial else p.dtype
        return {"storage": p.dtype, "kv": p.kv_dtype, "out": p.out_dtype, "sums": sums}.get(self.dtype, self.dtype)

    def by_head(self, x: Array, lead: tuple[int, ...], spec: Spec) -> Array:
        """The array as batch, heads, rows and columns. `lead` are how many batches and heads it has, `spec` is its own."""
        return x.reshape(*lead, spec.rows, spec.cols)

    def from_heads(self, x: Array, shape: tuple[int, ...]) -> Array:
        """What `by_head` made, in the operand's own shape again."""
        return x.reshape(shape)

    def spec(self, problem: Problem, tile: Tile | None, role: str) -> Spec:
        """How it lies in HBM. With one axis beside batch and heads it is a vector, which is not padded."""
        lead = [size_of(axis, problem, tile) for axis in self.lead]
        inner = [size_of(axis, problem, tile) for axis in self.axes if axis not in LEADING]
        rows, cols = (*inner, 1, 1)[:2]
        heads = math.prod(lead)
        return Spec(self.name, heads, rows, cols, self.dtype_in(problem), role, vector=len(inner) < 2)


def size_of(axis: str, problem: Problem, tile: Tile | None) -> int:
    """The length of an axis. The axes "row_tiles" and "key_tiles" need `tile`."""
    if axis in ("row_tiles", "key_tiles"):
        assert tile is not None, axis
        return problem.row_tiles(tile) if axis == "row_tiles" else problem.key_tiles(tile)
    return getattr(problem, axis)


class Operation(ABC):
    """One operation: its inputs, its outputs, and what is right.

    >>> from simulator.operations.attention import ATTENTION
    >>> [operand.name for operand in ATTENTION.required], [operand.name for operand in ATTENTION.outputs]
    (['q', 'k', 'v'], ['out', 'lse'])
    """

    name: str
    inputs: tuple[Operand, ...]
    """Those of one name are forms of it, of which a problem has one."""
    outputs: tuple[Operand, ...]
    in_pages: ClassVar[bool] = False
    """Do K and V lie in pages? Then a problem has a `page_size`, and else none."""
    shares_prefix: ClassVar[bool] = False
    """Do requests share their first keys? Then a problem has a `len_prefix`, and else none."""
    products: ClassVar[tuple[int, int]] = (1, 1)
    """Its matrix products over pairs of a query and a key: how many go over the columns of K, and how many over those of V."""
    kinds: ClassVar[Mapping[str, str]] = {"normal": "standard normal"}
    """The kinds of random numbers that `draw` knows: their names, and a description of each."""
    shapes: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "aligned": {"heads": 2, "len_q": 128},
        "causal": {"heads": 2, "len_q": 97, "causal": True},
        "ragged, GQA, batch 2": {"batch": 2, "heads": 4, "kv_heads": 2, "len_q": 33, "len_kv": 70, "head_dim": 40},
        "more queries than keys, causal": {"heads": 2, "len_q": 100, "len_kv": 37, "causal": True},
        "window": {"heads": 2, "len_q": 90, "window": (20, 3)},
        "one query": {"heads": 3, "len_q": 1, "len_kv": 50},
        "one key": {"heads": 1, "len_q": 50, "len_kv": 1},
        "head dim 128, a scale": {"heads": 1, "len_q": 65, "head_dim": 128, "scale": 0.3},
    }
    """Problems that verification runs, by description: what differs from one batch, one head and head dim 64."""
    probes: ClassVar[str | Mapping[str, Callable[[Any, Problem, int], float | None]]] = {}
    """The laws of its own that verification checks, by name: probes `(subject, problem, seed)`. Or the name of some in
    `flashlab.verify.general.PROBES`."""
    sanitized: ClassVar[Problems] = problems.SMALL
    """Small problems that the sanitizers run, by description: of one batch where they don't say. An algorithm gets those that ask
    only for what it knows."""

    shown: ClassVar[Mapping[str, Any]] = {}
    """Fields of a problem that shows step by step what the operation is for, where nobody asks for one. `tile` may be among them.
    What is left out is as for any algorithm."""

    @property
    def required(self) -> tuple[Operand, ...]:
        """The inputs that callers may not leave out, one of each name. A tile program takes them by position."""
        return tuple({x.name: x for x in reversed(self.inputs) if x.default is None}.values())[::-1]

    @property
    def in_place(self) -> frozenset[str]:
        """The names of the operands that are read and written: they are among the inputs and among the outputs."""
        return frozenset(x.name for x in self.inputs) & {x.name for x in self.outputs}

    def taken(self, problem: Problem) -> list[Operand]:
        """The inputs of a problem: the required ones, and those that it has and callers may leave out."""
        return [operand for operand in self.inputs if operand.when(problem)]

    def written(self, problem: Problem) -> tuple[Operand, ...]:
        """The outputs that every algorithm writes for a problem, whether they were asked for or not."""
        return tuple(operand for operand in self.outputs if operand.when(problem) and not operand.asked)

    def operand(self, name: str, problem: Problem | None = None) -> Operand:
        """The operand with a name; of several forms the one that a `problem` has, or else the first.

        Raises `UsageError` if there is none.
        """
        forms = [operand for operand in (*self.inputs, *self.outputs) if operand.name == name]
        if forms:
            return next((form for form in forms if problem is not None and form.when(problem)), forms[0])
        raise unknown("operand", name, [each.name for each in (*self.inputs, *self.outputs)])

    @abstractmethod
    def problem(self, arrays: Mapping[str, Any], **masks: Any) -> Problem:
        """The problem that the required inputs pose, from their shapes and dtypes alone.

        `masks` are `causal`, `window` and `scale`. Raises a `UsageError` that names the array at fault.
        """

    def settled(self, problem: Problem, arrays: Mapping[str, Any]) -> Problem:
        """The problem with what NumPy's arrays say of it by their values. A length that only a kernel reads is one."""
        del arrays
        return problem

    @abstractmethod
    def judge(self, problem: Problem, arrays: Arrays) -> dict[str, Array]:
        """The right outputs, by name, in float64."""

    @abstractmethod
    def bounds(self, problem: Problem, arrays: Arrays, truth: Arrays) -> dict[str, Array]:
        """How far a correct kernel's outputs may be from the truth, by name.

        An output with rows and columns has a bound for the 2-norm of each row's error. A vector has one per element.
        """

    @abstractmethod
    def flops(self, problem: Problem) -> int:
        """FLOPs by the field's convention, for TFLOP/s. A multiply-add counts 2. A causal mask halves them."""

    def fitted(self, problem: Problem) -> Problem:
        """A plain problem as this operation has it: where K and V lie in pages, with pages."""
        return problem

    def batched(self, lengths: Sequence[Any]) -> dict[str, Any]:
        """What a problem of sequences of these lengths has where a person doesn't say it: of requests, their number."""
        del lengths
        return {}

    def matrix(self, support: Support, dtype: str, *, boxes: bool) -> dict[str, problems.Sizes]:
        """The counter matrix of kernels with this `support`, in a dtype: the problems that counters are read for, by description.

        `boxes`: TMA loads them.
        """
        known = support.masks
        return {
            **problems.shaped(support, boxes),
            **(problems.EVEN if support.same_queries else problems.SEQUENCES if "lengths" in known else {}),
            **problems.served(known, dtype, problems.SOME_QUERIES, problems.A_QUERY),
            **(problems.MASKED if "mask" in known else {}),
        }

    def refusal(self, problem: Problem, by: str) -> UsageError | None:
        """The error for a problem that is none of this operation's, or None. `by` is the algorithm's name."""
        if self.in_pages != (problem.page_size is not None):
            accepted = "keys per page, as K and V lie in pages" if self.in_pages else "None, or paged for pages"
            return UsageError("page_size", problem.page_size, f"{accepted}, for {by}")
        if self.shares_prefix != (problem.len_prefix is not None):
            accepted = "keys that all requests share" if self.shares_prefix else "None, or cascade for a shared prefix"
            return UsageError("len_prefix", problem.len_prefix, f"{accepted}, for {by}")
        return None

    def pages(self, problem: Problem, arrays: Arrays) -> list[list[int]]:
        """The pages that each batch's keys lie in, in the order of the keys. It is empty where K and V don't lie in pages."""
        del problem, arrays
        return []

    def idle(self, problem: Problem) -> bool:
        """Does the problem have nothing to write? Then nothing is launched."""
        del problem
        return False

    def draw(self, problem: Problem, seed: int = 0, kind: str = "normal") -> dict[str, Array]:
        """The required inputs of a problem, full of random numbers of a kind. The same seed gives the same arrays.

        Raises `UsageError` for a kind that isn't one of `kinds`.
        """
        if kind not in self.kinds:
            raise unknown("inputs", kind, self.kinds)
        random = np.random.default_rng(integer("seed", seed, 0))
        elements = sum(math.prod(operand.shape(problem)) for operand in self.required)
        check_memory("random inputs", elements * (4 + problem.itemsize))
        return {
            operand.name: random.standard_normal(operand.shape(problem), np.float32).astype(
                numpy_dtype(operand.dtype_in(problem))
            )
            for operand in self.required
        }

    def apart(self, named: Mapping[str, Any]) -> tuple[dict[str, Any], Masks]:
        """A call's keywords: arrays by the names of their operands, and masks of the problem. Raises `UsageError`."""
        known = dict.fromkeys(operand.name for operand in self.inputs)
        for name in named:
            if name not in known and name not in MASKS:
                raise unknown("keyword", name, {**known, **dict.fromkeys(MASKS)})
        masks: Any = {name: value for name, value in named.items() if name not in known}
        return {name: x for name, x in named.items() if name in known}, masks

    def bound(self, given: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """A call's arguments as arrays by name.

        `given` are those by position, in the order of the required inputs. Raises `UsageError` for arguments that are
        too many, unknown, missing or given twice.
        """
        required = [operand.name for operand in self.required]
        if len(given) > len(required):
            raise UsageError("arrays", Said(f"{len(given)} by position"), f"{', '.join(required)}: {len(required)}")
        found = dict(zip(required, given, strict=False))
        known = list(dict.fromkeys(operand.name for operand in self.inputs))
        for name, x in named.items():
            if name not in known:
                raise unknown("operand", name, known)
            if name in found:
                raise UsageError(name, "given twice", "once, by position or by name")
            if x is not None:
                found[name] = x
        for name in required:
            if found.get(name) is None:
                raise UsageError(name, None, f"an array: {self.name} takes {', '.join(required)}")
        return found

    def check(self, problem: Problem, arrays: Mapping[str, Any], tile: Tile | None = None) -> None:
        """Raise `UsageError` for arrays that don't fit the problem or aren't part of it, by shape and dtype alone."""
        for name, x in arrays.items():
            operand = self.operand(name, problem)
            if not operand.when(problem):
                raise UsageError(name, Said(array_in_words(x)), f"nothing: {problem} has no {name}")
            shape, dtype = operand.shape(problem, tile), operand.dtype_in(problem)
            if tuple(x.shape) != shape:
                raise UsageError(f"{name}.shape", tuple(x.shape), f"{shape}, its axes are {', '.join(operand.axes)}")
            if dtype_name(x) not in SAID_AS.get(dtype, (dtype,)):
                raise UsageError(f"{name}.dtype", dtype_name(x), " or ".join(SAID_AS.get(dtype, (dtype,))))


def storage_dtypes(arrays: Mapping[str, Any], names: Sequence[str], accepted: str) -> DType:
    """The storage dtype that several arrays share. Raises a `UsageError` that names the array at fault."""
    first = names[0]
    found = {name: dtype_name(arrays[name]) for name in names}
    for name, dtype in found.items():
        if dtype not in ITEMSIZE:
            raise UsageError(f"{name}.dtype", dtype, accepted)
        if dtype != found[first]:
            raise UsageError(f"{name}.dtype", dtype, f"{found[first]}, as {first} has")
    return cast("DType", found[first])
