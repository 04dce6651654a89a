"""Reports for machines that show them beside the code: annotations of GitHub's workflows, and SARIF."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flashlab.base.version import __version__
from flashlab.verify.report import Report, Row

ANNOTATIONS = 10
"""The most annotations of one kind that GitHub shows for a step."""
SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def _where(place: tuple[str, int] | None) -> tuple[str, int] | None:
    """A file and line, the file relative to the working directory if it lies below."""
    if place is None:
        return None
    file, line = place
    path = Path(file).resolve()
    inside = path.is_relative_to(Path.cwd())
    return (path.relative_to(Path.cwd()) if inside else path).as_posix(), line


def _said(report: Report, row: Row) -> str:
    said = f"{row.case}{f' ({row.problem})' if row.problem else ''}: {row.detail}"
    likely = report.failing.likely if report.failing else ""
    return f"{said}. Likely: {likely}" if likely else said


def github(report: Report) -> str:
    """Commands of a GitHub workflow, one per line: an error per failed row, or one for a verdict that isn't "passed"."""
    at, found = _at(report.place), report.failed
    lines = [
        f"::error {_at(row.place or report.place)}title={_property(f'flashlab verify: {row.check}')}"
        f"::{_data(_said(report, row))}"
        for row in found[: ANNOTATIONS - (len(found) > ANNOTATIONS)]
    ]
    if len(found) > ANNOTATIONS:
        rest = len(found) - ANNOTATIONS + 1
        lines.append(f"::error {at}title=flashlab verify::{_data(f'{rest} more checks failed. {report.headline}')}")
    kind = "notice" if report.passed else "error"
    if not found:
        lines.append(f"::{kind} {at}title=flashlab verify::{_data(report.headline)}")
    return "\n".join(lines) + "\n"


def _at(place: tuple[str, int] | None) -> str:
    where = _where(place)
    return f"file={_property(where[0])},line={where[1]}," if where else ""


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def sarif(report: Report) -> str:
    """A SARIF 2.1.0 document: a rule per check, and a result per failed row."""
    from flashlab.verify.probes import CHECKS

    names = [*dict.fromkeys(row.check for row in report.rows)]
    results: list[dict[str, Any]] = [
        _result(row.check, names.index(row.check), _said(report, row), row.place or report.place)
        for row in report.failed
    ]
    if not report.passed and not results:
        names.append("verdict")
        results.append(_result("verdict", len(names) - 1, report.headline, report.place))
    rules = [{"id": name, "shortDescription": {"text": _about(CHECKS.get(name), name)}} for name in names]
    driver = {"name": "flashlab verify", "version": __version__, "rules": rules}
    run: dict[str, Any] = {
        "tool": {"driver": driver},
        "invocations": [{"executionSuccessful": True}],
        "results": results,
        "properties": {"verdict": report.verdict, "counts": report.counts},
    }
    return json.dumps({"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _about(check: Callable[..., Any] | None, name: str) -> str:
    """The first line of what a check says of itself."""
    said = {"search": "Random problems.", "verdict": "Enough of the checks ran."}
    return said.get(name) or ((check and check.__doc__) or name).strip().split("\n")[0]


def _result(rule: str, index: int, text: str, place: tuple[str, int] | None) -> dict[str, Any]:
    found: dict[str, Any] = {"ruleId": rule, "ruleIndex": index, "level": "error", "message": {"text": text}}
    if (where := _where(place)) is not None:
        file, line = where
        uri = file if not Path(file).is_absolute() else Path(file).as_uri()
        found["locations"] = [
            {"physicalLocation": {"artifactLocation": {"uri": uri}, "region": {"startLine": line}}},
        ]
    return found


FORMATS: Mapping[str, Callable[[Report], str]] = {
    "markdown": Report.to_markdown,
    "github": github,
    "sarif": sarif,
}
"""What a report can be printed as, by name."""
