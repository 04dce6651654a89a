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
HOUSE = (
    "__main__",
    "cli",
    "__init__",
    "lessons measure testing",
    "verify",
    "parallel serve",
    "integrations player",
    "run",
    "emulator views",
    "triton base",
)
"""The rooms of `flashlab/`, its folders and modules, by floor. The highest comes first. A room imports from lower floors only."""
FLOORS = {room: floor for floor, rooms in enumerate(HOUSE) for room in rooms.split()}


def python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout


def named(path: Path) -> Iterator[tuple[int, str]]:
    """All that a file imports, wherever in it: lines and dotted names. A text may be the name of a module, for `import_module`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path}:{node.lineno} imports relative to itself"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Constant) and (found := re.match(r"flashlab\.(\w+)[\w.]*\Z", str(node.value))):
            if found[1] in FLOORS:
                yield node.lineno, found[0]


def imports(path: Path) -> set[str]:
    """The top-level names of what a file imports."""
    return {name.split(".")[0] for _, name in named(path)}


def upward(root: Path) -> Iterator[str]:
    """The imports between rooms of `root`/flashlab that don't run down, in words."""
    for path in sorted((root / "flashlab").rglob("*.py")):
        room = path.relative_to(root / "flashlab").parts[0].removesuffix(".py")
        for line, name in named(path):
            package, _, rest = name.partition(".")
            there = rest.split(".")[0]
            there = there if there in FLOORS else "__init__"
            if package == "flashlab" and there != room and FLOORS[there] <= FLOORS[room]:
                yield f"{path.relative_to(root).as_posix()}:{line} imports {name}, which isn't below"


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
    assert set[str]().union(*map(imports, sources("simulator"))) <= allowed


def test_imports_between_rooms_run_down():
    """Those in functions, and those for types alone, too. Who adds a room gives it a floor."""
    assert list(upward(ROOT)) == []


def test_an_import_upward_is_named(tmp_path: Path):
    for name, text in {
        "base/late.py": "def late():\n    from flashlab.run import plan",
        "base/package.py": "import flashlab as fl",
        "base/sideways.py": "import flashlab.triton",
        "base/table.py": "WHERE = {'attention': 'flashlab.run.call'}",
        "base/typed.py": "if TYPE_CHECKING:\n    from flashlab import Problem",
        "run/down.py": "from flashlab.base import late\nfrom flashlab.run import up\nSAID = 'flashlab.exe', 'flashlab.run runs it'",
    }.items():
        path = tmp_path / "flashlab" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert list(upward(tmp_path)) == [
        "flashlab/base/late.py:2 imports flashlab.run.plan, which isn't below",
        "flashlab/base/package.py:1 imports flashlab, which isn't below",
        "flashlab/base/sideways.py:1 imports flashlab.triton, which isn't below",
        "flashlab/base/table.py:1 imports flashlab.run.call, which isn't below",
        "flashlab/base/typed.py:2 imports flashlab.Problem, which isn't below",
    ]


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
    assert len(loaded) <= 89, sorted(loaded)
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
    said = [path for path in rooms if "studies" in path.read_text(encoding="utf-8")]  # few are parsed
    assert [path.relative_to(ROOT).as_posix() for path in said if "studies" in imports(path)] == []


def test_text_names_the_distribution():
    """PyPI's `flashlab` belongs to strangers."""
    assert lines_matching(r"\b(install|(?<!\.)add)\b[^&;|#]*(?<![\w./-])flashlab(?![-\w./:])", "flashlab") == []


def test_text_names_no_machine():
    words = ("/work/", "/tmp/", "/root/", "/home/", "/Users/", "$OUT")
    assert lines_matching(r"(?<![\w.<}])/(work|tmp|root|home(?!/\$)|Users)/|\$OUT\b", *words) == []


def test_the_version_is_the_same_everywhere():
    assert re.search(r"(?m)^version: (\S+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"))[1] == fl.__version__
    assert f"## {fl.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
