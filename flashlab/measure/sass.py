"""Reads machine code as ncu shows it, with what each instruction did: the main loop, pipes, and where warps wait.

`ncu --page source --print-source sass --csv` lists every kernel that it profiled. For each instruction it gives the
address, the text, how often warps executed it, and how many samples of warps' states fell on it, by reason (NVIDIA,
"Nsight Compute: Warp State Sampling").
"""

from __future__ import annotations

import csv
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = ["FLOPS_16_BIT", "FLOPS_8_BIT", "PIPES", "Code", "Instruction", "flops", "parse", "pipe_of"]

PIPES: dict[str, tuple[str, ...]] = {
    "tensor": ("HGMMA", "QGMMA", "HMMA"),
    "exp": ("MUFU", "I2F", "F2I", "I2FP"),
    "fma": ("FFMA", "FADD", "FMUL", "IMAD"),
    "alu": ("F2FP", "FMNMX", "VIMNMX", "VIMNMX3", "VIADD", "VIADDMNMX", "FSETP", "ISETP", "FSEL", "SEL", "LOP3", "PLOP3",
            "IADD3", "LEA", "SHF", "PRMT", "IABS", "MOV", "CS2R", "VOTE"),
}  # fmt: skip
"""Opcodes by the pipe that executes them on Hopper. The uniform datapath's begin with U; the rest is "other"."""

FLOPS_16_BIT, FLOPS_8_BIT = 4096, 8192
"""FLOPs per clock of the tensor cores of one Hopper SM."""


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    `target` is the index of the instruction that it may branch to, and `falls` says whether the next one may follow.
    `executed` is how often warps executed it. `stalls` counts samples of warps that stood here, by reason, including
    the warps that were issuing it ("selected").
    """

    opcode: str
    target: int | None
    falls: bool
    executed: int
    stalls: Mapping[str, int]

    @property
    def name(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def samples(self) -> int:
        return sum(self.stalls.values())


@dataclass(frozen=True)
class Code:
    """A kernel's instructions in order."""

    kernel: str
    instructions: tuple[Instruction, ...]

    def after(self, i: int) -> list[int]:
        """The indices of the instructions that may follow instruction i."""
        this = self.instructions[i]
        found = [] if this.target is None else [this.target]
        return [*found, i + 1] if this.falls and i + 1 < len(self.instructions) else found

    @cached_property
    def round(self) -> tuple[int, ...]:
        """The indices of one round of the main loop, by the shortest way: no mask, no rescaling, no waiting.

        The main loop is the cycle with the largest share of matrix products. Empty without a loop over products.
        """
        best: tuple[float, tuple[int, ...]] = (0, ())
        for last, each in enumerate(self.instructions):
            if each.target is not None and each.target <= last:
                path = self._shortest(each.target, last)
                products = sum(self.instructions[i].name in PIPES["tensor"] for i in path)
                best = max(best, (products / max(1, len(path)), path), key=lambda x: x[0])
        return best[1]

    @cached_property
    def loop(self) -> frozenset[int]:
        """All instructions of the main loop: those that reach its end without passing its beginning."""
        if not self.round:
            return frozenset()
        head, last = self.round[0], self.round[-1]
        return _reached([last], lambda i: [] if i == head else self._before.get(i, []))

    @cached_property
    def computing(self) -> frozenset[int]:
        """The code of the warps that compute: the main loop, what leads into it, and what follows it."""
        return _reached(self.round[:1], lambda i: self._before.get(i, [])) | _reached(self.round[-1:], self.after)

    @cached_property
    def _before(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for i in range(len(self.instructions)):
            for j in self.after(i):
                found.setdefault(j, []).append(i)
        return found

    def _shortest(self, first: int, last: int) -> tuple[int, ...]:
        """The indices of the shortest path from `first` to `last`, both included. Empty if there is none."""
        came: dict[int, int] = {first: -1}
        queue = deque([first])
        while queue and last not in came:
            i = queue.popleft()
            for j in self.after(i):
                if j not in came:
                    came[j] = i
                    queue.append(j)
        path: list[int] = []
        i = last if last in came else -1
        while i >= 0:
            path.append(i)
            i = came[i]
        return tuple(reversed(path))

    def issued(self, indices: Iterable[int]) -> Counter[str]:
        """How many of these instructions each pipe has."""
        return Counter(pipe_of(self.instructions[i].name) for i in indices)

    def executed(self) -> Counter[str]:
        """How many instructions all warps executed, by pipe."""
        found: Counter[str] = Counter()
        for each in self.instructions:
            found[pipe_of(each.name)] += each.executed
        return found

    def stalls(self, indices: Iterable[int]) -> Counter[str]:
        """Samples by reason. A wait for wgmma has the reason "wgmma" here, where ncu calls it "barrier"."""
        found: Counter[str] = Counter()
        for i in indices:
            each = self.instructions[i]
            for reason, n in each.stalls.items():
                found["wgmma" if reason == "barrier" and each.name in ("WARPGROUP", "HGMMA") else reason] += n
        return found

    def flops(self, indices: Iterable[int]) -> int:
        """One warp's part of the FLOPs of these matrix products."""
        return sum(flops(self.instructions[i].opcode) for i in indices)

    def tensor_clocks(self, indices: Iterable[int]) -> float:
        """The clocks that an SM's tensor cores take for one warp's part of these products, at wgmma's rate."""
        opcodes = [self.instructions[i].opcode for i in indices]
        return sum(flops(opcode) / (FLOPS_8_BIT if opcode.startswith("Q") else FLOPS_16_BIT) for opcode in opcodes)


def pipe_of(name: str) -> str:
    """The pipe of an opcode.

    >>> pipe_of("MUFU"), pipe_of("UIADD3"), pipe_of("BAR")
    ('exp', 'uniform', 'other')
    """
    for pipe, names in PIPES.items():
        if name in names:
            return pipe
    return "uniform" if name.startswith("U") and name not in ("UTMALDG", "UTMASTG") else "other"


def flops(opcode: str) -> int:
    """One warp's FLOPs of a matrix instruction: a quarter of a warpgroup's. 0 for other instructions.

    >>> flops("HGMMA.64x128x16.F32.BF16"), flops("HMMA.16816.F32"), flops("FFMA")
    (65536, 4096, 0)
    """
    if match := re.match(r"[HQ]GMMA\.(\d+)x(\d+)x(\d+)", opcode):
        m, n, k = map(int, match.groups())
        return 2 * m * n * k // 4
    return {"HMMA.16816": 2 * 16 * 8 * 16, "HMMA.1688": 2 * 16 * 8 * 8}.get(".".join(opcode.split(".")[:2]), 0)


def parse(text: str) -> list[Code]:
    """The kernels on ncu's source page, in order."""
    parts = re.split(r'^"Kernel Name","(.*?)".*\n', text, flags=re.MULTILINE)[1:]
    return [
        Code(name, tuple(_instructions(list(csv.DictReader(table.splitlines())))))
        for name, table in zip(parts[::2], parts[1::2], strict=True)
    ]


def _instructions(rows: Sequence[Mapping[str, str]]) -> Iterable[Instruction]:
    places = {int(row["Address"], 16): i for i, row in enumerate(rows)}
    for row in rows:
        match = re.match(r"\s*(@!?U?P\w+\s+)?([A-Z0-9_.x]+)\s*(.*)", row["Source"])
        if match is None:
            raise ValueError(f"no instruction: {row['Source']!r}")
        guard, opcode, rest = match.groups()
        branch = re.search(r"0x[0-9a-f]+", rest) if opcode.startswith("BRA") else None
        # an unguarded branch may still depend on a predicate or on the lanes, as BRA P0 and BRA.DIV do
        always = not guard and not re.match(r"!?U?P\d", rest) and ".DIV" not in opcode and ".CONV" not in opcode
        ends = always and (branch is not None or opcode.startswith(("EXIT", "RET", "BRX")))
        yield Instruction(
            opcode,
            places.get(int(branch[0], 16)) if branch else None,
            not ends,
            _count(row["Instructions Executed"]),
            {
                name.removeprefix("stall_"): n
                for name, said in row.items()
                if re.fullmatch(r"stall_\w+", name or "") and (n := _count(said))
            },
        )


def _count(said: str | None) -> int:
    return int(said.replace(",", "")) if said else 0


def _reached(first: Iterable[int], following: Callable[[int], Sequence[int]]) -> frozenset[int]:
    found = set(first)
    queue = deque(found)
    while queue:
        for j in following(queue.popleft()):
            if j not in found:
                found.add(j)
                queue.append(j)
    return frozenset(found)
