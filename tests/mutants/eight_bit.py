"""Seeded bugs in the exact LSE of 8-bit operands. The emulator runs them, so that no GPU is needed."""

from __future__ import annotations

from tests.mutants.scores import SOFTMAX, ScoreMutant

FP8, KERNEL = "kernels_cu/include/fp8.cuh", "kernels_cu/flash3_fp8.cu"


def bug(mechanism: str, file: str, old: str, new: str, case: str = "causal, GQA") -> ScoreMutant:
    return ScoreMutant(
        mechanism=mechanism, file=file, edits=((old, new),), check="exact_lse", case=case, algorithm="flash3_fp8"
    )


EXACT_LSE = [
    bug("the rounded sums taken", FP8, "EXACT_LSE ? quad_sum(l[half]) : rounded[half]", "rounded[half]"),
    bug("a lane's part for the sum", FP8, "quad_sum(l[half])", "l[half]"),
    bug("the sum not rescaled", SOFTMAX, "l[half] *= alpha[half];", "", "falling"),
    bug("O divided by the exact sum", KERNEL, "sum = softmax.rounded[half]", "sum = softmax.of_lse(half)"),
]
