"""The design's rules about what imports what, what an import costs, and what the text of the project says."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import flashlab as fl
import simulator

ROOT = Path(__file__).resolve().parents[1]
HERE = Path(__file__).resolve()
SLOW = {"cupy", "hypothesis", "jax", "matplotlib", "rich", "safetensors", "torch", "triton", "typer"}
"""What costs import time, and waits until it is asked for."""


def python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout


def imports(path: Path) -> Iterator[str]:
    """The top-level names of all that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def tracked() -> list[Path]:
    """The project's text files: what git tracks."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in names.split("\0") if name]
    return [path for path in paths if path.is_file() and b"\0" not in path.read_bytes()]


def lines_matching(pattern: str, *words: str) -> list[str]:
    """Where a pattern is found. It is looked for only in lines that have one of the words, which is quick."""
    texts = ((path, path.read_text(encoding="utf-8")) for path in tracked() if path != HERE)
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path, text in texts
        if any(word in text for word in words)
        for number, line in enumerate(text.splitlines(), 1)
        if any(word in line for word in words) and re.search(pattern, line)
    ]


def test_simulator_is_the_lower_layer_and_needs_little():
    """threadpoolctl, beside NumPy and ml_dtypes: without it BLAS's threads and the simulator's own fight for the cores."""
    allowed = {*sys.stdlib_module_names, "simulator", "numpy", "ml_dtypes", "threadpoolctl"}
    assert {name for path in sources("simulator") for name in imports(path)} <= allowed


def test_import_loads_nothing_slow():
    code = f"import flashlab, sys; print(*sorted(set(sys.modules) & {SLOW!r}))"
    assert python(code).split() == []


def test_import_loads_few_modules():
    """A bound on the work, for a time would depend on the machine: what is left costs about 0.2 s.

    What each algorithm has of its own isn't bounded, since the catalogue grows.
    """
    code = "import flashlab, sys; print(*(n for n in sys.modules if n.split('.')[0] in ('flashlab', 'simulator')))"
    own = ("simulator.programs.", "simulator.formulas.", "simulator.time.schedules.", "simulator.algorithms.")
    loaded = [name for name in python(code).split() if not name.startswith(own)]
    assert len(loaded) <= 88, sorted(loaded)
    assert not {
        name
        for name in loaded
        if name.startswith(("flashlab.run", "flashlab.measure", "flashlab.cli", "flashlab.views"))
    }


def test_public_names_are_sorted_and_all_there():
    assert sorted(fl.__all__) == sorted(set(fl.__all__))
    assert set(fl.__all__) <= set(dir(fl))
    for name in fl.__all__:
        getattr(fl, name)


def test_a_package_does_not_hide_the_function_of_its_name():
    """`from flashlab.verify import Case` binds the package as an attribute of `flashlab`; `fl.verify` must stay the function."""
    rooms = [
        name
        for name in fl.__all__
        if (ROOT / "flashlab" / name).is_dir() or (ROOT / "flashlab" / f"{name}.py").exists()
    ]
    assert rooms == ["player", "verify"]
    code = "import importlib, flashlab as fl\n"
    code += f"for name in {rooms}: importlib.import_module('flashlab.' + name + '.page' * (name == 'player'))\n"
    code += f"print(*(type(getattr(fl, name)).__name__ for name in {rooms}))"
    assert python(code).split() == ["function"] * len(rooms)


@pytest.mark.parametrize("name", [f"{module.__name__}.{name}" for module in (fl, simulator) for name in module.__all__])
def test_every_public_name_has_an_example(name: str):
    module, _, attribute = name.rpartition(".")
    thing = getattr(sys.modules[module], attribute)
    if inspect.isclass(thing) or inspect.isroutine(thing):
        assert ">>>" in (thing.__doc__ or ""), f"{name}'s docstring has no example"


@pytest.mark.parametrize("name", fl.CATALOGUE)
def test_an_algorithm_has_its_rooms(name: str):
    row = fl.CATALOGUE[name]
    program = "softmax" if name.startswith("softmax_") else name  # the vector programs share a file
    operation = type(row.operation).__module__.replace(".", "/")
    row_of = re.sub(r"_\d$", "_rungs", program)  # rungs share a file, too
    rooms = {f"simulator/programs/{program}.py", f"simulator/algorithms/{row_of}.py", f"{operation}.py"}
    folder, ending = ("flashlab/triton", "py") if row.language == "triton" else ("kernels_cu", "cu")
    theirs = {kernel.source for kernel in row.kernels}
    shared = row.operation.in_pages or theirs <= {
        row.follows
    }  # the plain one's, or the rung's below, compiled in another way
    sources = theirs if shared else theirs | {name}
    rooms |= {f"{folder}/{source}.{ending}" for source in sources}
    rooms |= {f"simulator/time/schedules/{name}.py"} if row.schedule else set()
    assert {room for room in rooms if not (ROOT / room).is_file()} == set()


def test_the_library_needs_no_study():
    """What a user needs has a room; studies are for maintainers, in a checkout. `results` looks for them by name."""
    rooms = sources("flashlab", "simulator", "kernels_cu", "notebooks")
    named = [path for path in rooms if "studies" in path.read_text(encoding="utf-8")]  # few are parsed
    assert [path.relative_to(ROOT).as_posix() for path in named if "studies" in imports(path)] == []


def test_text_names_the_distribution():
    """PyPI's `flashlab` belongs to strangers."""
    assert lines_matching(r"\b(install|(?<!\.)add)\b[^&;|#]*(?<![\w./-])flashlab(?![-\w./:])", "flashlab") == []


def test_text_names_no_machine():
    words = ("/work/", "/tmp/", "/root/", "/home/", "/Users/", "$OUT")
    assert lines_matching(r"(?<![\w.<}])/(work|tmp|root|home(?!/\$)|Users)/|\$OUT\b", *words) == []


def test_the_version_is_the_same_everywhere():
    assert re.search(r"(?m)^version: (\S+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"))[1] == fl.__version__
    assert f"## {fl.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
