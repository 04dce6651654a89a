"""What the rows of several algorithms share: names of arrays that kernels take, and a launch."""

from __future__ import annotations

from simulator.algorithm import Kernel
from simulator.problem import COMMON_MASKS, SCORES

FORWARD = ("q", "k", "v", "out", "lse")
OFFSETS = ("offsets_q", "offsets_kv")
"""Where the sequences of a ragged batch begin."""
OPTIONAL = ("sinks", "alibi_slopes", *OFFSETS, "mask_bits", "mask_tiles")
"""What the kernels of the forward pass take in addition, where a problem has it."""
REQUESTS = ("block_table", "seq_lens")
PARTIAL = ("partial", "partial_m", "partial_l")
"""What blocks that have some of the keys of a row leave in HBM for others."""
TREE = (*PARTIAL, "arrivals")
TRAINED = (*COMMON_MASKS, *SCORES, "mask", "block_size", "lengths")
"""The masks of those forward passes that training wants."""
PACK = Kernel(
    "mask",
    "pack_mask",
    ("mask", "block_mask", "mask_bits", "mask_tiles", *OFFSETS, "offsets_mask"),
    when=lambda p: p.mask is not None,
)
"""The launch that packs a mask into bits."""
