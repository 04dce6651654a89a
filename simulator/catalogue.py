"""The catalogue has one row per algorithm. A new algorithm adds files of its name, and its row here."""

from __future__ import annotations

import copyreg
from typing import Any

from simulator.algorithm import Algorithm
from simulator.algorithms import (
    append_kv,
    cascade,
    copy_pages,
    flash1,
    flash1_backward,
    flash2,
    flash2_backward,
    flash2_backward_deterministic,
    flash2_triton,
    flash3,
    flash3_backward,
    flash3_backward_deterministic,
    flash3_backward_rungs,
    flash3_backward_wide,
    flash3_fp8,
    flash3_paged,
    flash3_rungs,
    flash_decoding,
    flash_decoding_rungs,
    mla,
    mla_hopper,
    mla_hopper_paged,
    mla_paged,
    online_softmax,
    paged,
    paged_rungs,
    softmax,
    standard,
    standard_backward,
)  # fmt: skip
from simulator.errors import UsageError, unknown
from simulator.misuse import undecorated
from simulator.operations.attention import ATTENTION
from simulator.operations.operation import Operation
from simulator.problem import FEATURES, Problem
from simulator.program import Program
from simulator.support import Support

ROWS = (
    standard.ROW,
    online_softmax.ROW,
    flash1.ROW,
    flash2.ROW,
    *flash3_rungs.ROWS,
    flash3.ROW,
    flash3_fp8.ROW,
    flash2_triton.ROW,
    *flash_decoding_rungs.ROWS,
    flash_decoding.ROW,
    *paged_rungs.ROWS,
    paged.ROW,
    flash3_paged.ROW,
    mla.ROW,
    mla_paged.ROW,
    mla_hopper.ROW,
    mla_hopper_paged.ROW,
    cascade.ROW,
    append_kv.ROW,
    copy_pages.ROW,
    standard_backward.ROW,
    flash1_backward.ROW,
    flash2_backward.ROW,
    flash2_backward_deterministic.ROW,
    *flash3_backward_rungs.ROWS,
    flash3_backward.ROW,
    flash3_backward_deterministic.ROW,
    flash3_backward_wide.ROW,
    *softmax.ROWS,
)

CATALOGUE = {row.name: row for row in ROWS}
"""Every algorithm by name."""


def of(operation: Operation = ATTENTION) -> dict[str, Algorithm]:
    """The algorithms of an operation, by name.

    >>> from simulator.operations.softmax import SOFTMAX
    >>> list(of(SOFTMAX))
    ['softmax_naive', 'softmax_safe', 'softmax_online', 'softmax_merge']
    """
    return {name: row for name, row in CATALOGUE.items() if row.operation is operation}


def with_kernels(operation: Operation | None = None, language: str | None = None) -> list[str]:
    """The algorithms that have kernels, of one operation or of all, in one language or in any.

    >>> with_kernels()[:2], with_kernels(language="triton")
    (['standard', 'online_softmax'], ['flash2_triton'])
    """
    return [
        row.name
        for row in CATALOGUE.values()
        if row.kernels and operation in (None, row.operation) and language in (None, row.language)
    ]


def ladder(top: str, bottom: str) -> list[str]:
    """The rungs from `bottom` up to `top`, by what each row follows. Raises `UsageError` if `bottom` isn't below `top`.

    >>> ladder("flash3", "flash2")
    ['flash2', 'flash3_1', 'flash3_2', 'flash3_3', 'flash3']
    >>> ladder("flash3_backward", "flash2_backward")[1:]
    ['flash3_backward_1', 'flash3_backward_2', 'flash3_backward_3', 'flash3_backward']
    """
    rungs = [top]
    while rungs[0] != bottom:
        below = get(rungs[0]).follows
        if below is None:
            raise UsageError("bottom", bottom, f"a rung below {top}")
        rungs.insert(0, below)
    return rungs


def names(problem: Problem, operation: Operation = ATTENTION) -> list[str]:
    """The algorithms of an operation that take a problem.

    >>> import flashlab as fl
    >>> names(fl.Problem(batch=1, heads=1, len_q=8, head_dim=64, dtype="float8_e4m3fn"))
    ['flash3_fp8']
    """
    return [row.name for row in of(operation).values() if row.refusal(problem) is None]


def get(algorithm: str | Program) -> Algorithm:
    """The row of an algorithm by name, or a new row for a user's own tile program. Raises `UsageError`."""
    if isinstance(algorithm, Program):
        own = Algorithm(algorithm.name, algorithm, support=Support(masks=FEATURES))
        return next((row for row in CATALOGUE.values() if row.program is algorithm), own)
    undecorated(algorithm)
    if not isinstance(algorithm, str) or algorithm not in CATALOGUE:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise unknown("algorithm", algorithm, CATALOGUE)
    return CATALOGUE[algorithm]


def _pickled(row: Algorithm) -> Any:
    """The catalogue's rows are pickled by their names, others by their content."""
    return (get, (row.name,)) if CATALOGUE.get(row.name) is row else row.__reduce_ex__(2)


copyreg.pickle(Algorithm, _pickled)
