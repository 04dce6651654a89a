"""What tests on a GPU share."""

from __future__ import annotations

import flashlab as fl
from flashlab.run import tritonc
from flashlab.run.devices import current_device


def cannot_run(algorithm: str, problem: fl.Problem) -> str | None:
    """Why an algorithm's kernels can't run here, or None."""
    row = fl.CATALOGUE[algorithm]
    if row.language == "triton":
        try:
            tritonc.compiler()
        except fl.Unavailable as missing:
            return str(missing)
    return row.refuses(problem, current_device())
