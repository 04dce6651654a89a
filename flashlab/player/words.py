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
    "page": "A few keys and values that lie together. A block table says which pages a request has, in the order of its keys.",
    "partial result": "What a chunk of keys says of a query: O, m and ℓ. A tree of these is merged into the output.",
    "step": "A named part of the tile program; the kernel has a mark of the same name.",
}
"""The words that the page explains, with their meanings."""

REGISTERS = {
    **dict.fromkeys(("m_i", "row_max", "top"), GLOSSARY["m"]),
    **dict.fromkeys(("l_i", "exact_i", "row_sum", "total"), GLOSSARY["ℓ"]),
    **dict.fromkeys(("s", "s_ij"), GLOSSARY["S"]),
    "p": GLOSSARY["P"],
    "new_k": "The new keys of these tokens.",
    "new_v": "The new values of these tokens.",
    "acc": GLOSSARY["accumulator"],
    "o_i": "The rows of O: the output so far, already divided by ℓ.",
    "pv": "P times the values of this tile.",
    "base": "What the accumulator is relative to: 1, or a scale of V that is still to be applied.",
    "m_new": "The row maximum, including this tile.",
    "l_new": "The row sum, including this tile.",
    "new_max": "The row maximum, including what was just read.",
    "m_tile": "The row maximum of this tile alone.",
    "l_tile": "The row sum of this tile alone.",
    "alpha": "exp(m_old − m_new): by how much the old sums shrink when the maximum rises. 1 where it did not.",
    "old": "exp(m_old − m_new): the factor for what was summed before.",
    "new": "exp(m_tile − m_new): the factor for this tile.",
    "logsumexp": "m + log ℓ, the log-sum-exp of the row.",
    "e": "exp(S − m) of what was just read.",
    "x": "What was just read, to be added up.",
    "q_i": "The rows of Q, in registers for the whole block.",
    "o": GLOSSARY["accumulator"],
    "o_n": "A row's next partial result: the output over one chunk of keys.",
    "m_n": "The largest score of that chunk.",
    "l_n": "The sum of exp(score − m) over that chunk.",
    "lse_n": "The log-sum-exp of that chunk. It is −∞ where the row saw none of its keys.",
    "beta": "exp(LSE or m of the part − m_new): by how much that part weighs.",
    "factor": "exp(m of a part − m of all): by how much that part's sums shrink when parts are merged.",
    "products": "The products of this tile, before their scales.",
    **{f"of_{name}": f"The scale of {name.upper()}: what its 8-bit numbers are multiplied by." for name in "qkv"},
    "rows": "A tile of V as it was read: keys down, head dim across.",
    "columns": "The same tile turned: head dim down, keys across.",
    "lse_i": "Per query, m + log ℓ from the forward pass. exp(S − LSE) is P at once: no maximum, no sum, no division.",
    "d_i": "Per query, the sum of dO · O over the head dim: what softmax's gradient subtracts.",
    "p_ij": "The probabilities, computed again from S and the LSE.",
    **dict.fromkeys(("dp", "dp_ij", "dp_ic"), "The gradient of P: dO times V transposed."),
    **dict.fromkeys(("ds", "ds_ic", "bent"), "The gradient of S, P · (dP − D), or what becomes it."),
    "dq_i": "What this tile of keys adds to the gradient of these queries.",
    "part": "What this tile adds to a gradient.",
    "dk_j": "The gradient of these keys so far: dS transposed times Q.",
    "dv_j": "The gradient of these values so far: P transposed times dO.",
}
"""What register tiles mean, by the names that the built-in programs give them."""
