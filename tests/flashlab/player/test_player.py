"""`fl.player` and `flashlab trace --html`: what they take, and what they write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import flashlab as fl
from flashlab.cli import app
from tests.flashlab.player.test_pack import Parts
from tests.flashlab.player.traces import small


def test_a_trace_shows_itself_by_the_player() -> None:
    frame = small("flash2")._repr_html_()
    assert frame is not None
    tag, given, _ = Parts(frame).text[0]
    assert tag == "iframe" and given["sandbox"] == "allow-scripts" and "src" not in given
    inner = given["srcdoc"] or ""
    assert inner.startswith("<!doctype html>") and inner.endswith("</html>\n")
    assert Parts(inner).data()["traces"][0]["algorithm"] == "flash2"
    assert frame == fl.player(small("flash2"))._repr_html_()


def test_save_writes_the_page(tmp_path: Path) -> None:
    player = fl.player(small("flash1"), small("flash2"), step=3)
    path = player.save(tmp_path / "two.html")
    assert path.read_text(encoding="utf-8") == player.html()
    data = Parts(player.html()).data()
    assert data["step"] == 3 and [each["algorithm"] for each in data["traces"]] == ["flash1", "flash2"]
    with pytest.raises(fl.UsageError, match="path = "):
        player.save(tmp_path / "nowhere" / "two.html")


def test_a_run_stands_for_its_trace() -> None:
    inputs = fl.random_inputs(fl.Problem(batch=1, heads=1, len_q=32, head_dim=16, dtype="float32"))
    run = fl.simulate("flash2", *inputs, trace=(0, 0))
    assert run.trace is not None and fl.player(run).html() == fl.player(run.trace).html()
    with pytest.raises(fl.UsageError, match="trace = 'a run without a trace': expected a trace, as in"):
        fl.player(fl.simulate("flash2", *inputs))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"trace": "flash2"}, "trace = 'flash2': expected a trace, as in fl.simulate"),
        ({"other": 3}, "other = 3: expected a trace"),
        ({"step": 0}, "step = 0: expected an integer from 1 to 54"),
        ({"step": 1.5}, "step = 1.5: expected an integer"),
        ({"kernel": "nowhere.cu"}, "kernel = 'nowhere.cu': expected a .cu file"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], line: str) -> None:
    with pytest.raises(fl.UsageError) as error:
        fl.player(**{"trace": small("flash2"), **arguments}).html()  # pyright: ignore
    assert str(error.value).startswith(line)


def test_a_trace_without_steps_is_refused() -> None:
    q, k, v = fl.random_inputs(fl.Problem(batch=1, heads=1, len_q=0, head_dim=16, dtype="float32"))
    trace = fl.simulate("flash2", q, k, v, trace=(0, 0)).trace
    assert trace is not None
    with pytest.raises(fl.UsageError, match="at least one step"):
        fl.player(trace)


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    return result.exit_code, result.output


def test_the_command_writes_the_same_page(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    status, printed = run("trace", "flash2", "--len-q", 64, "--tile", "16x16", "--html", path, "--against", "standard")
    assert status == 0 and str(path) in printed.replace("\n", "")
    p = fl.Problem(batch=1, heads=2, len_q=64, head_dim=64, dtype="float16", causal=True)
    traces = [
        fl.simulate(name, *fl.random_inputs(p), causal=True, tile=(16, 16), trace=(0, 0)).trace
        for name in ("flash2", "standard")
    ]
    assert path.read_text(encoding="utf-8") == fl.player(*filter(None, traces)).html()


@pytest.mark.parametrize(
    ("words", "tile"),
    [(["flash2"], [32, 32]), (["flash3"], [64, 32]), (["flash2", "--len-q", "100", "--len-kv", "300"], [32, 80]),
     (["flash3", "--tile", "128x128"], [128, 128])],
)  # fmt: skip
def test_the_command_cuts_s_in_quarters(words: list[str], tile: list[int]) -> None:
    status, printed = run("trace", *words, "--json")
    assert status == 0 and json.loads(printed)["tile"] == tile


@pytest.mark.parametrize(
    ("words", "wanted", "steps"),
    [
        (["flash_decoding"], {"batch": 1, "len_q": 2, "len_kv": 256, "causal": True}, {"store_partial": 4, "merge": 1}),
        (["paged"], {"batch": 2, "len_q": 2, "page_size": 16}, {"store_partial": 4, "merge": 1}),
        (["mla_paged", "--seed", "1"], {"batch": 2, "len_q": 1, "chunk": 64}, {"store_partial": 4, "merge": 1}),
        (["cascade", "--no-causal"], {"batch": 4, "len_prefix": 96, "causal": False}, {"store_part": 5, "merge": 8}),
        (["paged", "--len-q", "64"], {"batch": 1, "len_q": 64, "len_kv": 64}, {"store_partial": 0}),
        (["cascade", "--lengths", "1:20,1:30"], {"batch": 2, "len_prefix": 128}, {"store_part": 3}),
        (["flash2"], {"batch": 1, "len_q": 128}, {"store_o": 4}),
    ],
)
def test_without_lengths_it_is_what_the_algorithm_is_for(
    words: list[str], wanted: dict[str, Any], steps: dict[str, int]
) -> None:
    status, printed = run("trace", *words, "--json")
    assert status == 0, printed
    trace = json.loads(printed)
    assert {name: trace["problem"][name] for name in wanted} == wanted
    taken = [event["step"] for event in trace["events"]]
    assert {name: taken.count(name) for name in steps} == steps and len(taken) < 260


def test_ones_own_program_beside_ones_own_kernel(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import flashlab as fl\n\n@fl.program\ndef mine(m, q, k, v, problem, tile):\n    out = m.output('out')\n"
        "    for block in m.launch('mine', rows=problem.row_tiles(tile), warps=1):\n        block.step('copy')\n"
        "        block.store(out, block.fetch(v, block.i, tile.rows), block.i, tile.rows)\n    return out\n",
        encoding="utf-8",
    )
    (tmp_path / "mine.cu").write_text("// step: copy\ncopy();\n", encoding="utf-8")
    path = tmp_path / "page.html"
    status, _ = run("trace", f"{tmp_path / 'mine.py'}:mine", "--html", path, "--kernel", tmp_path / "mine.cu")
    assert status == 0
    (trace,) = Parts(path.read_text(encoding="utf-8")).data()["traces"]
    assert trace["kernels"] == [
        {"name": "mine.cu", "text": "// step: copy\ncopy();\n", "marks": {"copy": [[1, 2, ""]]}}
    ]
    assert "block.step('copy')" in trace["sources"][0]["text"] and trace["launches"][0]["grid"] is None
    assert str(tmp_path) not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--against", "flash1"], "--against = 'flash1': expected --html FILE"),
        (["--kernel", "flash1"], "--kernel = 'flash1': expected --html FILE"),
        (["--html", "page.html", "--against", "flash9"], "did you mean flash"),
        (["--html", "page.html", "--kernel", "flash9.cu"], "--kernel = 'flash9.cu': expected a .cu file"),
        (["--html", "nowhere/page.html"], "--html = 'nowhere/page.html': expected a file that can be written"),
    ],
)
def test_bad_usage(words: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    status, printed = run("trace", "flash2", "--tile", "32x32", *words)
    assert status == 2 and line in printed
