"""Seeded faults find their code whatever comments say and however lines are broken; a fault whose code is gone says so."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

import kernels_cu
from tests.flashlab.emulator import test_flash3_faults as flash3
from tests.flashlab.emulator import test_fp8 as fp8
from tests.flashlab.emulator.zoo import ZOO
from tests.mutants import backward, backward_parts, decoding, dropout, latent, latent_hopper, scores
from tests.mutants.kernels import KERNELS
from tests.mutants.zoo import ROOT
from tests.patches import MARK, line_of, patched, tokens, without_comments

TWICE = """\
// step: load
copy(a);  // copy(b) comes next
barrier();

// step: load (again)
copy(a);
copy(b);

// step: sum
x += a;
barrier();
"""


def rewritten(text: str) -> str:
    """The same code with other comments, other tags, and a line of its own for almost every token."""
    tagged = MARK.sub(lambda m: f"@{m[1]}{' (otherwise)' if m[0].endswith(')') else ''}@", text)
    lines = (
        line if line.lstrip().startswith("#") or line.endswith("\\") else re.sub(r"([;{},]) *", r"\1\n\n  ", line)
        for line in without_comments(tagged).split("\n")
    )
    return re.sub(r"@(.+?)@", r"// step: \1", "\n/* another */\n".join(lines))


def patches() -> Iterator[tuple[str, str, str, str, str | None]]:
    """A name, the text that is patched, and the patch, of every fault that is seeded in a kernel or a header."""

    def text(file: str) -> str:
        path = kernels_cu.include_dir() / file if file.endswith(".cuh") else kernels_cu.source(file.removesuffix(".cu"))
        return path.read_text(encoding="utf-8")

    for mutant in ZOO:
        yield mutant.name, mutant.real.read_text(encoding="utf-8"), mutant.old, mutant.new, mutant.within
    for fault in flash3.FAULTS:
        yield fault.name, text(fault.file or f"{fault.kernel}.cu"), fault.old, fault.new, fault.within
    for mutant in KERNELS:
        yield mutant.name, (ROOT / mutant.file).read_text(encoding="utf-8"), mutant.find, mutant.put, mutant.step
    for name, (file, old, new, _) in (fp8.FAULTS | fp8.MORE_FAULTS).items():
        yield name, text(file), old, new, None
    for name, (file, old, new) in fp8.WIDE_FAULTS.items():
        yield name, text(file), old, new, None
    for name, (_, file, old, new) in fp8.SYNCHRONISATION_FAULTS.items():
        yield name, text(file), old, new, None
    for change in fp8.ONE_ACCUMULATOR:
        file, old, new = change
        yield old, text(file), old, new, None


PATCHES = list(patches())


def test_every_seeded_fault_survives_new_comments_and_new_lines() -> None:
    assert len(PATCHES) > 120
    for name, text, old, new, step in PATCHES:
        other = rewritten(text)
        assert tokens(other) == tokens(text) and other != text
        changed = patched(text, old, new, step=step)
        assert changed != text, name
        assert tokens(patched(other, old, new, step=step)) == tokens(changed), name


def test_every_mutant_finds_its_code() -> None:
    of_kernels = [
        *backward.KERNELS,
        *backward_parts.KERNELS,
        *decoding.KERNELS,
        *dropout.GRADIENTS,
        *latent.KERNELS,
        *latent_hopper.KERNELS,
    ]
    edits = [(each.mechanism, each.file, [(each.old, each.new)], each.step) for each in of_kernels]
    edits += [(each.mechanism, each.file, list(each.edits), each.step) for each in (*scores.ZOO, *dropout.FORWARD)]
    assert len(edits) > 150
    for mechanism, file, changes, step in edits:
        text = (ROOT / file).read_text(encoding="utf-8")
        for old, new in changes:
            changed = patched(text, old, new, step=step)
            assert changed != text, mechanism
            text = changed


def test_a_step_narrows_the_search_to_its_regions() -> None:
    assert patched(TWICE, "copy(b);", "", step="load") == TWICE.replace("\ncopy(b);\n", "\n\n")
    assert line_of(TWICE, "barrier();", step="sum") == 11
    assert patched(TWICE, "", "begin();\n", step="sum") == TWICE.replace("x += a", "begin();\nx += a")


def test_what_comes_before_tells_two_places_apart() -> None:
    assert line_of(TWICE, "copy(b); … barrier();") == 11
    assert patched(TWICE, "x += a; … barrier();", "wait();") == TWICE.replace("a;\nbarrier();", "a;\nwait();")


@pytest.mark.parametrize(
    ("old", "step", "says"),
    [
        ("copy(c);", None, r"'copy\(c\);' occurs 0 times in the file, not once"),
        ("copy(a);", "load", r"'copy\(a\);' occurs 2 times in step 'load', not once"),
        ("copy(b);", "sum", r"occurs 0 times in step 'sum'"),
        ("cop", None, "occurs 0 times"),
        ("x += a; … copy(b);", None, r"no 'copy\(b\);' after 'x \+= a;'"),
        ("copy(b);", "add", "no mark of step 'add': there are load, sum"),
        ("copy(a);  // copy(b) comes next", None, "has a comment: an anchor is code"),
        ("copy(b); x += a;", None, "reaches over the mark of another step"),
    ],
)
def test_an_anchor_that_is_gone_says_so(old: str, step: str | None, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        patched(TWICE, old, "", step=step)
