"""The colour of each tensor: in the player, the race, the drawings and the plots by tensor.

A name leads to a kind, and a kind to a colour, a light and a dark one. As letters on the player's cards, on the row that
has just changed too, the colours have a contrast of 4.5 or more.
"""

from __future__ import annotations

__all__ = ["DARK", "KINDS", "LIGHT", "kind_of", "variables"]

LIGHT = {
    "q": "#004a80", "k": "#0d70a8", "v": "#00785a", "s": "#b5361c", "p": "#8f6000", "o": "#a04a7e", "out": "#454b54",
    "stat": "#6b6100", "other": "#5f6873",
}  # fmt: skip
"""The colours on a light ground, by kind: "stat" is a number a row, such as m and ℓ."""

DARK = {
    "q": "#4aa3ec", "k": "#9adcff", "v": "#4fc9a4", "s": "#ff8468", "p": "#e6b355", "o": "#e19bc5", "out": "#c2c9d2",
    "stat": "#d8cb55", "other": "#a9b2bd",
}  # fmt: skip
"""The same on a dark ground."""

KINDS = {
    **{name: name for name in ("q", "k", "v", "s", "p", "o", "out")},
    **{f"d{name}": name for name in ("q", "k", "v", "s", "p", "out")},  # a gradient has the colour of what it is of
    **dict.fromkeys(("v_t", "turned"), "v"),
    **dict.fromkeys(("partial", "partial_o", "o_warps"), "o"),
    "dq_sum": "q",
    "latent": "k",  # and V: the row is both
    **dict.fromkeys(("k_prefix", "k_pool", "new_k"), "k"),
    **dict.fromkeys(("v_prefix", "v_pool", "new_v"), "v"),
    **dict.fromkeys(
        ("l", "m", "alpha", "lse", "row_max", "row_sum", "a", "b", "d", "delta", "partial_l", "partial_m", "partial_lse", "l_warps",
         "m_warps"),
        "stat",
    ),
}  # fmt: skip
"""The kinds of tensors and buffers, by the names that the built-in programs give them. Others are "other"."""


def kind_of(name: str) -> str:
    """The kind of a tensor or a buffer.

    >>> kind_of("dk"), kind_of("lse"), kind_of("mine")
    ('k', 'stat', 'other')
    """
    return KINDS.get(name, "other")


def variables(colours: dict[str, str]) -> str:
    """Colours as variables of a style sheet.

    >>> variables({"q": "#004a80"})
    '--tensor-q: #004a80;'
    """
    return " ".join(f"--tensor-{kind}: {colour};" for kind, colour in colours.items())
