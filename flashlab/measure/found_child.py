"""Launches a compiled kernel on the GPU, and keeps what it left: the process that `found_gpu` starts, plainly and under each tool.

`python -m flashlab.measure.found_child JOB OUT TIMES` reads the folder JOB and writes into the folder OUT. Nothing but this
kernel runs on the GPU, and each array is an allocation of its own, to the byte.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flashlab.run.arrays import cupy

MOST_KEPT = 20
"""Different results that are kept whole. The others are counted."""


def main(folder: Path, out: Path, times: int) -> None:
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    cuda = cupy().cuda
    cuda.set_allocator(None)
    memory = {name: cuda.alloc(size) for name, size in job["arrays"].items()}
    kernel = cupy().RawModule(path=str(folder / "kernel.cubin")).get_function(job["entry"])
    if job["sram"] > kernel.max_dynamic_shared_size_bytes:
        kernel.max_dynamic_shared_size_bytes = job["sram"]
    arguments = tuple(_argument(each, memory) for each in job["arguments"])
    with np.load(folder / "written.npz") as file:
        written = {name: file[name] for name in file.files}
    left: dict[str, Any] = {name: np.empty(size, np.uint8) for name, size in job["arrays"].items()}
    seen: dict[bytes, dict[str, Any]] = {}
    for _ in range(times):
        for name, values in written.items():
            memory[name].copy_from_host(values.ctypes.data, values.nbytes)
        kernel(tuple(job["grid"]), tuple(job["block"]), arguments, shared_mem=job["sram"])
        cuda.runtime.deviceSynchronize()
        for name, values in left.items():
            memory[name].copy_to_host(values.ctypes.data, values.nbytes)
        digest = hashlib.sha256(b"".join(values.tobytes() for values in left.values())).digest()
        if digest not in seen:
            seen[digest] = {name: values.copy() for name, values in left.items()} if len(seen) < MOST_KEPT else {}
    kept = {f"{i}/{name}": values for i, each in enumerate(seen.values()) for name, values in each.items()}
    np.savez(out / "kept.npz", **kept)
    (out / "distinct.json").write_text(json.dumps(len(seen)), encoding="utf-8")
    print(f"launched {times} times")


def _argument(said: Mapping[str, str], memory: Mapping[str, Any]) -> np.generic:
    """A parameter: where an array lies, or a number's bits, which CuPy hands on as they are."""
    if "array" in said:
        return np.uintp(memory[said["array"]].ptr)
    bits = bytes.fromhex(said["bytes"])
    return np.frombuffer(bits, f"u{len(bits)}")[0]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
