"""The audit of claims: each has a source, a verdict and an experiment. tests/test_docs.py runs the experiments."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs._site import audit
from docs._site.blocks import replaced

PAGE = Path(__file__).resolve().parents[2] / "docs" / "audit.md"
VERDICTS = ("True", "Half", "False", "Open")
CLAIMS: dict[str, str] = dict(re.findall(r"(?ms)^### (\d+\. .*?)\n(.*?)(?=^##|\Z)", PAGE.read_text(encoding="utf-8")))


def test_there_are_at_least_thirty_and_they_are_numbered():
    assert [int(name.partition(".")[0]) for name in CLAIMS] == list(range(1, len(CLAIMS) + 1))
    assert len(CLAIMS) >= 30


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_has_a_source_a_verdict_and_an_experiment(name: str):
    """What nobody tried is called open; all else has a call whose output is on the page."""
    body = " ".join(CLAIMS[name].split())
    assert "“" in name
    source, _, rest = body.lstrip("*").partition(".*")
    assert source and rest, "the source stands first, in italics"
    verdict = re.match(r"\s*\*\*(\w+)", rest)
    assert verdict and verdict[1] in VERDICTS
    if verdict[1] == "Open":
        assert ">>>" not in body
    else:
        shown = CLAIMS[name].partition("```python\n")[2].partition("```")[0].strip()
        assert shown.startswith(">>> ") and not shown.splitlines()[-1].startswith((">>>", "..."))


def test_every_verdict_occurs():
    found = {match[1] for body in CLAIMS.values() if (match := re.search(r"\.\*\s+\*\*(\w+)", body))}
    assert found == set(VERDICTS)


def test_the_page_begins_with_its_claims():
    """Each claim has a row that says its verdict, and another verdict in the text is another table."""
    text = PAGE.read_text(encoding="utf-8")
    assert text == replaced(text, "audit", {"claims": audit.table(text), "tests": audit.tests()}), (
        "run python -m docs._site.audit"
    )
    assert [each.number for each in audit.claims(text)] == list(range(1, len(CLAIMS) + 1))
    assert audit.table(text) != audit.table(text.replace("**False.**", "**True.**", 1))
