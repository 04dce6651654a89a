"""Figures for people: bytes in binary units (KiB, MiB, …), everything else in decimal ones (k, M, …).

The binary ones because sizes here are mostly powers of two: a 64 x 64 tile of float16 is 8 KiB, not 8.192 kB.
"""

from __future__ import annotations

from simulator.problem import Problem

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_DECIMAL = ("", "k", "M", "G", "T", "P", "E")


def nbytes(n: float) -> str:
    """Bytes, three digits.

    >>> nbytes(0), nbytes(512), nbytes(81920), nbytes(3 * 2**40)
    ('0 B', '512 B', '80.0 KiB', '3.00 TiB')
    """
    return _scaled(n, 1024, _BINARY)


def count(n: float) -> str:
    """A number of things, three digits.

    >>> count(12), count(67_108_864), count(9.894e14)
    ('12', '67.1 M', '989 T')
    """
    return _scaled(n, 1000, _DECIMAL).rstrip()


def _scaled(n: float, base: int, units: tuple[str, ...]) -> str:
    value, step = float(n), 0
    while abs(value) >= 999.5 and step + 1 < len(units):
        value, step = value / base, step + 1
    whole = step == 0 and value == int(value)
    decimals = 0 if whole else 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:,.{decimals}f} {units[step]}"


def problem(p: Problem, *, length: bool = True) -> str:
    """A problem in a line; without its lengths if several are shown together.

    >>> problem(Problem(batch=1, heads=8, kv_heads=2, len_q=4096, head_dim=64, dtype="float16", causal=True))
    '1 × 8 heads (2 of K and V) × 4,096 × 64, float16, causal'
    """
    kv = "" if p.kv_heads == p.heads else f" ({p.kv_heads} of K and V)"
    heads = f"{p.heads} head{'s' if p.heads > 1 else ''}{kv}"
    parts = [f"{p.batch} × {heads} × " + (f"{p.len_q:,} × " if length else "") + f"{p.head_dim}", p.dtype]
    if length and p.len_kv != p.len_q:
        parts.append(f"{p.len_kv:,} keys")
    if p.len_prefix is not None:
        parts.append(f"{p.len_prefix:,} shared keys")
    if p.head_dim_v != p.head_dim:
        parts.append(f"values of {p.head_dim_v}")
    return ", ".join([*parts, *p.words])
