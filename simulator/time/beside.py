"""What slows down what runs beside it: warpgroups share the exponential, FMA and ALU units and the tensor cores instruction by
instruction, and both get through less of it while the other kind works, too (rates.py: VECTOR, PRODUCTS)."""

from __future__ import annotations

from simulator.time.engine import SM, Actor
from simulator.time.rates import ALONE, PRODUCTS, VECTOR


def vector(sm: SM, name: str, pieces: int = 8, **cycles: float) -> Actor:
    """Work of one warpgroup on `exp`, `alu` or both at a time: `cycles` of each at its full rate, in `pieces` that others may come
    between."""
    for _ in range(pieces):
        rate = VECTOR if sm.free["tensor"] > sm.now else ALONE
        yield max(sm.use(unit, share / pieces / rate, name) for unit, share in cycles.items())


def products(sm: SM, cycles: float, name: str) -> float:
    """Products of one warpgroup, begun when those before are done; returns when they end."""
    return sm.use("tensor", cycles * (PRODUCTS if sm.free["exp"] > sm.now else 1.0), name)
