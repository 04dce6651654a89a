"""What the player says: what each step of the built-in algorithms is for, and what the words mean."""

from __future__ import annotations

__all__ = ["ABOUT", "GLOSSARY", "REGISTERS"]

_SCORES = "Multiply the query tile by the transposed key tile: one tile of S, each query's scores for these keys."
_MASK = "Set the scores that the mask hides to −∞, so that their exponential is 0."
_STORE_LSE = "Write each row's log-sum-exp, m + log ℓ, to HBM: all that a backward pass needs to know of the softmax."

ABOUT = {
    "standard_scores": {
        "load_q": "Fetch a tile of queries into SRAM.",
        "load_k": "Fetch a tile of keys into SRAM.",
        "scores": _SCORES,
        "mask": _MASK,
        "store_s": "Write the tile of S to HBM in float32. The whole of S goes there, and the next launch reads it back.",
    },
    "standard_softmax": {
        "row_max": "First pass over the rows of S in HBM: each row's largest score.",
        "row_sum": "Second pass over the same rows, read from HBM again: the sum of exp(score − maximum).",
        "store_p": "Third pass: divide by the sum, and write P, the probabilities, to HBM.",
        "store_lse": _STORE_LSE,
    },
    "online_softmax": {
        "online_pass": "One pass over the rows of S finds maximum and sum together: a sum is rescaled when the maximum rises.",
        "store_p": "Second pass: divide by the sum, and write P, the probabilities, to HBM.",
        "store_lse": _STORE_LSE,
    },
    "standard_output": {
        "load_p": "Fetch a tile of P, which the launch before wrote to HBM.",
        "load_v": "Fetch the values that belong to these keys.",
        "output": "Weigh the values with the probabilities, and add them to the accumulator.",
        "store_o": "Write the finished rows of the output to HBM.",
    },
    "flash1": {
        "init": "Set O and ℓ to 0 and m to −∞ in HBM: there, between two key tiles, this algorithm keeps them.",
        "load_k": "Outer loop: fetch the next tile of keys. All queries pass by before it leaves SRAM.",
        "load_v": "Fetch the values of the same keys.",
        "load_q": "Inner loop: fetch a tile of queries. It will be fetched again for every other key tile.",
        "scores": _SCORES,
        "mask": _MASK,
        "row_max": "Each warp has some of the keys only, so the warps' row maxima meet in SRAM.",
        "exp": "Exponentials, with this tile's own maximum subtracted.",
        "row_sum": "The warps' partial row sums meet in SRAM, too.",
        "stats": "Fetch the running m and ℓ, merge this tile's into them, and write them back to HBM.",
        "output": "Multiply P by the values. Each warp has a part of the keys, so their partial results meet in SRAM.",
        "update_o": "Fetch the rows of O from HBM, rescale them, add this tile's part, and write them back.",
    },
    "flash2": {
        "load_q": "Fetch this block's queries once. Its rows of O, m and ℓ never leave the registers.",
        "load_k": "Walk on: fetch the next tile of keys that the mask leaves to these rows.",
        "scores": _SCORES,
        "mask": _MASK,
        "softmax": "The new row maximum m, and P = exp(S − m). Nothing is divided yet.",
        "rescale": "Where the maximum rose, what was summed up before shrinks: ℓ and the accumulator times α = exp(m_old − m_new).",
        "load_v": "Fetch the values of the same keys.",
        "output": "Weigh the values with P, and add them to the accumulator.",
        "normalize": "After the last key tile, and only now, divide the accumulator by ℓ.",
        "store_o": "Write the finished rows of the output to HBM, for the first and only time.",
        "store_lse": _STORE_LSE,
    },
    "softmax_naive": {
        "row_sum": "First pass over the row: the sum of exp(x). Over 88, exp overflows in float32.",
        "store": "Second pass: exp(x) again, divided by the sum.",
    },
    "softmax_safe": {
        "row_max": "First pass over the row: its maximum.",
        "row_sum": "Second pass: the sum of exp(x − maximum), which cannot overflow.",
        "store": "Third pass: exp(x − maximum) again, divided by the sum.",
    },
    "softmax_online": {
        "online_pass": "One pass for both: whenever the maximum rises, the sum so far is rescaled to the new one.",
        "store": "Second pass: exp(x − maximum), divided by the sum.",
    },
    "partial": {"partial": "A tile finds its own maximum and sum, without any other tile, and writes the pair to HBM."},
    "merge": {
        "merge": "Fetch the pairs of all tiles and merge them, in any order: sums are rescaled to the common maximum.",
        "store": "Divide this tile by the merged sum.",
    },
}  # fmt: skip
"""By launch and step, for the built-in algorithms: one sentence or two."""

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
}  # fmt: skip
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
