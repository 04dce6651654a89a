"""What a launch is passed, as far as no GPU is asked."""

from __future__ import annotations

from typing import Any

import pytest

import flashlab as fl
from flashlab.run.abi import check_pages


def test_pages_that_lie_too_far_apart_are_refused() -> None:
    """In units of what divides all strides: of 16 bytes 32 GiB are within reach, of 256 bytes 512 GiB."""
    p = fl.Problem(batch=1, heads=1, lengths=[(1, 64)], head_dim=16, dtype="float16", page_size=16, pages=1 << 20)
    spec = fl.count("paged", p).tensors["k"]
    far = (32 << 10) - 16
    check_pages(p, spec, (far, 32, 32))
    check_pages(p, spec, (256 << 10, 256, 256))
    with pytest.raises(fl.UsageError, match=r"k\.strides = \(32784, 32, 16\).*34,359,738,368 bytes.*units of 16"):
        check_pages(p, spec, ((32 << 10) + 16, 32, 16))


def test_so_many_scales_are_refused() -> None:
    sizes: dict[str, Any] = {"batch": 1, "heads": 2, "head_dim": 16, "page_size": 16, "pages": 1 << 26}
    p = fl.Problem(**sizes, lengths=[(1, 64)], dtype="float16", kv_dtype="int8", k_scale="token")
    with pytest.raises(fl.UsageError, match=r"pages = 67,?108,?864.*67,108,864 with a scale"):
        check_pages(p, fl.count("paged", p).tensors["k"], (512, 256, 16))
