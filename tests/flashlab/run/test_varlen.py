"""Requests with different numbers of new tokens in one call, on a CPU: bits, counts, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.run.emulated import emulate_problem
from simulator.operations.paged import PAGED
from tests.simulator.test_paged import within

pytestmark = pytest.mark.compiler
LENGTHS = [(1, 30), (1, 70), (1, 5), (70, 90), (0, 20), (9, 40), (33, 33)]
ROW = fl.CATALOGUE["flash3_paged"]


def problem(**more: Any) -> fl.Problem:
    sizes: dict[str, Any] = {
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 64,
        "dtype": "float16",
        "page_size": 16,
        "causal": True,
    }
    sizes |= {"lengths": LENGTHS, **more}
    return fl.Problem(batch=len(sizes["lengths"]), varlen=True, **sizes)


def drawn(p: fl.Problem, seed: int = 1) -> dict[str, Any]:
    return PAGED.draw(p, seed)


def attended(arrays: dict[str, Any], **options: Any) -> Any:
    with np.errstate(invalid="ignore"):
        return fl.attention(**arrays, causal=True, backend="emulator", **options)


def same(a: Any, b: Any) -> bool:
    return np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


@pytest.mark.parametrize("page_size", [16, pytest.param(20, marks=pytest.mark.long)])
def test_each_request_has_the_bits_that_it_has_alone(page_size: int) -> None:
    """Beside neighbours whose queries are NaN, too: no other row is seen, not even by a warp that decides to rescale."""
    p = problem(page_size=page_size)
    arrays = drawn(p)
    out, lse = attended(arrays, lse=True)
    assert within({"out": out, "lse": lse}, p, arrays)
    for b in (3, 5):
        rows = slice(*p.cu_seqlens_q[b : b + 2])
        alone = {
            **arrays, "q": arrays["q"][:, :, rows], "block_table": arrays["block_table"][b : b + 1],
            "seq_lens": arrays["seq_lens"][b : b + 1],
        }  # fmt: skip
        del alone["cu_seqlens_q"]
        found, logs = attended(alone, algorithm="flash3_paged", lse=True)
        assert same(found, out[:, :, rows]) and same(logs, lse[:, :, rows])
        others = arrays | {"q": np.full_like(arrays["q"], np.nan)}
        others["q"][:, :, rows] = arrays["q"][:, :, rows]
        assert same(attended(others)[:, :, rows], out[:, :, rows])


@pytest.mark.parametrize(
    ("head_dim", "sms"),
    [(64, 2), (256, 132), *(pytest.param(*case, marks=pytest.mark.long) for case in ((64, 132), (256, 2)))],
)
def test_every_byte_is_the_formulas(head_dim: int, sms: int) -> None:
    """With few SMs a block has many places, empty ones among them. A wide head leaves each block one place."""
    p = problem(head_dim=head_dim, lengths=[*LENGTHS, (0, 0), (64, 64), (0, 3), (128, 128)])
    arrays = drawn(p)
    device = fl.DEVICES["h100"].replace(sms=sms)
    with np.errstate(invalid="ignore"):
        run = emulate_problem(ROW, p, arrays, lse=True, tile=(64, 64) if head_dim == 64 else None, device=device)
    assert run.complaints() == []
    assert within(dict(run.outputs), p, arrays)


def test_the_lengths_may_be_read_from_the_arrays() -> None:
    p = problem()
    arrays = drawn(p)
    unknown = PAGED.problem(arrays, causal=True)
    assert unknown.lengths is None and unknown.pairs != p.pairs
    assert PAGED.settled(unknown, arrays).pairs == p.pairs
    with np.errstate(invalid="ignore"):
        run = fl.simulate("flash3_paged", **arrays, causal=True, lse=True)
    assert (
        run.counts.hbm == fl.count("flash3_paged", p.replace(pages=unknown.pages, len_kv=unknown.len_kv), lse=True).hbm
    )
    grids = {fl.count("flash3_paged", x).launches[0].blocks for x in (p, unknown)}
    assert len(grids) == 1  # it follows from the sum and the number of requests


@pytest.mark.parametrize(
    ("decodes", "given_out"),
    [(3, False), *(pytest.param(*case, marks=pytest.mark.long) for case in ((0, False), (1, True), (3, True)))],
)
def test_the_first_requests_may_be_decoded_apart(decodes: int, given_out: bool) -> None:
    p = problem()
    arrays = drawn(p)
    whole, logs = attended(arrays, lse=True)
    more: dict[str, Any] = {"out": np.zeros_like(arrays["q"])} if given_out else {}
    out, lse = attended(arrays, num_decodes=decodes, lse=True, **more)
    assert out is more.get("out", out)
    rest = slice(decodes, None)
    assert same(out[:, :, rest], whole[:, :, rest]) and same(lse[:, :, rest], logs[:, :, rest])
    assert within({"out": out, "lse": lse}, p, arrays)
    one = {name: arrays[name] for name in "kv"}
    for b in range(decodes):
        own = {name: arrays[name][b : b + 1] for name in ("block_table", "seq_lens")}
        found = attended({**one, **own, "q": arrays["q"][:, :, b : b + 1]})
        assert same(found, out[:, :, b : b + 1])
    assert same(attended(arrays, num_decodes=decodes), out)


def test_all_may_be_decoded() -> None:
    p = problem(lengths=[(1, n) for n in (40, 3, 0)])
    arrays = drawn(p)
    out, lse = attended(arrays, num_decodes=3, lse=True)
    assert within({"out": out, "lse": lse}, p, arrays)


def test_it_moves_less_than_padding_in_front() -> None:
    """A chunk of 512 and 63 decodes. Requests that are all padded to 512 queries move more, and multiply far more."""
    lengths = [(512, 4608), *[(1, 4096)] * 63]
    sizes: dict[str, Any] = {
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "dtype": "bfloat16",
        "page_size": 16,
        "causal": True,
        "batch": 64,
    }
    step = fl.count("flash3_paged", fl.Problem(**sizes, lengths=lengths, varlen=True))
    padded = fl.count("flash3_paged", fl.Problem(**sizes, lengths=[(512, n) for _, n in lengths]))
    assert padded.hbm.read > 3 * step.hbm.read and padded.flops.matmul > 3 * step.flops.matmul


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("it begins late", {"cu_seqlens_q": [1, 2, 3, 73, 73, 82, 115]}, r"cu_seqlens_q.shape"),
    ("it doesn't begin at 0", {"cu_seqlens_q": [1, 1, 2, 3, 73, 73, 82, 115]}, r"cu_seqlens_q\[0\] = 1: expected 0"),
    ("it falls", {"cu_seqlens_q": [0, 1, 2, 3, 2, 73, 82, 115]}, r"cu_seqlens_q\[4\] = 2: expected 3 to 115"),
    ("it ends early", {"cu_seqlens_q": [0, 1, 2, 3, 73, 73, 82, 114]}, r"cu_seqlens_q\[7\] = 114: expected 115"),
    ("too many decodes", {"num_decodes": 8}, "num_decodes = 8: expected at most 7"),
    ("no decode", {"num_decodes": 4}, "num_decodes = 4: expected fewer: the first 4 requests have other numbers"),
    ("decodes below 0", {"num_decodes": -1}, "num_decodes = -1"),
    ("half a decode", {"num_decodes": 0.5}, "num_decodes = 0.5"),
    ("decodes of a uniform call", {"cu_seqlens_q": None, "num_decodes": 1}, "num_decodes = 1: expected None without"),
    ("no table", {"block_table": None}, "block_table = None"),
    ("no pages", {"block_table": None, "seq_lens": None}, "cu_seqlens_q = ndarray: expected None without a block_table"),
    ("a batch of requests", {"q": np.zeros((7, 2, 1, 64), np.float16)}, r"q.shape = \(7, 2, 1, 64\): expected \(1, heads"),
    ("paged", {"algorithm": "paged"}, "varlen = True: expected nothing: paged knows"),
    ("one algorithm for two launches", {"algorithm": "paged", "num_decodes": 1}, "algorithm = 'paged'"),
    ("drafts", {"draft_mask": np.zeros((7, 115), np.uint32)}, "varlen = True"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_a_wrong_call_is_one_line(change: dict[str, Any], message: str) -> None:
    arrays = drawn(problem())
    given = {**arrays, **{name: np.array(x, np.int32) if isinstance(x, list) else x for name, x in change.items()}}
    with pytest.raises(fl.UsageError, match=message) as error:
        attended(given)
    assert "\n" not in str(error.value)


def test_a_plan_is_for_the_sum_and_wants_the_offsets() -> None:
    p = problem()
    arrays = drawn(p)
    plan = fl.plan("flash3_paged", PAGED.problem(arrays, causal=True), backend="emulator", lse=True)
    with np.errstate(invalid="ignore"):
        assert within(plan.run(arrays), p, arrays)
    with pytest.raises(fl.UsageError, match="cu_seqlens_q = None: expected an array"):
        plan.run({name: x for name, x in arrays.items() if name != "cu_seqlens_q"})


def test_lengths_of_a_problem_are_checked() -> None:
    for change, message in (
        ({"len_q": 7}, r"lengths = 115 queries in all: expected 7, the len_q"),
        ({"page_size": None}, "varlen = True: expected False without a page_size"),
        ({"len_kv": 50}, "lengths = 90 keys: expected up to len_kv = 50"),
    ):
        with pytest.raises(fl.UsageError, match=message):
            problem(**change)
