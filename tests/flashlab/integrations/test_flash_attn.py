"""The functions of flash-attn: chunks of keys, and the keywords that others pass."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import pytest

pytestmark = pytest.mark.torch

torch = pytest.importorskip("torch")
FUNCTIONS = ("flash_attn_func", "flash_attn_varlen_func")


def door() -> Any:
    return importlib.import_module("flashlab.integrations.flash_attn")


def naive(q: Any, k: Any, v: Any, chunk: int, causal: bool, left: int | None = None) -> tuple[Any, Any]:
    """`out` and LSE by a mask spelt out, in (batch, seqlen, heads, head_dim). A query that sees nothing has `out` 0."""
    rows, keys, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    own, key = torch.arange(rows)[:, None] + keys - rows, torch.arange(keys)
    seen = own.div(chunk, rounding_mode="floor") == key.div(chunk, rounding_mode="floor")
    seen &= (key <= own) if causal else True
    seen &= (key >= own - left) if left is not None else True
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1).nan_to_num(0) @ v).transpose(1, 2), scores.logsumexp(-1)


def drawn(*lengths: int, batch: int = 1) -> list[Any]:
    random = torch.manual_seed(3)
    heads = (4, 2, 2)
    return [
        torch.randn(batch, n, h, 16, generator=random).requires_grad_() for n, h in zip(lengths, heads, strict=True)
    ]


def alike(found: tuple[Any, Any], right: tuple[Any, Any], mine: list[Any], theirs: list[Any]) -> None:
    for a, b in zip(found, right, strict=True):
        assert torch.allclose(a, b, atol=2e-6)
    found[0].square().sum().backward()
    right[0].square().sum().backward()
    for a, b in zip(mine, theirs, strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.compiler
@pytest.mark.alike(3)
@pytest.mark.parametrize(
    ("rows", "keys", "chunk", "causal", "left"),
    [(10, 10, 4, True, None), (20, 9, 4, False, None), (5, 21, 8, True, 3), (9, 3, 100, False, None), (4, 9, 9, True, None)],
)  # fmt: skip
def test_chunks(rows: int, keys: int, chunk: int, causal: bool, left: int | None) -> None:
    """Fewer queries than keys, more of them, a window beside, and chunks that cut nothing; gradients, too."""
    mine, theirs = drawn(rows, keys, keys, batch=2), drawn(rows, keys, keys, batch=2)
    window = (-1 if left is None else left, -1)
    options: Any = {"causal": causal, "window_size": window, "return_attn_probs": True}
    out, lse, _ = door().flash_attn_func(*mine, **options, attention_chunk=chunk)
    alike((out, lse), naive(*theirs, chunk, causal, left), mine, theirs)


@pytest.mark.compiler
def test_chunks_of_sequences() -> None:
    """Each sequence is cut for itself. One may have no queries, and of one the last query and key aren't used."""
    mine, theirs = drawn(15, 21, 21), drawn(15, 21, 21)
    ends_q, ends_k, used_q, used_k = [0, 5, 5, 15], [0, 9, 12, 21], [5, 0, 9], [9, 3, 8]
    named = {"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k, "seqused_q": used_q, "seqused_k": used_k}
    out, lse, _ = door().flash_attn_varlen_func(
        *(x[0] for x in mine), **{name: torch.tensor(x, dtype=torch.int32) for name, x in named.items()},
        causal=True, attention_chunk=4, return_attn_probs=True,
    )  # fmt: skip
    parts = [
        naive(theirs[0][:, a : a + n], theirs[1][:, b : b + m], theirs[2][:, b : b + m], 4, True)
        for a, n, b, m in zip(ends_q, used_q, ends_k, used_k, strict=False)
    ]
    right = torch.cat([each[0][0] for each in parts]), torch.cat([each[1][0] for each in parts], -1)
    assert not out[14].any() and bool((lse[:, 14] == -torch.inf).all())
    alike((out[:14], lse[:, :14]), right, mine, theirs)


def test_where_sequences_are_cut() -> None:
    """At positions of keys. The second sequence's 5 queries have the positions -2 to 2."""
    ends_q, ends_k = door()._cut([0, 3, 8], [0, 7, 10], 4)
    assert ends_q.tolist() == [0, 0, 0, 3, 5, 8]
    assert ends_k.tolist() == [0, 0, 4, 7, 7, 10]


@pytest.mark.compiler
def test_chunks_of_what_is_used() -> None:
    """The rows that a sequence doesn't use change nothing, and their output is 0."""
    mine, theirs = drawn(14, 20, 20), drawn(14, 20, 20)
    numbers = ([0, 6, 14], [0, 11, 20], [4, 8], [9, 7])
    *offsets, used_q, used_k = (torch.tensor(x, dtype=torch.int32) for x in numbers)
    out, lse, _ = door().flash_attn_varlen_func(
        *(x[0] for x in mine), *offsets, causal=True, attention_chunk=4, return_attn_probs=True,
        seqused_q=used_q, seqused_k=used_k,
    )  # fmt: skip
    parts = [
        naive(theirs[0][:, a:b], theirs[1][:, c:d], theirs[2][:, c:d], 4, True)
        for a, b, c, d in ((0, 4, 0, 9), (6, 14, 11, 18))
    ]
    assert not out[4:6].any() and (lse[:, 4:6] == -torch.inf).all()
    found = torch.cat([out[:4], out[6:]]), torch.cat([lse[:, :4], lse[:, 6:]], -1)
    alike(
        found, (torch.cat([each[0][0] for each in parts]), torch.cat([each[1][0] for each in parts], -1)), mine, theirs
    )


@pytest.mark.transformers
def test_the_signatures_name_what_transformers_passes() -> None:
    """It reads signatures, and drops what isn't named. What pages need is for a function that we don't lend."""
    utils: Any = importlib.import_module("transformers.modeling_flash_attention_utils")
    source = inspect.getsource(utils._process_flash_attention_kwargs)
    passed = set(re.findall(r'flash_kwargs\["(\w+)"\]', source)) | set(
        re.findall(r'^ {8}"(\w+)":', source, re.MULTILINE)
    )
    passed |= set(re.findall(r"(\w+)=cu_seq_lens_", inspect.getsource(utils._flash_attention_forward)))
    assert {"s_aux", "learnable_sink", "softcap", "window_size", "causal", "cu_seqlens_q"} <= passed
    named = [inspect.signature(getattr(door(), name)).parameters for name in FUNCTIONS]
    assert passed - named[1].keys() == {"page_table", "cache_seqlens"}
    ragged = {name for name in passed if name.startswith(("cu_", "max_", "block_"))}
    assert passed - ragged - named[0].keys() == {"page_table", "cache_seqlens"}
    assert not any(p.kind is p.VAR_KEYWORD for each in named for p in each.values()), "a keyword may be swallowed"


@pytest.mark.parametrize("chunk", [0, 8])
def test_rows_behind_the_last_sequence_belong_to_none(chunk: int) -> None:
    """A server pads q, k and v for its CUDA graphs. NaN there reaches nothing, and `out` and gradients are 0 there."""
    torch.manual_seed(0)
    ends_q, ends_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 9, 20], [0, 15, 31]))
    dense = [torch.randn(n, heads, 16) for n, heads in ((20, 4), (31, 2), (31, 2))]
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 5), value=float("nan")) for x in dense]
    results = []
    for arrays in (dense, padded):
        q, k, v = (x.clone().requires_grad_() for x in arrays)
        out = door().flash_attn_varlen_func(q, k, v, ends_q, ends_k, causal=True, attention_chunk=chunk)
        out.square().sum().backward()
        results.append([out, q.grad, k.grad, v.grad])
    for right, found in zip(*results, strict=True):
        assert torch.equal(found[: len(right)], right) and not found[len(right) :].any()
