"""A request, what a full block of it holds, and what it owns: the records that a block manager keeps."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Content", "Owned", "Request"]


@dataclass(eq=False)
class Request:
    """A request: its prompt and, behind it, what has been answered so far. Tokens are only ever appended.

    Requests with another `salt` share nothing with this one, whatever their tokens are.
    """

    name: str
    tokens: list[int]
    salt: str = ""
    digests: list[bytes] = field(default_factory=list[bytes], repr=False)
    """Of its full blocks, so far as anybody asked. Each covers all tokens up to the end of its block."""


@dataclass(frozen=True, eq=False)
class Content:
    """What a full block holds: its tokens, behind all those of its parent."""

    digest: bytes
    parent: Content | None
    tokens: tuple[int, ...]
    salt: str

    def follows(self, parent: Content | None) -> bool:
        """Are all tokens before this block those up to the end of `parent`? Mostly they are one object."""
        ours = self.parent
        while ours is not parent:
            if ours is None or parent is None or (ours.tokens, ours.salt) != (parent.tokens, parent.salt):
                return False
            ours, parent = ours.parent, parent.parent
        return True


@dataclass(eq=False)
class Owned:
    """What a request owns. `written` tokens have K and V in the blocks of its `table`; its launch writes `reserved` more."""

    table: list[int]
    written: int
    contents: list[Content]
    reserved: int = 0
    source: int | None = None
    """A block that was copied for it, which its launch reads."""
    freed: bool = False
    """It was freed while its launch was in flight."""
