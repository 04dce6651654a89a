"""The files around the code: workflows, templates, the container. What they say agrees with the code, and what they run works."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import time
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import flashlab

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}")


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def build_hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_pin_actions_and_ask_for_little(path: Path) -> None:
    """A tag may move to other code, a commit can't. No workflow may write without saying so."""
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert "permissions" in workflow
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    used = [step for step in steps if "uses" in step]
    assert used and all(PINNED.fullmatch(step["uses"]) for step in used), used
    assert all(step["with"]["persist-credentials"] is False for step in used if "/checkout@" in step["uses"])
    assert all("timeout-minutes" in job for name, job in workflow["jobs"].items() if name != "deploy")


def test_a_tag_is_no_pin() -> None:
    assert not PINNED.fullmatch("actions/checkout@v4")


def test_what_is_released_is_the_version() -> None:
    """The changelog dates it, the citation names it, and the workflow compares the tag with it."""
    version = flashlab.__version__
    dated = re.search(rf"(?m)^## {re.escape(version)} \((\d{{4}}-\d\d-\d\d)\)$", text("CHANGELOG.md"))
    cited = yaml.safe_load(text("CITATION.cff"))
    assert dated and (cited["version"], str(cited["date-released"])) == (version, dated[1])
    (command,) = re.findall(r"\$\((sed .*)\)\"", text(".github/workflows/release.yml"))
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == version


def test_the_linter_before_a_commit_is_that_of_make_test() -> None:
    (hook,) = yaml.safe_load(text(".pre-commit-config.yaml"))["repos"]
    locked = re.search(r"(?m)^ruff==([\d.]+)", text("requirements/test.txt"))
    assert locked and hook["rev"] == f"v{locked[1]}"


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.name
)
def test_templates_are_forms(path: Path) -> None:
    form: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.name != "config.yml":
        assert {"name", "description", "body"} == set(form)
        assert all({"type", "id", "attributes"} <= set(field) for field in form["body"])


def test_addresses_follow_from_one_value() -> None:
    """While it is empty there are none; where it is set, all begin with it."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        hooks = tomllib.load(file)["tool"]["hatch"]["metadata"]["hooks"]
    assert hooks["custom"]["repository"] == ""
    urls = build_hooks().urls
    assert urls(None) == {}
    assert set(urls("https://host/us/it")) == {"Source", "Documentation", "Changelog", "Issues"}
    assert all(url.startswith("https://host/us/it") for url in urls("https://host/us/it").values())


# the container

OF_THE_SYSTEM = ("apt-get", "useradd", "chown")
"""Lines that change the machine, which no test does."""


def instructions() -> list[tuple[str, str]]:
    joined = re.sub(r"\\\n\s*", "", text("Dockerfile"))
    lines = [line for line in joined.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def test_the_container_ends_with_the_lessons_open() -> None:
    (command,) = [json.loads(rest) for word, rest in instructions() if word == "CMD"]
    assert command[:2] == ["jupyter", "lab"] and (ROOT / command[-1]).is_file()
    assert instructions()[-1][0] == "CMD"
    devcontainer = json.loads(text(".devcontainer/devcontainer.json"))
    assert (ROOT / ".devcontainer" / devcontainer["build"]["dockerfile"]).resolve() == ROOT / "Dockerfile"
    assert devcontainer["postAttachCommand"].endswith(Path(command[-1]).name)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_containers_lines_run_in_an_empty_folder(tmp_path: Path) -> None:
    """What git tracks is copied, the lines run, and JupyterLab serves the first lesson."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    work = tmp_path / "flashlab"
    for name in subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")[:-1]:
        if (ROOT / name).is_file():
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            (work / name).write_bytes((ROOT / name).read_bytes())
    environment = {key: x for key, x in os.environ.items() if not key.startswith(("PYTHON", "PYTEST", "VIRTUAL"))}
    environment["HOME"] = str(tmp_path)
    ran = 0
    for word, rest in instructions():
        if word == "ENV":
            name, _, value = rest.partition("=")
            if name != "HOME":
                environment[name] = re.sub(r"\$\{(\w+)\}", lambda found: environment[found[1]], value)
        if word == "RUN" and not any(name in rest for name in OF_THE_SYSTEM):
            subprocess.run(["sh", "-c", rest], cwd=work, env=environment, check=True, timeout=600)
            ran += 1
    assert ran >= 3
    (command,) = [json.loads(rest) for word, rest in instructions() if word == "CMD"]
    found = subprocess.run(
        ["sh", "-c", f"command -v {command[0]}"], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()
    assert Path(found).is_relative_to(tmp_path)
    root = ["--allow-root"] if os.geteuid() == 0 else []
    environment["JUPYTER_RUNTIME_DIR"] = str(tmp_path / "runtime")
    server = subprocess.Popen(
        [*command, *root, "--port=0"], cwd=work, env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        while not list((tmp_path / "runtime").glob("jpserver-*.json")):
            assert server.poll() is None, (
                f"{shlex.join(command)} ended: {server.stderr.read() if server.stderr else ''}"
            )
            time.sleep(0.2)
    finally:
        server.terminate()
        server.communicate(timeout=60)
