"""The player has words and colours for whatever a built-in algorithm does."""

from __future__ import annotations

import pytest

import flashlab as fl
from flashlab.player.pack import document
from flashlab.player.words import REGISTERS
from flashlab.views.palette import KINDS
from simulator.trace import Trace
from tests.flashlab.player.traces import traced

TRACED = [name for name in fl.CATALOGUE if not name.startswith("softmax_")]
PLAIN = {
    *("mbarriers", "ones", "q_scale", "k_scale", "v_scale", "arrivals", "drawn", "number", "work", "turns", "place"),
    *("block_table", "seq_lens", "units", "slot_mapping", "pairs"),
}
"""What is no matrix or statistic of attention, and is grey."""


def missing(trace: Trace, registers: dict[str, str], colours: dict[str, str]) -> set[str]:
    """The steps, register tiles and tensors of a trace that nothing is said of, or that have no colour."""
    about = {launch["name"]: launch["about"] for launch in document(trace)["launches"]}
    events = trace.events
    steps = {f"{event.launch}: {event.step}" for event in events if event.step not in about[event.launch]}
    tiles = {name for event in events for name in event.values} - registers.keys()
    moved = {transfer.tensor for event in events for transfer in event.transfers} | {n for e in events for n in e.sram}
    return steps | tiles | (moved - colours.keys() - PLAIN)


@pytest.mark.parametrize("algorithm", TRACED)
def test_all_that_an_algorithm_does_has_words_and_colours(algorithm: str) -> None:
    assert missing(traced(algorithm), REGISTERS, KINDS) == set()


def test_what_has_no_words_or_colour_is_found() -> None:
    without = {name: said for name, said in REGISTERS.items() if name != "dk_j"}
    uncoloured = {name: colour for name, colour in KINDS.items() if name != "dout"}
    assert missing(traced("flash2_backward"), without, uncoloured) == {"dk_j", "dout"}


def test_a_gradient_lies_along_what_it_is_of() -> None:
    roles = document(traced("flash2_backward"))["roles"]
    assert {roles[name] for name in ("k", "v", "dk", "dv")} == {"keys"}
    assert {roles[name] for name in ("q", "dq", "dout", "lse", "delta", "dq_sum")} == {"queries"}
