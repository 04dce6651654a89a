"""Rung 3 of FlashAttention-3 moves what the top one moves."""

from simulator.formulas.flash3 import flash3 as flash3_3

__all__ = ["flash3_3"]
