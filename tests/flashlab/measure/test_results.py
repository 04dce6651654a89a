"""Results are written whole or not at all, are as their kind's schema says, and yield the sentences that documents quote."""

from __future__ import annotations

import functools
import json
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from docs._site import kinds
from docs._site.archive import MANIFEST
from docs._site.blocks import replaced
from docs._site.kinds import KINDS
from flashlab.base.jsonlines import joined
from flashlab.measure import results, sources, speed
from simulator.catalogue import CATALOGUE
from simulator.errors import UsageError

RESULTS = Path(__file__).resolve().parents[3] / results.FOLDER

H200 = {"name": "NVIDIA H200", "compute_capability": "9.0", "sms": 132, "memory": 150 << 30, "l2": 60 << 20}


def about(date: str = "2026-11-21T01:02:03Z", device: dict[str, Any] | None = H200) -> dict[str, Any]:
    return {
        "device": device,
        "driver": "580.1",
        "cuda_runtime": "13.0",
        "nvrtc": "13.0",
        "cudnn": None,
        "versions": {"python": "3.12"},
        "date": date,
        "commit": None,
        "command": "flashlab bench flash2",
    }


class Times(results.Data):
    """A toy's data: a kind that no module of the library knows."""

    passed: bool
    milliseconds: dict[str, float]
    best: tuple[str, ...] = ()


class Row(results.Data):
    """A row of it."""

    n: int


class Rows(results.Data):
    """A toy's data with rows."""

    rows: tuple[Row, ...]


def headline(data: Times) -> str:
    return f"fastest {min(data.milliseconds.values()):.1f} ms"


def table(data: Times) -> str:
    return results.markdown_table(("kernel", "ms"), [(name, f"{t:.1f}") for name, t in data.milliseconds.items()])


TOY = results.Kind("toy", "Toys", "times of a toy", "toy measure", Times, headline, table)
ROWS = results.Kind("rows", "Rows", "rows", "rows", Rows, lambda data: "", lambda data: "")
DATA = {"passed": True, "milliseconds": {"flash2": 1.25, "flash1": 3.5}, "best": ["flash2"]}


def test_the_name_says_what_it_holds_and_reading_gives_back_what_was_written(tmp_path: Path) -> None:
    path = results.save(TOY, ["flash2", "online_softmax"], DATA, folder=tmp_path / "new", about=about())
    assert path == tmp_path / "new" / "toy" / "flash2-online_softmax_h200_2026-11-21.jsonl"
    read = results.load(path)
    assert (read.kind, read.algorithms, read.data) == ("toy", ("flash2", "online_softmax"), DATA)
    assert (read.subject, read.condition, read.about) == ("flash2-online_softmax", None, "flash2-online_softmax")
    assert read.content["schema"] == results.SCHEMA
    assert read.content["driver"] == "580.1"
    assert TOY.data(read).milliseconds["flash1"] == 3.5


def test_a_condition_is_in_the_name_and_in_the_content(tmp_path: Path) -> None:
    path = results.save(TOY, [], DATA, subject="all", condition="torch", folder=tmp_path, about=about(device=None))
    assert path.name == "all_torch_cpu_2026-11-21.jsonl"
    read = results.load(path)
    assert (read.condition, read.about, read.algorithms) == ("torch", "all (torch)", ())


@pytest.mark.parametrize(
    ("algorithms", "subject"),
    [
        (["mine"], "mine"),
        (["flash1", "mine"], "flash1-mine"),
        (["flash2", "flash1", "standard"], "flash2-and-2-more"),
        (["flash2", "online_softmax", "flash1"], "online_softmax-to-flash2"),
        ([name for name in CATALOGUE if name != "flash3_fp8"], "16-bit"),
        (list(CATALOGUE)[::-1], "all"),
    ],
)
def test_subjects_are_short_and_true(algorithms: list[str], subject: str) -> None:
    assert results.subject_of(algorithms) == subject


def test_what_is_there_stays_unless_asked(tmp_path: Path) -> None:
    first = results.save(TOY, ["flash2"], DATA, folder=tmp_path, about=about())
    before = first.read_bytes()
    other = {**DATA, "passed": False}
    with pytest.raises(UsageError, match="--force"):
        results.save(TOY, ["flash2"], other, folder=tmp_path, about=about())
    assert first.read_bytes() == before
    results.save(TOY, ["flash2"], other, folder=tmp_path, about=about(), replace=True)
    assert results.load(first).data == other
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_data_that_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        results.save(TOY, ["flash2"], {**DATA, "best": object()}, folder=tmp_path, about=about())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("data", "where"),
    [
        ({"passed": True}, "data.milliseconds"),
        ({**DATA, "more": 1}, "data.more"),
        ({**DATA, "milliseconds": {"flash2": "quick"}}, "data.milliseconds.flash2"),
    ],
)
def test_data_that_are_not_as_the_schema_says_are_refused_and_not_lost(
    data: dict[str, Any], where: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=f"^{where} = .*the schema of toy"):
        results.save(TOY, ["flash2"], data, folder=tmp_path, about=about())
    (kept,) = (tmp_path / "toy").iterdir()
    assert kept.suffix == ".refused"
    assert json.loads(kept.read_text())["data"] == data
    assert results.find(tmp_path) == []


def test_numbers_that_json_lacks_are_text_that_float_reads(tmp_path: Path) -> None:
    data = {**DATA, "milliseconds": {"flash2": math.inf, "flash1": 1.5}}
    path = results.save(TOY, ["flash2"], data, folder=tmp_path, about=about())
    assert json.loads(path.read_text())["data"]["milliseconds"] == {"flash2": "inf", "flash1": 1.5}
    assert TOY.data(results.load(path)).milliseconds["flash2"] == math.inf
    (schema,) = TOY.schemas().values()
    assert Draft202012Validator(schema).is_valid(results.load(path).content)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"algorithms": ["a/b"]}, "algorithms"),
        ({"algorithms": [], "subject": ""}, "subject"),
        ({"algorithms": ["flash2"], "condition": "a b"}, "condition"),
    ],
)
def test_bad_names_are_refused(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"^{said} ="):
        results.save(TOY, data=DATA, folder=tmp_path, about=about(), **given)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 2, "kind": "poem"}', '{"schema": 99, "kind": "bench"}'])
def test_what_is_no_result_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    for suffix in ("json", "jsonl"):
        path = tmp_path / f"x.{suffix}"
        path.write_text(text)
        with pytest.raises(UsageError) as refused:
            results.load(path)
        assert "\n" not in str(refused.value)


def test_a_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    path = results.save(ROWS, ["flash2"], {"rows": [{"n": 1}, {"n": 2}]}, folder=tmp_path, about=about())
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(UsageError, match="a result that can be read"):
        results.load(path)


def test_a_file_of_schema_2_is_read_as_ever(tmp_path: Path) -> None:
    """It was one JSON document."""
    new = results.save(ROWS, ["flash2"], {"rows": [{"n": 1}, {"n": 2}]}, folder=tmp_path, about=about())
    old = new.with_name("older_h200_2026-11-20.json")
    old.write_text(json.dumps({**results.load(new).content, "schema": 2}, indent=1))
    assert results.load(old).data == results.load(new).data
    assert [each.path for each in results.find(tmp_path, kind="rows")] == [new, old]


def test_the_newest_that_matches(tmp_path: Path) -> None:
    for date, algorithms, device, condition in (
        ("2026-11-20T00:00:00Z", ["flash2"], H200, None),
        ("2026-11-22T00:00:00Z", ["flash2"], None, None),
        ("2026-11-23T00:00:00Z", ["flash2"], H200, "torch"),
        ("2026-11-21T00:00:00Z", ["flash1", "flash2"], H200, None),
    ):
        results.save(TOY, algorithms, DATA, condition=condition, folder=tmp_path, about=about(date, device))
    assert results.latest("counters", tmp_path) is None
    newest = results.latest("toy", tmp_path)
    assert newest and newest.content["date"][:10] == "2026-11-22"
    on_gpu = results.latest("toy", tmp_path, algorithm="flash1", device="h200")
    assert on_gpu and on_gpu.algorithms == ("flash1", "flash2")
    on_torch = results.latest("toy", tmp_path, condition="torch")
    assert on_torch and on_torch.condition == "torch"
    assert len(results.find(tmp_path, algorithm="flash2")) == 4


def test_a_claim_and_a_table_come_from_the_data(tmp_path: Path) -> None:
    read = results.load(results.save(TOY, ["flash2"], DATA, folder=tmp_path, about=about()))
    assert TOY.claim(read) == "fastest 1.2 ms (NVIDIA H200, 2026-11-21)"
    assert "| flash1 | 3.5 |" in TOY.markdown(read)


# the kinds


def test_a_kind_is_found_in_the_module_that_declares_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adding a kind touches its module only; modules that declare none aren't imported."""
    room = tmp_path / "toy_room"
    (room / "deep").mkdir(parents=True)
    (room / "broken.py").write_text("raise ImportError('needs what is not there')\n")
    (room / "deep" / "timing.py").write_text(
        "from flashlab.measure.results import Data, Kind\n\n\nclass Toy(Data):\n    n: int\n\n\n"
        "KIND = Kind('deep-toy', 'Toys', 'toys', 'toy', Toy, lambda data: str(data.n), lambda data: '')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert list(results.kinds("toy_room")) == ["deep-toy"]
    assert {"bench", "counters", "verify"} < results.kinds().keys()


@functools.cache  # each file is parsed once
def every(kind: str) -> list[results.Result]:
    return results.find(RESULTS, kind=kind)


def committed(kind: str, algorithm: str) -> results.Result:
    return next(r for r in reversed(every(kind)) if algorithm in r.algorithms and r.condition is None)


@pytest.mark.parametrize(
    ("kind", "algorithm", "claim"),
    [
        ("verify", "flash1", "flash1 on gpu (full): passed; {passed} checks passed, 0 failed, 0 not run"),
        ("sanitizers", "flash2", "{findings} findings by memcheck, racecheck, initcheck, synccheck over {runs} runs"),
        (
            "counters",
            "flash2",
            "{equal:,} of {compared:,} counts of bytes and matrix FLOPs equal over {launches} launches",
        ),
    ],
)
def test_a_claim_has_the_figures_of_its_file(kind: str, algorithm: str, claim: str) -> None:
    result = committed(kind, algorithm)
    figures = result.data["counts" if kind == "verify" else "summary"]
    assert claim.format(**figures) in KINDS[kind].claim(result)


def test_a_difference_shows_in_the_claim_and_in_the_table() -> None:
    """Seeded: one count that isn't equal, one check that fails."""
    result = committed("counters", "flash3_fp8")
    content = json.loads(json.dumps(result.content))
    row = content["data"]["launches"][0]["rows"][0]
    row |= {"measured": row["formula"] + 1, "verdict": "differs"}
    changed = KINDS["counters"].markdown(results.Result(result.path, content))
    assert f"**{row['measured']:,} ≠ {row['formula']:,}**" in changed
    assert "≠" not in KINDS["counters"].markdown(result)
    result = committed("verify", "flash2")
    content = json.loads(json.dumps(result.content))
    content["data"]["rows"][0] |= {"check": "rule", "case": "odd", "status": "failed"}
    content["data"]["counts"]["failed"] = 1
    changed = KINDS["verify"].claim(results.Result(result.path, content))
    assert "1 failed, in rule (odd)" in changed


def test_ratios_of_a_benchmark_are_by_peer() -> None:
    rows = [
        speed.Row("float16", 64, True, 1024, peer, 1.0, 300.0, 0.4, ratio, None, 0.3, 11)
        for peer, ratio in ((None, None), ("sdpa-flash", 1.1), ("sdpa-flash", 1.3))
    ]
    report = speed.BenchReport("flash2", "NVIDIA H200", (), tuple(rows), ())
    data = speed.Bench.model_validate(report.to_dict())
    assert speed.BENCH.headline(data) == "speed of flash2: 1.10 to 1.30 × sdpa-flash (median 1.20)"
    assert "| float16 | 64 | causal | 1024 | sdpa-flash | 300 | 1.30 | 40% |" in speed.BENCH.table(data)


def test_errors_of_the_l2_model_are_told_apart() -> None:
    model = {"large": True, "measured": 100}
    data = {
        **committed("counters", "flash2").data,
        "models": [
            {**model, "case": "big", "estimate": 102, "error": 0.02},
            {**model, "case": "big fresh", "estimate": 91, "error": -0.09},
            {**model, "case": "small", "estimate": 200, "error": 1.0, "large": False},
        ],
    }
    kind = KINDS["counters"]
    typed = kind.schema.model_validate(data)
    said, shown = kind.headline(typed), kind.table(typed)
    assert "on 1 problems that it was fitted to: median error 2.0%, worst 2.0%" in said
    assert "on 1 problems measured after that: median error 9.0%" in said
    assert "| big | 100 | 102 | +2.0% |" in shown
    assert "| big fresh | 100 | 91 | -9.0% |" in shown
    assert "| small |" not in shown


# what is committed


NOT_MEASURED_YET: set[str] = set()
"""Kinds whose command waits for a GPU. A kind that has a result may not stand here."""


def test_there_are_results_of_every_kind_and_nothing_else_lies_there() -> None:
    found = {path.relative_to(RESULTS) for path in RESULTS.rglob("*") if path.is_file()}
    loose = {path.name for path in found if len(path.parts) == 1}
    assert loose == {"README.md", MANIFEST.name, sources.KERNELS}
    places = {Path(name.replace("-", "/", name in BESIDE)) for name in {*KINDS, *BESIDE} - NOT_MEASURED_YET}
    assert {path.parent for path in found if len(path.parts) > 1} - {Path("schema")} == places
    assert {path.suffix for path in found if len(path.parts) > 1 and path.parent != Path("schema")} == {".jsonl"}


BESIDE = {f"{kind.name}-{name}": RESULTS / kind.name / name for kind in KINDS.values() for name in kind.beside}
"""Folders of other files, by the names of their schemas."""


@functools.cache
def validators() -> dict[str, Draft202012Validator]:
    return {Path(name).stem: Draft202012Validator(json.loads(text)) for name, text in kinds.schemas().items()}


def test_there_is_a_schema_for_each_kind_of_file_and_the_page_lists_the_kinds() -> None:
    assert validators().keys() == KINDS.keys() | BESIDE.keys()
    for validator in validators().values():
        Draft202012Validator.check_schema(validator.schema)
    page = kinds.PAGE.read_text(encoding="utf-8")
    assert page == replaced(page, "kinds", {"kinds": kinds.table()}), "run python -m docs._site.kinds"
    assert page != replaced(page, "kinds", {"kinds": ""})


MEASURED = [name for name in KINDS if name not in NOT_MEASURED_YET]


@pytest.mark.long  # the newest of each kind are looked at below
@pytest.mark.parametrize("name", MEASURED)
def test_every_committed_result_is_as_a_validator_wants(name: str) -> None:
    """By a validator that knows nothing of the models."""
    for result in every(name):
        validators()[name].validate(result.content)


@pytest.mark.parametrize("name", MEASURED)
def test_every_committed_result_is_as_its_schema_says_lies_where_it_says_and_claims_something(name: str) -> None:
    """Each by the model that its claim is made from, and the newest by a validator that knows nothing of models."""
    kind, found = KINDS[name], every(name)
    for result in found[-3:]:
        validators()[name].validate(result.content)
    for result in found:
        assert result.path == RESULTS / name / results.name_of(result.content)
        assert re.fullmatch(r"[\w.-]{1,60}", result.subject)
        assert len(kind.claim(result)) > 40
        assert "\n| --- |" in kind.markdown(result)
    refuses_others(validators()[name], min(found, key=lambda result: result.path.stat().st_size).content)


@pytest.mark.parametrize("name", BESIDE)
def test_files_beside_results_are_as_their_schema_says(name: str) -> None:
    found = [joined(path.read_text(encoding="utf-8")) for path in sorted(BESIDE[name].iterdir())]
    for content in found:
        validators()[name].validate(content)
    refuses_others(validators()[name], found[0])


def refuses_others(validator: Draft202012Validator, content: Mapping[str, Any]) -> None:
    assert not validator.is_valid({**content, "more": 1})
    assert not validator.is_valid({key: value for key, value in content.items() if key != "date"})


def test_the_environment_is_found_without_a_gpu_too() -> None:
    found = results.environment()
    assert {"python", "numpy", "flashlab"} <= set(found["versions"])
    assert found["date"].endswith("Z")


@pytest.mark.parametrize(
    ("program", "module", "typed"),
    [
        ("studies/__main__.py", "studies.__main__", "python -m studies llm.c --force"),
        ("docs/_site/found.py", "docs._site.found", "python -m docs._site.found llm.c --force"),
        ("flashlab/__main__.py", "flashlab.__main__", "flashlab llm.c --force"),
        ("tool.py", None, "tool.py llm.c --force"),
    ],
)
def test_the_command_is_as_one_would_type_it(
    program: str, module: str | None, typed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = module and SimpleNamespace(name=module)
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=spec))
    assert results._command([f"/somewhere/{program}", "/checkouts/llm.c", "--force"]) == typed


def test_a_command_of_several_ranks_is_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=SimpleNamespace(name="studies.__main__")))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    typed = "torchrun --nproc-per-node 2 -m studies parallel speed"
    assert results._command(["/somewhere/studies/__main__.py", "parallel", "speed"]) == typed
