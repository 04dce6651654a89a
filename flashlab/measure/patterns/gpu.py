"""Launches access patterns on this machine's GPU, under ncu: `python -m flashlab.measure.patterns.gpu FILE`.

FILE is a JSON list of patterns' fields.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from flashlab.measure.patterns.patterns import SOURCE, SPAN, Pattern
from flashlab.run.arrays import cupy


def launch(patterns: Sequence[Pattern]) -> None:
    """Launch every pattern once, in order, one warp each."""
    import kernels_cu

    # without COUNTED, ncu misreads copies whose address in SRAM contains a constant (copy_async in memory.cuh)
    options = ("-std=c++17", "-DFL_DTYPE=1", "-DCOUNTED", f"-I{kernels_cu.include_dir()}")
    module = cupy().RawModule(code=SOURCE.read_text(encoding="utf-8"), options=options)
    data = cupy().zeros(SPAN, "u1")
    for pattern in patterns:
        sram = SPAN if pattern.in_sram else 0
        module.get_function(pattern.kernel)((1,), (32,), (data, pattern.argument()), shared_mem=sram)
    cupy().cuda.runtime.deviceSynchronize()


if __name__ == "__main__":
    launch([Pattern(**fields) for fields in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))])
