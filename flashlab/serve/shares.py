"""How much of what requests hold of a cache has tokens in it, by the way in which it is handed out."""

from __future__ import annotations

from collections.abc import Sequence

from flashlab.serve.traces import read

__all__ = ["MAXIMUM", "shares"]

MAXIMUM = 2048
"""Tokens that a request may have: prompts and answers of up to 1024 each."""


def shares(
    name: str, *, sizes: Sequence[int] = (1, 16, 32, 64, 128), requests: int = 20_000, seed: int = 0
) -> dict[str, float]:
    """Of a `lognormal` trace: the share of rows in use, of those that live requests hold, from a request's first token to its last.

    A request gets its whole room at once: as much as any may need ("the maximum"), room for its prompt and the next power of two of
    its answer, or just what it will need ("an oracle" knows). Or it gets pages as it grows. Lengths alone decide, as if no request
    ever waited.

    >>> found = shares("alpaca", sizes=(16,), requests=2000)
    >>> {name: f"{share:.0%}" for name, share in found.items()}
    {'the maximum': '4%', 'a power of two': '40%', 'an oracle': '56%', 'pages of 16': '92%'}
    """
    used = 0
    held = dict.fromkeys(("the maximum", "a power of two", "an oracle", *(f"pages of {size}" for size in sizes)), 0)
    for one in read(f"lognormal:{name}", requests=requests, seed=seed):
        whole, steps = one.prompt + one.answer, one.answer
        used += steps * one.prompt + steps * (steps - 1) // 2
        held["the maximum"] += steps * MAXIMUM
        held["a power of two"] += steps * (one.prompt + (1 << (one.answer - 1).bit_length()))
        held["an oracle"] += steps * whole
        for size in sizes:
            held[f"pages of {size}"] += size * (_pages(whole - 1, size) - _pages(one.prompt - 1, size))
    return {way: used / rows for way, rows in held.items()}


def _pages(n: int, size: int) -> int:
    """The pages of 1, 2, … n tokens, summed.

    >>> _pages(5, 2) == 1 + 1 + 2 + 2 + 3
    True
    """
    full, rest = divmod(n, size)
    return size * full * (full + 1) // 2 + rest * (full + 1)
