"""What holds of a block manager after every step, whatever the steps were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from flashlab.serve.blocks import NULL, KVCacheManager

__all__ = ["violations"]


def violations(manager: KVCacheManager) -> list[str]:
    """What doesn't hold, a line each. It is none of the manager's own functions that say so.

    >>> from flashlab.serve.requests import Request
    >>> manager = KVCacheManager(num_blocks=4, block_size=2)
    >>> manager.allocate_slots(Request("r", [1, 2, 3]), 3), violations(manager)
    ([1, 2], [])
    >>> manager.refs[2] += 1
    >>> violations(manager)
    ['block 2 has 2 owners by its count, and is in 1 table', 'block 2 is written, and shared']
    """
    return [*_owners(manager), *_pool(manager), *_requests(manager), *_cache(manager)]


def _owners(m: KVCacheManager) -> Iterator[str]:
    """Counts are what the tables say. A launch holds what it copies from."""
    tables = Counter(block for own in m.owned.values() for block in own.table)
    copied = Counter(own.source for own in m.owned.values() if own.source is not None)
    if tables[NULL] or copied[NULL] or m.refs[NULL] != 1:
        yield "the null block has been given away"
    for block in range(1, m.num_blocks):
        if m.refs[block] != tables[block]:
            said = f"{tables[block]} table{'s' * (tables[block] != 1)}"
            yield f"block {block} has {m.refs[block]} owners by its count, and is in {said}"
        if m.holds[block] != copied[block]:
            yield f"block {block} is held {m.holds[block]} times, and copied by {copied[block]} launches"


def _pool(m: KVCacheManager) -> Iterator[str]:
    """Free blocks and used ones are the pool. The null block is neither."""
    used = {block for own in m.owned.values() for block in (*own.table, *([own.source] if own.source else []))}
    free = set(m.free_list)
    if NULL in free:
        yield "the null block is free"
    if both := used & free:
        yield f"blocks {sorted(both)} are free, and used"
    if lost := set(range(1, m.num_blocks)) - used - free:
        yield f"blocks {sorted(lost)} are lost: neither free nor used"
    unknown = [m.contents[block] is None for block in m.free_list]
    if sorted(unknown, reverse=True) != unknown:
        yield "a block that nobody can find is taken after one that somebody may"


def _requests(m: KVCacheManager) -> Iterator[str]:
    """Each request has as many blocks as its tokens need. What it writes is its own."""
    for request, own in m.owned.items():
        tokens = own.written + own.reserved
        if tokens > len(request.tokens):
            yield f"{request.name} has room for {tokens} tokens, and has {len(request.tokens)}"
        if len(own.table) != -(-tokens // m.block_size):
            yield f"{request.name} has {len(own.table)} blocks for {tokens} tokens"
        if len(set(own.table)) != len(own.table):
            yield f"{request.name} has a block twice"
        if own.freed and not own.reserved:
            yield f"{request.name} is freed, and owns blocks without a launch"
        for block in own.table[own.written // m.block_size :] if own.reserved else ():
            if m.refs[block] != 1:
                yield f"block {block} is written, and shared"
            if m.contents[block] is not None:
                yield f"block {block} is written, and others can find it"


def _cache(m: KVCacheManager) -> Iterator[str]:
    """What others can find is full, and holds the tokens that it is found under."""
    known = {content.digest: block for block, content in enumerate(m.contents) if content is not None}
    if known != m.cached:
        yield "the cache leads to blocks that don't hold what it says"
    if any(content is not None and len(content.tokens) != m.block_size for content in m.contents):
        yield "a block that isn't full can be found"
    for request, own in m.owned.items():
        for i, block in enumerate(own.table):
            content, at = m.contents[block], i * m.block_size
            if content is None:
                continue
            if at + m.block_size > own.written:
                yield f"block {block} of {request.name} can be found, and isn't written"
            if (list(content.tokens), content.salt) != (request.tokens[at : at + m.block_size], request.salt):
                yield f"block {block} of {request.name} holds other tokens"
