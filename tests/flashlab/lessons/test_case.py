"""The case of lessons 03, 04 and 07: its facts are those of the files, and its conclusions follow from them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import flashlab as fl
from flashlab.lessons.case import STATES, a_round, problem, timed, took, waits
from flashlab.lessons.lesson07 import launches_of, measured
from flashlab.measure import results
from simulator import Device
from simulator.catalogue import CATALOGUE
from simulator.names import DType

ROOT = Path(__file__).resolve().parents[3]
SCENE = problem(64, 4096)


def requested(name: str, p: fl.Problem) -> int:
    moved = fl.count(name, p, device="h200").hbm
    return moved.read + moved.write


def test_the_times_are_those_of_the_files():
    sets: tuple[tuple[str, int, DType], ...] = (("unmeasured", 4096, "float16"), ("lengths", 2048, "bfloat16"))
    for condition, length, dtype in sets:
        found = results.latest("blind", ROOT / results.FOLDER, algorithm="flash1", condition=condition)
        assert found is not None
        for row in found.data["rows"]:
            if (row["algorithm"], row["causal"], row["length"]) in ((n, False, length) for n in ("standard", "flash1")):
                p = problem(row["head_dim"], length, dtype)
                assert took(row["algorithm"], p) == row["milliseconds"] / 1e3


@pytest.mark.parametrize("p", timed(), ids=str)
def test_fewer_bytes_and_slower_everywhere(p: fl.Problem):
    """What lesson 03 says of every problem; a reader's conclusion needs each of the three."""
    fewer, longer = requested("standard", p) / requested("flash1", p), took("flash1", p) / took("standard", p)
    assert 1.5 < fewer < 2.6 and 1.19 < longer < 6.05
    assert requested("flash1", p) / took("flash1", p) < 0.4 * requested("standard", p) / took("standard", p)


def test_the_other_suspects_are_where_lesson_04_finds_them():
    assert fl.count("flash1", SCENE, device="h200").launches[0].blocks == 128
    assert launches_of("flash1 bfloat16 L2 1×48×2048×64")[0]["occupancy"] == 4 / 64
    t = {name: fl.timeline(name, SCENE, device="h200") for name in ("standard", "flash1")}
    assert max(t["flash1"].utilisation.values()) < 0.15 and t["standard"].utilisation["copy"] > 0.9
    for name, timeline in t.items():  # the model is near enough to be asked
        assert timeline.seconds == pytest.approx(took(name, SCENE), rel=0.1)
    parts = a_round(t["flash1"])
    assert parts["update_o"] > 0.65 * sum(parts.values())
    assert sum(parts.values()) * 64**2 / t["flash1"].clock == pytest.approx(t["flash1"].seconds, rel=0.02)


def test_one_head_takes_as_long_as_128_and_standard_attention_does_not():
    def by_heads(name: str) -> list[float]:
        heads = [fl.Problem(batch=1, heads=n, len_q=4096, head_dim=64, dtype="float16") for n in (1, 128, 264)]
        return [fl.timeline(name, p, device="h200").seconds for p in heads]

    flash1, standard = by_heads("flash1"), by_heads("standard")
    assert flash1[1] < 1.02 * flash1[0] and standard[1] > 60 * standard[0]
    assert flash1[0] > 100 * standard[0] and flash1[2] < standard[2]


def test_the_model_s_first_answer_was_less_than_half_of_the_time():
    (row,) = (
        row
        for row in measured()["before_flash2"]
        if (row["algorithm"], row["head_dim"], row["length"], row["causal"]) == ("flash1", 64, 4096, False)
    )
    assert row["predicted"] < row["milliseconds"] / 2


def of_the_lesson(first: str, behind: str) -> dict[str, Any]:
    """What lesson 04 defines from `def first` to the line that begins with `behind`, by name."""
    text = (ROOT / "notebooks" / "source" / "04_flash2.md").read_text(encoding="utf-8")
    cell = re.search(rf"\n(def {first}\(.*?)\n{behind}", text, re.DOTALL)
    assert cell
    names: dict[str, Any] = {"fl": fl}
    exec(cell[1], names)
    return names


TILES = ((64, 32), (64, 64), (64, 128), (128, 64), (128, 128))
"""Those of the lesson's table."""


def places(tile: tuple[int, int]) -> dict[str, int]:
    p = fl.Problem(batch=1, heads=8, len_q=4096, head_dim=64, dtype="float16")
    return of_the_lesson("registers", "```")["places"](fl.count("flash2", p, tile=tile, device="h100"))


def test_each_limit_of_a_block_s_places_can_move():
    found = [places(tile) for tile in TILES]
    assert len({room["registers"] for room in found}) > 2 and len({room["SRAM"] for room in found}) > 2
    assert all(min(room, key=lambda name: room[name]) in ("registers", "SRAM") for room in found)


@pytest.mark.nvrtc
@pytest.mark.parametrize("tile", [pytest.param(t, marks=[] if t == (64, 64) else [pytest.mark.long]) for t in TILES])
def test_registers_are_what_the_compiler_gives(tile: tuple[int, int]):
    from flashlab.run.nvrtc import compile_kernel, defines

    p = fl.Problem(batch=1, heads=8, len_q=4096, head_dim=64, dtype="float16")
    config = CATALOGUE["flash2"].program.configure(p, Device.named("h100"), tile)
    compiled = compile_kernel("flash2", defines(config, "float16", 64), arch="sm_90")
    said = of_the_lesson("registers", "```")["registers"](*tile, 64, 32 * config.warps, config.q_in_registers)
    assert min(said, 255) == pytest.approx(compiled.resources["flash2"].registers, rel=0.2)
    assert compiled.spills == 0


def test_what_the_warps_wait_for_is_what_was_measured():
    (row,) = waits("flash1", SCENE)
    assert row["occupancy"] < 0.1 and max(row["busy"].values()) < 0.35
    assert len(waits("standard", SCENE)) == 3
    for seen in measured()["waits"]:
        assert set(list(seen["states"])[:4]) <= set(STATES), seen["launch"]
