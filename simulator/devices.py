"""The devices, with the source of each figure. Users can add their own.

Shared memory per SM and per block, warps and registers come from the CUDA C++ Programming Guide, "Technical
Specifications per Compute Capability". Bandwidths, rates, L2 sizes and SM counts come from the sources that each device
names. Rates are dense, with float32 accumulation, at boost clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Self, cast

from simulator.errors import UsageError, unknown
from simulator.fields import integer
from simulator.problem import FP8

KB, MB = 1024, 1024 * 1024


_UNITS = {
    "sram_per_block": (" of bytes", 1.0),
    "sram_per_sm": (" of bytes", 1.0),
    "l2": (" of bytes", 1024.0),
    "memory": (" of bytes", 1.0 * MB),
    "bandwidth": (" of bytes per second", 1e9),
    "tensor_flops": (" of FLOPs per second", 1e9),
    "fp32_flops": (" of FLOPs per second", 1e9),
}
"""What each figure counts, and the least that can be: a bandwidth of 3,352 was meant in GB/s."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """What the machine model needs to know about a GPU, in bytes, bytes per second and FLOPs per second.

    One block may use `sram_per_block`, and the blocks of an SM share `sram_per_sm`. `tensor_flops` is the dense 16-bit
    tensor-core rate with float32 accumulation. `fp32_flops` is the plain float32 rate. Raises `UsageError` for a figure
    that cannot be, such as a bandwidth in GB/s.

    >>> mine = Device.named("a100").replace(name="mine", sram_per_block=48 * 1024)
    >>> mine.sram_per_block, mine.sms
    (49152, 108)
    """

    name: str
    title: str = ""
    compute_capability: tuple[int, int]
    sms: int
    sram_per_block: int
    sram_per_sm: int
    l2: int
    bandwidth: float
    tensor_flops: float
    fp32_flops: float
    memory: int
    max_warps_per_sm: int = 64
    source: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            name: str = f"Device.{field.name}"
            value: Any = getattr(self, field.name)
            if isinstance(field.default, str) or field.name == "name":
                if not isinstance(value, str):
                    raise UsageError(name, value, "text")
            elif field.name == "compute_capability":
                if not isinstance(value, tuple) or len(cast("tuple[object, ...]", value)) != 2:
                    raise UsageError(name, cast("object", value), "(major, minor)")
                for part in cast("tuple[object, object]", value):
                    integer(name, part, 0, "(major, minor), two integers")
            elif field.type == "int":
                unit, least = _UNITS.get(field.name, ("", 1.0))
                least = int(least)
                object.__setattr__(
                    self, field.name, integer(name, value, least, f"an integer{unit} of at least {least}")
                )
            else:
                unit, least = _UNITS[field.name]
                if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
                    raise UsageError(name, value, f"a finite number{unit} of at least {least:g}")

    def replace(self, **changes: object) -> Self:
        """A copy with some figures changed: a device of your own. Raises `UsageError` for an unknown field."""
        known = [field.name for field in fields(self)]
        for name in changes:
            if name not in known:
                raise unknown("field", name, known)
        return replace(self, **changes)  # pyright: ignore[reportArgumentType]

    def flops(self, dtype: str) -> float:
        """Peak FLOPs per second for matrix products of a storage dtype.

        float32 means without TF32. The 8-bit rate is twice the 16-bit rate, as on Ada, Hopper and Blackwell.
        """
        return self.fp32_flops if dtype == "float32" else self.tensor_flops * (2 if dtype == FP8 else 1)

    def ridge(self, dtype: str) -> float:
        """The roofline's ridge point, in FLOPs per byte of DRAM traffic. Below it, a kernel waits for memory."""
        return self.flops(dtype) / self.bandwidth

    @classmethod
    def named(cls, device: Device | str) -> Device:
        """A device by name (`a100` is `a100-40`), or a `Device` as it is. Raises `UsageError` for an unknown name."""
        if isinstance(device, Device):
            return device
        try:
            return DEVICES[ALIASES.get(device, device)]
        except (KeyError, TypeError):
            raise unknown("device", device, [*DEVICES, *ALIASES]) from None


def _device(name: str, title: str, cc: tuple[int, int], sms: int, sram: tuple[int, int], l2: float, bandwidth: float,
            tensor: float, fp32: float, memory: int, warps: int, source: str) -> Device:  # fmt: skip
    """A device from figures as data sheets print them: KB of SRAM (block, SM), MB of L2, GB/s, TFLOP/s, GB."""
    return Device(
        name=name, title=title, compute_capability=cc, sms=sms, sram_per_block=sram[0] * KB, sram_per_sm=sram[1] * KB,
        l2=int(l2 * MB), bandwidth=bandwidth * 1e9, tensor_flops=tensor * 1e12, fp32_flops=fp32 * 1e12,
        memory=memory * 10**9, max_warps_per_sm=warps, source=source,
    )  # fmt: skip


DEVICES = {
    device.name: device
    for device in (
        _device("t4", "Tesla T4", (7, 5), 40, (64, 64), 4, 320, 65, 8.1, 16, 32,
                "NVIDIA T4 datasheet; Turing whitepaper (L2, SMs)"),
        _device("a100-40", "A100 SXM 40 GB", (8, 0), 108, (163, 164), 40, 1555, 312, 19.5, 40, 64,
                "NVIDIA A100 whitepaper; A100 40 GB datasheet (bandwidth)"),
        _device("a100-80", "A100 SXM 80 GB", (8, 0), 108, (163, 164), 40, 2039, 312, 19.5, 80, 64,
                "NVIDIA A100 whitepaper; A100 80 GB datasheet (bandwidth)"),
        _device("h100", "H100 SXM", (9, 0), 132, (227, 228), 50, 3352, 989.4, 66.9, 80, 64,
                "NVIDIA H100 whitepaper and datasheet"),
        _device("h200", "H200 SXM", (9, 0), 132, (227, 228), 60, 4800, 989.4, 66.9, 141, 64,
                "NVIDIA H200 datasheet; L2 size and SMs read from the device"),
        _device("b200", "B200 (HGX)", (10, 0), 148, (227, 228), 126, 7700, 2250, 75, 180, 64,
                "NVIDIA HGX B200 datasheet; Blackwell tuning guide (SRAM, L2)"),
        _device("l4", "L4", (8, 9), 58, (99, 100), 48, 300, 121, 30.3, 24, 48,
                "NVIDIA L4 datasheet; Ada whitepaper (L2)"),
        _device("l40s", "L40S", (8, 9), 142, (99, 100), 96, 864, 362, 91.6, 48, 48,
                "NVIDIA L40S datasheet; Ada whitepaper (L2)"),
        _device("3090", "GeForce RTX 3090", (8, 6), 82, (99, 100), 6, 936, 71, 35.6, 24, 48,
                "NVIDIA GA102 whitepaper"),
        _device("4090", "GeForce RTX 4090", (8, 9), 128, (99, 100), 72, 1008, 165.2, 82.6, 24, 48,
                "NVIDIA Ada whitepaper"),
        _device("5090", "GeForce RTX 5090", (12, 0), 170, (99, 100), 96, 1792, 209.5, 104.8, 32, 48,
                "NVIDIA RTX Blackwell whitepaper"),
    )
}  # fmt: skip
"""Every device by name."""

ALIASES = {"a100": "a100-40"}
"""Short names."""
