"""The promise about fields: a field of `Problem` is one line of `simulator/problem.py`; nothing else is edited.

A copy of the project, whose `Problem` has one field more, is asked for that field wherever a problem goes: options and help,
sweeps, JSON, words, results, keywords of the calls, the kernels' `struct Shape`.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import flashlab as fl
import kernels_cu
from flashlab.cli import options
from flashlab.run import abi
from simulator.problem import COMMON_MASKS, FEATURES, FIELDS, MASKS, OF_CACHES, SIZES, Masks

FORWARD = ", ".join(name for name in FEATURES if name not in ("dlse", "chunk", "varlen", "drafts"))
"""What the forward pass knows, in words."""
OF_FLASH2 = ", ".join(
    name for name in FEATURES if name not in ("dlse", "partial", *OF_CACHES, "exact_lse", "chunk", "varlen", "drafts")
)
ROOT = Path(__file__).resolve().parents[2]
FIELD = '    ceiling: float | None = described("Bound of the scores", default=None, aliases=("upper",))\n'
MEMBER = "  float ceiling;\n"
PROGRAM = """
import flashlab as fl

@fl.program
def capped(m, q, k, v, problem, tile):
    out = m.output("out")
    for block in m.launch("capped", rows=problem.row_tiles(tile), warps=4):
        block.step("copy")
        block.store(out, block.fetch(q, block.i, tile.rows) * (problem.ceiling or 1.0), block.i, tile.rows)
    return out

def outsider(q, k, v, causal=False, upper=None):
    return q * (upper or 1)
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project with one line more in problem.py, and one in params.cuh for a kernel that would read it."""
    root = tmp_path_factory.mktemp("copy")
    for package in ("flashlab", "simulator", "kernels_cu"):
        shutil.copytree(ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, before, line in (
        ("simulator/problem.py", "    def __post_init__", FIELD),
        ("kernels_cu/include/params.cuh", "  float scale;\n", MEMBER),
    ):
        text = (root / name).read_text(encoding="utf-8")
        assert text.count(before) == 1
        (root / name).write_text(text.replace(before, line + before), encoding="utf-8")
    (root / "mine.py").write_text(PROGRAM, encoding="utf-8")
    return root


def python(copy: Path, code: str) -> Any:
    """What a script says in the copy, as JSON."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=copy, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


COMMANDS = """
import contextlib, io, json, sys
from flashlab.cli import app

def run(*arguments):
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            app([*arguments], prog_name="flashlab")
        except SystemExit as stop:
            status = stop.code
    return status, out.getvalue(), err.getvalue()

names = [command.callback.__name__ for command in app.registered_commands]
print(json.dumps({
    "help": {name: run(name, "--help")[1] for name in names},
    "count": run("count", "mine.py:capped", "--ceiling", "30", "--json"),
    "simulate": run("simulate", "mine.py:capped", "--ceiling", "30", "--len-q", "16"),
    "left out": run("simulate", "flash2", "--len-q", "16", "--json"),
    "refused": run("count", "flash2", "--ceiling", "30"),
    "no number": run("count", "flash2", "--ceiling", "x"),
    "not finite": run("count", "flash2", "--ceiling", "inf"),
    "trace": run("trace", "mine.py:capped", "--ceiling", "30", "--len-q", "16", "--json"),
    "compare": run("compare", "flash2", "--sample", "--json"),
    "swept": run("sweep", "flash2", "mine.py:capped", "--ceiling", "none,30,50", "--json"),
}))
"""


def test_a_new_field_is_an_option_of_every_command_that_takes_a_problem(copy: Path):
    said = python(copy, COMMANDS)
    for name, text in said["help"].items():
        expected = ("--len-kv" in text, "Bound of the scores." in text)
        assert ("--ceiling" in text, "--ceiling" in text) == expected, name
    assert sum("--ceiling" in text for text in said["help"].values()) >= 8
    assert re.search(r"--ceiling +<float> ", said["help"]["count"])
    assert json.loads(said["count"][1])["problem"]["ceiling"] == 30.0
    assert json.loads(said["left out"][1])["counts"]["problem"]["ceiling"] is None
    assert json.loads(said["trace"][1])["problem"]["ceiling"] == 30.0
    assert json.loads(said["compare"][1])["problem"]["ceiling"] is None
    # what an algorithm, or the judge, doesn't reckon with it doesn't pretend to
    knows = "ceiling = 30.0: expected nothing: {} knows {}"
    assert said["refused"] == [2, "", f"flashlab: {knows.format('flash2', OF_FLASH2)}\n"]
    assert said["simulate"] == [2, "", f"flashlab: {knows.format('naive attention', FORWARD)}\n"]
    assert said["no number"][0] == 2 and "--ceiling" in said["no number"][2]
    assert said["not finite"] == [2, "", "flashlab: ceiling = inf: expected a finite number, or None\n"]
    table = json.loads(said["swept"][1])
    assert table["axes"] == ["algorithm", "ceiling"]
    assert [row["ceiling"] for row in table["rows"]] == [None, 30.0, 50.0] * 2
    refused = [knows.format("flash2", OF_FLASH2).replace("30", n) for n in ("30", "50")]
    assert [row["reason"] for row in table["rows"]] == [None, *refused, None, None, None]


CALLS = """
import inspect, json, tempfile
from pathlib import Path
import numpy as np
import flashlab as fl
from flashlab.measure import emulated, workload
from flashlab.player.pack import document
from flashlab.run import abi
from flashlab.verify.adapter import CallableTarget
from flashlab.verify.cases import Case, describe, problem_source
from flashlab.views import figures
from mine import capped, outsider

p = fl.Problem(batch=1, heads=1, len_q=32, head_dim=16, dtype="float32", causal=True)
capped_p = p.replace(ceiling=30)
q, k, v = fl.random_inputs(p)
run = fl.simulate(capped, q, k, v, causal=True, ceiling=30, trace=True)
cases = [workload.Case("mine", "flash2", capped_p)]
with tempfile.TemporaryDirectory() as folder:
    rows = fl.sweep(capped, p, ceiling=[None, 30.0], len_q=[16, 32])
    read = workload.read(workload.write(cases, Path(folder)))
    csv = rows.to_csv(Path(folder, "rows.csv")).read_text()
    rows.plot(x="ceiling", path=Path(folder, "rows.png"))

def refusal(call):
    try:
        call()
    except fl.UsageError as error:
        return str(error)

print(json.dumps({
    "out": bool(np.allclose(run.out, 30 * q)),
    "problem": run.counts.problem == capped_p != p,
    "repr": repr(capped_p),
    "source": problem_source(capped_p),
    "words": [describe(capped_p), figures.problem(capped_p), document(run.trace)["subtitle"], describe(p)],
    "cases": read == cases,
    "rows": [row["ceiling"] for row in rows.rows],
    "csv": csv.splitlines()[0].split(","),
    "signatures": ["ceiling" in inspect.signature(f).parameters for f in (fl.simulate, fl.emulate, fl.attention, fl.naive)],
    "shape": [float(abi.shape_struct(each, 1)["ceiling"]) for each in (p, capped_p)],
    "size": abi.SHAPE.itemsize,
    "outsider": bool((CallableTarget(fl.Adapter(outsider)).call(capped_p, {"q": q, "k": k, "v": v})[0] == 30 * q).all()),
    "outsider refuses": CallableTarget(fl.Adapter(lambda q, k, v, causal: q)).refuses(capped_p),
    "refusals": [
        refusal(lambda: fl.count("flash2_backward", capped_p)),
        refusal(lambda: fl.naive(q, k, v, ceiling=3)),
        refusal(lambda: fl.naive_loop(q, k, v, ceiling=3)),
        refusal(lambda: fl.attention(q, k, v, ceiling=3, backend="emulator")),
        refusal(lambda: fl.attention(q, k, v, ceilling=3, backend="emulator")),
        refusal(lambda: fl.compare((q, k, v), algorithms=["flash2"], ceiling=3)),
    ],
    "counters": emulated.run([workload.Case("flash2", "flash2", p)]).to_dict(),
}))
"""


@pytest.mark.compiler
def test_a_new_field_goes_wherever_a_problem_goes(copy: Path):
    said = python(copy, CALLS)
    assert said["out"] and said["problem"] and said["cases"] and said["outsider"]
    assert said["counters"]["passed"] and said["counters"]["launches"][0]["problem"]["ceiling"] is None
    assert said["repr"].endswith("causal=True, ceiling=30.0)") and said["source"] == f"fl.{said['repr']}"
    *with_it, without = said["words"]
    assert all("causal" in text and "ceiling 30" in text for text in with_it) and "ceiling" not in without
    assert said["rows"] == [None, None, 30.0, 30.0] and "ceiling" in said["csv"]
    assert said["signatures"] == [True] * 4
    assert said["shape"] == [0.0, 30.0] and said["size"] == abi.SHAPE.itemsize + 4
    assert said["outsider refuses"] == "the function takes no ceiling"
    backward, naive, loop, emulated, misspelt, compared = said["refusals"]
    known = "causal, window, scale, soft_cap, sinks, lengths, dropout, dlse, partial"
    assert backward == f"ceiling = 30.0: expected nothing: flash2_backward knows {known}"
    assert naive == loop == f"ceiling = 3.0: expected nothing: naive attention knows {FORWARD}"
    assert emulated == f"ceiling = 3.0: expected nothing: flash2 knows {OF_FLASH2}"
    assert misspelt.startswith("keyword = 'ceilling': expected one of ") and "did you mean ceiling" in misspelt
    assert compared is not None and "ceiling = 3.0" in compared


def test_metadata_are_whole():
    assert list(FIELDS) == [field.name for field in dataclasses.fields(fl.Problem)]
    for name, known in FIELDS.items():
        assert known.help and known.label and not known.help.endswith("."), name
    assert set(SIZES) | {"dtype"} | set(FEATURES) == set(FIELDS)
    assert set(FEATURES) - set(MASKS) == {
        "sinks",
        "alibi",
        "mask",
        "kv_dtype",
        "k_scale",
        "v_scale",
        "dlse",
        "varlen",
        "drafts",
    }
    assert set(COMMON_MASKS) <= set(MASKS)
    sized = {
        axis
        for row in fl.CATALOGUE.values()
        for x in (*row.operation.inputs, *row.operation.outputs)
        for axis in x.axes
    }
    others = {
        "row_tiles",
        "key_tiles",
        "offsets",
        "rng_words",
        "table_pages",
        "bit_bytes",
        "row_blocks",
        "block_list",
        "whole",
        "sequences_of_lengths",
        "two",
        "rows_batch",
    }
    assert sized - others <= set(SIZES)


def test_type_checkers_know_the_masks():
    """What a checker reads can't be made from metadata: it stands beside them."""
    assert get_type_hints(Masks) == {name: FIELDS[name].annotation for name in MASKS}


def test_signatures_show_the_masks():
    for function in (fl.attention, fl.simulate, fl.emulate, fl.naive, fl.naive_loop):
        shown = inspect.signature(function).parameters
        assert {name: shown[name].default for name in MASKS} == {
            "causal": False,
            "window": None,
            "scale": None,
            "soft_cap": None,
            "block_size": None,
            "lengths": None,
            "partial": False,
            "dropout": None,
            "exact_lse": False,
            "chunk": None,
        }


def test_the_default_problem_leaves_out_what_it_can():
    assert set(options.DEFAULTS) <= set(FIELDS)
    for name, value in options.DEFAULTS.items():
        assert FIELDS[name].checked(value) == value != FIELDS[name].default


def test_the_kernels_shape_holds_what_a_problem_says():
    """Every field but those that kernels are compiled for, and head_dim_v, which they need equal; windows as two bounds,
    of lengths how many and the longest, of dropout how many of 256 weights are kept, and the length of a block table for the
    pool's."""
    own = {"left", "right", "group", "sequences", "kept", "longest", "table_pages"}
    compiled_for = {"dtype", *(name for name, known in FIELDS.items() if known.operand)}
    assert set(abi.SHAPE.names or ()) - own == set(FIELDS) - compiled_for - {
        "head_dim_v",
        "causal",
        "window",
        "block_size",
        "lengths",
        "partial",
        "dropout",
        "exact_lse",
        "chunk",
        "pages",
    }
    source = (kernels_cu.include_dir() / "params.cuh").read_text(encoding="utf-8")
    members = re.search(r"struct Shape {(.*?)};", source, re.DOTALL)
    assert members
    declared = re.findall(r"\b(?!int|float)[a-z_]+(?=[,;])", re.sub("//.*", "", members[1]))
    assert declared == list(abi.SHAPE.names or ())


KNOW_WINDOWS = {
    "simulator/problem.py": "says what it is",
    "simulator/operations/operation.py": "verifies one",
    "simulator/operations/backward.py": "verifies one",
    "simulator/operations/paged.py": "verifies one",
    "simulator/operations/latent.py": "takes one for a problem of its own",
    "simulator/operations/cascade.py": "verifies one, and says where it begins in a prefix",
    "flashlab/run/latent.py": "takes one",
    "flashlab/lessons/lesson08.py": "checks with one",
    "flashlab/run/cascade.py": "takes one",
    "flashlab/verify/rule.py": "turns a top-left mask into one",
    "flashlab/verify/adapter.py": "refuses one with a top-left mask",
    "flashlab/verify/cases.py": "draws some",
    "flashlab/verify/probes.py": "probes some",
    "flashlab/verify/masks.py": "puts one beside a mask",
    "flashlab/verify/dropout.py": "puts one beside dropout",
    "flashlab/verify/scores.py": "probes some",
    "flashlab/verify/ragged.py": "probes some",
    "flashlab/verify/outsiders.py": "calls others' functions",
    "flashlab/verify/kernels.py": "hands its two sides to a kernel's parameters",
    "flashlab/measure/problems.py": "measures one",
    "flashlab/integrations/peers/fa3_wheel.py": "says one in another library's words",
    "flashlab/integrations/peers/flex.py": "says one in another library's words",
    "flashlab/measure/gradients.py": "shows queries of their own few keys",
    "simulator/operations/problems.py": "sanitises one",
    "flashlab/integrations/flash_attn.py": "takes one as another library says it",
    "flashlab/integrations/sdpa.py": "takes one as another library says it",
    "flashlab/integrations/transformers.py": "reads what another library calls one",
    "flashlab/testing.py": "compares with one",
    "flashlab/verify/audit.py": "tells a test's function of one",
    "flashlab/verify/page_mistakes.py": "tries what a wrong kernel makes of one",
    "flashlab/verify/zoo.py": "has kernels that are wrong about one",
}
"""The files that may name the field, and why: to reckon with a window, or to choose some."""


def names(path: Path, field: str) -> bool:
    """Does a file name a field in its code: as an attribute, a keyword, a parameter, a variable or a string?"""
    return any(
        field in (getattr(node, "attr", None), getattr(node, "arg", None), getattr(node, "id", None), getattr(node, "value", None))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    )  # fmt: skip


def test_few_files_name_a_field():
    """Of the fields that a caller says, this one for all: what handles problems of any kind goes by the metadata."""
    paths = [path for folder in ("flashlab", "simulator") for path in (ROOT / folder).rglob("*.py")]
    assert {path.relative_to(ROOT).as_posix() for path in paths if names(path, "window")} == set(KNOW_WINDOWS)
