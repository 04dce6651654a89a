"""Writes the tables of docs/audit.md, of the page's own claims and of public tests on record: `python -m docs._site.audit`."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from docs._site.blocks import replaced
from flashlab.base.files import replace_file
from flashlab.measure import results
from flashlab.measure.results import markdown_table
from studies.audited import PUBLIC

PAGE = Path(__file__).resolve().parents[1] / "audit.md"
CLAIM = re.compile(r"(?ms)^### (\d+)\. (.*?)\n\n(\*.*?)(?=\n\n```|\n\n###|\Z)")
VERDICTS = ("True", "Half", "False", "Open")


class Claim(NamedTuple):
    number: int
    words: str
    verdict: str
    why: str


def claims(text: str) -> list[Claim]:
    """The claims of the page: the heading, the verdict in bold, and the sentence that it begins."""
    found: list[Claim] = []
    for number, words, body in CLAIM.findall(text):
        said = " ".join(body.split())
        verdict = re.search(r"\.\*\s+\*\*(\w+)\*?\*?\.?\*?\*?(.*)", said)
        if verdict is None:
            raise ValueError(f"claim {number} has no verdict")
        why = re.match(r"[ ,:]*(.*?[.:])(?: |$)", verdict[2])
        found.append(Claim(int(number), words, verdict[1], why[1].rstrip(":") if why else ""))
    return found


def table(text: str) -> str:
    """How many of each verdict there are, and a row for each claim."""
    found = claims(text)
    counts = Counter(each.verdict for each in found)
    said = ", ".join(f"{counts[verdict]} {verdict.lower()}" for verdict in VERDICTS)
    rows = [(str(each.number), f"[{each.words}](#{anchor(each)})", f"**{each.verdict.lower()}**") for each in found]
    return f"{len(found)} claims: {said}.\n\n{markdown_table(('no.', 'claim', 'verdict'), rows)}\n"


def anchor(claim: Claim) -> str:
    """The heading's anchor, as Markdown makes it: small letters, no punctuation, hyphens for blanks."""
    heading = f"{claim.number}. {claim.words}"
    return re.sub(r"[^\w\- ]", "", heading.lower().strip()).replace(" ", "-")


def tests() -> str:
    """A row for each public test that was put to the test, and what each is for. Without a record, what each holds."""
    result = results.latest("audit", PAGE.parent / "results")
    known: list[Any] = [asdict(test) for test in PUBLIC] if result is None else list(result.data["rows"])
    rows, said = list[tuple[str, ...]](), list[str]()
    for each in known:
        name = each["test" if result else "name"]
        source = f"https://github.com/{each['repository']}/blob/{each['commit']}/{each['file']}"
        found = (f"{each['caught']} of {each['kernels']}", ", ".join(each["no_attention"]) or "none") if result else ()
        rows.append((f"[{name}]({source})", each["tolerance"], *found))
        purpose = each["purpose"] + ("" if each["purpose"].endswith("?") else ".")
        said.append(
            f"- **{name}** (`{each['command']}`, commit {each['commit'][:9]}): {purpose} Computed: {each['part']}."
        )
    head = ("test", "what it holds", *(("wrong kernels caught", "no attention, and passes") if result else ()))
    file = f"\n\n[The data](results/audit/{result.path.name}) name what each lets pass." if result else ""
    return f"{markdown_table(head, rows)}\n\n{chr(10).join(said)}{file}\n"


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    replace_file(PAGE, replaced(text, "audit", {"claims": table(text), "tests": tests()}))
