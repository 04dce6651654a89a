"""Rung 1 of FlashAttention-3 moves what the top one moves."""

from simulator.formulas.flash3 import flash3 as flash3_1

__all__ = ["flash3_1"]
