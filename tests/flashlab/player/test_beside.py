"""What lies beside S: keys in pages, requests with a prefix in common, and partial results."""

from __future__ import annotations

import numpy as np
import pytest

import flashlab as fl
from flashlab.player.grid import Cell, Scores
from flashlab.player.parts import Part, parts, pool
from tests.flashlab.player.test_grid import played
from tests.flashlab.player.traces import shown, small

PAGED = ("paged", "flash3_paged", "mla_paged", "mla_hopper_paged")
SPLIT = ("flash_decoding", "paged", "mla", "mla_paged", "mla_hopper", "mla_hopper_paged")


@pytest.mark.parametrize("algorithm", PAGED)
def test_keys_of_a_pool_are_keys_of_their_request(algorithm: str) -> None:
    trace = shown(algorithm)
    ((_, grid, states), *_) = played(trace)
    assert grid is not None and set(np.unique(states[-1])) <= {Cell.DONE, Cell.SKIPPED}
    events = [event for event in trace.events if event.launch == trace.events[0].launch]
    for event, now in zip(events, states, strict=True):
        assert (now == Cell.WORK).any() or event.step != "scores"


@pytest.mark.parametrize("algorithm", PAGED)
def test_the_pool_says_whose_page_it_is(algorithm: str) -> None:
    trace = shown(algorithm)
    found, problem = pool(trace), fl.Problem(**trace.problem)
    arrays = fl.CATALOGUE[algorithm].operation.draw(problem)
    assert found is not None and found["pages"] == problem.pages and found["own"] == 0
    for table, line, keys in zip(found["tables"], arrays["block_table"], problem.seq_lens, strict=True):
        assert table == line[: -(-keys // problem.page_size)].tolist() != sorted(table)
    owned = [page for table in found["tables"] for page in table]
    assert len(set(owned)) == len(owned) < problem.pages
    moved = {x.tensor for event in trace.events for x in event.transfers if x.tensor in found["tensors"]}
    assert moved == {"latent"} if "mla" in algorithm else moved == {"k", "v"}
    assert pool(small("flash2")) is None


@pytest.mark.parametrize("algorithm", SPLIT)
def test_chunks_are_merged(algorithm: str) -> None:
    """A block of flash_decoding has runs of two chunks here, whose parts it merges in registers."""
    trace = shown(algorithm)
    found = parts(trace, Scores.of(trace))
    assert found is not None
    keys = Scores.of(trace).keys
    width = 128 if algorithm == "flash_decoding" else 64
    many = -(-keys // width)
    assert many >= 2 and found.boxes == [((n * width, min(keys, (n + 1) * width)), 0) for n in range(many)]
    stored = [states for event, states in zip(trace.events, found.states, strict=True) if event.step == "store_partial"]
    assert stored == [(*[Part.THERE] * n, Part.WRITTEN, *[Part.NONE] * (many - n)) for n in range(many)]
    merged = [states for event, states in zip(trace.events, found.states, strict=True) if event.step == "merge"]
    assert all(states[:many] == (Part.READ,) * many for states in merged) and merged
    assert found.states[-1] == (*[Part.THERE] * many, Part.WRITTEN)


def test_a_node_of_many_chunks_is_above_them() -> None:
    """Beyond 32 runs of two chunks a node is written, too."""
    p = fl.Problem(batch=1, heads=1, len_q=1, len_kv=80 * 64, head_dim=16, dtype="float16")
    trace = fl.simulate("flash_decoding", *fl.random_inputs(p), tile=(16, 16), trace=(0, 0)).trace
    assert trace is not None
    found = parts(trace, Scores.of(trace))
    assert found is not None
    assert [box for box in found.boxes if box[1]] == [((0, 4096), 1), ((4096, 5120), 1)]


def test_keys_of_one_chunk_have_no_parts() -> None:
    assert parts(small("flash_decoding"), Scores.of(small("flash_decoding"))) is None
    assert parts(small("flash2"), Scores.of(small("flash2"))) is None


def test_requests_with_a_prefix_share_its_tiles_and_have_rows_of_their_own() -> None:
    trace = shown("cascade")
    scores = Scores.of(trace)
    own = fl.Problem(**trace.problem).seq_lens
    assert (scores.queries, scores.keys, scores.prefix) == (4, 96 + max(own), 96)
    prefix, suffix, merge = played(trace)
    assert prefix[1] is not None and (prefix[1].rows, prefix[1].cols) == (1, 9)
    assert prefix[2][-1].tolist() == [[Cell.DONE] * 6 + [Cell.NOT_YET] * 3]
    ends = [[Cell.DONE] * (6 + -(-n // 16)) + [Cell.SKIPPED] * (3 - -(-n // 16)) for n in own]
    assert suffix[2][-1].tolist() == merge[2][0].tolist() == merge[2][-1].tolist() == ends
    requests = [event.request for event in trace.events if event.launch == "cascade_suffix"]
    assert requests == sorted(requests) and set(requests) == {0, 1, 2, 3}
    found = parts(trace, scores)
    assert found is not None and found.boxes == [((0, 96), 0), ((96, 96 + max(own)), 0)]


def test_a_traced_request_computes_what_the_whole_batch_does() -> None:
    trace, op = shown("cascade"), fl.CATALOGUE["cascade"].operation
    problem = fl.Problem(**trace.problem)
    out = fl.simulate("cascade", **op.draw(problem), causal=True, tile=(16, 16), device="h100").out
    rows = {event.request: event.values["acc"] for event in trace.events if event.step == "normalize"}
    for request, row in rows.items():
        assert np.abs(row[0] - out[request, 0, 0].astype(np.float32)).max() < 2e-3  # out is rounded to 16 bits
    assert list(rows) == [0, 1, 2, 3]


def test_a_window_leaves_out_what_lies_before_it_in_the_prefix() -> None:
    p = fl.Problem(batch=2, heads=1, len_q=1, len_kv=32, len_prefix=96, head_dim=16, dtype="float16", window=(60, 0))
    arrays = fl.CATALOGUE["cascade"].operation.draw(p)
    trace = fl.simulate("cascade", **arrays, window=(60, 0), tile=(16, 16), trace=(0, 0)).trace
    assert trace is not None
    prefix = played(trace)[0]
    # the query sits at key 127 and sees 67 to 127
    assert prefix[2][-1].tolist() == [[Cell.SKIPPED] * 4 + [Cell.DONE] * 2 + [Cell.NOT_YET] * 2]
