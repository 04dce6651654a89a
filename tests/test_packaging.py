"""What is built and installed: wheel and sdist carry the same, and work outside the checkout."""

from __future__ import annotations

import email
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import flashlab

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("flashlab", "simulator", "kernels_cu")
OUTSIDE = ("_flashlab_pytest.py",)
"""pytest's plugin: outside of the packages, since pytest imports it at each start."""
pytestmark = pytest.mark.xdist_group("packaging")  # builds and environments are made once


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(part) for part in command]
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, encoding="utf-8", timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Wheel and sdist, each built from the checkout by the backend itself: no network."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-d", out, cwd=ROOT)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


@pytest.fixture(scope="module", params=["wheel", "sdist"])
def python(request: pytest.FixtureRequest, archives: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment where nothing is installed but one of the archives.

    The dependencies are lent by the environment that runs the tests. A line in a .pth does that without following the
    .pth files there, so that an editable install of the checkout does not come along.
    """
    folder = tmp_path_factory.mktemp(request.param)
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    binaries = folder / ("Scripts" if os.name == "nt" else "bin")
    interpreter = binaries / ("python.exe" if os.name == "nt" else "python")
    purelib = Path(run(interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    archive = archives[request.param]
    if request.param == "sdist":  # installing one means building the wheel that is in it
        with tarfile.open(archive) as tar:
            tar.extractall(folder / "unpacked", filter="data")
        (unpacked,) = (folder / "unpacked").iterdir()
        run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder / "built", cwd=unpacked)
        (archive,) = (folder / "built").glob("*.whl")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", interpreter)
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", archive, cwd=folder)
    lent = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (purelib / "lent.pth").write_text("\n".join(lent), encoding="utf-8")
    return interpreter


NOTEBOOKS = {f"flashlab/notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")}
TOLD = ("docs", "notebooks", "requirements", "studies", "tests")
"""What only the sdist has besides the packages: who builds from it can test it and read it."""


def checkout() -> set[str]:
    """The files of the packages, as `flashlab/api.py`."""
    return {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    } | {*OUTSIDE}


def test_wheel_carries_exactly_the_packages_and_what_lies_outside(archives: dict[str, Path]):
    with zipfile.ZipFile(archives["wheel"]) as wheel:
        names = set(wheel.namelist())
    info = f"flashlab_attention-{flashlab.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {*PACKAGES, *OUTSIDE, info}
    assert NOTEBOOKS and {name for name in names if not name.startswith(info)} == checkout() | NOTEBOOKS
    assert f"{info}/licenses/LICENSE" in names


def test_sdist_carries_the_same_and_its_tests_and_pages(archives: dict[str, Path]):
    with tarfile.open(archives["sdist"]) as sdist:
        names = {name.split("/", 1)[1] for name in sdist.getnames()}
    assert {name for name in names if name.split("/")[0] in (*PACKAGES, *OUTSIDE)} == checkout()
    committed = run("git", "ls-files", *TOLD, cwd=ROOT).split() if (ROOT / ".git").exists() else []
    assert names >= set(committed)
    assert {name for name in names if "/" not in name} - set(TOLD) - set(PACKAGES) == {
        "CHANGELOG.md",
        "CITATION.cff",
        "CONTRIBUTING.md",
        "LICENSE",
        "Makefile",
        "PKG-INFO",
        "README.md",
        "hatch_build.py",
        "pyproject.toml",
        ".gitignore",
        *OUTSIDE,
    }


RELATIVE = re.compile(r"\]\((?!https?:)[^)]*\)")


def test_no_link_dies_on_a_package_index(archives: dict[str, Path]):
    with zipfile.ZipFile(archives["wheel"]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
        shown = str(email.message_from_bytes(wheel.read(name)).get_payload())
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert RELATIVE.findall(text)
    assert RELATIVE.findall(shown) == []
    assert "hardware counter" in shown and "![" not in shown  # nothing to show them from


def test_a_stated_repository_is_where_links_lead():
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    text = "[a](docs/a.md), [b](https://b.org)\n\n![c](c.png)\n\nd\n"
    assert hook.description(text, None) == "a, [b](https://b.org)\n\nd\n"
    assert hook.description(text, "https://host/us/it") == (
        "[a](https://host/us/it/blob/main/docs/a.md), [b](https://b.org)\n\n![c](https://host/us/it/raw/main/c.png)\n\nd\n"
    )


def test_installed_packages_come_from_the_environment(python: Path, tmp_path: Path):
    for package in PACKAGES:
        path = run(python, "-c", f"import {package}; print({package}.__file__)", cwd=tmp_path).strip()
        assert Path(path).is_relative_to(python.parents[1])


def test_installed_version(python: Path, tmp_path: Path):
    code = "import importlib.metadata as m, flashlab; print(m.version('flashlab-attention') == flashlab.__version__)"
    assert run(python, "-c", code, cwd=tmp_path).strip() == "True"


def test_installed_kernels_are_found(python: Path, tmp_path: Path):
    code = "import kernels_cu as k; print(k.source('flash2').is_file(), any(k.include_dir().glob('*.cuh')))"
    assert run(python, "-c", code, cwd=tmp_path).split() == ["True", "True"]


def test_installed_commands_work(python: Path, tmp_path: Path):
    flashlab_command = python.with_name("flashlab" + python.suffix)
    counts = json.loads(run(flashlab_command, "count", "flash2", "--json", cwd=tmp_path))
    assert counts["hbm"]["read"] > 0
    run(flashlab_command, "compare", "--sample", "--out", "pictures", cwd=tmp_path)
    assert list((tmp_path / "pictures").iterdir())


def test_installed_lessons_are_copied(python: Path, tmp_path: Path):
    command = python.with_name("flashlab" + python.suffix)
    found = json.loads(run(command, "lessons", "course", "--json", cwd=tmp_path))
    assert {f"flashlab/notebooks/{name}" for name in found["copied"]} == NOTEBOOKS


def test_installed_plugin_is_found_by_pytest(python: Path, tmp_path: Path):
    assert "verify_attention" in run(python, "-m", "pytest", "--fixtures", cwd=tmp_path)
    code = "import sys, _flashlab_pytest; print('flashlab' in sys.modules, 'numpy' in sys.modules)"
    assert run(python, "-c", code, cwd=tmp_path).split() == ["False", "False"]


def test_foreign_simulator_in_the_way(tmp_path: Path):
    """PyPI has another `simulator`; one line names the file that is in the way."""
    foreign = tmp_path / "simulator.py"
    foreign.write_text("answer = 42\n", encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = [sys.executable, "-c", "import flashlab"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("ImportError: ")
    assert str(foreign) in last
