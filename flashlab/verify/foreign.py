"""Backward passes, and attention over pages, from elsewhere, held to the rule and the probes of our own.

A backward pass that is a function of its own (`Backward`) gets the `out` and the LSE of the judge, rounded, as our kernels do.
The gradients of a differentiable function (`Differentiated`) are those for the `out` and the LSE of its own forward pass. That
has to obey the forward's rule. Then D may be the sum of dO O, as the kernels have it, or that of P dP, as autograd has it where
nobody wrote a backward pass. So a row may be off by the distance of the two, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from dataclasses import replace as changed
from typing import Any

import numpy as np

from flashlab.verify.adapter import GRADIENTS, Adapter, CallableTarget, Failure, Refused
from flashlab.verify.cases import LAYOUTS
from flashlab.verify.kernels import FileKernel
from flashlab.verify.outsiders import OUTSIDERS, outsider
from flashlab.verify.steps import Ended, Steps
from flashlab.verify.subject import Expected, Subject, worst
from simulator import Problem
from simulator.dtypes import Array, as_numpy
from simulator.errors import Said, Unavailable, UsageError
from simulator.names import DType
from simulator.operations.attention import ATTENTION
from simulator.operations.backward import BACKWARD
from simulator.operations.paged import PAGED

__all__ = ["foreign"]


class BackwardTarget(CallableTarget):
    """A function (dout, q, k, v, out, lse, ...) behind an `Adapter`."""

    operands = ("dout", "q", "k", "v", "out", "lse")

    def refuses(self, problem: Problem) -> str | None:
        return super().refuses(problem.replace(dlse=False) if self._takes_dlse(problem) else problem)

    def told(self, problem: Problem) -> dict[str, Any]:
        return {name: x for name, x in super().told(problem).items() if name != self.keyword("lse")}

    def results(self, problem: Problem, arrays: Mapping[str, Any]) -> list[Any]:
        """All that the function returns, given the LSE by its own conventions."""
        return super().results(problem, {**arrays, "lse": self._own(arrays["lse"])})

    def _takes_dlse(self, problem: Problem) -> bool:
        return problem.dlse and "dlse" in self.keywords

    def _per_head(self, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
        more = {"dlse": arrays["dlse"]} if self._takes_dlse(problem) else {}
        return super()._per_head(problem, arrays) | more

    def _own(self, lse: Any) -> Any:
        adapter = self.adapter
        if adapter.lse != "2" and adapter.empty_lse == -math.inf:
            return lse
        values = self.frame.get(lse)
        values = values / np.float32(math.log(2)) if adapter.lse == "2" else values
        return self.frame.put(np.where(np.isneginf(values), np.float32(adapter.empty_lse), values))


@dataclass(frozen=True, kw_only=True)
class Function(Subject):
    """A function of an operation other than attention, behind an `Adapter`."""

    target: CallableTarget
    steps: Steps

    def probe(self, dtypes: Sequence[DType]) -> None:
        """Call the function once per dtype. Raises `UsageError` if it refuses its arguments, whatever they hold."""
        for dtype in dtypes:
            with suppress(Ended, Refused):
                self.steps.step(lambda dtype=dtype: self._probe(dtype))

    def _probe(self, dtype: DType) -> None:
        for causal in (False, True):
            p = self.fit(Problem(batch=1, heads=2, len_q=16, head_dim=64, dtype=dtype, causal=causal))
            if not self.refuses(p):
                break
        else:
            return  # it does neither: the rows will say why
        try:
            self.run_on(p, {name: self.frame.put(x) for name, x in self.operation.draw(p).items()})
        except (UsageError, Unavailable, Refused):
            raise
        except (Exception, SystemExit) as error:
            if (refusal := self.target.argument_error(p, error)) is not None:
                raise refusal from None


@dataclass(frozen=True, kw_only=True)
class Backward(Function):
    """A backward pass behind an `Adapter`."""

    def refuses(self, problem: Problem) -> str | None:
        p = problem
        for name in ("dropout", "sinks"):
            if name in p.applied:
                return f"{name} of a backward pass {'has' if name == 'dropout' else 'have'} no convention here"
        if self.target.align == "top-left" and p.causal and any(len(rows) != len(keys) for rows, keys in p.spans):
            return "it aligns a causal mask top-left, and the lengths differ"
        return self.target.refuses(p)

    def fit(self, problem: Problem) -> Problem:
        """The nearest problem of sizes in the domain. What it asks for stays: what isn't supported is refused."""
        return changed(self.target.adapter.domain, masks=None).fit(problem)

    def allocates(self, problem: Problem) -> Iterable[int]:
        # gradients, and what many kernels have beside them: the float32 ones, and D
        rows = problem.batch * problem.heads * max(problem.len_q, problem.len_kv)
        elements = rows * problem.head_dim
        return [elements * problem.itemsize] * 3 + [elements * 4] * 3 + [rows * 4]

    def run_on(self, problem: Problem, given: Mapping[str, Any]) -> dict[str, Array]:
        with self.steps.call():
            return self._arrays(self.target.results(problem, given))

    def _arrays(self, found: Sequence[Any]) -> dict[str, Array]:
        """Gradients of the function's layout by name. What it returns beside them doesn't count."""
        if len(found) < len(GRADIENTS):
            raise UsageError("target", Said(self.name), "a backward pass that returns (dq, dk, dv)")
        return {name: self.frame.get(self.target.turned(x)) for name, x in zip(GRADIENTS, found, strict=False)}


class Differentiated(Backward):
    """Attention in torch behind an `Adapter`, with the gradients that autograd finds."""

    def run_on(self, problem: Problem, given: Mapping[str, Any]) -> dict[str, Array]:
        with self.steps.call():
            found = self.gradients(problem, given)
        missing = [name for name, x in zip(GRADIENTS, found, strict=True) if x is None]
        if missing:
            raise Failure(f"{', '.join(missing)}: autograd finds no way to it from out")
        return {name: as_numpy(name, x) for name, x in zip(GRADIENTS, found, strict=True)}

    def gradients(self, problem: Problem, given: Mapping[str, Any]) -> Sequence[Any]:
        """dq, dk and dv, in our layout; None where autograd finds none. Raises `UsageError` for a function without a graph."""
        apart = getattr(self.target.adapter.fn, "gradients", None)
        if apart is not None:  # the graph is in another process
            arguments, named = self.target.asked(problem, given)
            found = apart(self.target.turned(given["dout"]), *arguments, **named)
            if not found:
                raise self._no_graph()
            return [x if x is None else self.target.turned(x) for x in found]
        leaves, out, _ = self._forward(problem, given)
        return self.frame.module.autograd.grad(out, leaves, given["dout"].to(out.dtype), allow_unused=True)

    def expect(self, problem: Problem, arrays: Mapping[str, Array]) -> Expected:
        """The truth for the function's own output and LSE."""
        exact = ATTENTION.judge(problem, arrays)
        with self.steps.call():
            out, lse = self._outputs(problem, {name: self.frame.put(x) for name, x in arrays.items()})
        own = {"out": as_numpy("out", out)}
        if lse is not None:
            own["lse"] = self.target.natural(as_numpy("lse", lse))
        try:
            worst(ATTENTION, (exact, ATTENTION.bounds(problem, arrays, exact)), own)
        except Failure as failure:
            raise Failure(f"of its forward pass {failure}") from None
        given = {**arrays, **exact, **own}
        truth, bounds = super().expect(problem, given)
        other = BACKWARD.judge(problem, {**given, "out": exact["out"]})
        apart = {name: np.linalg.norm(x - other[name], axis=-1) for name, x in truth.items()}
        return truth, {name: bound + apart[name] for name, bound in bounds.items()}

    def _outputs(self, problem: Problem, given: Mapping[str, Any]) -> tuple[Any, Any]:
        """The output and the LSE where a gradient is asked for: a function may go another way then."""
        apart = getattr(self.target.adapter.fn, "differentiated", None)
        if apart is not None:
            return self.target.sorted(apart(*(asked := self.target.asked(problem, given))[0], **asked[1]))
        _, out, lse = self._forward(problem, given)
        return out.detach(), None if lse is None else lse.detach()

    def _forward(self, problem: Problem, given: Mapping[str, Any]) -> tuple[list[Any], Any, Any]:
        """q, k and v as leaves of a graph, and the output and LSE at its end."""
        leaves = {name: given[name].detach().requires_grad_() for name in "qkv"}
        with self.frame.module.enable_grad():
            out, lse = self.target.call(problem, {**given, **leaves})
        if not out.requires_grad:
            raise self._no_graph()
        return [*leaves.values()], out, lse

    def _no_graph(self) -> UsageError:
        return UsageError("target", Said(self.name), "a function whose output torch's autograd can differentiate")


class PagedTarget(CallableTarget):
    """A function (q, k, v, block_table, seq_lens, ...) behind an `Adapter`."""

    operands = ("q", "k", "v", "block_table", "seq_lens")

    def refuses(self, problem: Problem) -> str | None:
        return super().refuses(_plain(problem))  # the arrays say the pages and the lengths

    def told(self, problem: Problem) -> dict[str, Any]:
        return super().told(_plain(problem))


def _plain(p: Problem) -> Problem:
    """What is said of a problem beside its arrays: plain attention of its first request."""
    return p.sequences[0].gathered


@dataclass(frozen=True, kw_only=True)
class Paged(Function):
    """Attention over pages behind an `Adapter`."""

    def refuses(self, problem: Problem) -> str | None:
        for name in ("varlen", "drafts"):
            if getattr(problem, name):
                return f"{name} has no convention here"
        if self.target.align == "top-left" and problem.causal:
            return "it aligns a causal mask top-left, and the lengths differ"
        return self.target.refuses(problem)

    def fit(self, problem: Problem) -> Problem:
        return PAGED.fitted(problem)

    def run_on(self, problem: Problem, given: Mapping[str, Any]) -> dict[str, Array]:
        if reason := self.refuses(problem):  # a probe asks for drafts, too
            raise Refused(reason)
        with self.steps.call():
            found = self.target.results(problem, given)
        if self.target.lse and len(found) < 2:
            raise UsageError("lse", self.target.adapter.lse, "None for a function that returns no (out, lse)")
        named = {"out": self.frame.get(self.target.turned(found[0]))}
        if self.target.lse:
            named["lse"] = self.target.natural(np.asarray(self.frame.get(found[1]), np.float32))
        return named


def adapted(target: Any) -> Adapter | None:
    """The adapter of a target whose operation isn't attention, or None for any other target."""
    if isinstance(target, str) and target in OUTSIDERS:
        target = outsider(target)
    return target if isinstance(target, Adapter) and target.operation != "attention" else None


def foreign(adapter: Adapter, steps: Steps) -> Function:
    """The function of an adapter, as the checks see it. Raises `UsageError` and `Unavailable`."""
    if isinstance(adapter.fn, FileKernel):
        raise UsageError("operation", adapter.operation, "attention, for a kernel of a .cu file")
    if adapter.operation == "paged":
        paged = PagedTarget(adapter)
        return Paged(
            name=paged.name, operation=PAGED, backend=paged.backend, frame=paged.frame, target=paged, steps=steps
        )
    backward = adapter.operation == "backward"
    target = (BackwardTarget if backward else CallableTarget)(adapter)
    known = LAYOUTS if adapter.domain.layouts is None else adapter.domain.layouts
    return (Backward if backward else Differentiated)(
        name=target.name, operation=BACKWARD, backend=target.backend, frame=target.frame, atomics=adapter.atomics,
        layouts=[layout for layout in ("padded", "bshd") if layout in known], target=target, steps=steps,
    )  # fmt: skip
