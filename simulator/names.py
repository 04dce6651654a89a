"""Names that arguments take, as types: an editor offers them, and a type checker knows a wrong one.

Algorithms aren't among them: a program of one's own stands wherever a name does.
"""

from __future__ import annotations

from typing import Literal

DType = Literal["float32", "float16", "bfloat16", "float8_e4m3fn"]
"""The storage dtypes."""
DeviceName = Literal[
    "t4", "a100", "a100-40", "a100-80", "h100", "h200", "b200", "l4", "l40s", "3090", "4090", "5090",
]  # fmt: skip
"""The GPUs that are known by name."""
Backend = Literal["gpu", "emulator"]
"""What runs kernels."""
AnyBackend = Literal["simulator", "emulator", "gpu"]
"""What runs an algorithm: its tile program, or its kernels on either."""
