"""The names of the hardware counters: which of them make up each count of the accounting contract, and which are reported."""

from __future__ import annotations

from itertools import chain

from flashlab.measure import ncu
from simulator.problem import FP8

__all__ = [
    "BOX_SECTORS", "BYTES", "DRAM_READ", "DRAM_WRITE", "EXP", "EXTRAS", "RATES", "SECTORS", "TENSOR_OPS", "WAVEFRONTS", "asked",
]  # fmt: skip

_GLOBAL, _SHARED = "smsp__sass_data_bytes_mem_global_op_", "smsp__sass_data_bytes_mem_shared_op_"

BYTES: dict[str, tuple[str, ...]] = {
    "hbm.read": (f"{_GLOBAL}ld", f"{_GLOBAL}ldgsts", "l1tex__m_xbar2l1tex_read_bytes_mem_global_op_tma_ld"),
    "hbm.write": (f"{_GLOBAL}st", "l1tex__m_l1tex2xbar_write_bytes_mem_global_op_tma_st"),
    "hbm.atomic": (f"{_GLOBAL}red", f"{_GLOBAL}atom", "l1tex__m_l1tex2xbar_write_bytes_mem_global_op_tma_red"),
    "sram.read": (f"{_SHARED}ld", f"{_SHARED}ldsm", f"{_SHARED}gmma"),
    "sram.write": (f"{_SHARED}st", f"{_SHARED}stsm", f"{_SHARED}ldgsts"),
}
"""The counters whose sum is each level and direction of the contract. A GPU without one moves no such bytes."""

TENSOR_OPS = {
    "float16": ("sm__ops_path_tensor_src_fp16", "sm__ops_path_tensor_src_fp16_dst_fp32"),
    "bfloat16": ("sm__ops_path_tensor_src_bf16_dst_fp32",),
    FP8: ("sm__ops_path_tensor_src_fp8",),
}
"""Operations of the tensor cores, by the dtype of the operands; the first that the GPU has."""

EXP = "sm__inst_executed_pipe_xu"
"""Instructions of the unit for special functions: it also does reciprocals and logarithms."""

DRAM_READ, DRAM_WRITE = "dram__bytes_read", "dram__bytes_write"

RATES = {
    "l2_hit_rate": "lts__t_sector_hit_rate.pct",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "warp_efficiency": "smsp__thread_inst_executed_per_inst_executed.ratio",
}
"""Reported, not judged: percent, percent, and threads an instruction (of 32)."""

SECTORS = {
    f"sectors_{op}": f"smsp__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_{op}" for op in ("ld", "st", "ldgsts", "red")
}
WAVEFRONTS = {
    f"wavefronts_{op}": f"smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_{op}"
    for op in ("ld", "st", "ldsm", "stsm", "ldgsts")
}
"""By instruction: sectors of 32 bytes in HBM, and passes over the banks of SRAM, conflicts included."""

BOX_SECTORS = {
    "sectors_tma_ld": "l1tex__m_xbar2l1tex_read_sectors_mem_global_op_tma_ld",
    "sectors_tma_st": "l1tex__m_l1tex2xbar_write_sectors_mem_global_op_tma_st",
}
"""The same of boxes, which the copy engine moves."""

EXTRAS = {
    "local_bytes": ("smsp__sass_data_bytes_mem_local",),
    "bank_conflicts": ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared",),
    **{name: (metric,) for name, metric in {**SECTORS, **BOX_SECTORS, **WAVEFRONTS}.items()},
    "sectors_red": (SECTORS["sectors_red"], "smsp__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_atom"),
}
"""Reported, not judged here: spilled bytes, conflicts (these two as the hardware sees them: kernels in one another's way
conflict, too), sectors and wavefronts. `sectors_red` are those of all atomics, whether or not anybody reads what they
return. The emulator's sectors and wavefronts are held against these."""


def asked() -> tuple[str, ...]:
    """The metrics to ask for, as far as the GPU has them."""
    sums = [name for names in (*BYTES.values(), *EXTRAS.values()) for name in names]
    sums += [*chain(*TENSOR_OPS.values()), EXP, DRAM_READ, DRAM_WRITE]
    wanted = [f"{name}.sum" for name in sums] + list(RATES.values())
    return tuple(name for name in dict.fromkeys(wanted) if name.split(".")[0] in ncu.known())
