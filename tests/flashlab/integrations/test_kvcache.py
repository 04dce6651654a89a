"""flash-attention's cache door against a plain computation of the same signature, on the emulator: caches, pages, RoPE, masks."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.compiler]

torch = pytest.importorskip("torch")


def door() -> Any:
    return importlib.import_module("flashlab.integrations.flash_attn")


def turned(x: Any, cos: Any, sin: Any, position: int, interleaved: bool) -> Any:
    """One row (heads, head_dim) by RoPE, pair by pair."""
    out, half = x.float().clone(), cos.shape[1]
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        c, s = cos[position, i].float(), sin[position, i].float()
        out[:, a], out[:, b] = x[:, a].float() * c - x[:, b].float() * s, x[:, b].float() * c + x[:, a].float() * s
    return out.to(x.dtype)


def plain(
    q: Any, k_cache: Any, v_cache: Any, k: Any = None, v: Any = None, rotary_cos: Any = None, rotary_sin: Any = None,
    cache_seqlens: Any = None, cache_batch_idx: Any = None, block_table: Any = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, rotary_interleaved: bool = True, rotary_seqlens: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """`out` and LSE, request by request and row by row. The caches are written."""
    batch, rows, heads, _ = q.shape
    outs, lses = [], []
    size = k_cache.shape[1]
    for b in range(batch):
        own = b if cache_batch_idx is None else int(cache_batch_idx[b])
        line = [own] if block_table is None else block_table[own].tolist()
        held = (
            len(line) * size
            if cache_seqlens is None
            else int(cache_seqlens if isinstance(cache_seqlens, int) else cache_seqlens[b])
        )
        first = held if rotary_seqlens is None else int(rotary_seqlens[b])
        mine, new = q[b], 0 if k is None else k.shape[1]
        if rotary_cos is not None:
            along = causal or window_size != (-1, -1)
            mine = torch.stack(
                [
                    turned(x, rotary_cos, rotary_sin, first + (i if along else 0), rotary_interleaved)
                    for i, x in enumerate(mine)
                ]
            )
        for i in range(new):
            at = held + i
            row = (
                k[b, i]
                if rotary_cos is None
                else turned(k[b, i], rotary_cos, rotary_sin, first + i, rotary_interleaved)
            )
            k_cache[line[at // size], at % size], v_cache[line[at // size], at % size] = row, v[b, i]
        n = held + new
        keys, values = (
            x[line].flatten(0, 1)[:n].double().repeat_interleave(heads // x.shape[2], 1) for x in (k_cache, v_cache)
        )
        scores = torch.einsum("qhd,khd->hqk", mine.double(), keys) * q.shape[-1] ** -0.5
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        far = torch.arange(n)[None] - torch.arange(rows)[:, None] - (n - rows)
        left, right = window_size[0], 0 if causal else window_size[1]
        hidden = ((far > right) if right >= 0 else far > 10**6) | ((far < -left) if left >= 0 else far < -(10**6))
        scores = scores.masked_fill(hidden, -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(0), values))
        lses.append(scores.logsumexp(-1))
    return torch.stack(outs), torch.stack(lses)


def drawn(
    batch: int, rows: int, size: int, *, pages: int = 0, new: int = 0, dim: int = 16, lines: int | None = None
) -> dict[str, Any]:
    random = torch.manual_seed(rows + size + new)

    def some(*shape: int) -> Any:
        return torch.randn(*shape, generator=random).half()

    lines = (batch if lines is None else lines) if not pages else batch * pages + 1
    x = {"q": some(batch, rows, 4, dim), "k_cache": some(lines, size, 2, dim), "v_cache": some(lines, size, 2, dim)}
    if pages:
        x["block_table"] = torch.randperm(lines, generator=random)[: batch * pages].view(batch, pages).int()
    if new:
        x |= {"k": some(batch, new, 2, dim), "v": some(batch, new, 2, dim)}
    return x


def rotary(dim: int, half: int = 4) -> dict[str, Any]:
    angle = torch.arange(64)[:, None] / 10000 ** (torch.arange(half) / half)
    return {"rotary_cos": angle.cos().half(), "rotary_sin": angle.sin().half()}


def alike(given: dict[str, Any], **options: Any) -> None:
    """The door's output, LSE and caches are those of the plain computation."""
    theirs = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    out, lse = door().flash_attn_with_kvcache(**given, **options, return_softmax_lse=True)
    right, logs = plain(**theirs, **options)
    assert torch.allclose(out.double(), right, atol=3e-3, rtol=3e-3)
    assert torch.allclose(lse.double(), logs, atol=1e-3)
    for name in ("k_cache", "v_cache"):
        assert torch.allclose(given[name], theirs[name], atol=1e-3), name
    assert out.is_contiguous() and out.shape == given["q"].shape


HELD = torch.tensor([9, 17, 0], dtype=torch.int32)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the whole of a dense cache": (drawn(3, 1, 20), {}),
    "some keys of it": (drawn(3, 1, 24), {"cache_seqlens": HELD}),
    "a number for all": (drawn(2, 2, 24), {"cache_seqlens": 11, "causal": True}),
    "lines of a larger cache": (drawn(3, 1, 24, lines=5), {"cache_seqlens": HELD, "cache_batch_idx": torch.tensor([4, 0, 2])}),
    "new keys": (drawn(3, 1, 24, new=1), {"cache_seqlens": HELD, "causal": True}),
    "several new keys, and more queries": (drawn(3, 5, 24, new=3), {"cache_seqlens": HELD, "causal": True}),
    "pages": (drawn(3, 1, 8, pages=3), {"cache_seqlens": HELD}),
    "new keys in pages": (drawn(3, 2, 8, pages=3, new=2), {"cache_seqlens": HELD, "causal": True}),
    "RoPE of pairs": (drawn(3, 2, 24, new=2), {"cache_seqlens": HELD, "causal": True, **rotary(16)}),
    "RoPE of halves, in pages": (
        drawn(3, 2, 8, pages=3, new=2), {"cache_seqlens": HELD, "window_size": (6, 0), "rotary_interleaved": False, **rotary(16)},
    ),
    "lines of a larger table": (
        {name: x[:2] if name in ("q", "k", "v") else x for name, x in drawn(3, 2, 8, pages=3, new=2).items()},
        {"cache_seqlens": HELD[:2], "cache_batch_idx": torch.tensor([2, 1]), "causal": True},
    ),
    "RoPE from other positions": (
        drawn(3, 2, 24, new=2), {"cache_seqlens": HELD, "rotary_seqlens": HELD // 2, "causal": True, **rotary(16)},
    ),
    "RoPE without a mask": (drawn(3, 3, 24, new=1), {"cache_seqlens": HELD, **rotary(16, 8)}),
    "a window and a soft cap": (drawn(3, 4, 24), {"cache_seqlens": HELD, "window_size": (5, 1), "softcap": 3.0}),
    "rows that aren't whole chunks": (drawn(3, 1, 24, new=1, dim=20), {"cache_seqlens": HELD, "causal": True}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_door_is_the_plain_computation(case: str) -> None:
    given, options = CASES[case]
    alike({name: x.clone() for name, x in given.items()}, **options)


def test_other_turns_are_seen() -> None:
    """The test above can fail: here the plain computation turns halves, and the door pairs."""
    given, options = CASES["RoPE of pairs"]
    mine, theirs = ({name: x.clone() for name, x in given.items()} for _ in range(2))
    out = door().flash_attn_with_kvcache(**mine, **options)
    right, _ = plain(**theirs, **options, rotary_interleaved=False)
    assert (out.double() - right).abs().max() > 0.1


def test_queries_one_behind_the_other() -> None:
    """Different numbers of queries and of new keys: those of each request alone."""
    whole = drawn(3, 5, 8, pages=4, new=5)
    counts, begins = [2, 5, 1], torch.tensor([0, 2, 7, 8], dtype=torch.int32)

    def packed(x: Any) -> Any:
        return torch.cat([x[b, :n] for b, n in enumerate(counts)])

    caches = {name: whole[name].clone() for name in ("k_cache", "v_cache")}
    out, lse = door().flash_attn_with_kvcache(
        packed(whole["q"]), **caches, k=packed(whole["k"]), v=packed(whole["v"]), cache_seqlens=HELD,
        page_table=whole["block_table"], cu_seqlens_q=begins, cu_seqlens_k_new=begins, causal=True, return_softmax_lse=True,
        **rotary(16),
    )  # fmt: skip
    for b, n in enumerate(counts):
        alone = {name: whole[name][b : b + 1, :n] for name in "qkv"} | {
            name: whole[name].clone() for name in ("k_cache", "v_cache")
        }
        right, logs = plain(
            **alone,
            block_table=whole["block_table"][b : b + 1],
            cache_seqlens=HELD[b : b + 1],
            causal=True,
            **rotary(16),
        )
        rows = slice(int(begins[b]), int(begins[b + 1]))
        assert torch.allclose(out[rows].double(), right[0], atol=3e-3) and torch.allclose(
            lse[:, rows].double(), logs[0], atol=1e-3
        )
        pages = whole["block_table"][b].long()
        assert torch.allclose(caches["k_cache"][pages], alone["k_cache"][pages], atol=1e-3)


def test_varlen_over_pages() -> None:
    whole = drawn(3, 5, 8, pages=4)
    begins, lengths = torch.tensor([0, 2, 7, 8], dtype=torch.int32), torch.tensor([9, 17, 3], dtype=torch.int32)
    q = torch.cat([whole["q"][b, :n] for b, n in enumerate((2, 5, 1))])
    varlen = door().flash_attn_varlen_func
    pools = whole["k_cache"], whole["v_cache"]
    keys = torch.tensor([0, 9, 26, 29], dtype=torch.int32)
    out, lse, _ = varlen(
        q, *pools, begins, keys, 5, 17, causal=True, block_table=whole["block_table"], return_attn_probs=True
    )
    for b in range(3):
        rows = slice(int(begins[b]), int(begins[b + 1]))
        right, logs = plain(
            q[None, rows],
            *pools,
            block_table=whole["block_table"][b : b + 1],
            cache_seqlens=lengths[b : b + 1],
            causal=True,
        )
        assert torch.allclose(out[rows].double(), right[0], atol=3e-3) and torch.allclose(
            lse[:, rows].double(), logs[0], atol=1e-3
        )
    used = varlen(q, *pools, begins, None, 5, 17, causal=True, block_table=whole["block_table"], seqused_k=lengths)
    assert torch.equal(used, out)
    ones = torch.arange(4, dtype=torch.int32)
    one = varlen(
        whole["q"][:, 0].contiguous(), *pools, ones, keys, 1, 17, causal=True, block_table=whole["block_table"]
    )
    right, _ = plain(whole["q"][:, :1], *pools, block_table=whole["block_table"], cache_seqlens=lengths, causal=True)
    assert torch.allclose(one.double(), right[:, 0], atol=3e-3)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("leftpad", {"cache_leftpad": HELD}, "cache_leftpad = Tensor: expected None"),
    ("alibi", {"alibi_slopes": torch.ones(4)}, "alibi_slopes = Tensor: expected nothing: the kernels over pages"),
    ("chunks", {"attention_chunk": 8}, "attention_chunk = 8: expected nothing"),
    ("qv", {"qv": torch.ones(1)}, "qv = Tensor: expected None"),
    ("v alone", {"v": torch.zeros(3, 1, 2, 16)}, "k = None: expected both of k and v"),
    ("RoPE without keys", rotary(16), "k = None: expected new keys"),
    ("new keys behind nobody knows how many", {"k": torch.zeros(3, 1, 2, 16).half(), "v": torch.zeros(3, 1, 2, 16).half()},
     "cache_seqlens = None"),
    ("two tables", {"block_table": torch.zeros(3, 1).int(), "page_table": torch.zeros(3, 1).int()}, "page_table = torch tensor"),
    ("another batch", {"q": torch.zeros(2, 1, 4, 16).half()}, r"q.shape = \(2, 1, 4, 16\): expected 3 requests"),
    ("a full cache", {"k": torch.zeros(3, 1, 2, 16).half(), "v": torch.zeros(3, 1, 2, 16).half(), "cache_seqlens": 24},
     r"slot_mapping\[|index|block_table"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_no_kernel_has_is_one_line(change: dict[str, Any], message: str) -> None:
    from simulator import UsageError

    with pytest.raises((UsageError, IndexError), match=message) as error:
        door().flash_attn_with_kvcache(**drawn(3, 1, 24) | change)
    assert "\n" not in str(error.value)
