"""Byte-pair encoding, learned and applied in plain Python (Sennrich et al., 1508.07909).

Merges stay inside words. A word is a newline with the indent after it, a name (with the space before it), a digit, or
one sign.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise

Pair = tuple[int, int]
WORD = re.compile(rb"\n *| ?[A-Za-z_]+| ?[0-9]| ?[^A-Za-z0-9_ \n]| +")


def learn(text: bytes, size: int) -> list[Pair]:
    """The `size - 256` merges, in order: each merges the most frequent pair. Merge number n makes token 256 + n."""
    counted = Counter(WORD.findall(text))
    words, counts = [list(word) for word in counted], list(counted.values())
    pairs: Counter[Pair] = Counter()
    where: defaultdict[Pair, set[int]] = defaultdict(set)
    for index, word in enumerate(words):
        for pair in pairwise(word):
            pairs[pair] += counts[index]
            where[pair].add(index)
    merges: list[Pair] = []
    while len(merges) < size - 256:
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        for index in where.pop(best):
            word, count = words[index], counts[index]
            for pair in pairwise(word):
                pairs[pair] -= count
            words[index] = word = list(_merged(word, best, 256 + len(merges)))
            for pair in pairwise(word):
                pairs[pair] += count
                where[pair].add(index)
        del pairs[best]
        merges.append(best)
    return merges


def encode(text: bytes, merges: list[Pair]) -> list[int]:
    rank = {pair: 256 + number for number, pair in enumerate(merges)}
    known: dict[bytes, list[int]] = {}
    tokens: list[int] = []
    for word in WORD.findall(text):
        if word not in known:
            parts = list(word)
            while found := [pair for pair in pairwise(parts) if pair in rank]:
                first = min(found, key=rank.__getitem__)
                parts = list(_merged(parts, first, rank[first]))
            known[word] = parts
        tokens += known[word]
    return tokens


def pieces(merges: list[Pair]) -> list[bytes]:
    """The bytes of every token."""
    table = [bytes([value]) for value in range(256)]
    for a, b in merges:
        table.append(table[a] + table[b])
    return table


def _merged(word: list[int], pair: Pair, token: int) -> Iterator[int]:
    index = 0
    while index < len(word):
        if tuple(word[index : index + 2]) == pair:
            yield token
            index += 2
        else:
            yield word[index]
            index += 1
