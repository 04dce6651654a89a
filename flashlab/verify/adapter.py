"""What the checks see of anything that they verify, and how an outsider's function, with its conventions, becomes that."""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self

import numpy as np

from flashlab.verify.cases import LAYOUTS
from flashlab.verify.domain import Domain
from flashlab.verify.memory import Frame, frame_named
from flashlab.verify.rule import Align
from simulator import Problem, UsageError
from simulator.dtypes import Array, numpy_dtype
from simulator.errors import Said, among, unknown
from simulator.fields import flag
from simulator.misuse import undecorated
from simulator.names import DType
from simulator.operations.attention import ATTENTION
from simulator.problem import COMMON_MASKS, DTYPES, FEATURES, FIELDS, MASKS, OF_CACHES, SCORES

Layout = Literal["bhsd", "bshd"]
LseBase = Literal["e", "2"]
Checked = Literal["attention", "backward", "gradients", "paged"]

OPERATIONS: tuple[Checked, ...] = ("attention", "backward", "gradients", "paged")
"""What may be checked of a function: its output, the gradients that it returns, those that autograd finds of it, or its output over
K and V in pages."""
GRADIENTS = ("dq", "dk", "dv")

_INPUTS = {operand.name: operand for operand in reversed(ATTENTION.inputs)}
TOLD = tuple(name for name in FEATURES if FIELDS[name].operand in ("", *_INPUTS) and name not in OF_CACHES)
"""The features that a function may be told of. None is told of quantised K and V."""
KEYWORDS = {name: (FIELDS[name].operand or name, *FIELDS[name].aliases) for name in TOLD} | {
    "lse": ("lse", "return_lse", "compute_log_sumexp"),
    "seed": ("seed",),
}
"""The names under which a callable may take each feature and the LSE. A problem with a feature that it has no name for is
not run."""
PER_HEAD = {name: _INPUTS[FIELDS[name].operand] for name in TOLD if FIELDS[name].operand}
"""The operands by which a call says a feature: an array with a number per head, or a mask."""
MOST_SEEDS = 1 << 31
"""Seeds of dropout are below this."""
SAID_TO_ALL = ("causal", "scale")
"""What a function without a signature is told. What else it takes, `Adapter.names` says."""
PLACED = ("window", "alibi")
"""The features that go by the place of a key relative to its query. Only a bottom-right alignment says that for any lengths."""
REFUSES_ARGUMENTS = re.compile(
    r"keyword|positional argument|required argument|argument.* required|multiple values for|function arguments"
)
"""What interpreters and bindings say of arguments that a function doesn't take."""


@dataclass(frozen=True)
class Adapter:
    """An attention function from elsewhere, with its conventions: another convention is no bug.

    `fn(q, k, v, ...)` returns out, or (out, lse) if `lse` names its base. It gets what it has a keyword for: `causal`
    (or `is_causal`), `scale` (`softmax_scale`, `sm_scale`), `window` (`window_size`: a pair, None for open), `soft_cap`
    (`softcap`, `logits_soft_cap`), `lse` (`return_lse`), and arrays (heads,) of float32: `sinks` (`s_aux`,
    `learnable_sink`) and `alibi_slopes`. It also gets a `mask`, bool (len_q, len_kv), True where a key is visible; `lengths`, pairs
    (queries, keys) of sequences that lie one behind the other in arrays of batch 1; and `dropout` (a rate) with `seed`, an integer
    by which it must drop the same weights again. `names={"causal": "mask_future", "alibi": "slopes"}` says other keywords. A
    problem with the default scale is run without one, where `fn` has a default of its own. `layout` is that of q, k, v
    and out; the LSE is (batch, heads, len_q) either way. `domain` (a `Domain`) shapes the problems of every check to
    those that `fn` is for. `supports(problem)` says False, or why not, for what else is not to be run. `empty_lse` is
    what the LSE of a row without keys is there. An exception is a failed check; only `NotImplementedError` says "not
    run". Raises `UsageError` for conventions that there aren't.

    With `operation="backward"`, `fn(dout, q, k, v, out, lse, ...)` is a backward pass and returns (dq, dk, dv). All but the
    LSE have that `layout`; the LSE is natural unless `lse` says otherwise. With `operation="gradients"`, `fn(q, k, v, ...)`
    is attention in torch, whose gradients by autograd are checked. `atomics` names the gradients that atomics add up: their
    last bits may differ from run to run.

    With `operation="paged"`, `fn(q, k, v, block_table, seq_lens, ...)` is attention over pages. k and v are (pages, kv_heads,
    page_size, head_dim), or (pages, page_size, kv_heads, head_dim) in the layout "bshd". `block_table` (batch, pages of a request)
    and `seq_lens` (batch,) are int32.

    >>> import flashlab as fl
    >>> def half_baked(q, k, v, causal=False): return q
    >>> adapter = fl.Adapter(half_baked, "numpy", layout="bshd", lse=None)
    >>> fl.verify(adapter, checks=["rule"], dtypes=["float16"]).verdict
    'failed'
    """

    fn: Callable[..., Any]
    framework: str = "numpy"
    layout: Layout = "bhsd"
    causal: Align = "bottom-right"
    lse: LseBase | None = None
    supports: Callable[[Problem], bool | str | None] | None = None
    name: str | None = None
    empty_lse: float = -math.inf
    bitwise: bool = False
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    domain: Domain = field(default_factory=Domain)
    operation: Checked = "attention"
    atomics: Collection[str] = ()

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise UsageError("fn", self.fn, "a callable (q, k, v, ...)")
        undecorated(self.fn)
        for name, accepted in (
            ("operation", OPERATIONS),
            ("layout", ("bhsd", "bshd")),
            ("causal", ("bottom-right", "top-left")),
            ("lse", ("e", "2", None)),
        ):
            if self.lse is not None or name != "lse":
                among(name, getattr(self, name), [x for x in accepted if x is not None])
        flag("bitwise", self.bitwise)
        self._check_gradients()
        if not isinstance(self.domain, Domain):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError("domain", self.domain, "a Domain")
        if not isinstance(self.names, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError("names", self.names, 'a dictionary such as {"causal": "is_causal"}')
        has, anything = _keywords(self.fn)
        for name, own in self.names.items():
            if name not in KEYWORDS:
                raise unknown("names", name, KEYWORDS)
            if not isinstance(own, str) or not (anything or own in has):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise unknown("names", own, has)

    def _check_gradients(self) -> None:
        try:
            atomics = (self.atomics,) if isinstance(self.atomics, str) else tuple(self.atomics)
        except TypeError:  # arrays without axes say so late
            raise UsageError("atomics", self.atomics, f"some of {', '.join(GRADIENTS)}") from None
        object.__setattr__(self, "atomics", atomics)  # a name alone is a list of one
        for name in atomics:
            among("atomics", name, GRADIENTS)
        if atomics and self.operation not in ("backward", "gradients"):
            raise UsageError(
                "atomics", ", ".join(atomics), f"none of them: the operation {self.operation} has no gradients"
            )
        if self.operation == "gradients" and self.framework != "torch":
            raise UsageError("framework", self.framework, "torch: its autograd finds the gradients")


class Refused(Exception):
    """The target does not do this problem, and says so."""

    @classmethod
    def by(cls, error: NotImplementedError) -> Self:
        """What a function says of it."""
        return cls(f"NotImplementedError: {' '.join(str(error).split()) or 'no message'}")


class Failure(Exception):
    """A check that did not hold. The message says where and by how much; `place` is the (file, line) if it has one."""

    def __init__(self, message: str, place: tuple[str, int] | None = None) -> None:
        super().__init__(message)
        self.place = place


class Raised(Exception):
    """What a candidate raised in another process, of which only words come here: the `kind` is its type's name.

    `of` is the type of Python's, or of ours, that it is one of ("TypeError", "RuntimeError", "BuildError"), or "". `at_call`: the
    call itself raised it, since its arguments didn't fit.
    """

    def __init__(self, kind: str, said: str, *, of: str = "", at_call: bool = False) -> None:
        super().__init__(said)
        self.kind, self.of, self.at_call = kind, of, at_call


def in_words(error: BaseException) -> str:
    """What a row says of an exception of the target's."""
    kind = error.kind if isinstance(error, Raised) else type(error).__name__
    return f"raised {kind}: {' '.join(str(error).split())}"[:300]


TileShape = tuple[int, int] | None


class Target:
    """What the checks see: `call` takes a problem's operands by name, as arrays of its framework.

    `dtypes` are those that it is checked in unless others are asked for. `bitwise`: must its result be the same, bit by
    bit, in another batch? `takes_out`: can it write into an array of the caller's? A random search draws from
    `head_dims`, `tiles`, `layouts` and `scales`, from the combinations of `SCORES` in `scores`, and lengths up to
    `longest`; it tries `examples`. `watched`: does it run where every access is seen, so that guard bands would add
    nothing? All problems are shaped by `domain`.
    """

    name: str
    backend: str
    frame: Frame
    dtypes: tuple[DType, ...] = DTYPES
    align: Align = "bottom-right"
    lse: bool = True
    bitwise: bool = False
    takes_out: bool = False
    head_dims: tuple[int, ...] = (16, 64, 111, 128)  # on a GPU each is a compilation
    tiles: tuple[TileShape, ...] = (None,)
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    scales: tuple[float | None, ...] = (None, 0.3, -0.2, 0.0)
    scores: tuple[tuple[str, ...], ...] = ((), SCORES)  # on a GPU each is a compilation, too
    longest: int = 300
    examples: int = 300
    watched: bool = False
    domain: Domain = Domain()

    def check_options(self) -> None:
        """Raises `UsageError` for options with which it could do no problem at all."""

    def refuses(self, problem: Problem) -> str | None:
        """Why it is not asked to do this problem, or None."""
        return None

    def call(
        self,
        problem: Problem,
        arrays: Mapping[str, Any],
        *,
        out: Any = None,
        tile: TileShape = None,
        scales: Any = None,
    ) -> tuple[Any, Any]:
        """(out, lse), the LSE None where it has none. Raises `Refused`."""
        raise NotImplementedError

    def source(self) -> str | None:
        """Python that names it, or None where it has no name to import."""
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        """How `verify` was told to run it."""
        return {}

    def place(self) -> tuple[str, int] | None:
        """The file and line that it stands in, where it is code of the user's."""
        return None

    def footprint(self, problem: Problem) -> Iterable[int]:
        """Bytes of the arrays that it allocates."""
        return ()


class CallableTarget(Target):
    """An outsider's function behind an `Adapter`."""

    backend = "callable"
    # what may fault, and what many kernels do not mean to do, have checks of their own
    layouts = tuple(layout for layout in LAYOUTS if layout != "misaligned")
    scales = (None, 0.3)
    head_dims = (16, 32, 64, 128)
    operands: tuple[str, ...] = ("q", "k", "v")
    """What the function takes by position."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.name = adapter.name or getattr(adapter.fn, "__qualname__", "callable")
        self.frame = getattr(adapter.fn, "frame", frame_named)(
            adapter.framework
        )  # a function in another process has its own
        self.align = adapter.causal
        self.lse, self.bitwise = adapter.lse is not None, adapter.bitwise
        self.keywords, self.anything = _keywords(adapter.fn)
        self.domain = self._domain()
        self.dtypes = self.domain.dtypes or self.dtypes

    def _domain(self) -> Domain:
        """The adapter's domain, less the features that the function can't be told or that have no meaning here."""
        domain = self.adapter.domain
        masks = [name for name in TOLD if self.keyword(name) and (domain.masks is None or name in domain.masks)]
        if self.align == "top-left":
            masks = [name for name in masks if name not in PLACED]
        if domain.causal and "causal" not in masks:
            masks.append("causal")  # it is never told, since it knows nothing else
        return replace(domain, masks=None if set(masks) == set(TOLD) else tuple(masks))

    def keyword(self, name: str) -> str | None:
        """What the function calls it, or None."""
        if name in self.adapter.names:
            return self.adapter.names[name]
        return next((own for own in KEYWORDS.get(name, ()) if own in self.keywords), None)

    def refuses(self, problem: Problem) -> str | None:
        p = problem
        for name in p.applied:
            if not self.keyword(name) and not (name == "causal" and self.domain.causal):
                return f"the function takes no {'quantized K and V' if name in OF_CACHES else FIELDS[name].operand or name}"
            if name in PLACED and self.align == "top-left":
                return f"{name} has no top-left convention here"
        if p.dropout and not self.keyword("seed"):
            return "the function takes no seed, so what it drops can't be repeated"
        if p.mask not in (None, "dense"):
            return f"a mask of {p.mask} has no convention here"
        if outside := self.domain.outside(p):
            return outside
        answer = True if self.adapter.supports is None else self.adapter.supports(p)
        if isinstance(answer, str):
            return answer
        return None if answer is None or answer else "not supported"  # also NumPy's False, and 0

    def told(self, problem: Problem) -> dict[str, Any]:
        """The keywords of a call. The function's own default is run for what the problem leaves to follow."""
        said = {**problem.masks, "lse": True if self.lse else None}
        left = {name for name in MASKS if FIELDS[name].follows and name not in problem.given}
        return {
            own: value
            for name, value in said.items()
            if value is not None and (own := self.keyword(name)) and not (name in left and self.keywords.get(own))
        }

    def call(
        self,
        problem: Problem,
        arrays: Mapping[str, Any],
        *,
        out: Any = None,
        tile: TileShape = None,
        scales: Any = None,
    ) -> tuple[Any, Any]:
        return self.sorted(self.results(problem, arrays))

    def sorted(self, got: Sequence[Any]) -> tuple[Any, Any]:
        """(out, lse) of what the function returned. Raises `UsageError` where the LSE lacks."""
        if self.lse and (len(got) < 2 or got[1] is None):  # without it, nobody would hold it to the rule
            raise UsageError("lse", self.adapter.lse, "None for a function that returns no (out, lse)")
        return self.turned(got[0]), (got[1] if self.lse else None)

    def results(self, problem: Problem, arrays: Mapping[str, Any]) -> list[Any]:
        """All that the function returns, as it returns it. Raises `Refused`."""
        given, named = self.asked(problem, arrays)
        try:
            result: Any = self.adapter.fn(*given, **named)
        except NotImplementedError as refusal:
            raise Refused.by(refusal) from None
        return [*result] if isinstance(result, tuple | list) else [result]

    def asked(self, problem: Problem, arrays: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """What the function is called with, by position and by keyword."""
        given = [self.turned(arrays[name]) for name in self.operands]
        return given, self.told(problem) | self._per_head(problem, arrays)

    def turned(self, x: Any) -> Any:
        """An array of our layout in the function's, or the other way round."""
        return x.swapaxes(1, 2) if self.adapter.layout == "bshd" and x.ndim == 4 else x

    def natural(self, lse: Array) -> Array:
        """The function's LSE by our conventions."""
        if self.adapter.empty_lse != -math.inf:
            lse = np.where(lse == self.adapter.empty_lse, np.float32(-np.inf), lse)
        return lse * np.float32(math.log(2)) if self.adapter.lse == "2" else lse

    def _per_head(self, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays with a number per head, by the function's keywords. Where it needs one that the problem hasn't, it gets
        numbers that change nothing."""
        found: dict[str, Any] = {}
        seed = self.keyword("seed")
        if seed and "rng_state" in arrays:
            found[seed] = int(np.asarray(self.frame.get(arrays["rng_state"])).reshape(-1)[0]) % MOST_SEEDS
        for name, operand in PER_HEAD.items():
            own = self.keyword(name)
            if own and operand.name in arrays:
                found[own] = arrays[operand.name]
            elif own and self.keywords.get(own) is False:
                dtype = numpy_dtype(operand.dtype_in(problem))
                found[own] = self.frame.put(np.full(operand.shape(problem), operand.default, dtype))
        return found

    def argument_error(self, problem: Problem, error: BaseException) -> Exception | None:
        """The error for a function that refuses its arguments, or None for an error of another kind."""
        of = next((kind for kind in (TypeError, RuntimeError) if isinstance(error, kind)), None)
        kind, at_call = of.__name__ if of else "", False
        if isinstance(error, Raised):
            kind, at_call = error.of, error.at_call
        else:
            innermost = error.__traceback__
            while innermost and innermost.tb_next:
                innermost = innermost.tb_next
            at_call = innermost is not None and innermost.tb_frame.f_code is CallableTarget.results.__code__
        says_so = kind in ("TypeError", "RuntimeError") and REFUSES_ARGUMENTS.search(str(error)) is not None
        if at_call:  # the call itself raised
            refused = says_so or kind == "TypeError"
        else:  # a function that names no arguments of its own may have passed them on
            refused = says_so and self.anything
        if not refused:
            return None
        said = " ".join(str(error).split())[:150]
        took = ", ".join([*self.operands, *self.told(problem), *self._per_head(problem, {})])
        renamed = "names={...} of fl.Adapter, or --arg-names, renames keywords"
        return UsageError(
            "target",
            Said(self.name),
            f"a function that takes ({took}) in {self.frame.name}'s arrays ({said}); {renamed}",
        )

    def place(self) -> tuple[str, int] | None:
        code = getattr(inspect.unwrap(self.adapter.fn), "__code__", None)
        return code and (code.co_filename, code.co_firstlineno)

    def source(self) -> str | None:
        if self.adapter.name in outsiders():
            return repr(self.adapter.name)
        given = named(self.adapter.fn)
        return given and f"fl.Adapter({given}, {self.adapter.framework!r}{self._conventions()})"

    def _conventions(self) -> str:
        said = {f.name: x for f in fields(Adapter) if (x := getattr(self.adapter, f.name)) != f.default}
        plain = ("operation", "layout", "causal", "lse", "names", "bitwise")
        domain = f", domain=fl.{self.adapter.domain!r}" if self.adapter.domain != Domain() else ""
        return "".join(f", {name}={said[name]!r}" for name in plain if said.get(name)) + domain

    def footprint(self, problem: Problem) -> Iterable[int]:
        p = problem
        rows = p.batch * p.heads * p.len_q
        out, lse = rows * p.head_dim_v, rows
        return [out * p.itemsize, lse * 4, out * 4]  # many keep a float32 out beside that of the storage dtype


def _keywords(fn: Callable[..., Any]) -> tuple[dict[str, bool], bool]:
    """What a function can be told by keyword, and whether each has a default; and may it take others?

    One that takes any keyword is told of the masks that every kernel knows, and one that doesn't say of `SAID_TO_ALL`.
    """
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return dict.fromkeys(SAID_TO_ALL, False), True
    named = {
        name: p.default is not p.empty
        for name, p in parameters.items()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return (dict.fromkeys(COMMON_MASKS, False) | named if anything else named), anything


def outsiders() -> tuple[str, ...]:
    from flashlab.verify.outsiders import OUTSIDERS

    return tuple(OUTSIDERS)


def imported(name: str) -> Callable[..., Any]:
    """What "package:function" names. Raises `UsageError` if it can't be imported."""
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise UsageError("target", name, f"package:function that can be imported ({error})") from None
    return found


def named(thing: Any) -> str | None:
    """Python that names something: a string, or what `load` imports."""
    if isinstance(thing, str):
        return repr(thing)
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not module or not name or "<" in name or module == "__main__":
        return None
    return f"load({f'{module}:{name}'!r})"
