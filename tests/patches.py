"""Patches of kernels, for seeded faults: they find code by its step and by its tokens.

A patch that looked for a line as it is written would break when somebody rewords a comment, or lets the formatter break a line.
So comments and white space don't count here, and a step's mark says where to look.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Iterator

from flashlab.measure.sources import tokens, without_comments

MARK = re.compile(r"// step: (\w+)(?: \(.+\))?$", re.MULTILINE)


def patched(text: str, old: str, new: str, *, step: str | None = None) -> str:
    """The source with `old`, code that occurs once, replaced by `new`.

    With `step`, `old` is looked for in that step's regions alone: each reaches from a mark of that name, tagged or not, to the next
    mark. `"before … old"` means the first `old` after `before`, of which only `old` is replaced. An empty `old` puts `new` at the
    beginning of the step's untagged region.

    >>> patched("// step: load\\ncopy(a);  // all of it\\n// step: sum\\ncopy(b);\\n", "copy(b);", "", step="sum")
    '// step: load\\ncopy(a);  // all of it\\n// step: sum\\n\\n'
    """
    begin, end = place(text, old, step=step)
    assert not MARK.search(text, begin, end), f"{old!r} reaches over the mark of another step"
    return text[:begin] + new + text[end:]


def line_of(text: str, code: str, *, step: str | None = None) -> int:
    """The number of the line on which code that occurs once begins, looked for as `patched` does."""
    return 1 + text.count("\n", 0, place(text, code, step=step)[0])


def place(text: str, code: str, *, step: str | None = None) -> tuple[int, int]:
    """Where code that occurs once begins and ends."""
    bare = without_comments(text)
    assert without_comments(code) == code, f"{code!r} has a comment: an anchor is code"
    regions = [(0, len(text))] if step is None else list(_regions(text, step))
    assert regions, f"no mark of step {step!r}: there are {', '.join(sorted({m[1] for m in MARK.finditer(text)}))}"
    if not code:
        (begin,) = (m.end() + 1 for m in MARK.finditer(text) if m[0] == f"// step: {step}")
        return begin, begin
    before, found, after = code.rpartition(" … ")
    first = _pattern(before if found else after)
    matches = [(m, end) for begin, end in regions for m in first.finditer(bare, begin, end)]
    where = f"in step {step!r}" if step else "in the file"
    assert len(matches) == 1, f"{before or after!r} occurs {len(matches)} times {where}, not once"
    ((match, end),) = matches
    if found:
        match = _pattern(after).search(bare, match.end(), end)
        assert match, f"no {after!r} after {before!r} {where}"
    return match.span()


def _regions(text: str, step: str) -> Iterator[tuple[int, int]]:
    marks = list(MARK.finditer(text))
    begins = [mark.start() for mark in marks]
    for mark in marks:
        if mark[1] == step:
            n = bisect(begins, mark.start())
            yield mark.end(), begins[n] if n < len(begins) else len(text)


def _pattern(code: str) -> re.Pattern[str]:
    """The same tokens with any white space between them: none is cut in two."""
    parts = [rf"\b{token}\b" if token[0].isalnum() or token[0] == "_" else re.escape(token) for token in tokens(code)]
    return re.compile(r"\s*".join(parts))
