"""The GPU that this process runs on, as a `Device`: one of the table, or one built from what the driver says."""

from __future__ import annotations

import functools
import os

from flashlab.run.arrays import cupy
from simulator.devices import DEVICES, Device
from simulator.errors import unknown

__all__ = ["ARCH", "current_device", "gpu_device", "without"]

ARCH: str | None = os.environ.get("FLASHLAB_ARCH")
"""`compute_75`, say, to run that architecture's PTX instead of the GPU's own code: a T4's kernels on a newer GPU."""

_NAMES = {
    "Tesla T4": "t4", "A100-SXM4-40GB": "a100-40", "A100-SXM4-80GB": "a100-80", "H100 80GB HBM3": "h100",
    "H200": "h200", "B200": "b200", "L4": "l4", "L40S": "l40s", "GeForce RTX 3090": "3090", "GeForce RTX 4090": "4090",
    "GeForce RTX 5090": "5090",
}  # fmt: skip
"""What drivers call the devices of the table, without "NVIDIA "."""

_FLOPS = {
    (7, 5): (1024, 128),
    (8, 0): (2048, 128),
    (8, 6): (512, 256),
    (8, 9): (512, 256),
    (9, 0): (4096, 256),
    (10, 0): (8192, 256),
}
"""FLOPs a clock and SM by compute capability: 16-bit tensor cores with float32 accumulation, and plain float32."""


def current_device() -> Device:
    """The current GPU as a `Device`: that of the table, or one built from what the driver says.

    Raises `Unavailable` without CuPy or a GPU.
    """
    return _device(cupy().cuda.runtime.getDevice())


@functools.cache
def _device(index: int) -> Device:
    runtime = cupy().cuda.runtime
    has = runtime.getDeviceProperties(index)
    title = has["name"].decode().removeprefix("NVIDIA ")
    capability, sms, sram = (
        (has["major"], has["minor"]),
        has["multiProcessorCount"],
        has["sharedMemPerBlockOptin"],
    )
    known = DEVICES.get(_NAMES.get(title, ""))
    if known and (known.compute_capability, known.sms, known.sram_per_block) == (capability, sms, sram):
        return known
    # cudaDevAttrClockRate and MemoryClockRate (kHz), GlobalMemoryBusWidth (bits); some virtual GPUs say 0
    clock, memory_clock, bus = (max(1, runtime.deviceGetAttribute(attribute, index)) for attribute in (13, 36, 37))
    tensor, plain = _FLOPS.get(capability, (1024, 256))
    return Device(
        name=title, title=title, compute_capability=capability, sms=sms, sram_per_block=sram,
        sram_per_sm=has["sharedMemPerMultiprocessor"], l2=has["l2CacheSize"], bandwidth=2e3 * memory_clock * bus / 8,
        tensor_flops=1e3 * clock * sms * tensor, fp32_flops=1e3 * clock * sms * plain, memory=has["totalGlobalMem"],
        max_warps_per_sm=has["maxThreadsPerMultiProcessor"] // 32, source="the driver",
    )  # fmt: skip


def gpu_device(arch: str | None) -> Device:
    """The model of the current GPU, or that of an architecture by name."""
    return _device_of_arch(arch) if arch else current_device()


def _device_of_arch(arch: str) -> Device:
    known: dict[str, Device] = {}
    for device in DEVICES.values():
        known.setdefault("compute_{}{}".format(*device.compute_capability), device)
    if arch not in known:
        raise unknown("FLASHLAB_ARCH", arch, known)
    return known[arch]


def without(device: Device, sms: int) -> Device:
    """The same with so many SMs fewer, and one at least.

    >>> from simulator import DEVICES
    >>> without(DEVICES["h100"], 16).sms, without(DEVICES["h100"], 0) is DEVICES["h100"]
    (116, True)
    """
    return device.replace(sms=max(1, device.sms - sms)) if sms else device
