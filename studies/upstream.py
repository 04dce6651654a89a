"""The flash-attention project's own tests of our functions: `python -m studies upstream FOLDER [attention|cache]`.

FOLDER is a checkout of github.com/Dao-AILab/flash-attention, of which nothing is copied here. Its test `hopper/test_flash_attn.py`
calls `flash_attn_func` and `flash_attn_varlen_func`, forward and backward, and holds their largest error to `rtol` times that of
attention in the storage dtype. Here both are ours (`flashlab.integrations.flash_attn`), and each `rtol` of the test is halved as it
is read. With `cache` it is the test of `flash_attn_with_kvcache`, as it stands, in its cases of 16 bits without `cache_leftpad`.

A case of the test tries several head dims of V and chunks, one after the other. Each of these trials is a run of its own here,
because what our functions refuse would end the case. Refusals are counted by their reason. A trial that fails runs once more at
the whole tolerance, which may be 0: where a query sees one key, the gradients of q and k are 0 to the last bit in the test's two
references, whose sums are alike. Needs a GPU, torch and einops.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib
import io
import itertools
import random
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from rich.progress import track

from flashlab.measure import results
from flashlab.measure.results import Kind, markdown_table
from simulator.errors import Said, Unavailable, UsageError
from studies.rows import row

TESTS = ("test_flash_attn_output", "test_flash_attn_varlen_output")
CACHE = "test_flash_attn_kvcache"
PARTS = {"attention": TESTS, "cache": (CACHE,)}
_FILE = Path("hopper/test_flash_attn.py")
_DIVISOR = "rtol_divisor"
_OURS = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")


def _no_metadata(*_: object, **__: object) -> None:
    """Ours need none."""


_OTHERS: dict[str, Any] = {"flash_attn_combine": None, "get_scheduler_metadata": _no_metadata}
"""What the test's file imports beside them."""

REFUSAL = row("Refusal", "What our functions refuse, in their words, and in how many trials.", reason=str, trials=int)
OUTCOME = row(
    "Outcome", "One of the tests. Of so many `cases`, `drawn` were run, and each in as many trials as the test itself makes. A case"
    " may be `skipped` by the test itself. `failures` say which trial failed, and why; those `at_whole_rtol` fail there, too.",
    test=str, cases=int, drawn=int, skipped=int, trials=int, passed=int, refusals=tuple[REFUSAL, ...], failures=tuple[str, ...],
    at_whole_rtol=tuple[str, ...],
)  # fmt: skip
UPSTREAM = row("Upstream", "What the tests said. `source` is a digest of their file.", source=str, seed=int,
               outcomes=tuple[OUTCOME, ...])  # fmt: skip


def halved(text: str) -> ast.Module:
    """The test's file, whose tests of attention have half of their `rtol`. Raises `UsageError` if one has none."""
    module = ast.parse(text)
    tests = {each.name: each for each in module.body if isinstance(each, ast.FunctionDef)}
    for name in TESTS:
        assigned = [x for x in ast.walk(tests.get(name, ast.Pass())) if isinstance(x, ast.Assign)]
        found = [x for x in assigned if any(isinstance(to, ast.Name) and to.id == "rtol" for to in x.targets)]
        if len(found) != 1:
            raise UsageError("folder", Said(f"{_FILE} with {len(found)} rtol in {name}"), "a test that sets it once")
        found[0].value = ast.BinOp(found[0].value, ast.Div(), ast.Name(_DIVISOR, ast.Load()))
    return ast.fix_missing_locations(module)


class Trials:
    """`itertools` for a test, whose first product is of what a case tries. A run of the case gets the one at `place`."""

    def __init__(self) -> None:
        self.place, self.of, self._chosen = 0, 1, False

    def begin(self, place: int) -> None:
        """The next run is of this trial."""
        self.place, self._chosen = place, False

    def product(self, *lists: Iterable[Any], **more: Any) -> Iterator[tuple[Any, ...]]:
        found = list(itertools.product(*lists, **more))
        if self._chosen:
            return iter(found)
        self.of, self._chosen = len(found), True
        return iter(found[self.place : self.place + 1])

    def __getattr__(self, name: str) -> Any:
        return getattr(itertools, name)


@contextlib.contextmanager
def loaded(folder: Path) -> Generator[dict[str, Any]]:
    """The names of the test's file, in which attention is ours. Raises `UsageError` for a folder without it, and `Unavailable` if
    something that it imports isn't installed."""
    path = folder / _FILE
    if not path.is_file():
        raise UsageError("folder", str(folder), f"a checkout of flash-attention, with {_FILE}")
    ours = importlib.import_module("flashlab.integrations.flash_attn")
    interface = ModuleType("flash_attn_interface")
    vars(interface).update({name: getattr(ours, name) for name in _OURS} | _OTHERS)
    names: dict[str, Any] = {"__name__": "flash_attention_test", "__file__": str(path), _DIVISOR: 2}
    before = dict(sys.modules)
    sys.modules["flash_attn_interface"] = interface
    sys.path.insert(0, str(path.parent))
    try:
        exec(compile(halved(path.read_text(encoding="utf-8")), str(path), "exec"), names)
        yield names
    except ImportError as error:
        raise Unavailable(f"the test cannot be imported ({error}): pip install torch einops pytest") from None
    finally:
        sys.path.remove(str(path.parent))
        for name in {"flash_attn_interface", "padding", "test_util"} & set(sys.modules):
            del sys.modules[name]
            if name in before:
                sys.modules[name] = before[name]


def cases(test: Callable[..., Any]) -> list[dict[str, Any]]:
    """The arguments of each case of a test, by its marks of pytest, but for 8 bits and `has_leftpad`."""
    axes: list[list[dict[str, Any]]] = []
    for mark in cast("Any", test).pytestmark:
        if mark.name == "parametrize":
            words, values = mark.args[:2]
            names = [word.strip() for word in words.split(",")] if isinstance(words, str) else list(words)
            axes.append([dict(zip(names, each if len(names) > 1 else (each,), strict=True)) for each in values])
    found = [{name: x for part in parts for name, x in part.items()} for parts in itertools.product(*axes)]
    return [case for case in found if not case.get("has_leftpad") and "float8" not in str(case.get("dtype"))]


def run(
    names: dict[str, Any], test: str, sample: int | None = None, seed: int = 0, progress: Callable[[Any], Iterable[Any]] = iter
) -> Any:  # fmt: skip
    """Run a test in all its cases, or in a `sample` of so many that a seed draws, and return the `OUTCOME`."""
    function, every = names[test], cases(names[test])
    chosen = every if sample is None else random.Random(seed).sample(every, min(sample, len(every)))
    skips: type[BaseException] = importlib.import_module("pytest").skip.Exception
    skipped = passed = 0
    refusals, failures, at_whole = Counter[str](), list[str](), list[str]()
    for case in progress(chosen):
        names["itertools"] = trials = Trials()
        place = 0
        while place < trials.of:
            trials.begin(place)
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    function(**case)
                passed += 1
            except skips:
                skipped += 1
                break
            except UsageError as refused:
                refusals[f"{refused.argument}: expected {refused.accepted}"] += 1
            except Exception as error:  # a test fails in whatever way it does
                said = " ".join(str(error).split()) or traceback.extract_tb(error.__traceback__)[-1].line
                shown = ", ".join(f"{name} {str(x).removeprefix('torch.')}" for name, x in case.items())
                trials.begin(place)
                failed = failures if _passes_at_whole_rtol(function, case) else at_whole
                failed.append(f"{shown}, trial {place}: {type(error).__name__}: {said}"[:400])
            place += 1
    refused = [{"reason": reason, "trials": n} for reason, n in refusals.most_common()]
    found = {"passed": passed, "refusals": refused, "failures": failures, "at_whole_rtol": at_whole, "skipped": skipped}
    trials_run = passed + refusals.total() + len(failures) + len(at_whole)
    return OUTCOME(test=test, cases=len(every), drawn=len(chosen), trials=trials_run, **found)


def _passes_at_whole_rtol(function: Callable[..., Any], case: dict[str, Any]) -> bool:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            function.__globals__[_DIVISOR] = 1
            function(**case)
    except Exception:
        return False
    finally:
        function.__globals__[_DIVISOR] = 2
    return True


def _counts(x: Any) -> tuple[int, ...]:
    """The trials of an outcome that passed, were refused, failed, and failed at the whole rtol, too."""
    return x.passed, sum(each.trials for each in x.refusals), len(x.failures), len(x.at_whole_rtol)


def headline(of: Any) -> str:
    """How many trials passed, failed and were refused."""
    passed, refused, failed, at_whole = map(sum, zip(*map(_counts, of.outcomes), strict=True))
    which = "all" if all(x.drawn == x.cases for x in of.outcomes) else f"{sum(x.drawn for x in of.outcomes):,} drawn"
    how = "of a cache" if of.outcomes[0].test == CACHE else "at half its rtol"
    return (
        f"flash-attention's own test {how}, {which} cases: {passed:,} of {passed + failed + at_whole:,} trials pass, "
        f"{at_whole:,} fail at the whole rtol, too; {refused:,} more are refused"
    )


def table(of: Any) -> str:
    """A row per test, and what was refused and failed."""
    header = (
        "test",
        "cases",
        "run",
        "skipped by the test",
        "trials",
        "passed",
        "refused",
        "failed",
        "at the whole rtol, too",
    )
    numbers = [(f"`{x.test}`", x.cases, x.drawn, x.skipped, x.trials, *_counts(x)) for x in of.outcomes]
    refused = [(f"`{x.test}`", each.reason, f"{each.trials:,}") for x in of.outcomes for each in x.refusals]
    failed = [(f"`{x.test}`", each) for x in of.outcomes for each in (*x.failures, *x.at_whole_rtol)]
    parts = [markdown_table(header, [(name, *(f"{n:,}" for n in found)) for name, *found in numbers])]
    parts += [markdown_table(("test", "refused", "trials"), refused)] if refused else []
    parts += [markdown_table(("test", "failed"), failed)] if failed else []
    return "\n\n".join(parts)


KIND = Kind(
    "upstream", "Verified: flash-attention's own test",
    "what flash-attention's own test says of our functions, at half of its tolerance",
    "python -m studies upstream ../flash-attention", UPSTREAM, headline, table,
)  # fmt: skip


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("python -m studies upstream", description=KIND.holds)
    parser.add_argument("folder", type=Path, help="a checkout of github.com/Dao-AILab/flash-attention")
    parser.add_argument("part", nargs="?", choices=[*PARTS], default="attention", help="what is tested (%(default)s)")
    parser.add_argument(
        "--sample", type=int, metavar="N", help="run so many cases of each test, drawn by the seed (all)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="folder of the file (%(default)s)")
    parser.add_argument("--force", action="store_true", help="replace a file of that name")
    given = parser.parse_args(words)
    with loaded(given.folder) as names:
        outcomes = [
            run(names, test, given.sample, given.seed, partial(track, description=test)) for test in PARTS[given.part]
        ]
    source = hashlib.sha256((given.folder / _FILE).read_bytes()).hexdigest()[:16]
    data = {"source": source, "seed": given.seed, "outcomes": [each.model_dump() for each in outcomes]}
    condition = "_".join(["cache"] * (given.part == "cache") + [f"sample-{given.sample}"] * bool(given.sample)) or None
    named: Any = {"subject": "flash-attention", "condition": condition}
    algorithms = (
        ["flash3_paged"] if given.part == "cache" else ["flash2", "flash3", "flash2_backward", "flash3_backward"]
    )
    print(results.save(KIND, algorithms, data, **named, folder=given.out, replace=given.force))
    sys.exit(any(each.failures or each.at_whole_rtol or not each.passed for each in outcomes))
