"""Documents as JSON Lines: the first line is the document without its rows, and each further line is one row of its data.

`data` maps names to values. A value that is a list of objects is a list of rows. In the first line such a list is empty, and
`rows` says how many rows it has. A further line is `{"name of the list": row}`, in the order of the lists.

`template` shows the keys that all rows of a list have. A row's line leaves out what is as the template has it: what all rows
share, and what is null, false, 0 or empty in most. Of the others, the template says "…".
"""

from __future__ import annotations

import copy
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard, cast

from flashlab.base.files import parsed
from simulator.errors import UsageError

__all__ = ["document", "joined", "written"]

Row = dict[str, Any]
_PLAIN = (str, int, float, type(None))
"""What need not be copied."""

GIVEN = "…"
"""Of a template: each row's line says it."""
NOTHING = frozenset(("null", "false", "0", "0.0", '""', "[]", "{}"))
"""Values that say nothing, as text."""


def written(document: Mapping[str, Any]) -> str:
    """The lines of a document, which holds what JSON can hold, and has an object `data`.

    >>> print(written({"kind": "toy", "data": {"ok": True, "rows": [{"n": 1, "of": "x"}, {"n": 2, "of": "x"}]}}), end="")
    {"kind":"toy","data":{"ok":true,"rows":[]},"rows":{"rows":2},"template":{"rows":{"n":"…","of":"x"}}}
    {"rows":{"n":1}}
    {"rows":{"n":2}}
    """
    data = cast("Mapping[str, Any]", document["data"])
    lists = {name: value for name, value in data.items() if _are_rows(value) and value}
    templates = {name: _template(rows) for name, rows in lists.items()}
    header: Row = {
        **document,
        "data": {name: [] if name in lists else value for name, value in data.items()},
        "rows": {name: len(rows) for name, rows in lists.items()},
        "template": templates,
    }
    lines = [header, *({name: _short(row, templates[name])} for name, rows in lists.items() for row in rows)]
    return "".join(f"{json.dumps(x, ensure_ascii=False, allow_nan=False, separators=(',', ':'))}\n" for x in lines)


def joined(text: str) -> dict[str, Any]:
    """The document that `written` gave these lines. Raises `ValueError` for others, and where lines are missing.

    >>> joined(written({"kind": "toy", "data": {"rows": [{"n": 1}, {"n": 2}]}}))
    {'kind': 'toy', 'data': {'rows': [{'n': 1}, {'n': 2}]}}
    """
    first, *rest = text.removesuffix("\n").split("\n")
    document: Any = parsed(first)
    try:
        data, rows, templates = document["data"], document.pop("rows"), document.pop("template")
        for line in rest:
            ((name, row),) = parsed(line).items()
            data[name].append(_whole(row, templates[name]))
        if {name: len(data[name]) for name in rows} != rows or sum(rows.values()) != len(rest):
            raise ValueError(f"{len(rest)} rows where {rows} are said")
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"lines of no document ({error!r})") from None
    return document


def document(argument: str, path: str | os.PathLike[str], accepted: str) -> dict[str, Any]:
    """The document in a file of anybody's, JSON or JSON Lines. Raises `UsageError`; `argument` is what it calls the path."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        found = joined(text) if Path(path).suffix == ".jsonl" else parsed(text)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(argument, str(path), f"{accepted} ({reason})") from None
    if not isinstance(found, dict):
        raise UsageError(argument, str(path), f"{accepted} (it holds {type(found).__name__})")
    return cast("dict[str, Any]", found)


def _is_row(value: Any) -> TypeGuard[Row]:
    return isinstance(value, dict)


def _are_rows(value: Any) -> TypeGuard[list[Row]]:
    return isinstance(value, list) and all(map(_is_row, cast("list[Any]", value)))


def _template(rows: Sequence[Row]) -> Row:
    """The template of rows: of objects in them key by key, of lists of objects one for all of these."""
    found: Row = {}
    for key in rows[0]:
        if not all(key in row for row in rows):
            continue
        values = [row[key] for row in rows]
        if all(map(_is_row, values)):
            found[key] = _template(values)
        elif all(map(_are_rows, values)) and any(values):
            found[key] = [_template([each for value in values for each in value])]
        else:
            (text, number), *_ = Counter(map(json.dumps, values)).most_common(1)
            shared = len(rows) > 1 and (number == len(rows) or text in NOTHING)
            found[key] = json.loads(text) if shared else GIVEN
    return found


def _short(value: Any, template: Any) -> Any:
    """A value without what it has in common with the template."""
    if _is_row(value) and _is_row(template):
        parts = {key: part for key, part in value.items() if not (key in template and _same(part, template[key]))}
        return {key: _short(part, template.get(key)) for key, part in parts.items()}
    if _are_rows(value) and _are_rows(template) and template:
        return [_short(each, template[0]) for each in value]
    return value


def _same(value: Any, part: Any) -> bool:
    """As text: 0, 0.0 and false are equal in Python."""
    return part != GIVEN and json.dumps(value, sort_keys=True) == json.dumps(part, sort_keys=True)


def _whole(value: Any, template: Any) -> Any:
    """The value that `_short` made shorter, its keys in the template's order."""
    if _is_row(value) and _is_row(template):
        whole, rest = Row(), iter(value)
        for key, part in template.items():
            if key not in value:
                if part == GIVEN:
                    raise KeyError(key)
                whole[key] = part if isinstance(part, _PLAIN) else copy.deepcopy(part)
            while key not in whole:  # and what only some rows have, before it
                own = next(rest)
                whole[own] = _whole(value[own], template.get(own))
        return whole | {own: _whole(value[own], template.get(own)) for own in rest}
    if _are_rows(value) and _are_rows(template) and template:
        return [_whole(each, template[0]) for each in value]
    return value
