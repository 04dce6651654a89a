"""Seeded bugs in what writes pools of pages: in which slot or page, which tokens, which scale, and where an address is. The
emulator runs them."""

from __future__ import annotations

from typing import Any

import numpy as np

import flashlab as fl
from tests.mutants.backward import KernelMutant

APPEND, COPY = "kernels_cu/append_kv.cu", "kernels_cu/copy_pages.cu"
ROWS, QUANTIZE = "kernels_cu/include/rows.cuh", "kernels_cu/include/quantize.cuh"
TOKEN = {"k_scale": "token", "v_scale": "token"}
ROW = {"heads": 1, "len_q": 3, "page_size": 16, "pages": 1, "head_dim": 128, **TOKEN}

CASES: dict[str, dict[str, Any]] = {
    "append": {"heads": 2, "len_q": 75, "len_kv": 60, "page_size": 7, "pages": 12},
    "wide append": {
        "heads": 1,
        "len_q": 20,
        "len_kv": 15,
        "page_size": 16,
        "pages": 2,
        "head_dim": 256,
        "dtype": "float32",
    },
    "int8": {"heads": 2, "len_q": 40, "len_kv": 35, "page_size": 16, "pages": 4, "kv_dtype": "int8", **TOKEN},
    "e4m3": {"heads": 2, "len_q": 40, "len_kv": 35, "page_size": 16, "pages": 4, "kv_dtype": "float8_e4m3fn", **TOKEN},
    "odd dim": {"heads": 2, "len_q": 40, "page_size": 16, "pages": 4, "head_dim": 19, "kv_dtype": "int8", **TOKEN},
    "ties": {**ROW, "kv_dtype": "int8"},
    "infinite": {**ROW, "kv_dtype": "int8"},
    "tiny": {**ROW, "kv_dtype": "float8_e4m3fn", "dtype": "bfloat16"},
    "copies": {"heads": 2, "len_q": 9, "page_size": 70, "pages": 20},
    "scaled copies": {"heads": 2, "len_q": 3, "page_size": 150, "pages": 8, "kv_dtype": "int8", **TOKEN},
}


def problem(case: str) -> fl.Problem:
    """A case as a problem: float16, head dim 64."""
    sizes: dict[str, Any] = {"batch": 1, "dtype": "float16", "head_dim": 64, **CASES[case]}
    return fl.Problem(**sizes)


def changed(case: str, arrays: dict[str, Any]) -> dict[str, Any]:
    """The arrays of a case. Of some, a row of keys is made for one bug."""
    if case == "ties":  # of a scale of 7: each quotient is halfway between two integers, and the largest 127
        arrays["k"][..., 1, :] = 7 * np.append(np.arange(127) + 0.5, 127)
    elif case == "tiny":
        arrays["k"][..., 1, :], arrays["k"][..., 1, 3] = float.fromhex("0x1.fp-118"), float.fromhex("0x1.74p-123")
    elif case == "infinite":
        arrays["k"][..., 1, 5] = np.inf
    return arrays


def append(
    mechanism: str, old: str, new: str, check: str = "rule", case: str = "append", file: str = APPEND
) -> KernelMutant:
    """`check` is what must find it: "misuse", "bytes" or "rule" (wrong values)."""
    return KernelMutant(mechanism=mechanism, old=old, new=new, check=check, case=case, file=file, algorithm="append_kv")


def copy(
    mechanism: str, old: str, new: str, check: str = "rule", case: str = "copies", file: str = COPY
) -> KernelMutant:
    return KernelMutant(
        mechanism=mechanism, old=old, new=new, check=check, case=case, file=file, algorithm="copy_pages"
    )


KERNELS = [
    append(
        "a page's last row goes to the next page", "slot - page * shape.page_size)", "(slot + 1) % shape.page_size)"
    ),
    append("a token without a slot is written", "slot >= 0};", "true};", "misuse"),
    append("slot 0 is skipped", "slot >= 0};", "slot > 0};", "bytes"),
    append("pages count from 1", "return {page, ", "return {page + 1, ", "misuse"),
    append("the slot of the token before", "slot_mapping + token)", "slot_mapping + max(token - 1, 0))"),
    append("tokens behind the last one", "row < TOKENS && first + row < shape.len_q", "row < TOKENS", "misuse"),
    append("V goes into K's pool", "store_row(v_pool, v_scale", "store_row(k_pool, v_scale"),
    append("K is loaded twice", "load_row(new_v[i], v,", "load_row(new_v[i], k,"),
    append("the first head of all", "head = blockIdx.x % shape.kv_heads, first", "head = 0, first"),
    append(
        "skipped rows are read",
        "if (is_there && at < padded_row_bytes(shape)) x",
        "if (at < padded_row_bytes(shape)) x",
        "misuse",
    ),
    append(
        "the second half of wide rows is lost",
        "turn < Lanes::TURNS; ++turn) {\n    const int at = Lanes::chunk(turn) * CHUNK_BYTES;\n    lanes_meet();",
        "turn < 1; ++turn) {\n    const int at = Lanes::chunk(turn) * CHUNK_BYTES;\n    lanes_meet();",
        "bytes",
        "wide append",
    ),
    append(
        "half of the tokens of a warp",
        "PASSES = ceil_div(TOKENS, Lanes::ROWS)",
        "PASSES = ceil_div(TOKENS / 2, Lanes::ROWS)",
        "bytes",
    ),
    append(
        "the scale of the next row",
        "scale_in(scales, shape, place.page, head, place.row), scale)",
        "scale_in(scales, shape, place.page, head, (place.row + 1) % shape.page_size), scale)",
        "rule",
        "int8",
    ),
    append("K's scales are V's", "store_row(k_pool, k_scale", "store_row(k_pool, v_scale", "rule", "int8"),
    append("the scale of a part of the row", "mask = Lanes::LANES / 2", "mask = Lanes::LANES / 4", "rule", "int8"),
    append("the scale isn't written", "if (place.is_there && first == 0)", "if (false)", "bytes", "int8"),
    append("padding counts", "if (left < 8)", "if (false)", "rule", "odd dim", QUANTIZE),
    append(
        "elements are cut",
        "bits(quotient[0] + 0x1.8p23f)",
        "bits(truncf(quotient[0]) + 0x1.8p23f)",
        "rule",
        "int8",
        QUANTIZE,
    ),
    append("127 for e4m3", "CACHE == 2 ? 127 : 448", "127", "rule", "e4m3", QUANTIZE),
    append("ties away from even", "0x7ffffu + (size >> 20 & 1)", "0x80000u", "rule", "e4m3", QUANTIZE),
    append(
        "no subnormals",
        "if (size < 0x3c800000u) return sign |",
        "if (size < 0x3c800000u) return sign; else if (false) return",
        "rule",
        "e4m3",
        QUANTIZE,
    ),
    append("the sign is lost", ">> 24 & 0x80, size", ">> 24 & 0, size", "rule", "e4m3", QUANTIZE),
    append(
        "what the reciprocal leaves is lost",
        "fmaf(fmaf(-first, scale, x[2 * i + j]), reciprocal, first)",
        "first",
        "rule",
        "ties",
        QUANTIZE,
    ),
    append(
        "tiny rows as others",
        "top - 0x20000000u < 0x7f800000u - 0x20000000u",
        "top - 1 < 0x7f800000u - 1",
        "rule",
        "tiny",
        QUANTIZE,
    ),
    append(
        "infinite rows as others",
        "top - 0x20000000u < 0x7f800000u - 0x20000000u",
        "top - 0x20000000u < 0x7f800001u - 0x20000000u",
        "rule",
        "infinite",
        QUANTIZE,
    ),
    append("a scale of 0", "(x > 0 ? x : 1.0f)", "x", "rule", "int8", QUANTIZE),
    append("heads lie a page apart", "head * pool.head", "head * pool.batch", "misuse", "append", ROWS),
    append("scales without heads", "(page * shape.kv_heads + head)", "page", "rule", "int8", ROWS),
    copy(
        "the other direction",
        "{static_cast<int>(both.x), static_cast<int>(both.y)}",
        "{static_cast<int>(both.y), static_cast<int>(both.x)}",
    ),
    copy(
        "V into V from K's page number",
        "load_rows(v, v_pool, v_scale, shape, head, pair.from",
        "load_rows(v, v_pool, v_scale, shape, head, pair.to",
    ),
    copy("K twice, and no V", "load_rows(v, v_pool,", "load_rows(v, k_pool,"),
    copy(
        "the pair before", "blockIdx.x / shape.kv_heads)", "max(0, static_cast<int>(blockIdx.x / shape.kv_heads) - 1))"
    ),
    copy(
        "the first rows of a page alone",
        "begin < shape.page_size; begin",
        "begin < 1; begin",
        "bytes",
    ),
    copy(
        "a row behind the page",
        "if (row < shape.page_size && at < bytes_of(shape)) store_global(",
        "if (row <= shape.page_size && at < bytes_of(shape)) store_global(",
        "bytes",
    ),
    copy(
        "scales aren't copied",
        "store_global(scale_in(scales, shape, page, head, row), rows.scale[i])",
        "",
        "bytes",
        "scaled copies",
    ),
    copy("rows a warp apart", "(i * WARPS + warp_id())", "(i * WARPS + WARPS - 1)", "misuse"),
    copy("V's scales are K's", "load_rows(v, v_pool, v_scale", "load_rows(v, v_pool, k_scale", "rule", "scaled copies"),
]
