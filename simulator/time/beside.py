"""How exponentials and matrix products slow each other down.

Warpgroups share the exponential, FMA and ALU units and the tensor cores instruction by instruction. While one kind of
work runs beside the other, both take longer (`VECTOR`, `COMPARED` and `PRODUCTS` in rates.py).
"""

from __future__ import annotations

from simulator.time.engine import SM, Actor
from simulator.time.rates import ALONE, COMPARED, PRODUCTS, VECTOR


def vector(sm: SM, name: str, pieces: int = 8, **cycles: float) -> Actor:
    """Work of one warpgroup on `exp`, on `alu`, or on both at a time: `cycles` of each at its full rate.

    It comes in `pieces`, and the work of other warpgroups may come in between.
    """
    for _ in range(pieces):
        rate = VECTOR if sm.free["tensor"] > sm.now else ALONE
        yield max(sm.use(unit, share / pieces / rate, name) for unit, share in cycles.items())


def compared(sm: SM, name: str, cycles: float, pieces: int = 8) -> Actor:
    """Maxima, comparisons and selections of one warpgroup: `cycles` at their full rate."""
    for _ in range(pieces):
        yield sm.use("alu", cycles / pieces / (COMPARED if sm.free["tensor"] > sm.now else ALONE), name)


def products(sm: SM, cycles: float, name: str) -> float:
    """Issue matrix products of one warpgroup, which begin when those before are done. Returns when they end."""
    return sm.use("tensor", cycles * (PRODUCTS if sm.free["exp"] > sm.now else 1.0), name)
