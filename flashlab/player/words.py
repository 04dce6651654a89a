"""What the player's words mean. What each step is for is in the catalogue's row of its algorithm (`about`)."""

from __future__ import annotations

__all__ = ["GLOSSARY", "REGISTERS"]

GLOSSARY = {
    "HBM": "The GPU's large memory (global memory). Counts are bytes that instructions request; caches may serve some.",
    "SRAM": "The small, fast memory that each thread block has for itself (CUDA calls it shared memory).",
    "registers": "Where a block computes. What stays there moves no bytes.",
    "launch": "One start of a kernel on the GPU. Between launches, everything has to lie in HBM.",
    "block": "A thread block: the threads that share one SRAM. It works on its own tiles, step by step.",
    "tile": "A piece of a matrix that is moved and multiplied as a whole: Br rows of queries, Bc columns of keys.",
    "S": "The scores: one row per query, one column per key. FlashAttention never holds more than a tile of it.",
    "P": "The probabilities: exp(S − m), divided by ℓ at the end.",
    "m": "Per query row, the largest score so far. It is subtracted before exp, so that nothing overflows.",
    "ℓ": "Per query row, the sum so far of exp(score − m).",
    "accumulator": "Per query row, the sum so far of exp(score − m) times the value. Divided by ℓ, it is the output.",
    "step": "A named part of the tile program; the kernel has a mark of the same name.",
}
"""The words that the page explains, with their meanings."""

REGISTERS = {
    **dict.fromkeys(("m_i", "row_max", "top"), GLOSSARY["m"]),
    **dict.fromkeys(("l_i", "row_sum", "total"), GLOSSARY["ℓ"]),
    **dict.fromkeys(("s", "s_ij"), GLOSSARY["S"]),
    "p": GLOSSARY["P"],
    "acc": GLOSSARY["accumulator"],
    "o_i": "The rows of O: the output so far, already divided by ℓ.",
    "pv": "P times the values of this tile.",
    "m_new": "The row maximum, including this tile.",
    "l_new": "The row sum, including this tile.",
    "new_max": "The row maximum, including what was just read.",
    "m_tile": "The row maximum of this tile alone.",
    "l_tile": "The row sum of this tile alone.",
    "alpha": "exp(m_old − m_new): by how much the old sums shrink when the maximum rises. 1 where it did not.",
    "old": "exp(m_old − m_new): the factor for what was summed before.",
    "new": "exp(m_tile − m_new): the factor for this tile.",
    "logsumexp": "m + log ℓ, the log-sum-exp of the row.",
}
"""What register tiles mean, by the names that the built-in programs give them."""
