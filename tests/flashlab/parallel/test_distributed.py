"""Ranks of torch.distributed on gloo, with kernels on the emulator: numbers, bytes, the same bits, and what goes wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from simulator.dtypes import numpy_dtype
from simulator.operations.attention import ATTENTION
from simulator.operations.backward import BACKWARD
from tests.flashlab.parallel.forked import TIMEOUT, Ranks, drawn

pytestmark = [pytest.mark.torch, pytest.mark.compiler]

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.close()


CASES = [
    ("ring", 2, [2, 1], "zigzag", True, "bfloat16"),
    ("all_gather", 2, [1, 1], "zigzag", True, "float32"),
    ("ulysses", 2, [2, 1], "zigzag", True, "float32"),
    ("ring", 2, [2, 2], "contiguous", False, "float32"),
    *(
        (name, 4, heads, layout, causal, dtype)
        for name in ("ring", "all_gather", "ulysses")
        for layout in ("zigzag", "contiguous")
        for causal in (True, False)
        for heads, dtype in (([4, 2], "bfloat16"), ([4, 4], "float32"))
    ),
    ("all_gather", 3, [3, 1], "zigzag", True, "float16"),
    ("ring", 3, [3, 1], "contiguous", True, "float16"),
    ("ring", 1, [2, 1], "zigzag", True, "float32"),
    ("all_gather", 1, [2, 1], "zigzag", True, "float32"),
    ("ulysses", 1, [2, 1], "zigzag", True, "float32"),
]


@pytest.mark.parametrize(
    ("name", "n", "heads", "layout", "causal", "dtype"),
    [pytest.param(*case, marks=[pytest.mark.long] if i > 2 else []) for i, case in enumerate(CASES)],
)
def test_ranks_hold_the_rule(
    ranks: Ranks, tmp_path: Path, name: str, n: int, heads: list[int], layout: str, causal: bool, dtype: Any
) -> None:
    """Outputs, LSEs and gradients, through both; each rank sends what the formula says. In a ring: the same bits twice."""
    p = fl.Problem(
        batch=1,
        heads=heads[0],
        kv_heads=heads[1],
        len_q=48 if n == 3 else 16 * n,
        head_dim=16,
        dtype=dtype,
        causal=causal,
        dlse=True,
    )
    masks: dict[str, Any] = {"causal": causal}
    ended = ranks.run(
        n,
        "scheme",
        folder=str(tmp_path),
        name=name,
        heads=heads,
        length=p.len_q,
        dtype=dtype,
        masks=masks,
        layout=layout,
    )
    assert [each["line"] for each in ended] == [None] * n
    q, k, v, dout = (
        drawn(i, 1, h, p.len_q, 16).astype(numpy_dtype(dtype)) for i, h in enumerate([*heads, heads[1], heads[0]])
    )
    given = {"q": q, "k": k, "v": v}
    truth = ATTENTION.judge(p, given)
    formula = fl.parallel.count(name, p.replace(dlse=False), ranks=n, layout=layout, backward=True)
    for rank in range(n):
        found = dict(np.load(tmp_path / f"{rank}.npz"))
        assert found.pop("sent") == formula.sent[rank]
        back = given | {"dout": dout, "out": found["out"].astype(q.dtype), "lse": found["lse"]}
        back |= {"dlse": drawn(9, 1, heads[0], p.len_q).astype(np.float32)}
        right = BACKWARD.judge(p, back)
        allowed = {**ATTENTION.bounds(p, given, truth), **BACKWARD.bounds(p, back, right)}
        for array, x in found.items():
            off = np.abs(x - {**truth, **right}[array])
            off = np.linalg.norm(off, axis=-1) if x.ndim == 4 else off
            assert (off <= allowed[array]).all(), (array, (off / allowed[array]).max())


@pytest.mark.parametrize(
    ("n", "keys", "interleave", "page_size"),
    [
        (2, 37, 1, None),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((2, 37, 4, 16), (4, 3, 1, None), (2, 90, 16, 16))),
    ],
)
def test_decoding_over_striped_keys(
    ranks: Ranks, tmp_path: Path, n: int, keys: int, interleave: int, page_size: int | None
) -> None:
    """A rank may have no key, and NaN behind the keys of its pages."""
    heads = [4, 2]
    ended = ranks.run(
        n, "decode", folder=str(tmp_path), heads=heads, keys=keys, interleave=interleave, page_size=page_size
    )
    assert [each["line"] for each in ended] == [None] * n
    q, k, v = (drawn(i, 1, h, m, 16).astype(np.float32) for i, (h, m) in enumerate([(4, 1), (2, keys), (2, keys)]))
    out = np.concatenate([np.load(tmp_path / f"{rank}.npz")["out"] for rank in range(n)], axis=1)
    np.testing.assert_allclose(out, fl.naive(q, k, v).out, atol=2e-6)


DISAGREE = {
    "another length": "q.shape of rank 1 = (1, 1, 34, 16): expected (1, 1, 32, 16), as rank 0 has",
    "another dtype": "dtype of rank 1 = 'bfloat16': expected 'float32', as rank 0 has",
    "another mask": "causal of rank 1 = True: expected False, as rank 0 has",
    "does not divide": "rank 1 = q.shape = (1, 1, 33, 16): expected an even number of rows: zigzag deals two chunks to each rank: "
    "expected arrays that it takes, as on the other ranks",
}


@pytest.mark.parametrize("how", [*DISAGREE])
def test_all_ranks_learn_that_they_disagree(ranks: Ranks, tmp_path: Path, how: str) -> None:
    ended = ranks.run(2, "fault", folder=str(tmp_path), how=how, timeout=30)
    assert [each["kind"] for each in ended] == ["UsageError"] * 2
    lines = [each["line"] for each in ended]
    assert lines[0] == DISAGREE[how]
    assert lines[1] == (
        DISAGREE[how] if how != "does not divide" else lines[0].partition(" = ")[2].rpartition(": expected")[0]
    )
    assert max(each["seconds"] for each in ended) < 15
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("how", ["dies", "dies later", "late", "interrupted"])
def test_a_rank_that_is_gone_ends_the_others(ranks: Ranks, tmp_path: Path, how: str) -> None:
    """Within the time-out, with a line of ours, and with nothing returned."""
    ended = ranks.run(2, "fault", folder=str(tmp_path), how=how, timeout=TIMEOUT)
    first, second = ended
    assert first["kind"] == "Interrupted", first
    assert re.match(
        r"a rank didn't come to this call within 4 s|rank 0 of 2: forward 0 was interrupted, nothing is returned: ",
        first["line"],
    )
    assert first["seconds"] < TIMEOUT + 10
    assert second["status"] == (3 if how != "late" else 1)
    assert not [*tmp_path.iterdir()]


@pytest.mark.long
def test_the_command_line_shows_ranks() -> None:
    words = ["--nproc-per-node", "2", "-m", "flashlab.parallel", "--backend", "gloo", "--scheme", "ring"]
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.count("passed") == 2 and "rank 1: relative errors out" in run.stdout


@pytest.mark.long
def test_the_small_model_trains_with_its_rows_on_two_ranks() -> None:
    """20 steps: each loss within 1e-5 of one rank's, or the study fails."""
    words = ["--nproc-per-node", "2", "-m", "studies", "parallel", "train", "--tiny"]
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "20 steps of training by rows of 2 ranks" in run.stdout
