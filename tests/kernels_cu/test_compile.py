"""Every kernel compiles without a GPU, at its default tiles, for every architecture: no spills, no warnings."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kernels_cu
from flashlab.base import cache
from flashlab.run import nvrtc
from flashlab.run.nvrtc import Compiled, compile_kernel, defines
from simulator import CATALOGUE, Config, Device, Problem, Tile, count
from simulator.catalogue import with_kernels
from simulator.operations.latent import latent_problem
from simulator.problem import SCORES
from tests.patches import patched
from tests.tiers import one_of_each

pytestmark = pytest.mark.nvrtc

ROOT = Path(__file__).resolve().parents[2]
DEVICES = {"sm_75": "t4", "sm_80": "a100", "sm_89": "l4", "sm_90": "h100", "sm_90a": "h200"}
WITH_KERNELS = {name: CATALOGUE[name] for name in with_kernels(language="cuda")}
HOPPER = [name for name, row in CATALOGUE.items() if row.arch]
HEAD_DIMS = (40, 64, 128, 256, 576)


def takes(name: str, head_dim: int) -> bool:
    """Does an algorithm take the head dim at all?"""
    plain = Problem(batch=1, heads=1, len_q=64, head_dim=head_dim, dtype=CATALOGUE[name].dtypes[-1])
    problem = CATALOGUE[name].fitted(plain)
    return problem.head_dim == head_dim and CATALOGUE[name].refuses(problem, Device.named("h200")) is None


SPILLED_ONCE = [("flash2", "float32", 208), ("standard", "float32", 16)]
"""With other tiles: their defaults step aside."""
SPILL = [
    *(("flash1_backward", "float16", 256, arch) for arch in DEVICES),
    *(("flash1_backward", "bfloat16", 256, arch) for arch in ("sm_80", "sm_89", "sm_90")),
    *(("flash1_backward", "float32", 256, arch) for arch in DEVICES),
    *(("flash1_backward", dtype, 128, "sm_75") for dtype in ("float16", "float32")),
    *((name, "float16", 256, "sm_75") for name in ("flash2_backward", "flash2_backward_deterministic")),
    *(
        (name, "float32", 256, arch)
        for name in ("flash2_backward", "flash2_backward_deterministic")
        for arch in ("sm_75", "sm_89")
    ),
    ("flash2_backward_deterministic", "float32", 256, "sm_90"),
    ("flash_decoding", "float16", 256, "sm_75"),
    *(("flash_decoding", dtype, head_dim, "sm_80") for dtype in ("float16", "bfloat16") for head_dim in (128, 256)),
    ("flash_decoding", "float32", 128, "sm_75"),
    *(("flash_decoding", "float32", 256, arch) for arch in ("sm_75", "sm_80", "sm_89")),
    *(
        ("paged", dtype, 128, arch)
        for dtype in ("float16", "bfloat16")
        for arch in ("sm_75", "sm_80", "sm_89", "sm_90")
    ),
    *(("paged", dtype, 256, arch) for dtype in ("float16", "bfloat16") for arch in ("sm_75", "sm_80", "sm_89")),
    *(("paged", "float32", head_dim, "sm_75") for head_dim in (64, 128)),
    *(("paged", "float32", 256, arch) for arch in DEVICES),
    *(
        ("flash3_backward_deterministic", dtype, head_dim, "sm_90a")
        for dtype in ("float16", "bfloat16")
        for head_dim in (40, 64)
    ),
    *(("cascade", dtype, 128, arch) for dtype in ("float16", "bfloat16") for arch in ("sm_80", "sm_89", "sm_90")),
]
"""A backward pass's dK, dV and dQ take up to 192 of a thread's 255 registers, and more where SRAM leaves room for few warps or
none. flash_decoding asks for 16 partial results at once, and where rows are long and warps are few they fill the registers. In
pages its warps also keep where the rows of a chunk lie: with 32 rows of Q (here) these are 32 bytes too many on Hopper in 16
bits. What loads the LSE in flash3_backward_deterministic has 24 registers, and keeps in memory where SRAM begins. A warp of cascade
has 32 rows of a prefix's tile: S and O take 192 registers, and one or two of the others are set aside."""
MATRIX = [
    case
    for name, row in WITH_KERNELS.items()
    for case in itertools.product([name], row.dtypes, HEAD_DIMS, DEVICES)
    if (case[1], case[3]) != ("bfloat16", "sm_75")  # bfloat16 begins with compute capability 8.0
    and (case[0] in HOPPER) == (case[3] == "sm_90a")
    and Device.named(DEVICES[case[3]]).compute_capability >= row.support.least
    and case not in SPILL
    and takes(name, case[2])
] + [(*case, arch) for case in SPILLED_ONCE for arch in DEVICES]
SCORED = [
    case
    for name, arches in (
        ("flash2", ("sm_90", "sm_80", "sm_75")),
        ("flash3", ("sm_90a",)),
        ("flash3_paged", ("sm_90a",)),
    )
    for case in itertools.product(
        [name], [("soft_cap",), ("sinks",), ("alibi",), SCORES], CATALOGUE[name].dtypes, (64, 128, 256), arches
    )
    if set(case[1]) <= set(CATALOGUE[name].support.masks)
    if case[4] != "sm_75" or case[2] == "float16"  # a T4 has no bfloat16, and in float32 all three spill 8 bytes there
]
QUANTIZED = [
    (name, kv_dtype, scales, dtype, head_dim)
    for name in ("flash_decoding", "paged")
    for dtype, head_dim in itertools.product(("float16", "bfloat16"), (128, 64))
    for kv_dtype in ("int8", "float8_e4m3fn")
    for scales in (("token", "token"), ("head", "head"), ("channel", "token"))
]
WRITTEN = [
    (name, kv_dtype, dtype, head_dim, arch)
    for name in ("append_kv", "copy_pages")
    for kv_dtype in (None, "int8", "float8_e4m3fn")
    for dtype, head_dim, arch in itertools.product(
        ("bfloat16", "float16", "float32"), (16, 80, 128, 256), ("sm_90", "sm_80")
    )
    if kv_dtype is None or dtype != "float32"
]
"""Kernels that write pools, also of 8 bits."""
UNEVEN = [
    (features, dtype, head_dim, arch)
    for features, head_dims in (
        ({"window": (900, 0)}, (40, 64, 128, 256)),
        ({"lengths": [(1, 300)] * 40}, (40, 64, 256)),  # of 128 a full tile spills as it does without
        ({"lengths": [(1, 300)] * 40, "window": (900, 0)}, (40, 64, 128, 256)),
    )
    for dtype, head_dim, arch in itertools.product(("bfloat16", "float16"), head_dims, ("sm_90", "sm_80"))
]
FLASH3_3, INCLUDE = kernels_cu.source("flash3_3"), kernels_cu.include_dir()
SMALL = defines(Config(tile=Tile(16, 16), warps=1), "float16", 16)


def source_of(name: str) -> str:
    """The `.cu` of an algorithm: that of its name, if it has one."""
    sources = [kernel.source for kernel in CATALOGUE[name].kernels]
    return name if name in sources else sources[-1]


def compiled_by_default(name: str, dtype: str, head_dim: int, arch: str, *options: str, **features: Any) -> Compiled:
    problem = Problem(batch=1, heads=8, len_q=4096, head_dim=head_dim, dtype=dtype, causal=True, **features)
    row = CATALOGUE[name]
    config = row.program.configure(row.fitted(problem), Device.named(DEVICES[arch]))
    return compile_kernel(source_of(name), (*defines(config, dtype, head_dim), *options), arch=arch)


def complaints(compiled: Compiled) -> list[str]:
    """What a compiled kernel must not have: warnings, spills, a stack."""
    stacks = [f"{name}: {each}" for name, each in compiled.resources.items() if each.stack]
    return [*compiled.warnings, *([f"{compiled.spills} bytes of spills"] if compiled.spills else []), *stacks]


@pytest.mark.parametrize(
    "case",
    one_of_each(
        sorted(MATRIX, key=lambda case: case[1] != "bfloat16"),
        lambda case: case[0],
        lambda case: "-".join(map(str, case)),
    ),
)
def test_compiles_without_spills_or_warnings(case: tuple[str, str, int, str]) -> None:
    name, dtype, head_dim, arch = case
    compiled = compiled_by_default(name, dtype, head_dim, arch)
    assert complaints(compiled) == []
    assert compiled.image.startswith(b"\x7fELF")
    without_parts = [kernel for kernel in CATALOGUE[name].kernels if not kernel.parts]
    assert set(compiled.resources) == {kernel.entry for kernel in without_parts if kernel.source == source_of(name)}
    assert all(0 < each.registers <= 255 and each.static_smem == 0 for each in compiled.resources.values())


@pytest.mark.parametrize("name", one_of_each(WITH_KERNELS, lambda _: None))
def test_as_many_threads_are_launched_as_a_kernel_is_built_for(name: str) -> None:
    """In every shape that the operation is verified in. With fewer, rows are left out, and CUDA doesn't mind."""
    row, device = CATALOGUE[name], Device.named("h200")
    kernels = {kernel.entry: kernel for kernel in row.kernels if kernel.language == "cuda"}
    seen = set[tuple[str, tuple[str, ...]]]()
    for shape in row.operation.shapes.values():
        sizes: dict[str, Any] = {"batch": 1, "heads": 1, "head_dim": 64, "dtype": row.dtypes[0], **shape}
        problem = row.fitted(Problem(**sizes))
        if row.refuses(problem, device):
            continue
        counts = count(name, problem, device=device)
        assert counts.config is not None
        for launch in counts.launches:
            source, options = kernels[launch.name].source, defines(counts.config, problem.dtype, problem.head_dim)
            if (launch.name, options) not in seen:
                seen.add((launch.name, options))
                bounds = bounds_of(compile_kernel(source, options, arch="compute_90a").image)
                assert bounds[launch.name] == 32 * launch.warps, str(problem)
    assert seen


def test_too_few_threads_would_be_found(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(INCLUDE.parent, tmp_path / "kernels_cu", ignore=shutil.ignore_patterns("emulator")))
    text = kernels_cu.source("cascade").read_text(encoding="utf-8")
    wrong = patched(
        text, "__launch_bounds__(SUFFIX_ROWS / SUFFIX_WARP_ROWS * 32)", "__launch_bounds__(SUFFIX_ROWS * 2)"
    )
    (folder / "cascade.cu").write_text(wrong, encoding="utf-8")
    with kernels_cu.sources_in(folder), pytest.raises(AssertionError, match="256 == "):
        test_as_many_threads_are_launched_as_a_kernel_is_built_for("cascade")


def bounds_of(ptx: bytes) -> dict[str, int]:
    """The `__launch_bounds__` of each kernel."""
    found = re.findall(rb"\.entry (\w+)\([^)]*\)\s*\.maxntid (\d+)", ptx)
    return {name.decode(): int(threads) for name, threads in found}


@pytest.mark.alike("flash2-soft_cap-sinks-alibi", "flash3-soft_cap-sinks-alibi", "flash3_paged-soft_cap")
@pytest.mark.parametrize(
    "case", one_of_each(SCORED, lambda case: case[:2], lambda case: "-".join(map(str, (case[0], *case[1], *case[2:]))))
)
def test_what_changes_the_scores_spills_nothing_either(case: tuple[str, tuple[str, ...], str, int, str]) -> None:
    name, features, dtype, head_dim, arch = case
    asked = {feature: {"soft_cap": 30.0}.get(feature, True) for feature in features}
    assert complaints(compiled_by_default(name, dtype, head_dim, arch, **asked)) == []


@pytest.mark.alike(1)
@pytest.mark.parametrize(
    "case",
    one_of_each(QUANTIZED, lambda case: case[0], lambda case: "-".join(map(str, (*case[:2], *case[2], *case[3:])))),
)
def test_quantized_caches_spill_next_to_nothing(case: tuple[str, str, tuple[str, str], str, int]) -> None:
    """A query token's rows. Those of pages with Q in two parts lack a few registers, as more rows do: 32 spill up to 184 bytes."""
    name, kv_dtype, (of_k, of_v), dtype, head_dim = case
    asked = {"kv_dtype": kv_dtype, "k_scale": of_k, "v_scale": of_v}
    sizes = {"batch": 1, "heads": 32, "kv_heads": 8, "len_q": 1, "len_kv": 8192, "head_dim": head_dim, "dtype": dtype}
    problem = CATALOGUE[name].fitted(Problem(**sizes, **asked))
    config = CATALOGUE[name].program.configure(problem, Device.named("h200"))
    compiled = compile_kernel("flash_decoding", defines(config, dtype, head_dim), arch="sm_90")
    assert compiled.spills <= (44 if (name, of_k, dtype, head_dim) == ("paged", "channel", "float16", 128) else 0)


@pytest.mark.parametrize("case", one_of_each(WRITTEN, lambda case: case[:2], lambda case: "-".join(map(str, case))))
def test_what_writes_pools_spills_nothing(case: tuple[str, str | None, str, int, str]) -> None:
    name, kv_dtype, dtype, head_dim, arch = case
    of_8_bits = {"kv_dtype": kv_dtype, "k_scale": "token", "v_scale": "token"} if kv_dtype else {}
    assert complaints(compiled_by_default(name, dtype, head_dim, arch, page_size=16, **of_8_bits)) == []


@pytest.mark.parametrize("case", one_of_each(UNEVEN, lambda case: len(case[0])))
def test_cascade_spills_nothing_with_windows_and_own_lengths(case: tuple[dict[str, Any], str, int, str]) -> None:
    """Full tiles of rows over the prefix."""
    features, dtype, head_dim, arch = case
    sizes: dict[str, Any] = {"batch": 40, "heads": 8, "kv_heads": 2, "len_kv": 300, "len_prefix": 5000, "dtype": dtype}
    queries = {} if "lengths" in features else {"len_q": 1}
    problem = Problem(**sizes, **queries, **features, head_dim=head_dim)
    config = CATALOGUE["cascade"].program.configure(problem, Device.named(DEVICES[arch]))
    assert complaints(compile_kernel("cascade", defines(config, dtype, head_dim), arch=arch)) == []


@pytest.mark.alike("dlse")
@pytest.mark.parametrize("features", [{}, {"dropout": 0.1}, {"dlse": True}], ids=lambda features: ", ".join(features))
def test_turns_at_narrow_heads_spill_next_to_nothing(features: dict[str, Any]) -> None:
    """A register, in a warp that has time."""
    compiled = compiled_by_default("flash3_backward_deterministic", "bfloat16", 64, "sm_90a", **features)
    assert compiled.spills <= 8


DROPPED = [
    case
    for case in MATRIX
    if "dropout" in CATALOGUE[case[0]].support.masks
    and case[3] in ("sm_80", "sm_90")
    and case[:3:2] not in (("flash1_backward", 256), ("flash2_backward_deterministic", 256))
    and case != ("standard_backward", "float32", 256, "sm_90")
]
"""At head dim 256 these two have no register to spare for the random bytes, nor has the third one's dK for its factor."""


@pytest.mark.alike("flash2", "flash2_backward")
@pytest.mark.parametrize("case", one_of_each(DROPPED, lambda case: case[0], lambda case: "-".join(map(str, case))))
def test_dropout_spills_nothing_either(case: tuple[str, str, int, str]) -> None:
    name, dtype, head_dim, arch = case
    assert complaints(compiled_by_default(name, dtype, head_dim, arch, dropout=0.1)) == []


OF_THE_LSE = [
    case
    for case in MATRIX
    if any("dlse" in kernel.arguments and kernel.source == source_of(case[0]) for kernel in CATALOGUE[case[0]].kernels)
    and case[3] != "sm_75"
    and case[:3:2] != ("flash1_backward", 256)
]
"""Of a `.cu` that reads it. At head dim 256 flash1_backward has no register to spare for it."""


@pytest.mark.alike("flash2_backward", "flash3_backward")
@pytest.mark.parametrize("case", one_of_each(OF_THE_LSE, lambda case: case[0], lambda case: "-".join(map(str, case))))
def test_a_gradient_of_the_lse_spills_nothing_either(case: tuple[str, str, int, str]) -> None:
    name, dtype, head_dim, arch = case
    assert complaints(compiled_by_default(name, dtype, head_dim, arch, dlse=True)) == []


@pytest.mark.alike("64-sm_80-flash2_backward", "256-sm_90-flash2_backward_deterministic")
@pytest.mark.parametrize("name", ["flash2_backward", "flash2_backward_deterministic"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_backward_pass_over_sequences(head_dim: int, arch: str, name: str) -> None:
    """Where a sequence lies takes three registers more. At head dim 256, and at 128 with one order, fewer are left: up to six
    are kept in memory from the first step to the last."""
    problem = Problem(batch=1, heads=8, lengths=[1000], head_dim=head_dim, dtype="bfloat16", causal=True)
    config = CATALOGUE[name].program.configure(problem, Device.named(DEVICES[arch]))
    compiled = compile_kernel(source_of(name), defines(config, "bfloat16", head_dim), arch=arch)
    few = head_dim == 256 or (head_dim == 128 and name == "flash2_backward_deterministic")
    assert compiled.spills <= (24 if few else 0)


MASKED_WITH_SINKS: dict[str, Any] = {"causal": True, "sinks": True}
OF_SEQUENCES = [
    (name, features, *case)
    for name, head_dims, asked in (
        ("flash3_backward", (128, 64, 40, 96), (MASKED_WITH_SINKS, {"dlse": True}, {"window": (100, 20)})),
        ("flash3_backward_wide", (256, 192, 136, 64), (MASKED_WITH_SINKS, {"window": (100, 20)})),
    )
    for features, *case in itertools.product(asked, head_dims, ("bfloat16", "float16"))
]
IN_PARTS = [
    (sizes, features, *case)
    for sizes, features, *case in itertools.product(
        ({"len_q": 4096, "len_kv": 512}, {"lengths": [(4000, 300), (500, 200)]}),
        (MASKED_WITH_SINKS, {"dropout": 0.1}, {"dlse": True}),
        (128, 64, 40, 96),
        ("bfloat16", "float16"),
    )
    if not ("lengths" in sizes and "dropout" in features)  # which no problem has
]


@pytest.mark.parametrize(
    "case",
    one_of_each(OF_SEQUENCES, lambda case: case[0], lambda case: "-".join(map(str, (case[0], *case[1], *case[2:])))),
)
def test_a_backward_pass_over_sequences_on_hopper(case: tuple[str, dict[str, Any], int, str]) -> None:
    """Blocks that take tile after tile of sequences share their registers out anew: their producer has more."""
    name, features, head_dim, dtype = case
    of_all = {"batch": 1, "heads": 8, "head_dim": head_dim, "dtype": dtype}
    problem = Problem(**of_all, lengths=[(1000, 1000), (500, 700)], **features)
    config = CATALOGUE[name].program.configure(problem, Device.named("h200"))
    assert complaints(compile_kernel(name, defines(config, dtype, head_dim), arch="sm_90a")) == []


@pytest.mark.parametrize(
    "case",
    one_of_each(IN_PARTS, lambda case: [*case[0]][0], lambda case: "-".join(map(str, (*case[0], *case[1], *case[2:])))),
)
def test_parts_of_a_group_on_hopper(case: tuple[dict[str, Any], dict[str, Any], int, str]) -> None:
    """Their sums of dK and dV leave the registers in another way, and one launch more adds them up."""
    sizes, features, head_dim, dtype = case
    problem = Problem(batch=1, heads=8, kv_heads=2, head_dim=head_dim, dtype=dtype, **sizes, **features)
    config = CATALOGUE["flash3_backward"].program.configure(problem, Device.named("h200"))
    assert config.parts == 4
    compiled = compile_kernel("flash3_backward", defines(config, dtype, head_dim), arch="sm_90a")
    assert complaints(compiled) == []
    assert "flash3_backward_parts" in compiled.resources


DRAFTED = [
    case
    for case in itertools.product(("float16", "bfloat16"), (128, 64), (32, 4), ("sm_90", "sm_89", "sm_80"))
    if case[1:3] != (128, 32)
]
"""Of 32 rows with a word in a register 40 bytes are spilled on Hopper."""


@pytest.mark.parametrize("case", one_of_each(DRAFTED, lambda _: "one build", lambda case: "-".join(map(str, case))))
def test_drafts_compile_without_spills_or_warnings(case: tuple[str, int, int, str]) -> None:
    dtype, head_dim, len_q, arch = case
    sizes: dict[str, Any] = {
        "batch": 1,
        "heads": 8,
        "kv_heads": 8,
        "len_q": len_q,
        "len_kv": 4096,
        "head_dim": head_dim,
    }
    problem = Problem(**sizes, dtype=dtype, page_size=16, drafts=True)
    config = CATALOGUE["paged"].program.configure(problem, Device.named(DEVICES[arch]))
    assert complaints(compile_kernel("flash_decoding", defines(config, dtype, head_dim), arch=arch)) == []


@pytest.mark.alike("flash_decoding-sm_90", "mla_hopper")
@pytest.mark.parametrize(
    ("name", "arch"),
    [("flash_decoding", "sm_90"), ("flash_decoding", "sm_80"), ("mla", "sm_90"), ("mla_hopper", "sm_90a")],
)
def test_sequences_compile_without_spills_or_warnings(name: str, arch: str) -> None:
    operation, program = CATALOGUE[name].operation, CATALOGUE[name].program
    problem = operation.fitted(Problem(batch=1, heads=16, lengths=[(1, 4000), (1, 90)], head_dim=128, dtype="bfloat16"))
    config = program.configure(problem, Device.named(DEVICES[arch]))
    assert complaints(compile_kernel(name, defines(config, "bfloat16", problem.head_dim), arch=arch)) == []


MASKED = [case for case in MATRIX if "mask" in CATALOGUE[case[0]].support.masks]


@pytest.mark.parametrize("case", one_of_each(MASKED, lambda case: case[0], lambda case: "-".join(map(str, case))))
def test_masks_compile_without_spills_or_warnings(case: tuple[str, str, int, str]) -> None:
    name, dtype, head_dim, arch = case
    for length in (1024, 4096):  # which have tiles of their own
        problem = Problem(batch=1, heads=8, len_q=length, head_dim=head_dim, dtype=dtype, causal=True, mask="dense")
        config = CATALOGUE[name].program.configure(problem, Device.named(DEVICES[arch]))
        for source in (name, "mask"):
            assert complaints(compile_kernel(source, defines(config, dtype, head_dim), arch=arch)) == []


RAGGED_MASKED = [case for case in MASKED if case != ("flash2", "float32", 208, "sm_75")]  # 8 bytes


@pytest.mark.alike("dense")
@pytest.mark.parametrize(
    "case", one_of_each(RAGGED_MASKED, lambda case: case[0], lambda case: "-".join(map(str, case)))
)
@pytest.mark.parametrize("mask", ["dense", "bits"])
def test_masks_of_sequences_compile_without_spills_or_warnings(case: tuple[str, str, int, str], mask: str) -> None:
    name, dtype, head_dim, arch = case
    problem = Problem(batch=1, heads=8, lengths=[1000], head_dim=head_dim, dtype=dtype, causal=True, mask=mask)
    config = CATALOGUE[name].program.configure(problem, Device.named(DEVICES[arch]))
    for source in (name, "mask"):
        assert complaints(compile_kernel(source, defines(config, dtype, head_dim), arch=arch)) == []


@pytest.mark.long
@pytest.mark.parametrize("length", [1024, 16384])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("name", "head_dim"), [case for case in itertools.product(HOPPER, (64, 128, 192, 256)) if takes(*case)]
)
def test_every_tile_of_hoppers_kernels(name: str, causal: bool, head_dim: int, length: int) -> None:
    dtype = CATALOGUE[name].dtypes[-1]
    problem = Problem(batch=1, heads=8, len_q=length, head_dim=head_dim, dtype=dtype, causal=causal)
    config = CATALOGUE[name].program.configure(problem, Device.named("h200"))
    assert complaints(compile_kernel(source_of(name), defines(config, dtype, head_dim), arch="sm_90a")) == []


@pytest.mark.parametrize(
    "case",
    one_of_each(
        list(itertools.product((1, 16, 128, 256), (64, 128, 192, 256), (None, 20.0))),
        lambda case: case[0] == 1,
        lambda case: "-".join(map(str, case)),
    ),
)
def test_pages_of_any_size_spill_nothing(case: tuple[int, int, float | None]) -> None:
    """TMA's boxes of 16 and 128 keys, or of part of a page, and copies."""
    size, head_dim, soft_cap = case
    problem = Problem(
        batch=4, heads=8, len_q=512, len_kv=4096, head_dim=head_dim, dtype="bfloat16", page_size=size, soft_cap=soft_cap
    )
    config = CATALOGUE["flash3_paged"].program.configure(problem, Device.named("h200"))
    assert (config.page_box > 0) == (size % 16 == 0 and max(size, config.tile.cols) % min(size, config.tile.cols) == 0)
    compiled = compile_kernel("flash3_paged", defines(config, "bfloat16", head_dim), arch="sm_90a")
    assert complaints(compiled) == []


@pytest.mark.alike("flash2", "flash_decoding", "flash2_backward")
@pytest.mark.parametrize(
    "name", [name for name, row in WITH_KERNELS.items() if row.support.least <= (7, 5) and not row.arch]
)
def test_ptx_for_the_oldest_architecture(name: str) -> None:
    row = WITH_KERNELS[name]
    problem = row.fitted(Problem(batch=1, heads=1, len_q=16, head_dim=16, dtype="float16"))
    config = row.program.configure(problem, Device.named("t4"), Tile(16, 16))
    image = compile_kernel(source_of(name), defines(config, "float16", 16), arch="compute_75").image
    assert b".target sm_75" in image
    assert all(f".entry {x.entry}".encode() in image for x in row.kernels if x.source == source_of(name))


@pytest.fixture
def own_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of sources instead of the project's, and a cache of its own."""
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "number.cuh").write_text("constexpr int NUMBER = 1;\n")
    (tmp_path / "tiny.cu").write_text(
        '#include "number.cuh"\nextern "C" __global__ void tiny(int* x) { *x = NUMBER; }\n'
    )
    monkeypatch.setenv("FLASHLAB_CACHE", str(tmp_path / "cache"))
    with kernels_cu.sources_in(tmp_path):
        yield tmp_path


def test_a_spill_is_seen(own_sources: Path) -> None:
    lines = [f"float x{i} = x[{i} * n];" for i in range(64)] + [f"x[{i}] = x{i};" for i in range(64)]
    (own_sources / "tiny.cu").write_text(
        f'extern "C" __global__ void tiny(volatile float* x, int n) {{ {" ".join(lines)} }}\n'
    )
    assert complaints(compile_kernel("tiny", arch="sm_80")) == []
    found = complaints(compile_kernel("tiny", ("-maxrregcount=32",), arch="sm_80"))
    assert any("spilled" in line for line in found)
    assert any("bytes of spills" in line for line in found)


def test_a_warning_is_seen(own_sources: Path) -> None:
    (own_sources / "tiny.cu").write_text('extern "C" __global__ void tiny(int* x) { int unused; *x = 1; }\n')
    assert any("unused" in line for line in complaints(compile_kernel("tiny", arch="sm_80")))


def test_a_remark_on_wgmma_is_seen(own_sources: Path) -> None:
    """Without its fence a product makes ptxas put one in, and say so: C7519."""
    shutil.copytree(INCLUDE, own_sources / "include", dirs_exist_ok=True)
    text = FLASH3_3.read_text(encoding="utf-8")
    without = patched(text, "wgmma_fence(); multiply_pv(", "multiply_pv(", step="output")
    options = defines(Config(tile=Tile(128, 64), warps=12, stages=2, consumers=2), "float16", 64)
    for source, ok in ((text, True), (without, False)):
        (own_sources / "tiny.cu").write_text(source, encoding="utf-8")
        found = complaints(compile_kernel("tiny", options, arch="sm_90a"))
        assert (found == []) == ok
        assert ok or any("C7519" in line for line in found)


def test_an_error_shows_the_log(own_sources: Path) -> None:
    (own_sources / "tiny.cu").write_text("nonsense\n")
    with pytest.raises(nvrtc.CompileError, match="tiny.cu.*nonsense|nonsense.*"):
        compile_kernel("tiny", arch="sm_80")


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what is compiled."""
    names: list[str] = []
    compile_really = nvrtc._compile  # pyright: ignore[reportPrivateUsage]

    def counted(library: Any, path: Path, *args: Any, **options: Any) -> Compiled:
        names.append(path.stem)
        return compile_really(library, path, *args, **options)

    monkeypatch.setattr(nvrtc, "_compile", counted)
    return names


def test_the_cache_answers_until_something_changes(
    own_sources: Path, compiles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, digest = compile_kernel("tiny", arch="sm_80"), nvrtc.sources_digest()
    assert compile_kernel("tiny", arch="sm_80") == first
    assert len(compiles) == 1
    compile_kernel("tiny", arch="sm_90")
    compile_kernel("tiny", ("-DX=1",), arch="sm_80")
    assert len(compiles) == 3
    (own_sources / "include" / "number.cuh").write_text("constexpr int NUMBER = 2;\n")
    assert nvrtc.sources_digest() != digest
    assert compile_kernel("tiny", arch="sm_80").image != first.image
    assert len(compiles) == 4
    for part in ("_nvrtc_build", "_cuda_headers"):
        with monkeypatch.context() as patch:
            patch.setattr(nvrtc, part, lambda: "another")
            compile_kernel("tiny", arch="sm_80")
    assert len(compiles) == 6


def test_headers_that_are_installed_anew_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new environment compiles nothing anew. Another version does, though its files be as long."""

    def known(folder: str, text: str) -> str:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "cuda_fp16.hpp").write_text(text)
        monkeypatch.setattr(nvrtc, "cuda_include_dir", lambda: tmp_path / folder)
        return nvrtc._cuda_headers.__wrapped__()  # pyright: ignore[reportPrivateUsage]

    assert known("first", "version 1") == known("again", "version 1") != known("another", "version 2")


def test_nvrtc_is_known_to_the_build() -> None:
    assert re.search(r"release 1\d\.\d+, V1\d\.\d+\.\d+", nvrtc._nvrtc_build())  # pyright: ignore[reportPrivateUsage]


ANOTHER_PROCESS = """
import sys
from collections.abc import Iterator
from pathlib import Path
import kernels_cu
from flashlab.run import nvrtc
folder = Path(sys.argv[1])
kernels_cu.source, kernels_cu.include_dir = lambda name: folder / f"{name}.cu", lambda: folder / "include"
nvrtc._compile = None
sys.stdout.buffer.write(nvrtc.compile_kernel("tiny", arch="sm_80").image)
"""


def test_another_process_does_not_compile(own_sources: Path) -> None:
    first = compile_kernel("tiny", arch="sm_80")
    command = [sys.executable, "-c", ANOTHER_PROCESS, str(own_sources)]
    found = subprocess.run(command, capture_output=True, check=True, cwd=ROOT, timeout=60)
    assert found.stdout == first.image


def test_a_damaged_image_is_compiled_anew(own_sources: Path, compiles: list[str]) -> None:
    first = compile_kernel("tiny", arch="sm_80")
    (file,) = (own_sources / "cache").rglob("image")
    file.write_bytes(first.image[:-1])
    for _ in range(2):
        assert compile_kernel("tiny", arch="sm_80").image == first.image
    assert len(compiles) == 2


def test_a_cache_that_cannot_be_written_costs_the_compile(
    own_sources: Path, compiles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compile_kernel("tiny", arch="sm_80")
    (own_sources / "file").write_text("")
    monkeypatch.setenv("FLASHLAB_CACHE", str(own_sources / "file"))
    monkeypatch.setattr(cache, "_own", None)
    with pytest.warns(RuntimeWarning, match="set FLASHLAB_CACHE to a folder that can be written") as said:
        for _ in range(2):
            assert compile_kernel("tiny", arch="sm_80").image == first.image
        compile_kernel("tiny", arch="sm_90")
    assert (len(said), len(compiles)) == (1, 3)


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    with pytest.raises(nvrtc.CompilerMissing, match="^NVRTC's Python bindings are missing: pip install .*nvrtc.*$"):
        compile_kernel("standard", SMALL, arch="sm_80")


def test_few_chunks_merge_with_half_of_the_registers() -> None:
    """So twice as many blocks of the second launch fit on an SM."""

    def registers(len_kv: int) -> int:
        problem = latent_problem(batch=2, heads=16, len_kv=len_kv, dtype="bfloat16")
        config = CATALOGUE["mla_hopper"].program.configure(problem, Device.named("h200"))
        compiled = compile_kernel("mla_hopper", defines(config, "bfloat16", 576), arch="sm_90a")
        return compiled.resources["mla_hopper_merge"].registers

    few, many = registers(4096), registers(4097)
    assert 2 * few < many
