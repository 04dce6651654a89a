"""Attention that torch differentiates, transforms and compiles. `flashlab.run.autograd` has the operators behind it."""

from flashlab.run.autograd import attention

__all__ = ["attention"]
