"""The access patterns: which addresses a warp's lanes ask for, in every arrangement that may matter to a memory
pipe."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

__all__ = ["KERNELS", "LANES", "SOURCE", "SPAN", "Pattern", "patterns"]

SOURCE = Path(__file__).with_name("patterns.cu")

LANES = np.dtype([("at", "i4", 32), ("to", "i4", 32), ("mask", "u4")])
"""The layout of `struct Lanes` in patterns.cu."""

SPAN = 32 * 1024
"""The bytes of HBM, and of SRAM, that patterns may touch."""

KERNELS = (
    "load_global_4", "load_global_8", "load_global_16", "store_global_4", "store_global_8", "store_global_16",
    "add_global_4", "copy_async_16", "load_shared_4", "load_shared_8", "load_shared_16", "store_shared_4",
    "store_shared_8", "store_shared_16", "ldmatrix_16", "ldmatrix_transposed_16",
)  # fmt: skip
"""The kernels of patterns.cu. The number is how many bytes each lane asks for."""

ALL = 0xFFFFFFFF
MASKS = {
    "even lanes": 0x55555555,
    "even pairs": 0x33333333,
    "first half": 0xFFFF,
    "every other quarter": 0x00FF00FF,
    "one lane a quarter": 0x08040201,
    "one lane a half": 0x00800002,
    "even lanes here, odd there": 0x5555AAAA,
    "neighbours in one half only": 0x9050124B,
}
SLOTS: dict[str, Callable[[int], int]] = {
    "contiguous": lambda i: i,
    "from the second on": lambda i: i + 1,
    "backwards": lambda i: 31 - i,
    "the same for all": lambda _: 3,
    "times 5 modulo 32": lambda i: i * 5 % 32,
    "quarters interleaved": lambda i: i % 8 * 4 + i // 8,
    "halves interleaved": lambda i: i % 16 * 2 + i // 16,
    **{f"stride {s}": lambda i, s=s: i * s for s in (2, 3, 4, 8, 32)},
    # one bit of the lane number doesn't matter: two lanes ask for the same
    **{f"lanes {1 << b} apart the same": lambda i, b=b: i >> b + 1 << b | i & (1 << b) - 1 for b in range(5)},
    "lanes 2 apart the same, stride 2": lambda i: 2 * (i & ~2),
    "first half in pairs": lambda i: i // 2 if i < 16 else i,
    "second half in pairs, stride 4": lambda i: 4 * (i if i < 16 else i // 2),
    "pairs here, 2 apart there": lambda i: i & ~1 if i < 16 else i & ~2,
    **{f"{n} in turn": lambda i, n=n: i % n for n in (2, 4, 8)},
    "4 at a time": lambda i: i // 4,
    "halves 128 bytes apart": lambda i: i % 16 + i // 16 * 32,
    "quarters 128 bytes apart": lambda i: i % 8 + i // 8 * 32,
    "halves meet in one slot": lambda i: 15 - i if i < 16 else i - 15,
}
COPIED: dict[str, Callable[[int], int]] = {
    **{f"from {n} on": lambda i, n=n: i + n for n in (2, 3, 4, 6)},
    **{f"stride {s}": lambda i, s=s: i * s for s in (5, 6, 7)},
}
"""Further patterns for copies. Like `SLOTS`, each gives a lane's place, in units of what one lane asks for."""


@dataclass(frozen=True)
class Pattern:
    """A kernel, and the byte offsets `at` that the lanes of `mask` ask for. Copies go to the offsets `to` in SRAM."""

    name: str
    kernel: str
    at: tuple[int, ...]
    to: tuple[int, ...]
    mask: int = ALL

    @property
    def bytes(self) -> int:
        """How many bytes each lane asks for."""
        return int(self.kernel.rsplit("_", 1)[1])

    @property
    def in_sram(self) -> bool:
        """True if the kernel touches SRAM."""
        return "global" not in self.kernel

    def argument(self) -> np.void:
        """The kernel's argument, a `struct Lanes`."""
        return np.array([(self.at, self.to, self.mask)], LANES)[0]


def patterns(drawn: int = 8) -> list[Pattern]:
    """All patterns: the named ones, and `drawn` random ones per kernel, which are the same every time."""
    return [pattern for kernel in KERNELS for pattern in (*_named(kernel), *_drawn(kernel, drawn))]


def _named(kernel: str) -> Iterator[Pattern]:
    width = int(kernel.rsplit("_", 1)[1])
    contiguous = tuple(16 * i for i in range(32))
    copies = kernel == "copy_async_16"
    for name, slot in {**SLOTS, **(COPIED if copies else {})}.items():
        at = tuple(width * slot(i) for i in range(32))
        yield Pattern(name, kernel, at, contiguous)
        if copies:
            yield Pattern(f"contiguous to {name}", kernel, contiguous, at)
    if kernel.startswith("ldmatrix"):  # ldmatrix needs all lanes
        return
    for name, mask in MASKS.items():
        yield Pattern(name, kernel, tuple(width * i for i in range(32)), contiguous, mask)
        if "shared" in kernel:
            yield Pattern(f"{name}, stride 32", kernel, tuple(width * 32 * i for i in range(32)), contiguous, mask)


def _drawn(kernel: str, n: int) -> Iterator[Pattern]:
    rng = random.Random(kernel)
    width = int(kernel.rsplit("_", 1)[1])
    for k in range(n):
        at, to = (tuple(width * slot for slot in _slots(rng, k % 3, SPAN // width)) for _ in range(2))
        masks = [
            ALL,
            ALL,
            rng.getrandbits(32),
            rng.getrandbits(32) & rng.getrandbits(32) | 1,
            rng.choice([*MASKS.values()]),
        ]
        mask = ALL if kernel.startswith("ldmatrix") else rng.choice(masks)
        yield Pattern(f"drawn {k}", kernel, at, to, mask)


def _slots(rng: random.Random, kind: int, most: int) -> list[int]:
    """32 random numbers below `most`, one per lane."""
    if kind == 0:  # the lane number's bits, each XORing in some bits of the slot number: strides, swizzles, duplicates
        columns = [rng.getrandbits(rng.choice([1, 3, 5, 8])) % most for _ in range(5)]
        shift = rng.getrandbits(8) % most
        return [shift ^ _xor(columns[b] for b in range(5) if i >> b & 1) for i in range(32)]
    if kind == 1:  # a few numbers, drawn again and again
        pool = [rng.randrange(min(most, 256)) for _ in range(rng.choice([2, 4, 8, 16, 32]))]
        return [rng.choice(pool) for _ in range(32)]
    order = list(range(32))  # neighbours in any order, some of them doubled
    rng.shuffle(order)
    for _ in range(rng.choice([0, 4, 12])):
        order[rng.randrange(32)] = order[rng.randrange(32)]
    return order


def _xor(numbers: Iterator[int]) -> int:
    total = 0
    for number in numbers:
        total ^= number
    return total
