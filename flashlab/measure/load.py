"""What a GPU does while calls run: the clock rate that it holds, at what power, and for how long its power limit binds.

Needs CuPy, torch and NVIDIA's NVML bindings (nvidia-ml-py).
"""

from __future__ import annotations

import functools
import importlib
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from flashlab.measure.timing import interleaved
from simulator.errors import Unavailable

__all__ = ["Gpu", "Held", "Stamps", "Watch", "clocks", "loaded"]

STAMP = """
extern "C" __global__ void stamp(unsigned long long* out) {
  unsigned sm;
  unsigned long long now;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  if (threadIdx.x == 0) out[2 * sm] = clock64(), out[2 * sm + 1] = now;
}
"""
"""Writes each SM's clock count and the time in nanoseconds. NVML's clock is the one that was asked for: under a power
limit the SMs count fewer clocks."""


@functools.cache
def _stamp() -> Any:
    return importlib.import_module("cupy").RawKernel(STAMP, "stamp")


class Stamps:
    """Stamps two moments on the GPU, and gives the clock rate of the SMs between them."""

    def __init__(self) -> None:
        self._cupy: Any = importlib.import_module("cupy")
        self._kernel = _stamp()
        self._sms = self._cupy.cuda.Device().attributes["MultiProcessorCount"]
        self._taken = self._cupy.zeros((2, self._sms, 2), "u8")

    def take(self, which: int) -> None:
        """Queue the first (0) or the second (1) stamp on the null stream."""
        with self._cupy.cuda.Stream.null:
            self._kernel((8 * self._sms,), (32,), (self._taken[which],))

    def elapsed(self) -> Any:
        """Clocks and nanoseconds between the two stamps, a row per SM."""
        first, second = self._taken.get().astype("f8")
        return second - first


def mhz(elapsed: Iterable[Any]) -> float:
    """The clock rate of some spans of time in MHz, as `Stamps.elapsed` has them: the median over the SMs.

    >>> import numpy as np
    >>> mhz([np.array([[3000.0, 2000.0], [1500.0, 1000.0]]), np.array([[1000.0, 0.0], [500.0, 0.0]])])
    2000.0
    """
    total: Any = sum(elapsed)
    counted, nanoseconds = total.T
    return float(statistics.median(1e3 * counted / nanoseconds))


class Gpu:
    """NVML's view of the current GPU. Raises `Unavailable` without NVML."""

    def __init__(self) -> None:
        try:
            self._nvml: Any = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
        except Exception as reason:  # the bindings are missing, or the driver's library
            raise Unavailable(f"NVML can't be asked ({reason}): pip install nvidia-ml-py") from None
        uuid = f"GPU-{importlib.import_module('torch').cuda.get_device_properties().uuid}"
        self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)

    @property
    def limit(self) -> float:
        """The power limit that the driver enforces, in watts."""
        return self._nvml.nvmlDeviceGetPowerManagementLimit(self._handle) / 1000

    @property
    def highest(self) -> int:
        """The highest clock rate of the SMs, in MHz."""
        return self._nvml.nvmlDeviceGetMaxClockInfo(self._handle, self._nvml.NVML_CLOCK_SM)

    def clock(self) -> int:
        """The SMs' clock rate that the driver has set, in MHz."""
        return self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM)

    def watts(self) -> float:
        """The power drawn at this moment, in watts. (nvidia-smi shows the mean of a second.)"""
        return self._field(self._nvml.NVML_FI_DEV_POWER_INSTANT).uiVal / 1000

    def capped(self) -> float:
        """For how many seconds, so far, the power limit has lowered the clock."""
        return self._field(self._nvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP).ullVal / 1e9

    def reasons(self) -> int:
        """What holds the clock down at this moment: bits of `nvmlClocksEventReason…`, 4 for the power limit."""
        return self._nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle)

    def _field(self, name: int) -> Any:
        return self._nvml.nvmlDeviceGetFieldValues(self._handle, [name])[0].value


POWER = "power limit"
REASONS = {
    0x2: "a set clock",
    0x4: POWER,
    0x8: "hardware",
    0x20: "temperature",
    0x40: "temperature",
    0x80: "power brake",
}
"""What may hold the clock down, by bit of `Gpu.reasons`."""
_EVERY = 5e-3  # seconds between two looks


@dataclass(frozen=True)
class Held:
    """What held the SMs' clock down while something ran. `capped` is the share of the time in which the power limit did, and
    `reasons` are all that were seen."""

    capped: float
    reasons: tuple[str, ...]


class Watch:
    """Looks at NVML from a thread while its block runs. `held` is there afterwards."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._over, self._seen = gpu, threading.Event(), 0
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Self:
        self._capped, self._began = self._gpu.capped(), time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        took = time.perf_counter() - self._began
        reasons = dict.fromkeys(name for bit, name in REASONS.items() if self._seen & bit)
        self.held = Held(min(1.0, (self._gpu.capped() - self._capped) / took), tuple(reasons))

    def _look(self) -> None:
        while True:
            self._seen |= self._gpu.reasons()
            if self._over.wait(_EVERY):
                return


def clocks(torch: Any, calls: Sequence[Callable[[], Any]], seconds: float) -> list[float]:
    """The SMs' clock rate in MHz during each call, while the calls take turns as they do when they are timed.

    The first third of the rounds is left out, in which the clock settles.
    """
    seen: list[list[Stamps]] = [[] for _ in calls]

    def stamped(call: Callable[[], Any], seen: list[Stamps]) -> Callable[[], None]:
        def both() -> None:
            stamps = Stamps()
            stamps.take(0)
            call()
            stamps.take(1)
            seen.append(stamps)

        return both

    interleaved(torch, [stamped(*each) for each in zip(calls, seen, strict=True)], seconds, least=5)
    return [mhz(stamps.elapsed() for stamps in found[len(found) // 3 :]) for found in seen]


def loaded(call: Callable[[], Any], flops: float, gpu: Gpu, seconds: float) -> dict[str, Any]:
    """Measure call after call without a pause, for `seconds`, after as many seconds in which clock and power settle."""
    torch: Any = importlib.import_module("torch")
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stamps = Stamps()
    for which in range(2):  # the first one compiles the kernel
        stamps.take(which)
    call()
    begun.record()
    for _ in range(10):
        call()
    ended.record()
    torch.cuda.synchronize()
    calls = max(10, round(seconds / (begun.elapsed_time(ended) / 1e4)))
    for _ in range(calls):
        call()
    stamps.take(0)
    begun.record()
    for _ in range(calls):
        call()
    ended.record()
    stamps.take(1)
    while not begun.query():
        time.sleep(1e-3)
    started, capped = time.perf_counter(), gpu.capped()
    samples: list[tuple[int, float, int]] = []
    while not ended.query():
        samples.append((gpu.clock(), gpu.watts(), gpu.reasons()))
        time.sleep(5e-3)
    took, capped = time.perf_counter() - started, gpu.capped() - capped
    clock, watts, reasons = zip(*samples, strict=True)
    milliseconds = begun.elapsed_time(ended) / calls
    return {
        "calls": calls,
        "milliseconds": milliseconds,
        "tflops": flops / milliseconds / 1e9,
        "samples": len(samples),
        "mhz": mhz([stamps.elapsed()]),
        "mhz_set": statistics.mean(clock),
        "watts": statistics.mean(watts),
        "capped": min(1.0, capped / took),
        "reasons": {str(bits): reasons.count(bits) for bits in sorted(set(reasons))},
    }
