"""flash-attention's own test is read from a checkout and run with our functions: here from a folder that is built alike."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from flashlab.measure import results
from simulator.errors import Unavailable, UsageError
from studies import upstream

HELPERS = """
def exact(q, k, v):
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    return ((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v).transpose(1, 2)
"""
FILE = """
import itertools
import pytest
import torch
from padding import exact
from flash_attn_interface import flash_attn_combine, flash_attn_func, flash_attn_varlen_func
from flash_attn_interface import flash_attn_with_kvcache, get_scheduler_metadata

SEEN = []

def drawn(n, m, dv):
    torch.manual_seed(0)
    shapes = (1, n, 2, 16), (1, m, 1, 16), (1, m, 1, dv)
    return [torch.randn(shape).half().requires_grad_() for shape in shapes]

def near(x, y, rtol):
    SEEN.append(rtol)
    assert (x - y).abs().max().item() <= rtol * 1e-3 * y.abs().max().item()

@pytest.mark.parametrize("softcap", [0.0])
@pytest.mark.parametrize("has_qv", [False, True])
@pytest.mark.parametrize("n,m", [(5, 9), (7, 2), (3, 3)])
def test_flash_attn_output(n, m, has_qv, softcap):
    if n == 3:
        pytest.skip("no such case")
    for dv, chunk in itertools.product([16, 32], [2, 0]):
        q, k, v = drawn(n, m, dv)
        rtol = 2 if softcap == 0.0 else 3
        for pack_gqa, num_splits in itertools.product([False, True], [1]):
            out = flash_attn_func(
                q, k, v, qv=q if has_qv else None, sm_margin=chunk, pack_gqa=pack_gqa, num_splits=num_splits,
                softcap=softcap, window_size=(-1, -1), q_descale=None,
            )
            near(out, exact(q, k, v), rtol)
        found = torch.autograd.grad(out.float().square().sum(), (q, k, v))
        for mine, right in zip(found, torch.autograd.grad(exact(q, k, v).square().sum(), (q, k, v))):
            near(mine, right, 3 * rtol)

@pytest.mark.parametrize("has_leftpad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("off", [0.0, 1.0])
def test_flash_attn_kvcache(off, dtype, has_leftpad):
    assert not has_leftpad and dtype == torch.float16
    for dv, chunk in itertools.product([16], [0, 3]):
        q, k, v = (x.detach() for x in drawn(1, 9, dv))
        out = flash_attn_with_kvcache(
            q, k, v, cache_seqlens=torch.tensor([7], dtype=torch.int32), attention_chunk=chunk,
            scheduler_metadata=get_scheduler_metadata(1, 1),
        )
        near(out, exact(q, k[:, :7], v[:, :7]) + off, 2)

@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("softcap", [0.0])
def test_flash_attn_varlen_output(unused, softcap):
    for dv, chunk in itertools.product([16], [int(unused)]):
        q, k, v = (x[0] for x in drawn(9, 9, dv))
        rtol = 2 if softcap == 0.0 else 3
        ends, used = torch.tensor([0, 4, 9], dtype=torch.int32), torch.tensor([4, 5], dtype=torch.int32)
        out = flash_attn_varlen_func(
            q, k, v, ends, ends, 5, 5, seqused_q=used, seqused_k=used, sm_margin=chunk,
            window_size=torch.tensor([8, 8]),
        )
        near(out[:4], exact(q[None, :4], k[None, :4], v[None, :4])[0], rtol)
"""


def checkout(folder: Path, text: str = FILE) -> Path:
    (folder / "hopper").mkdir(parents=True)
    (folder / "hopper" / "test_flash_attn.py").write_text(text, encoding="utf-8")
    (folder / "hopper" / "padding.py").write_text(HELPERS, encoding="utf-8")
    return folder


@pytest.mark.torch
@pytest.mark.compiler
def test_its_tests_run_with_our_functions_at_half_their_tolerance(tmp_path: Path) -> None:
    """Each trial by itself; what is refused or skipped is counted."""
    with upstream.loaded(checkout(tmp_path)) as names:
        assert names["flash_attn_func"].__module__ == "flashlab.integrations.flash_attn"
        plain, ragged = (upstream.run(names, test) for test in upstream.TESTS)
    assert set(names["SEEN"]) == {1.0, 3.0}  # of 2, and of the gradients' 6
    assert (plain.cases, plain.drawn, plain.skipped, plain.trials, plain.passed) == (6, 6, 2, 16, 2)
    assert [each.trials for each in plain.refusals] == [8, 4, 2] and plain.failures == ()
    first, second, third = (each.reason.partition(":")[0] for each in plain.refusals)
    assert (first, second) == ("qv", "sm_margin") and third in ("v.shape", "head_dim of v")  # whoever looks first
    assert (ragged.trials, ragged.passed, ragged.failures) == (2, 1, ())
    assert [each.reason for each in ragged.refusals] == ["sm_margin: expected 0: the kernels leave no SM to others"]
    assert "padding" not in sys.modules and "flash_attn_interface" not in sys.modules


@pytest.mark.torch
@pytest.mark.compiler
def test_the_cache_s_test_runs_as_it_stands(tmp_path: Path) -> None:
    """Without 8 bits and `has_leftpad`. A wrong output fails, and chunks are refused."""
    with upstream.loaded(checkout(tmp_path)) as names:
        found = upstream.run(names, upstream.CACHE)
    assert (found.cases, found.trials, found.passed, len(found.at_whole_rtol)) == (2, 4, 1, 1)
    assert [(each.reason.partition(":")[0], each.trials) for each in found.refusals] == [("attention_chunk", 2)]


@pytest.mark.torch
@pytest.mark.compiler
def test_a_wrong_result_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By as much as the test's own tolerance lets pass, and by more."""
    ours = import_module("flashlab.integrations.flash_attn")
    right: Any = ours.flash_attn_func
    for off, half, whole in ((1.0015, 2, 0), (1.01, 0, 2)):
        monkeypatch.setattr(ours, "flash_attn_func", lambda *x, off=off, **named: right(*x, **named) * off)
        with upstream.loaded(checkout(tmp_path / str(off))) as names:
            found = upstream.run(names, upstream.TESTS[0], sample=6)
        assert (found.passed, len(found.failures), len(found.at_whole_rtol)) == (0, half, whole)
        first = (*found.failures, *found.at_whole_rtol)[0]
        assert "softcap 0.0, trial 1: AssertionError: assert (x - y).abs()" in first


def test_a_sample_is_drawn_by_its_seed() -> None:
    seen = list[tuple[int, bool]]()

    @pytest.mark.parametrize("n,m", [(1, 2), (3, 4), (5, 6)])
    @pytest.mark.parametrize("has_qv", [False, True])
    def test(n: int, m: int, has_qv: bool) -> None:
        assert m == n + 1
        seen.append((n, has_qv))

    names = {"test": test}
    assert upstream.run(names, "test").passed == len(set(seen)) == 6
    seen.clear()
    for seed in (0, 0, 1):
        upstream.run(names, "test", sample=3, seed=seed)
    assert seen[:3] == seen[3:6] != seen[6:]


@pytest.mark.torch
@pytest.mark.parametrize(
    ("text", "line"),
    [
        (None, "folder = '.*': expected a checkout of flash-attention"),
        ("def test_flash_attn_output():\n    rtol = 2\n", "with 0 rtol in test_flash_attn_varlen_output"),
        (FILE.replace("        rtol = 2 if", "        rtol = 1\n        rtol = 2 if", 1), "with 2 rtol"),
    ],
)
def test_another_file_is_refused(text: str | None, line: str, tmp_path: Path) -> None:
    folder = tmp_path if text is None else checkout(tmp_path, text)
    with pytest.raises(UsageError, match=line), upstream.loaded(folder):
        pass


@pytest.mark.torch
def test_what_it_imports_is_named(tmp_path: Path) -> None:
    folder = checkout(tmp_path, "import not_installed_anywhere\n" + FILE)
    with pytest.raises(Unavailable, match="not_installed_anywhere.*pip install torch einops"), upstream.loaded(folder):
        pass


def test_a_result_tells_what_was_refused() -> None:
    refusals = (upstream.REFUSAL(reason="qv: expected None", trials=40),)
    outcomes = tuple(
        upstream.OUTCOME(test=test, cases=90, drawn=50, skipped=3, trials=100, passed=59, refusals=refusals,
                         failures=("d 64: AssertionError",), at_whole_rtol=())
        for test in "ab"
    )  # fmt: skip
    data = upstream.UPSTREAM(source="0", seed=0, outcomes=outcomes)
    assert (
        "100 drawn cases: 118 of 120 trials pass, 0 fail at the whole rtol, too; 80 more are refused"
        in upstream.headline(data)
    )
    assert "qv: expected None" in upstream.table(data) and "d 64: AssertionError" in upstream.table(data)
    assert results.kinds()["upstream"] is upstream.KIND
