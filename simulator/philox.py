"""The random bytes of dropout: a function of (seed, offset, head, row, column), and of nothing else.

So the mask is the same for every tile size, kernel and pass, and no bit of it is kept: a backward pass makes it again from
16 bytes, the seed and the offset.

The bytes come from Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), a bijection of 128 bits
under a key of 64. It has 7 rounds here: the fewest with which it passes all of TestU01's BigCrush (their table 2), and what
FlashAttention-2 takes. Their usual 10 cost 40 % more instructions in kernels that have none to spare.

A call makes 16 bytes, which serve a patch of 4 x 4 pairs:

    key = seed,  counter = (offset + head: 64 bits, row patch, column patch)
    rows 2a, 2a + 1, 2a + 8, 2a + 9 of 16 neighbours are row patch 4 (row // 16) + a, and columns alike
    word = 2 (row % 2) + column % 2 of the four,  byte = 2 (row // 8 % 2) + column // 8 % 2 of its four

`head` counts over all batches: batch * heads + head. A call advances the offset by the number of its heads. Why the patch
has this shape: kernels_cu/include/philox.cuh.
"""

from __future__ import annotations

import numpy as np

from simulator.dtypes import Array
from simulator.problem import Problem

ROUNDS = 7
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF


def philox4x32(counter: tuple[Array, Array, Array, Array], key: tuple[int, int], rounds: int = ROUNDS) -> list[Array]:
    """Four words of 32 bits for each counter, whose four words may broadcast. All are arrays of uint64.

    >>> zero = np.zeros(1, np.uint64)
    >>> [f"{int(word[0]):08x}" for word in philox4x32((zero, zero, zero, zero), (0, 0))]
    ['5f6fb709', '0d893f64', '4f121f81', '4f730a48']
    """
    x: list[Array] = [np.asarray(word, np.uint64) for word in counter]
    low, shift = np.uint64(_WORD), np.uint64(32)
    for i in range(rounds):
        first, second = (np.uint64((word + i * weyl) & _WORD) for word, weyl in zip(key, _WEYL, strict=True))
        a, b = x[0] * np.uint64(_MULTIPLIERS[0]), x[2] * np.uint64(_MULTIPLIERS[1])
        x = [b >> shift ^ x[1] ^ first, b & low, a >> shift ^ x[3] ^ second, a & low]
    return x


def random_bytes(state: Array, heads: Array, rows: Array, columns: Array) -> Array:
    """The byte of each pair, uint8 with the axes of `heads`, then rows, then columns. `state` is (seed, offset), int64."""
    seed, offset = (int(n) & 2**64 - 1 for n in state)
    counters = np.array([(offset + int(head)) & 2**64 - 1 for head in heads.flat], np.uint64).reshape(-1, 1, 1)
    (row_patches, own_row), (column_patches, own_column) = (
        np.unique(line // 16 * 4 + line % 8 // 2, return_inverse=True) for line in (rows, columns)
    )
    words = philox4x32(
        (
            counters & np.uint64(_WORD),
            counters >> np.uint64(32),
            row_patches.astype(np.uint64)[:, None],
            column_patches.astype(np.uint64),
        ),
        (seed & _WORD, seed >> 32),
    )
    shape = len(counters), len(row_patches), len(column_patches)
    bytes_of = np.stack([np.broadcast_to(word, shape) for word in words], -1).astype("<u4").view(np.uint8)
    place = 4 * (2 * (rows % 2)[:, None] + columns % 2) + 2 * (rows // 8 % 2)[:, None] + columns // 8 % 2
    found = bytes_of[:, own_row[:, None], own_column, place]
    return found.reshape(*heads.shape, len(rows), len(columns))


def kept_weights(problem: Problem, state: Array) -> Array:
    """Z of all pairs in float64, (batch, kv_heads, query_in_group, len_q, len_kv): 0 or 256 / kept, which is 1 on the average."""
    p = problem
    heads = np.arange(p.batch * p.heads).reshape(p.batch, p.kv_heads, p.queries_per_kv)
    kept = random_bytes(state, heads, np.arange(p.len_q), np.arange(p.len_kv)) < p.kept
    return kept * (256 / p.kept)


def is_kept(problem: Problem, state: Array, head: int, row: int, column: int) -> bool:
    """Is the weight of one pair kept? The definition in plain integers, with which `random_bytes` shares no line.

    >>> p = Problem(batch=1, heads=1, len_q=3, len_kv=20, head_dim=4, dtype="float32", dropout=0.5)
    >>> state = np.array([7, 8])
    >>> bool((kept_weights(p, state)[0, 0, 0, 2, 17] > 0) == is_kept(p, state, 0, 2, 17))
    True
    """
    key, start = int(state[0]) % 2**64, (int(state[1]) + head) % 2**64
    k0, k1 = key % 2**32, key // 2**32
    patches = [line // 16 * 4 + line % 8 // 2 for line in (row, column)]
    c0, c1, c2, c3 = start % 2**32, start // 2**32, *patches
    for _ in range(ROUNDS):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = b // 2**32 ^ c1 ^ k0, b % 2**32, a // 2**32 ^ c3 ^ k1, a % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    word = (c0, c1, c2, c3)[2 * (row % 2) + column % 2]
    return word // 256 ** (2 * (row // 8 % 2) + column // 8 % 2) % 256 < problem.kept
