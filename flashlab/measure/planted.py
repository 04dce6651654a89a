"""What compute-sanitizer is held to: faults that it must find, and controls that show where it errs.

A tool that has found nothing is believed only if it found what was planted. Faults are planted in kernels of a few
lines, and in our own (without their barriers, or on inputs that nobody wrote).

A control is the opposite of a fault: a kernel of a few lines that PTX says is right, and that a tool reports all the same.
What the tool says of a larger kernel that does the same is then no evidence. The emulator holds the controls right.

`python -m flashlab.measure.planted NAME` runs one of them.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from flashlab.measure import workload as case_files
from flashlab.measure.workload import Case
from simulator import Problem

__all__ = ["CONTROLS", "FAULTS", "Control", "Fault"]


@dataclass(frozen=True)
class Fault:
    """A planted fault: the tool that must find it, what it is, and a function that runs it."""

    tool: str
    what: str
    plant: Callable[[], None]


@dataclass(frozen=True)
class Control:
    """A kernel that is right: the tool that reports it, what it does, its source, and how many threads and words it has."""

    tool: str
    what: str
    source: str
    threads: int
    words: int

    def run(self) -> None:
        """Launch it. Raises `RuntimeError` if words don't arrive."""
        from flashlab.run.arrays import cupy

        x = cupy().zeros(self.words, "float32")
        cupy().RawKernel(self.source, "control")((1,), (self.threads,), (x,))
        if x.get().tolist() != [*range(self.words - 1, -1, -1)]:
            raise RuntimeError("the control's words did not arrive")


def _tiny(source: str, threads: int = 64) -> Callable[[], None]:
    """A function that runs a kernel of a few lines on an array of 64 floats that nobody wrote."""

    def plant() -> None:
        from flashlab.run.arrays import cupy

        kernel = cupy().RawKernel(f'extern "C" __global__ void planted(float* x) {{ {source} }}', "planted")
        kernel((1,), (threads,), (cupy().empty(64, "float32"),))

    return plant


def _without_barriers() -> None:
    """Run flash2, compiled from a copy of the headers whose barrier does nothing."""
    import kernels_cu

    with tempfile.TemporaryDirectory() as folder:
        headers = Path(folder) / "include"
        shutil.copytree(kernels_cu.include_dir(), headers)
        for path in headers.rglob("*.cuh"):
            path.write_text(path.read_text().replace("__syncthreads()", "(void)0"))
        kernels_cu.include_dir = lambda: headers
        case_files.launch(_PLAIN)


def _unwritten() -> None:
    """Run flash2 on q, k and v as they come from the allocator."""
    from flashlab.run.plan import gpu_plan

    gpu_plan("flash2", _PLAIN[0].problem).launch({})


_PLAIN = [Case("plain", "flash2", Problem(batch=1, heads=1, len_q=200, head_dim=64, dtype="float16"))]

FAULTS: Mapping[str, Fault] = {
    "write-past-the-end": Fault("memcheck", "a store 4 KB past the end", _tiny("x[1024 + threadIdx.x] = 1;")),
    "missing-barrier": Fault(
        "racecheck",
        "neighbours exchange words through SRAM with no barrier between",
        _tiny("__shared__ volatile float s[64]; s[threadIdx.x] = threadIdx.x; x[threadIdx.x] = s[63 - threadIdx.x];"),
    ),
    "flash2-without-barriers": Fault("racecheck", "our flash2 without its barriers", _without_barriers),
    "read-unwritten": Fault("initcheck", "a load of what nobody wrote", _tiny("x[threadIdx.x] = x[threadIdx.x] + 1;")),
    "flash2-on-unwritten-inputs": Fault("initcheck", "our flash2 on inputs that nobody wrote", _unwritten),
    "divergent-barrier": Fault(
        "synccheck",
        "a barrier that part of a warp never reaches",
        _tiny("if (threadIdx.x < 40) { __syncthreads(); } x[threadIdx.x] = 1;"),
    ),
}
"""The planted faults by name. If a tool misses one, its silence elsewhere means nothing."""

CONTROLS: Mapping[str, Control] = {
    "barrier-arrive": Control(
        "racecheck",
        "two warps wait for room, write and say barrier.arrive; two others say barrier.arrive, wait and read",
        r"""
extern "C" __global__ void control(float* x) {
  __shared__ volatile float s[64];
  for (int round = 0; round < 3; ++round) {
    if (threadIdx.x < 64) {
      asm volatile("barrier.sync 2, 128;" ::: "memory");
      s[threadIdx.x] = threadIdx.x;
      asm volatile("barrier.arrive 1, 128;" ::: "memory");
    } else {
      asm volatile("barrier.arrive 2, 128;" ::: "memory");
      asm volatile("barrier.sync 1, 128;" ::: "memory");
      x[threadIdx.x - 64] = s[127 - threadIdx.x];
    }
  }
}
""",
        threads=128,
        words=64,
    ),
    "mbarrier-of-a-warp": Control(
        "racecheck",
        "a warp writes and meets, one lane arrives at an mbarrier for all, another warp waits there and reads",
        r"""
extern "C" __global__ void control(float* x) {
  __shared__ volatile float s[32];
  __shared__ unsigned long long mbarrier;
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(&mbarrier));
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(at) : "memory");
  __syncthreads();
  if (threadIdx.x < 32) {
    s[threadIdx.x] = threadIdx.x;
    __syncwarp();
    if (threadIdx.x == 0) asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at) : "memory");
  } else {
    unsigned over = 0;
    while (!over)
      asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}"
                   : "=r"(over) : "r"(at) : "memory");
    x[threadIdx.x - 32] = s[63 - threadIdx.x];
  }
}
""",
        threads=64,
        words=32,
    ),
}
"""The controls by name: what flash_decoding and paged do, and what flash3_backward does."""


if __name__ == "__main__":
    from flashlab.run.arrays import cupy

    cupy().cuda.set_allocator(None)
    if sys.argv[1] in FAULTS:
        FAULTS[sys.argv[1]].plant()
    else:
        CONTROLS[sys.argv[1]].run()
    cupy().cuda.runtime.deviceSynchronize()
    print("launched 1 kernel")
