"""`flashlab audit-test` puts somebody's test of attention to the test: which wrong kernels does it let pass?"""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated, Any

import typer

from flashlab.cli import options, output
from flashlab.cli.options import Json, ProblemOptions
from flashlab.views import progress
from simulator.errors import UsageError

_TEST, _INPUTS = "A test that pytest runs", "Inputs and a tolerance"


def register(app: typer.Typer) -> None:
    options.add(
        app,
        audit_test,
        "flashlab audit-test tests/test_attention.py --replace mypackage:attention",
        "flashlab audit-test --rtol 1e-2 --atol 1e-2 --len-q 512 --head-dim 64",
    )


def audit_test(
    problem: ProblemOptions,
    test: Annotated[
        str | None, typer.Argument(metavar="[TEST]", help="A file or folder of tests, or file.py::test.")
    ] = None,
    replace: Annotated[
        str | None,
        typer.Option(
            metavar="PACKAGE:FUNCTION",
            help="The function (q, k, v, ...) that the tests call, in whose place wrong kernels are put.",
            rich_help_panel=_TEST,
        ),
    ] = None,
    select: Annotated[
        str | None, typer.Option("-k", "--select", metavar="EXPR", help="As pytest's -k.", rich_help_panel=_TEST)
    ] = None,
    layout: Annotated[
        str, typer.Option(help="Order of the function's axes: bhsd or bshd.", rich_help_panel=_TEST)
    ] = "bhsd",
    causal_align: Annotated[
        str, typer.Option(help="Alignment of its causal mask: bottom-right or top-left.", rich_help_panel=_TEST)
    ] = "bottom-right",
    lse: Annotated[
        str, typer.Option(help="Base of the LSE that it returns: e, 2, or none.", rich_help_panel=_TEST)
    ] = "none",
    arg_names: Annotated[
        str | None,
        typer.Option(metavar="NAME=ITS,…", help="Its keywords, as in causal=is_causal.", rich_help_panel=_TEST),
    ] = None,
    fault: Annotated[
        str | None, typer.Option(metavar="NAME,…", help="Some wrong kernels; default all.", rich_help_panel=_TEST)
    ] = None,
    rtol: Annotated[
        float | None, typer.Option(help="Relative tolerance of a comparison, as of allclose.", rich_help_panel=_INPUTS)
    ] = None,
    atol: Annotated[
        float | None, typer.Option(help="Absolute tolerance of a comparison.", rich_help_panel=_INPUTS)
    ] = None,
    json: Json = False,
) -> None:
    """Run a test, or a tolerance, against wrong kernels: which pass, and which input would have caught them."""
    if (test is None) == (rtol is None and atol is None):
        raise UsageError("TEST", test, "a test with --replace, or --rtol and --atol without one")
    if test is None:
        found = _of_inputs(problem, rtol, atol, replace)
    else:
        problem.refuse_shape()
        if replace is None:
            raise UsageError("--replace", None, "package:function, which the tests call")
        named: dict[str, Any] = {
            "select": select, "layout": layout, "causal": causal_align, "lse": None if lse == "none" else lse,
            "names": options.pairs("--arg-names", arg_names), "faults": options.values("--fault", fault, str) or None,
        }  # fmt: skip
        spelled: Any = {
            "replace": "--replace",
            "layout": "--layout",
            "causal": "--causal-align",
            "lse": "--lse",
            "faults": "--fault",
        }
        with options.spelled(**spelled), progress.busy("wrong kernels"):
            found = _apart(test, replace, named)
    if json:
        output.document(found.to_dict())
    else:
        found.print()
    if not found.passed:
        raise typer.Exit(1)


def _of_inputs(problem: ProblemOptions, rtol: float | None, atol: float | None, replace: str | None) -> Any:
    from flashlab.verify.audit import audit_inputs

    for name, value in (("--rtol", rtol), ("--atol", atol)):
        if value is None:
            raise UsageError(name, value, "a number: a comparison has both tolerances")
    if replace is not None:
        raise UsageError("--replace", replace, "nothing without a test")
    with options.spelled(rtol="--rtol", atol="--atol"), progress.busy("wrong kernels"):
        return audit_inputs(problem.problem("flash2"), rtol=rtol or 0.0, atol=atol or 0.0)


def _apart(test: str, replace: str, named: dict[str, Any]) -> Any:
    """In a process of its own, since tests may do anything to theirs."""
    from flashlab.base.apart import Ended, call_apart
    from flashlab.verify.audit import audit_test

    try:
        done = call_apart(partial(audit_test, test, replace, **named))
    except Ended as ended:
        print(ended.printed, end="", file=sys.stderr)
        raise UsageError("test", test, f"tests that come to an end: {ended}") from None
    print(done.printed, end="", file=sys.stderr)
    return done.value
