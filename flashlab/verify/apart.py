"""Verifies a candidate that runs in a process of its own. The judge stays in this one.

What the child says of itself is taken for what a caller might say: a signature, conventions of an adapter in the candidate's own
file. The conventions of a bare function are said here. Inputs are drawn after the candidate was loaded.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from flashlab.base.process import ONE_THREAD
from flashlab.verify.adapter import Adapter
from flashlab.verify.domain import Domain
from flashlab.verify.kernels import FileKernel, KernelTarget
from flashlab.verify.report import Report, Row
from flashlab.verify.session import Counted, Function, Session, place_of, word
from flashlab.verify.steps import Ended
from simulator import Problem
from simulator.errors import Said, UsageError
from simulator.simulate import one_blas_thread

if TYPE_CHECKING:
    from flashlab.verify import Options

__all__ = ["SEEDS", "verify_apart"]

SEEDS = 1 << 32
"""How many seeds there are to draw from."""


def verify_apart(
    name: str, load: Callable[[], Any], options: Options, *, seconds: float = math.inf, memory: int | None = None,
    on_row: Callable[[Row], None] | None = None, adapt: Callable[[Any], Adapter] | None = None,
    refuse: Callable[[], object] = lambda: None,
) -> Report:  # fmt: skip
    """What `verify` says of the candidate that `load` returns in a child process, which is restarted when it ends.

    A check in which it ended has failed. A call of it may take `seconds`; the child may use `memory` bytes of address space. What
    it prints goes to stderr when it has ended. `name` is the target's, for errors. `adapt` gives a bare function its
    conventions. For what has conventions of its own `refuse` is called. Raises what `load` and `verify` raise.
    """
    import cloudpickle  # pyright: ignore[reportMissingTypeStubs]  # only for a child: it costs import time

    from flashlab.base.scratch import scratch  # only where there is a child
    from flashlab.verify import verified

    begun = time.perf_counter()
    try:
        dumped: bytes = cloudpickle.dumps(load)  # pyright: ignore[reportUnknownMemberType]
    except Exception as error:  # whatever an object raises that can't be pickled
        raise UsageError("target", Said(name), f"one that can go to another process ({error})"[:200]) from None
    with scratch() as folder:
        # small products have nothing to share out, and threads that wait for each other cost more than they do
        environment: Mapping[str, str] = ONE_THREAD if options.quick else dict[str, str]()
        threads = one_blas_thread() if options.quick else nullcontext()
        session = Session(folder, name, dumped, seconds, memory, options.framework, environment)
        try:
            seed = secrets.randbelow(SEEDS) if options.seed is None else options.seed
            target = _target(session, options, adapt, refuse)
            with threads:
                report = verified(target, replace(options, seed=seed), on_row, Counted(session))
        finally:
            session.close()
    return replace(report, seconds=time.perf_counter() - begun)


def loaded(target: Any) -> tuple[str, Callable[[], Any]]:
    """The name of a target, and what loads it in another process. Raises `UsageError` for an algorithm of ours."""
    from flashlab.verify.adapter import imported
    from flashlab.verify.outsiders import OUTSIDERS, outsider

    if not isinstance(target, str):
        if not callable(target) and not isinstance(target, Adapter):
            raise UsageError("target", target, "package:function, a function, an Adapter or a tile program")
        return str(getattr(target, "__qualname__", type(target).__name__)), lambda: target
    if target in OUTSIDERS:
        return target, partial(outsider, target)
    if ":" not in target:
        raise UsageError("isolate", True, f"False for {target}: what runs in a process of its own is somebody's code")
    return target, partial(imported, target)


def _target(
    session: Session, options: Options, adapt: Callable[[Any], Adapter] | None, refuse: Callable[[], object]
) -> Any:
    """The candidate of a session, as `verified` takes it."""
    told = session.told
    kind, said = told.get("kind"), told.get("adapter")
    if kind == "program":
        from flashlab.verify import programs  # only where there is one

        refuse()
        return programs.target_of(session, options.device, options.tile)
    if kind == "kernel":
        if adapt is not None:
            refuse()
        adapter = _adapter(session, _ToldKernel.of(told), said)
        if adapter.operation != "attention":
            raise UsageError("operation", adapter.operation, "attention, for a kernel of a .cu file")
        return _OutsideKernel(adapter, session)
    fn: Any = Function(session)
    if said is None:
        if adapt is not None:
            made = adapt(fn)
            if not isinstance(made, Adapter):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise UsageError("adapt", made, "a function that returns an Adapter")
            return made
        return Adapter(fn, options.framework or "numpy", name=session.name)
    refuse()
    return _adapter(session, fn, said)


def _adapter(session: Session, fn: Any, said: Any) -> Adapter:
    """The adapter of the candidate's own file, with the function or kernel that runs there. Raises `UsageError`."""
    given: dict[str, Any] = dict(said or {})
    if session.told.get("supports") is True:
        given["supports"] = partial(_supports, session)
    domain: Any = given.pop("domain", None) or {}
    ranges: Any = {key: range(*x["range"]) if issubclass(type(x), dict) else x for key, x in domain.items()}
    try:
        return Adapter(fn, **given, domain=Domain(**ranges))
    except (AttributeError, KeyError, TypeError) as error:  # a child may say anything
        raise UsageError("target", Said(session.name), f"an Adapter with such conventions ({error})") from None


def _supports(session: Session, problem: Problem) -> bool | str | None:
    try:
        return session.ask("supports", problem)
    except Ended as ended:  # it isn't asked in a step
        raise UsageError("supports", Said(session.name), f"a function that returns: {ended.message}") from None


@dataclass(frozen=True)
class _ToldKernel:
    """What is known here of a kernel that the candidate's own file describes."""

    file: Path
    name: str
    known: Any
    features: tuple[str, ...]
    python: str | None

    @classmethod
    def of(cls, told: dict[str, Any]) -> _ToldKernel:
        file, line, name = told["declared"]
        place = place_of([file, line]) or ("", 0)
        python = told.get("source")
        return cls(
            Path(str(told.get("file"))), str(told.get("name")), SimpleNamespace(file=place[0], line=place[1], name=word(name)),
            tuple(map(str, told.get("takes", ()))), python if isinstance(python, str) else None,
        )  # fmt: skip

    def __call__(self, q: Any, k: Any, v: Any, *, sinks: Any = None, alibi_slopes: Any = None, **masks: Any) -> Any:
        raise NotImplementedError  # only `_OutsideKernel` runs it

    def declared(self) -> Any:
        return self.known

    def takes(self, feature: str) -> bool:
        return feature in self.features

    def source(self) -> str | None:
        return self.python


class _OutsideKernel(KernelTarget):
    """A kernel of a `.cu` file that another process runs."""

    def __init__(self, adapter: Adapter, session: Session) -> None:
        super().__init__(adapter, cast("FileKernel", adapter.fn))

        def attend(problem: Problem, arrays: Any, layout: str) -> Any:
            found = session.ask("attend", problem, dict(arrays), layout)
            return (*found, None, None)[:2]

        self.attend = attend  # pyright: ignore[reportAttributeAccessIssue]
