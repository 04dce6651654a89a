"""Traces: what belongs to which step of which block, and where in which text its lines are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from simulator import Problem, Trace, program, random_inputs, simulate
from simulator.trace import HbmShape, SramShape

P = Problem(batch=1, heads=1, len_q=48, head_dim=16, dtype="float32", causal=True)


def record(algorithm: Any) -> Trace:
    trace = simulate(algorithm, *random_inputs(P), causal=True, tile=(16, 16), trace=(0, 0)).trace
    assert trace is not None
    return trace


def test_a_block_begins_with_its_own_values() -> None:
    """What a program sets before its first step of a block is that block's, not the end of the block before."""
    output = [event for event in record("standard").events if event.launch == "standard_output"]
    for event in output:
        assert ("acc" in event.values) == (event.step in ("load_p", "output")) or event.step == "load_p"
    stores = [event for event in output if event.step == "store_o"]
    assert len(stores) == 3 and all(not event.values for event in stores)
    begins = [event for n, event in enumerate(output) if n == 0 or output[n - 1].block != event.block]
    assert all(not event.values["acc"].any() for event in begins)


@program
def helped(m: Any, q: Any, k: Any, v: Any, problem: Any, tile: Any) -> Any:
    out = m.output("out")

    def values_of(block: Any) -> Any:
        return block.fetch(v, block.i, tile.rows)

    for block in m.launch("helped", rows=problem.row_tiles(tile), warps=1):
        x = block.to_registers(block.load(q, block.i, tile.rows))
        block.step("store")
        block.store(out, x + values_of(block), block.i, tile.rows)
    return out


def test_what_comes_before_the_first_step_has_no_name() -> None:
    trace = record(helped)
    assert [(event.step, event.block) for event in trace.events] == [
        (step, (i, 0)) for i in range(3) for step in ("", "store")
    ]
    assert [t.tensor for t in trace.events[2].transfers] == ["q", "q"]


def test_lines_are_in_their_functions_text() -> None:
    """A function within another one is part of its text."""
    trace = record(helped)
    assert list(trace.sources) == ["helped"]
    first, text = trace.sources["helped"]
    lines = text.splitlines()
    store = next(event for event in trace.events if event.step == "store")
    assert lines[store.line - first].strip() == 'block.step("store")'
    found = {transfer.tensor: lines[transfer.line - first].strip() for transfer in store.transfers}
    assert found["v"] == "return block.fetch(v, block.i, tile.rows)" and found["out"].startswith("block.store(out")


def test_functions_of_one_name_from_two_files(tmp_path: Path) -> None:
    bodies: list[Any] = []
    for n in range(2):
        path = tmp_path / f"part{n}.py"
        path.write_text(
            f"def part(m, v, out, problem, tile):\n    for block in m.launch('part{n}', rows=3, warps=1):\n"
            f"        block.step('step{n}')\n        block.store(out, block.fetch(v, block.i, 16), block.i, 16)\n",
            encoding="utf-8",
        )
        names: dict[str, Any] = {}
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), names)
        bodies.append(names["part"])

    @program
    def two(m: Any, q: Any, k: Any, v: Any, problem: Any, tile: Any) -> Any:
        out = m.output("out")
        for body in bodies:
            body(m, v, out, problem, tile)
        return out

    trace = record(two)
    assert list(trace.sources) == ["part", "part'"]
    for event in trace.events:
        first, text = trace.sources[event.source]
        assert f"'{event.step}'" in text.splitlines()[event.line - first]


def test_shapes_of_what_lay_in_hbm_and_sram() -> None:
    trace = record("flash1")
    assert trace.tensors["o"] == HbmShape(48, 16, "float32", "workspace", vector=False)
    assert trace.tensors["l"] == HbmShape(48, 1, "float32", "workspace", vector=True)
    assert trace.tensors["q"] == HbmShape(48, 16, "float32", "input", vector=False)
    assert trace.buffers["k"] == SramShape(16, 16, "float32", 1)
    for event in trace.events:
        assert set(event.sram) <= set(trace.buffers)
    again = Trace.from_dict(trace.to_dict())
    assert (again.tensors, again.buffers) == (trace.tensors, trace.buffers)


def test_a_trace_without_the_newer_keys_is_read() -> None:
    old = record("flash2").to_dict()
    del old["tensors"], old["buffers"]
    for event in old["events"]:
        del event["source"]
        for transfer in event["transfers"]:
            del transfer["source"]
    again = Trace.from_dict(old)
    assert again.tensors == {} and again.events[0].source == ""
    assert np.array_equal(again.events[0].values["acc"], np.zeros((16, 16)))


def test_a_trace_says_what_it_is_and_shows_itself_where_it_can(monkeypatch: Any) -> None:
    trace = record("flash2")
    assert repr(trace) == "<trace of flash2, batch 0, head 0: 54 steps>"
    monkeypatch.setattr(Trace, "renderer", None)
    assert trace._repr_html_() is None
    monkeypatch.setattr(Trace, "renderer", lambda which: f"<b>{len(which.events)}</b>")
    assert trace._repr_html_() == "<b>54</b>"
