"""Results are written whole or not at all, say where they come from, and yield the sentences that documents quote."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from flashlab.measure import claims, results
from simulator.errors import UsageError

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


BENCH = {
    "passed": True,
    "algorithm": "flash2",
    "rows": [
        {
            "dtype": "float16",
            "head_dim": 64,
            "causal": True,
            "length": 1024,
            "peer": peer,
            "tflops": 300.0,
            "ratio": ratio,
            "of_matmul": 0.4,
        }
        for peer, ratio in ((None, None), ("sdpa-flash", 1.1), ("sdpa-flash", 1.3))
    ],
}


def test_the_name_says_what_it_holds_and_reading_gives_back_what_was_written(tmp_path: Path) -> None:
    path = results.save("bench", ["flash2", "online_softmax"], BENCH, folder=tmp_path / "new", about=about())
    assert path.name == "bench_flash2-online_softmax_h200_2026-11-21.json"
    read = results.load(path)
    assert (read.kind, read.algorithms, read.data) == ("bench", ("flash2", "online_softmax"), BENCH)
    assert read.content["schema"] == results.SCHEMA
    assert read.content["driver"] == "580.1"


def test_what_is_there_stays_unless_asked(tmp_path: Path) -> None:
    first = results.save("bench", ["flash2"], BENCH, folder=tmp_path, about=about())
    before = first.read_bytes()
    with pytest.raises(UsageError, match="--force"):
        results.save("bench", ["flash2"], {"rows": []}, folder=tmp_path, about=about())
    assert first.read_bytes() == before
    results.save("bench", ["flash2"], {"rows": []}, folder=tmp_path, about=about(), replace=True)
    assert results.load(first).data == {"rows": []}
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


def test_data_that_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        results.save("bench", ["flash2"], {"rows": object()}, folder=tmp_path, about=about())
    assert not list(tmp_path.iterdir())


def test_numbers_that_json_lacks_are_text_that_float_reads(tmp_path: Path) -> None:
    path = results.save("verify", ["flash2"], {"worst": [math.inf, 1.5]}, folder=tmp_path, about=about())
    assert [float(x) for x in json.loads(path.read_text())["data"]["worst"]] == [math.inf, 1.5]


@pytest.mark.parametrize(
    ("kind", "algorithms", "said"),
    [("speed", ["flash2"], "kind"), ("bench", [], "algorithms"), ("bench", ["a/b"], "algorithms")],
)
def test_bad_names_are_refused(kind: str, algorithms: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        results.save(kind, algorithms, {}, folder=tmp_path, about=about())


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 1, "kind": "poem"}', '{"schema": 99, "kind": "bench"}'])
def test_what_is_no_result_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(UsageError) as refused:
        results.load(path)
    assert "\n" not in str(refused.value)


def test_the_newest_that_matches(tmp_path: Path) -> None:
    for date, algorithms, device in (
        ("2026-11-20T00:00:00Z", ["flash2"], H200),
        ("2026-11-22T00:00:00Z", ["flash2"], None),
        ("2026-11-21T00:00:00Z", ["flash1", "flash2"], H200),
    ):
        results.save("bench", algorithms, BENCH, folder=tmp_path, about=about(date, device))
    assert results.latest("counters", tmp_path) is None
    newest = results.latest("bench", tmp_path)
    assert newest and newest.content["date"][:10] == "2026-11-22"
    on_gpu = results.latest("bench", tmp_path, algorithm="flash1", device="h200")
    assert on_gpu and on_gpu.algorithms == ("flash1", "flash2")


def test_a_headline_and_tables_come_from_the_data(tmp_path: Path) -> None:
    read = results.load(results.save("bench", ["flash2"], BENCH, folder=tmp_path, about=about()))
    assert claims.headline(read) == "speed of flash2: 1.10 to 1.30 × sdpa-flash (median 1.20) (NVIDIA H200, 2026-11-21)"
    assert "| float16 | 64 | causal | 1024 | sdpa-flash | 300 | 1.30 | 40% |" in claims.markdown(read)


VERIFY = {
    "target": "flash2",
    "backend": "gpu",
    "verdict": "passed",
    "counts": {"passed": 2, "failed": 0, "not run": 1},
    "rows": [
        {"check": "rule", "status": "passed"},
        {"check": "edges", "status": "passed"},
        {"check": "edges", "status": "not run"},
    ],
}
SANITIZERS = {
    "summary": {"tools": ["memcheck"], "runs": 12, "findings": 0, "faults": 1, "faults_found": 1},
    "rows": [{"tool": "memcheck", "target": "flash2", "cases": 12, "findings": 0, "verdict": "clean"}],
}
COUNTERS = {
    "summary": {
        "equal": 5, "compared": 5, "launches": 1, "dram_checked": 1, "dram_inside": 1,
        "model_problems": 1, "model_median_error": 0.02, "model_worst_error": 0.02,
    },
    "models": [
        {"case": "big", "measured": 100, "estimate": 102, "error": 0.02, "large": True},
        {"case": "big fresh", "measured": 100, "estimate": 91, "error": -0.09, "large": True},
        {"case": "small", "measured": 100, "estimate": 200, "error": 1.0, "large": False},
    ],
    "launches": [{
        "case": "big", "launch": "flash2", "dram": {"measured": 100},
        "rows": [{"what": "hbm.read", "measured": 4096, "formula": 4096, "verdict": "equal"},
                 {"what": "hbm.write", "measured": 1, "formula": 2, "verdict": "differs"}],
    }],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "data", "headline", "table"),
    [
        (
            "verify",
            VERIFY,
            "flash2 on gpu (quick): passed; 2 checks passed, 0 failed, 1 not run",
            "| edges | 1 | 0 | 1 |",
        ),
        ("sanitizers", SANITIZERS, "0 findings by memcheck over 12 runs; 1 of 1 seeded faults found", "| clean |"),
        (
            "counters",
            COUNTERS,
            "5 of 5 counts of bytes and matrix FLOPs equal over 1 launches",
            "| = 4,096 | **1 ≠ 2** |",
        ),
        (
            "counters",
            COUNTERS,
            "on 1 problems measured after that: median error 9.0%",
            "| big fresh | 100 | 91 | -9.0% |",
        ),
        (
            "counters",
            COUNTERS,
            "on 1 problems that it was fitted to: median error 2.0%, worst 2.0%",
            "| big | 100 | 102 | +2.0% |",
        ),
    ],
)
def test_every_kind_has_a_headline_and_a_table(
    kind: str, data: dict[str, Any], headline: str, table: str, tmp_path: Path
) -> None:
    read = results.load(results.save(kind, ["flash2"], data, folder=tmp_path, about=about()))
    assert headline in claims.headline(read)
    assert table in claims.markdown(read)


def test_the_environment_is_found_without_a_gpu_too() -> None:
    found = results.environment()
    assert {"python", "numpy", "flashlab"} <= set(found["versions"])
    assert found["date"].endswith("Z")


def test_every_result_in_the_repository_can_be_read() -> None:
    for result in results.find(Path(__file__).parents[3] / "docs" / "results"):
        name = f"{result.kind}_{'-'.join(result.algorithms)}_"
        assert result.path.name.startswith(name)
        assert claims.headline(result)
        assert claims.markdown(result)
