"""Partial outputs of a rank's rows become one, where they lie: by a kernel of 16-bit rows on a GPU, else by torch."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import kernels_cu
from flashlab.run import nvrtc
from flashlab.run.arrays import cupy, framework
from flashlab.run.autograd import torch
from flashlab.run.launch import enter

__all__ = ["SOURCE", "merge_into"]

SOURCE = Path(__file__).with_name("merge.cu")
_DTYPES = {"float16": 1, "bfloat16": 2}
_THREADS = 256


def merge_into(own: Any, log: Any, part: Any, part_log: Any) -> None:
    """`part` joins `own`, in place, weighed by their LSEs `part_log` and `log`. Nothing waits for the device.

    Outputs are (batch, heads, rows, columns), and `own` may be float32 where `part` has 16 bits. A row that no part has a key for
    is 0, and its LSE is -inf.
    """
    dtype = str(part.dtype).removeprefix("torch.")
    if part.is_cuda and dtype in _DTYPES and part.shape[3] % 8 == 0 and own.stride(3) == log.stride(2) == 1:
        return _by_kernel(dtype, own, log, part.contiguous(), part_log.contiguous())
    both = torch.logaddexp(log, part_log)
    kept, joins = ((x - both).exp_().nan_to_num_(0)[..., None] for x in (log, part_log))
    torch.addcmul(own * kept, part, joins, out=own)
    log.copy_(both)
    return None


def _by_kernel(dtype: str, own: Any, log: Any, part: Any, part_log: Any) -> None:
    device, (batch, heads, rows, columns) = part.device.index, part.shape
    both, all_rows, int32 = torch.empty_like(part_log), batch * heads * rows, cupy().int32
    arguments = (
        own.data_ptr(), part.data_ptr(), log.data_ptr(), part_log.data_ptr(), both.data_ptr(), *own.stride()[:3], *log.stride()[:2],
        int32(heads), int32(rows), int32(columns), all_rows,  # CuPy passes Python's numbers in 64 bits
    )  # fmt: skip
    with framework("part", part).stream(device):
        enter(cupy().cuda)
        blocks = -(-all_rows * (columns // 8) // _THREADS)
        _kernel(dtype, own.dtype == torch.float32, device)((blocks,), (_THREADS,), arguments)
    log.copy_(both)


def macros(dtype: str, own_float: bool) -> tuple[str, ...]:
    """What the kernel is compiled with."""
    return f"-DFL_DTYPE={_DTYPES[dtype]}", f"-DOWN_FLOAT={int(own_float)}"


@functools.cache
def _kernel(dtype: str, own_float: bool, device: int) -> Any:
    """Compiled for the current `device`. CuPy keeps it on disk."""
    del device  # part of the key
    options = (*nvrtc.OPTIONS, f"-I{kernels_cu.include_dir()}", *macros(dtype, own_float))
    return cupy().RawModule(code=SOURCE.read_text(encoding="utf-8"), options=options).get_function("merge")
