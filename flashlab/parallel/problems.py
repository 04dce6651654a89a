"""What ranks can share: the checks that a scheme and its formula have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashlab.parallel import layouts
from flashlab.parallel.rank import Scheme
from flashlab.parallel.schemes import SCHEMES
from simulator.errors import Said, UsageError, among, unknown
from simulator.fields import integer
from simulator.problem import FEATURES, FIELDS, Problem

__all__ = ["MOST_RANKS", "check", "scheme_of"]

MOST_RANKS = 1024
"""The most ranks: each pair may have its entries in the ledger."""
_KNOWN = ("causal", "scale", "soft_cap")
_ACCEPTED = "nothing: of what bends scores, ranks know causal, scale and soft_cap"


def scheme_of(scheme: Any) -> Scheme:
    """A scheme by its name, or one of one's own: a `Scheme`, or a function for the forward pass alone."""
    if isinstance(scheme, Scheme):
        return scheme
    if callable(scheme):
        return Scheme(getattr(scheme, "__name__", "mine"), scheme)
    if not isinstance(scheme, str) or scheme not in SCHEMES:
        raise unknown("scheme", scheme, SCHEMES)
    return SCHEMES[scheme]


def check(scheme: Scheme, problem: Problem, ranks: int, layout: str, interleave: int, *, backward: bool) -> None:
    """Raise `UsageError` for what the ranks of a scheme can't share."""
    p, striped = Problem.checked(problem), scheme.kv == "striped"
    among("layout", layout, layouts.LAYOUTS)
    integer("interleave", interleave, 1)
    if integer("ranks", ranks, 1) > MOST_RANKS:
        raise UsageError("ranks", ranks, f"an integer from 1 to {MOST_RANKS:,}")
    if backward and scheme.backward is None:
        raise UsageError("dout", Said("given"), f"None: {scheme.name} has a forward pass only")
    for name in FEATURES:
        if name not in (*_KNOWN, *(("lengths",) if striped and p.page_size else ())):
            if getattr(p, name) != FIELDS[name].left_out(p):
                raise UsageError(name, getattr(p, name), _ACCEPTED)
    if p.len_prefix is not None or (p.page_size is not None and not striped):
        name = "page_size" if p.len_prefix is None else "len_prefix"
        raise UsageError(name, getattr(p, name), "None: pages are for dcp, and no scheme shares a prefix")
    if striped and p.causal and p.len_q > 1:
        raise UsageError("causal", True, f"False with several queries: keys of {scheme.name} don't lie in one piece")
    if not striped and p.causal and scheme.q == "rows" == scheme.lse and p.len_q != p.len_kv:
        raise UsageError("len_kv", p.len_kv, f"{p.len_q}, as many as queries, for a causal {scheme.name}")
    if scheme.q == "rows":
        layouts.check(layout, p.len_q, ranks, argument="len_q")
    if scheme.kv == "rows":
        layouts.check(layout, p.len_kv, ranks, argument="len_kv")
    if scheme.lse == "heads":
        _divides("heads", p.heads, [ranks], scheme)
    if scheme.kv == "heads":
        _divides("kv_heads", p.kv_heads, [ranks], scheme)
    elif scheme.kv == "rows" and scheme.lse == "heads" and ranks % p.kv_heads:
        _divides("kv_heads", p.kv_heads, [ranks], scheme)


def _divides(name: str, n: int, by: Sequence[int], scheme: Scheme) -> None:
    if any(n % each for each in by):
        raise UsageError(name, n, f"a multiple of ranks = {by[0]} for {scheme.name}")
