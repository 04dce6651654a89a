"""Kernels of other projects, as they were published: an adapter of at most 12 lines, and at least 60 checks that pass.

FLASHLAB_CORPUS is a folder of their checkouts, as <owner>__<repository>: https://github.com/tspeterkim/flash-attention-minimal
at 00f8f46, https://github.com/gau-nernst/learn-cuda at 1454f8b, https://github.com/EricLBuehler/mistral.rs at 9e922623f.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.verify import verify
from simulator.dtypes import Array

pytestmark = [pytest.mark.long, pytest.mark.compiler, pytest.mark.timeout(3600)]


def minimal(file: Path) -> fl.Adapter:
    """FlashAttention-1 in float32, lengths of 32, no mask."""
    arguments: Any = {"Tc": "len_q / 32", "Tr": "len_q / 32", "Bc": 32, "Br": 32, "O": "out:zeros"}
    arguments |= {"l": "float32[batch, heads, len_q]:zeros", "m": "float32[batch, heads, len_q]:full(-inf)"}
    sram = "4 * (3 * 32 * head_dim + 32 * 32)"
    flash = fl.kernel(file, grid="batch, heads", block=32, sram=sram, arguments=arguments)
    return fl.Adapter(flash, domain=fl.Domain(dtype="float32", multiple=32, same_lengths=True, groups=1))


def version_5(file: Path) -> fl.Adapter:
    """FlashAttention-2 on tensor cores: cp.async, ldmatrix, mma, swizzled tiles. bfloat16, head dim 128, lengths of 64."""
    launch: Any = {"grid": "batch * heads * len_q / 64", "block": 128, "sram": "2 * 3 * 64 * 128"}
    flash = fl.kernel(file, "attention_v5_kernel<64, 64, 128, 4>", **launch, arguments={"bs": "batch * heads"})
    return fl.Adapter(flash, domain=fl.Domain(dtype="bfloat16", head_dim=128, multiple=64, groups=1))


def paged(file: Path) -> fl.Adapter:
    """vLLM's paged attention in float32: one query, grouped heads, keys and values in pages of 16 tokens."""

    def arguments(p: fl.Problem, q: Array, k: Array, v: Array) -> dict[str, Any]:
        pages, page, padding = -(-p.len_kv // 16), 16 * p.head_dim, [(0, 0), (0, 0), (0, -p.len_kv % 16), (0, 0)]
        k, v = (np.pad(x, padding).reshape(p.batch, p.kv_heads, pages, 16, -1).transpose(0, 2, 1, 4, 3) for x in (k, v))
        table, lengths = np.arange(p.batch * pages, dtype="u4"), np.full(p.batch, p.len_kv, "u4")
        given = {"k_cache": k.reshape(*k.shape[:3], -1, 4, 16).swapaxes(-1, -2), "v_cache": v, "block_tables": table}
        given |= {"context_lens": lengths, "max_num_blocks_per_seq": pages, "q_stride": p.heads * p.head_dim}
        given |= {"kv_head_stride": page, "kv_block_stride": p.kv_heads * page, "softcapping": 1}
        return given | dict.fromkeys(("alibi_slopes", "k_scale", "v_scale", "sinks"))

    name = "vllm::paged_attention_v1_kernel<float, float, vllm::Fp8KVCacheDataType::kAuto, {head_dim}, 16, 128>"
    launch: Any = {"grid": "heads, batch", "block": 128, "sram": "max(4 * 16 * cdiv(len_kv, 16), 2 * 4 * head_dim)"}
    domain = fl.Domain(dtype="float32", head_dim=(64, 128), len_q=1, causal=False, empty=False)
    return fl.Adapter(fl.kernel(file, name, **launch, arguments=arguments), domain=domain)


PUBLISHED = {
    minimal: "tspeterkim__flash-attention-minimal/flash.cu",
    version_5: "gau-nernst__learn-cuda/07_attention/attention_v5.cu",
    paged: "EricLBuehler__mistral.rs/mistralrs-paged-attn/src/cuda/pagedattention_v1_f32.cu",
}


@pytest.mark.parametrize("adapter", PUBLISHED)
def test_published_kernels_run_sixty_checks(adapter: Callable[[Path], fl.Adapter]) -> None:
    _, _, *lines = filter(str.strip, inspect.getsource(adapter).splitlines())  # less its own name and sentence
    assert len(lines) <= 12
    corpus = Path(os.environ.get("FLASHLAB_CORPUS", "none"))
    if not corpus.is_dir():
        pytest.skip("no checkouts of other projects: FLASHLAB_CORPUS is their folder")
    report = verify(adapter(corpus / PUBLISHED[adapter]), examples=20)
    assert report.verdict == "passed, LSE unchecked", report
    assert report.counts["passed"] >= 60, report
