"""Attention that torch differentiates, transforms and compiles, and our kernels behind torch's own attention.

`flashlab.run.autograd` has the operators behind `attention`, and `flashlab.integrations.sdpa` those behind `register_sdpa`.
"""

from flashlab.integrations.sdpa import register_sdpa
from flashlab.run.autograd import attention, padded

__all__ = ["attention", "padded", "register_sdpa"]
