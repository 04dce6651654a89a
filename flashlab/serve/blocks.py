"""Who owns which page of K and V: a block manager in plain Python, with vLLM's verbs.

A page of the pool is a block of `block_size` tokens. Each request has a table of its blocks, in the order of its tokens. Full
blocks may be shared: by requests with the same beginning, and by forks. A block that nobody owns keeps what it holds until it is
taken for something else, so that a later request with the same beginning finds it.

One step of a server is: `allocate_slots` for each request, `take_copies`, then `slot_mapping` and `block_table` for the launch, and
`commit` once the launch has written. If something fails in between, `abandon` gives back what was allocated. Until one of them is
called, the request is in flight: it keeps what its launch reads, even if it is freed.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256

import numpy as np

from flashlab.serve.requests import Content, Owned, Request
from simulator.dtypes import Array
from simulator.errors import UsageError
from simulator.fields import flag, integer
from simulator.memory import check_memory

__all__ = ["NULL", "KVCacheManager"]

NULL = 0
"""The block that no request owns. It fills the lines of block tables, and is never given away."""

_BYTES_PER_BLOCK = 160
"""A little more than what the manager's lists take for each block."""


class KVCacheManager:
    """Gives out the `num_blocks` blocks of a pool, of which block 0 is the null block, `block_size` tokens each.

    `enable_caching` lets requests find blocks that hold their beginning. A newcomer leaves a share `watermark` of the pool free,
    unless it is alone: room for those that are there to grow.

    Raises `UsageError` for a call out of order, such as freeing what is free. Nothing has changed then.

    >>> manager = KVCacheManager(num_blocks=8, block_size=4, watermark=0)
    >>> first = Request("first", tokens=[1, 2, 3, 4, 5, 6])
    >>> manager.allocate_slots(first, 6), manager.slot_mapping([first]).tolist()
    ([1, 2], [4, 5, 6, 7, 8, 9])
    >>> manager.commit(first)
    >>> second = Request("second", tokens=[1, 2, 3, 4, 9])
    >>> manager.get_computed_blocks(second)
    ([1], 4)
    >>> manager.allocate_slots(second, 1), manager.block_table([first, second]).tolist()
    ([3], [[1, 2], [1, 3]])
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_caching: bool = True, watermark: float = 0.01
    ) -> None:
        self.num_blocks = integer("num_blocks", num_blocks, 2)
        self.block_size = integer("block_size", block_size, 1)
        self.enable_caching = flag("enable_caching", enable_caching)
        if not isinstance(watermark, int | float) or not 0 <= watermark < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError("watermark", watermark, "a share of the pool, from 0 to below 1")
        check_memory(f"what is known of {num_blocks:,} blocks", _BYTES_PER_BLOCK * num_blocks)
        self.watermark = int(watermark * num_blocks)
        self.owned: dict[Request, Owned] = {}
        self.refs = [1] + [0] * (num_blocks - 1)  # how many tables have a block; nobody gives up the null block
        self.holds = [0] * num_blocks  # how many launches copy from it
        self.free_list = OrderedDict.fromkeys(range(1, num_blocks))  # the first is taken first
        self.contents: list[Content | None] = [None] * num_blocks
        self.cached: dict[bytes, int] = {}
        self.copies: list[tuple[int, int]] = []

    # -- what requests are told

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_list)

    def num_computed_tokens(self, request: Request) -> int:
        """How many tokens of a request have K and V in its blocks: 0 for one that owns none."""
        return self.owned[request].written if request in self.owned else 0

    def get_computed_blocks(self, request: Request) -> tuple[list[int], int]:
        """The blocks that hold a request's beginning, and how many tokens that is. Nothing is taken yet.

        For a newcomer they are full blocks, and never its whole prompt: its last token has to be computed for an answer.
        """
        own = self.owned.get(request)
        if own is not None:
            return list(own.table), own.written
        blocks = self._hits(request)
        return blocks, len(blocks) * self.block_size

    def block_table(self, requests: Sequence[Request]) -> Array:
        """The blocks of each request, int32 `(requests, most blocks)`. Behind a request's blocks stands the null block."""
        tables = [self._known(request).table for request in requests]
        found = np.full((len(tables), max(map(len, tables), default=0)), NULL, np.int32)
        for line, table in zip(found, tables, strict=True):
            line[: len(table)] = table
        return found

    def slot_mapping(self, requests: Sequence[Request]) -> Array:
        """Where the launch writes each new token, int64 `(new tokens,)`, request by request: block · block_size + row."""
        slots: list[int] = []
        for own in map(self._known, requests):
            for n in range(own.written, own.written + own.reserved):
                slots.append(own.table[n // self.block_size] * self.block_size + n % self.block_size)
        return np.array(slots, np.int64)

    def digests(self, request: Request, blocks: int) -> list[bytes]:
        """Of a request's first blocks: the digest of its tokens up to the end of each. Its parent's digest is part of it."""
        while len(request.digests) < blocks:
            at = len(request.digests) * self.block_size
            parent = request.digests[-1] if request.digests else request.salt.encode()
            tokens = array("q", request.tokens[at : at + self.block_size]).tobytes()
            request.digests.append(sha256(parent + tokens).digest())
        return request.digests[:blocks]

    # -- a step

    def allocate_slots(self, request: Request, num_new_tokens: int) -> list[int] | None:
        """Blocks for the next tokens of a request: those that it got, or None if there are too few. Then it got none.

        A newcomer gets the blocks that hold its beginning, too, and new tokens are those behind. A block that others own as
        well isn't written: the request gets a copy (`take_copies`).
        """
        own, n = self.owned.get(request), integer("num_new_tokens", num_new_tokens, 1)
        if own is not None and own.reserved:
            raise UsageError("request", request.name, "a request that is in flight no more: commit or abandon it first")
        hits = self._hits(request) if own is None else []
        table, written = (hits, len(hits) * self.block_size) if own is None else (own.table, own.written)
        if own is None:
            n = min(n, len(request.tokens) - written)  # it may have found more than it was promised
        if not 0 < n <= len(request.tokens) - written:
            left = f"at most {len(request.tokens) - written:,}: {request.name} has no more tokens"
            raise UsageError("num_new_tokens", num_new_tokens, left)
        blocks = -(-(written + n) // self.block_size)
        if blocks >= self.num_blocks:
            room = f"at most {(self.num_blocks - 1) * self.block_size:,} tokens in a request: the pool has no more"
            raise UsageError("request", f"{request.name}, {written + n:,} tokens", room)
        tail = written // self.block_size  # which block the first new token falls into
        shared = tail < len(table) and self.refs[table[tail]] > 1
        room = len(self.free_list) - sum(block in self.free_list for block in hits)
        if own is None and self.owned:
            room -= self.watermark
        if blocks - len(table) + shared > room:
            return None
        if own is None:
            for block in hits:
                self.free_list.pop(block, None)
                self.refs[block] += 1
            kept = [content for block in hits if (content := self.contents[block])]
            own = self.owned[request] = Owned(hits, written, kept)
        new = [self._taken() for _ in range(blocks - len(own.table) + shared)]
        own.reserved = n
        if shared:
            own.source, own.table[tail] = own.table[tail], new[0]
            self.holds[own.source] += 1
            self._left(own.source)
        if own.source is not None:  # from now, or from a launch that failed
            self.copies.append((own.source, own.table[tail]))
        own.table += new[shared:]
        return new

    def take_copies(self) -> list[tuple[int, int]]:
        """The copies, as (from, to), that have to be made before the launch writes. They are told once."""
        copies, self.copies = self.copies, []
        return copies

    def commit(self, request: Request) -> None:
        """The launch has written a request's new tokens. From now on others find its full blocks."""
        own = self._in_flight(request)
        if own.source is not None and (own.source, own.table[own.written // self.block_size]) in self.copies:
            raise UsageError("request", request.name, "a request whose copies were made: see take_copies")
        own.written, own.reserved = own.written + own.reserved, 0
        self._unhold(own)
        if self.enable_caching:
            self._cache(request, own)
        if own.freed:
            self._release(request)

    def abandon(self, request: Request) -> None:
        """The launch has failed. A request keeps what was written before; the blocks for its new tokens are free again."""
        own = self._in_flight(request)
        own.reserved = 0
        if own.freed:
            self._release(request)
            return
        while len(own.table) > -(-own.written // self.block_size):
            self._left(own.table.pop())
        self._forget_copy(own)  # which may not have been made: it is told again with the next launch

    def fork(self, parent: Request, child: Request) -> None:
        """Give a child all that a parent owns. Whichever of them writes into a shared block first gets a copy of it."""
        own = self._known(parent)
        if own.reserved or own.source is not None:
            raise UsageError("parent", parent.name, "a request that is not in flight, and is owed no copy")
        if child in self.owned:
            raise UsageError("child", child.name, "a request that owns no blocks")
        if child.tokens[: own.written] != parent.tokens[: own.written] or child.salt != parent.salt:
            raise UsageError("child", child.name, f"a request that begins with what {parent.name} has computed")
        for block in own.table:
            self.refs[block] += 1
        self.owned[child] = Owned(list(own.table), own.written, list(own.contents))

    def free(self, request: Request) -> None:
        """A request is done, cancelled or preempted. If it is in flight, its blocks are free when its launch is over."""
        own = self._known(request)
        if own.freed:
            raise UsageError("request", request.name, "a request that was not freed before")
        own.freed = True
        if not own.reserved:
            self._release(request)

    # -- inside

    def _known(self, request: Request) -> Owned:
        if request not in self.owned:
            raise UsageError("request", getattr(request, "name", request), "a request that owns blocks")
        return self.owned[request]

    def _in_flight(self, request: Request) -> Owned:
        own = self._known(request)
        if not own.reserved:
            raise UsageError("request", request.name, "a request in flight: allocate_slots comes first")
        return own

    def _digest(self, request: Request, i: int) -> bytes:
        return request.digests[i] if i < len(request.digests) else self.digests(request, i + 1)[i]

    def _found(self, request: Request, i: int, parent: Content | None) -> Content | None:
        """What is cached under the digest of a request's block i, if it is that: equal digests prove nothing."""
        block = self.cached.get(self._digest(request, i))
        content = None if block is None else self.contents[block]
        tokens = tuple(request.tokens[i * self.block_size : (i + 1) * self.block_size])
        same = content is not None and (content.tokens, content.salt) == (tokens, request.salt)
        return content if content is not None and same and content.follows(parent) else None

    def _hits(self, request: Request) -> list[int]:
        parent, hits = None, list[int]()
        full = (len(request.tokens) - 1) // self.block_size if self.enable_caching else 0
        for i in range(full):
            parent = self._found(request, i, parent)
            if parent is None:
                break
            hits.append(self.cached[parent.digest])
        return hits

    def _cache(self, request: Request, own: Owned) -> None:
        """Let others find the blocks that are full now. What another block holds already is not entered twice."""
        for i in range(len(own.contents), own.written // self.block_size):
            parent = own.contents[-1] if own.contents else None
            content, digest = self._found(request, i, parent), self._digest(request, i)
            if content is None:
                tokens = tuple(request.tokens[i * self.block_size : (i + 1) * self.block_size])
                content = Content(digest, parent, tokens, request.salt)
            if digest not in self.cached:
                self.cached[digest], self.contents[own.table[i]] = own.table[i], content
            own.contents.append(content)

    def _taken(self) -> int:
        """The next free block. Nobody finds what it held any more."""
        block, _ = self.free_list.popitem(last=False)
        if (content := self.contents[block]) is not None:
            del self.cached[content.digest]
            self.contents[block] = None
        self.refs[block] = 1
        return block

    def _left(self, block: int) -> None:
        """A table has a block no more."""
        self.refs[block] -= 1
        self._rest(block)

    def _rest(self, block: int) -> None:
        """Free a block that nobody owns or reads. Those that nobody can find are taken first."""
        if not self.refs[block] and not self.holds[block]:
            self.free_list[block] = None
            if self.contents[block] is None:
                self.free_list.move_to_end(block, last=False)

    def _forget_copy(self, own: Owned) -> None:
        self.copies = [copy for copy in self.copies if copy[0] != own.source or copy[1] not in own.table]

    def _unhold(self, own: Owned) -> None:
        if own.source is not None:
            self.holds[own.source] -= 1
            self._rest(own.source)
            own.source = None

    def _release(self, request: Request) -> None:
        """Give all blocks of a request back. The tail comes first: a beginning is worth more to others."""
        own = self.owned.pop(request)
        self._forget_copy(own)
        self._unhold(own)
        for block in reversed(own.table):
            self._left(block)
