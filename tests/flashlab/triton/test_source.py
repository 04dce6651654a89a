"""The kernels in Triton as text: few lines, the tile program's steps in its order, and nothing that flashlab imports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import flashlab as fl
from flashlab.player.sources import kernels_of, marks
from flashlab.run import abi
from flashlab.triton import source
from tests.flashlab.player.traces import small
from tests.flashlab.run.fake import parameters

NAMES = sorted(path.stem for path in source("flash2_triton").parent.glob("*_triton.py"))
MOST_LINES = 49


def code(text: str) -> list[str]:
    """The lines of a kernel and its helpers, without comments and blank ones."""
    body = text[text.index("@triton.jit") :]
    return [line for line in body.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def test_every_algorithm_in_triton_has_its_kernel() -> None:
    assert sorted(fl.catalogue.with_kernels(language="triton")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_it_is_short(name: str) -> None:
    lines = code(source(name).read_text(encoding="utf-8"))
    assert len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("name", NAMES)
def test_steps_are_the_tile_programs(name: str) -> None:
    """Each once, in the order in which the tile program first takes them; each has lines, and no two share one."""
    steps = list(dict.fromkeys(event.step for event in small(name).events))
    text = source(name).read_text(encoding="utf-8")
    found = marks(text)
    assert list(found) == steps
    assert [len(places) for places in found.values()] == [1] * len(steps)
    assert len(re.findall("step:", text)) == len(steps)
    taken = sorted(line for ((first, last, _),) in found.values() for line in range(first, last + 1))
    assert len(taken) == len(set(taken)) and all(last > first for ((first, last, _),) in found.values())


def test_a_step_out_of_order_is_seen() -> None:
    text = source("flash2_triton").read_text(encoding="utf-8")
    swapped = (
        text.replace("step: load_k", "step: x")
        .replace("step: load_v", "step: load_k")
        .replace("step: x", "step: load_v")
    )
    assert list(marks(swapped)) != list(marks(text))


def test_a_step_ends_with_its_function_or_before_a_loop() -> None:
    lines = ["def f(x):", "    # step: a", "    y = x", "    # why", "    for i in x:", "        # step: b (ahead)"]
    text = "\n".join([*lines, "        y += i", "", "", "def g(x):", "    pass"])
    assert marks(text) == {"a": [(2, 3, "")], "b": [(6, 7, "ahead")]}


@pytest.mark.parametrize("name", NAMES)
def test_the_player_shows_it(name: str) -> None:
    (kernel,) = {kernel.name for kernel in kernels_of(small(name), None).values()}
    assert kernel == f"{name}.py"
    assert kernels_of(small("flash1"), name)["flash1"].name == f"{name}.py"


@pytest.mark.parametrize("name", NAMES)
def test_a_launch_knows_every_parameter(name: str) -> None:
    (kernel,) = fl.CATALOGUE[name].kernels
    counts = fl.count(name, fl.Problem(batch=1, heads=1, len_q=8, head_dim=16, dtype="float16"))
    assert set(parameters(source(name), kernel.entry)) <= set(abi.triton_parameters(counts))


def test_a_kernel_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"name='flash9': no such kernel; there are flash2_triton"):
        source("flash9")
    mine = tmp_path / "mine.py"
    mine.touch()
    assert source(str(mine)) == mine
