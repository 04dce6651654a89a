"""What the player's words mean. What each step is for, the algorithm's row of the catalogue says."""

from __future__ import annotations

__all__ = ["GLOSSARY", "REGISTERS"]

GLOSSARY = {
    "HBM": "The GPU's large memory (global memory). Counted are the bytes that instructions request; caches may serve some.",
    "SRAM": "The small, fast memory that each thread block has for itself (CUDA calls it shared memory).",
    "registers": "Where a block computes. What stays there moves no bytes.",
    "launch": "One start of a kernel on the GPU. Between launches, everything has to lie in HBM.",
    "block": "A thread block: the threads that share one SRAM. It works on its own tiles, step by step.",
    "tile": "A piece of a matrix that is moved and multiplied as a whole: Br rows of queries, Bc columns of keys.",
    "S": "The scores: one row a query, one column a key. FlashAttention never has more of it than a tile.",
    "P": "The probabilities: exp(S − m), and in the end divided by ℓ.",
    "m": "For each query row, the largest score so far. Subtracted before exp, so that nothing overflows.",
    "ℓ": "For each query row, the sum so far of exp(score − m).",
    "accumulator": "For each query row, the sum so far of exp(score − m) times the value; divided by ℓ it is the output.",
    "step": "A named part of the tile program; the CUDA kernel has a mark of the same name.",
}
"""The words that the page explains."""

REGISTERS = {
    **dict.fromkeys(("m_i", "row_max", "top"), GLOSSARY["m"]),
    **dict.fromkeys(("l_i", "row_sum", "total"), GLOSSARY["ℓ"]),
    **dict.fromkeys(("s", "s_ij"), GLOSSARY["S"]),
    "p": GLOSSARY["P"],
    "acc": GLOSSARY["accumulator"],
    "o_i": "The rows of O: the output so far, already divided by ℓ.",
    "pv": "P times the values, of this tile.",
    "m_new": "The row maximum, this tile included.",
    "l_new": "The row sum, this tile included.",
    "new_max": "The row maximum, what was just read included.",
    "m_tile": "The row maximum of this tile alone.",
    "l_tile": "The row sum of this tile alone.",
    "alpha": "exp(m_old − m_new): by how much the old sums shrink when the maximum rises. 1 where it did not.",
    "old": "exp(m_old − m_new): the factor of what was summed up before.",
    "new": "exp(m_tile − m_new): the factor of this tile.",
    "logsumexp": "m + log ℓ, the log-sum-exp of the row.",
}
"""Register tiles by the name that the built-in programs give them."""
