"""Documents as JSON Lines are read back as they were, and are refused where a line is missing or is none of theirs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashlab.base.jsonlines import joined, written

PLAIN = (
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([0.0, -0.0, 1.0, 0.1, "…"]) | st.text(max_size=3)
)
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=12,
)
ROWS = st.lists(st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3), max_size=5)
"""Few keys and few values, so that rows often have something in common."""


@given(st.dictionaries(st.text(max_size=4), ROWS | VALUES, max_size=3))
def test_what_was_written_is_read_back(data: dict[str, Any]) -> None:
    document = {"kind": "toy", "data": data}
    text = written(document)
    # as text: 0, 0.0 and false are equal in Python
    assert json.dumps(joined(text), sort_keys=True) == json.dumps(document, sort_keys=True)
    lists = [x for x in data.values() if isinstance(x, list) and all(isinstance(row, dict) for row in x)]
    assert text.count("\n") == 1 + sum(map(len, lists))


def test_what_rows_share_and_what_most_leave_empty_is_said_once() -> None:
    def launch(len_q: int, **more: Any) -> dict[str, Any]:
        problem = {"len_q": len_q, "window": None, "lengths": None, "block": [128, 128], **more}
        return {"problem": problem, "lse": True, "counts": [{"what": x, "equal": True} for x in more], "failures": []}

    rows = [launch(64), launch(64), launch(96, window=[2, 0])]
    header, *lines = map(json.loads, written({"data": {"rows": rows}}).splitlines())
    assert header["template"]["rows"] == {
        "problem": {"len_q": "…", "window": None, "lengths": None, "block": [128, 128]},
        "lse": True,
        "counts": [{"what": "…", "equal": "…"}],
        "failures": [],
    }
    assert lines == [
        {"rows": {"problem": {"len_q": 64}, "counts": []}},
        {"rows": {"problem": {"len_q": 64}, "counts": []}},
        {"rows": {"problem": {"len_q": 96, "window": [2, 0]}, "counts": [{"what": "window", "equal": True}]}},
    ]


def test_keys_keep_their_order() -> None:
    rows = [
        {"a": n, "same": 1, "b": {"x": 0, "y": n, "z": 0}, "last": 2, **({"some": n} if n else {})} for n in range(3)
    ]
    assert json.dumps(joined(written({"data": {"rows": rows}}))["data"]["rows"]) == json.dumps(rows)


def test_what_a_row_has_by_default_is_its_own() -> None:
    rows = joined(written({"data": {"rows": [{"x": [1], "n": n} for n in range(2)]}}))["data"]["rows"]
    rows[0]["x"].append(2)
    assert rows[1]["x"] == [1]


WHOLE = written({"data": {"rows": [{"n": 1}, {"n": 2}], "other": [{"n": 1}]}}).splitlines()


@pytest.mark.parametrize(
    "lines",
    [
        [],
        ["{}"],
        ["[]"],
        ["1"],
        ['{"data": {}, "rows": [], "template": {}}'],
        ['{"data": 1, "rows": {"a": 0}, "template": {}}'],
        WHOLE[:-1],
        WHOLE[:1],
        [*WHOLE, WHOLE[-1]],
        [WHOLE[0], *WHOLE[1:3], WHOLE[1]],
        [*WHOLE[:3], '{"unknown": {"n": 1}}'],
        [*WHOLE[:3], '{"rows": {"n": 1}, "other": {"n": 1}}'],
        [*WHOLE[:3], "[1]"],
        [*WHOLE[:3], '{"other": {}}'],
        [*WHOLE[:3], ""],
        [*WHOLE[:3], WHOLE[3][:-1]],
    ],
)
def test_lines_of_no_document_are_refused(lines: list[str]) -> None:
    assert joined("\n".join(WHOLE)) == joined("\n".join([*WHOLE, ""]))
    with pytest.raises(ValueError):
        joined("\n".join(lines))
