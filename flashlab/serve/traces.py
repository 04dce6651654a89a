"""Traces: when requests came, how long they were, and what they share.

- Mooncake's: JSON Lines with `timestamp` (milliseconds), `input_length`, `output_length` and `hash_ids`. An id stands for 512
  tokens of the prompt, together with all before them. Prompts that begin with the same ids begin with the same tokens.
- Azure's: CSV with `TIMESTAMP`, `ContextTokens` and `GeneratedTokens`. Nothing says what is shared, so nothing is.
- `lognormal:sharegpt`, `lognormal:alpaca`: lengths drawn from distributions that are like those of two data sets, at random times.
  Their parameters are assumed. Drawn lengths outside 4 to 1024 (prompts) and 1 to 1024 (answers) are set to these.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, cast

from flashlab.serve.requests import Request
from simulator.errors import Said, UsageError, unknown

__all__ = ["LOGNORMAL", "Arrival", "demo", "read"]

HASHED = 512
"""Tokens that an id of Mooncake's stands for."""
LONGEST = 2**24
"""The longest prompt or answer of a trace, in tokens: more is a mistake, and wouldn't fit here."""
LOGNORMAL = {"sharegpt": ((4.447, 1.2), (5.466, 1.0)), "alpaca": ((2.780, 0.6), (3.664, 0.9))}
"""μ and σ of the logarithms of prompts' and answers' lengths."""
_PROMPTS, _ANSWERS = (4, 1024), (1, 1024)


class Arrival(NamedTuple):
    """A request of a trace: when it comes, in seconds, and the tokens of its prompt and of its answer.

    `shared` has an id for each `every` tokens of its prompt: equal ids are equal tokens. No ids: nothing is shared.
    """

    seconds: float
    prompt: int
    answer: int
    shared: tuple[int, ...] = ()
    every: int = HASHED

    def request(self, i: int) -> Request:
        """It as a request, the i-th of its trace. Token numbers tell what is shared, and mean nothing.

        >>> a, b = Arrival(0.0, 5, 1, (7, 8), every=4).request(0), Arrival(0.1, 5, 1, (7, 9), every=4).request(1)
        >>> a.tokens[:4] == b.tokens[:4], a.tokens == b.tokens
        (True, False)
        """
        if not self.shared:
            first = (i + 1) << 32
            return Request(f"r{i}", list(range(first, first + self.prompt)))
        tokens = [(one << 12 | n) + 1 for one in self.shared for n in range(self.every)]
        return Request(f"r{i}", tokens[: self.prompt])


def read(trace: str, *, requests: int | None = None, seed: int = 0, rate: float = 4.0) -> list[Arrival]:
    """The first `requests` of a trace, in the order in which they come.

    `trace` is a file, or "lognormal:sharegpt" or "lognormal:alpaca": of these 100, `seed` says which, and `rate` how many come
    per second. Raises `UsageError` that names the line and what is wrong with it.

    >>> [arrival[1:3] for arrival in read("lognormal:alpaca", requests=3)]
    [(14, 40), (11, 158), (6, 50)]
    """
    if requests is not None and requests < 1:
        raise UsageError("requests", requests, "an integer of at least 1")
    name, _, of = trace.partition(":")
    if name == "lognormal":
        return list(_drawn(of, 100 if requests is None else requests, seed, rate))
    path = Path(trace)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or type(error).__name__
        raise UsageError("trace", trace, f"a file that can be read ({said}), or lognormal:sharegpt") from None
    lines = text.splitlines()
    parse = _azure if lines and lines[0].lstrip("\ufeff").upper().startswith("TIMESTAMP") else _mooncake
    found: list[Arrival] = []
    for arrival in parse(path.name, lines):
        found.append(arrival)
        if len(found) == requests:
            break
    if not found:
        raise UsageError("trace", trace, "a file with a request at least: Mooncake's JSON Lines or Azure's CSV")
    begin = min(arrival.seconds for arrival in found)
    return sorted((x._replace(seconds=x.seconds - begin) for x in found), key=lambda x: x.seconds)


def demo() -> list[Arrival]:
    """40 requests in two waves, most of which begin with the same 24 tokens.

    >>> len(demo()), sum(arrival.shared[:1] == (1,) for arrival in demo())
    (40, 30)
    """
    random, found = Random(0), list[Arrival]()
    for i in range(40):
        prompt, common = random.randint(26, 44), i % 4 != 3
        ids = tuple(range(1, 4)) if common else tuple(1000 * i + n for n in range(1, 4))
        own = tuple(1000 * i + n for n in range(4, 4 + -(-(prompt - 24) // 8)))
        seconds = (i // 20) * 0.0009 + random.random() * 0.0003
        found.append(Arrival(seconds, prompt, random.randint(4, 12), ids + own, every=8))
    return sorted(found, key=lambda arrival: arrival.seconds)


def _drawn(of: str, requests: int, seed: int, rate: float) -> Iterator[Arrival]:
    if of not in LOGNORMAL:
        raise unknown("trace", f"lognormal:{of}", [f"lognormal:{name}" for name in LOGNORMAL])
    if not 0 < rate < math.inf:
        raise UsageError("rate", rate, "requests per second, above 0")
    random, seconds = Random(seed), 0.0
    prompts, answers = LOGNORMAL[of]
    for _ in range(requests):
        prompt, answer = (
            min(max(round(random.lognormvariate(*law)), least), most)
            for law, (least, most) in ((prompts, _PROMPTS), (answers, _ANSWERS))
        )
        yield Arrival(seconds, prompt, answer)
        seconds += random.expovariate(rate)


def _wrong(where: str, value: Any, accepted: str) -> UsageError:
    return UsageError(where, value if isinstance(value, str | int | float) else Said(repr(value)[:80]), accepted)


def _length(where: str, key: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LONGEST:
        raise _wrong(f"{where}, {key}", value, f"an integer from {least} to {LONGEST:,}")
    return value


def _mooncake(name: str, lines: list[str]) -> Iterator[Arrival]:
    for n, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{name}:{n}"
        got: Any = None
        with suppress(ValueError, RecursionError):
            got = json.loads(line)
        if not isinstance(got, dict):
            raise _wrong(where, line[:80], 'a JSON object with "timestamp", "input_length", "output_length"')
        row = cast("dict[str, Any]", got)
        stamp: Any = row.get("timestamp")
        ids: Any = row.get("hash_ids", [])
        if isinstance(stamp, bool) or not isinstance(stamp, int | float) or not abs(stamp) < 1e15:
            raise _wrong(f"{where}, timestamp", stamp, "milliseconds, a number")
        prompt = _length(where, "input_length", row.get("input_length"), 1)
        answer = _length(where, "output_length", row.get("output_length"), 1)
        shared: list[Any] = cast("list[Any]", ids) if isinstance(ids, list) else [None]
        known = all(type(x) is int and 0 <= x < 2**40 for x in shared)
        if not known or (shared and len(shared) != -(-prompt // HASHED)):
            room = f"{-(-prompt // HASHED)} integers of at least 0, one for each {HASHED} tokens, or none"
            raise _wrong(f"{where}, hash_ids", ids, room)
        yield Arrival(stamp / 1000, prompt, answer, tuple(shared))


def _azure(name: str, lines: list[str]) -> Iterator[Arrival]:
    rows = csv.reader(lines)
    head = [cell.strip().lstrip("\ufeff") for cell in next(rows)]
    wanted = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    if not set(wanted) <= set(head):
        raise _wrong(f"{name}:1", ",".join(head), f"the columns {', '.join(wanted)}")
    at = [head.index(column) for column in wanted]
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            raise UsageError(f"{name}:{rows.line_num}", Said(str(error)), "a line of CSV") from None
        if not row:
            continue
        where = f"{name}:{rows.line_num}"
        if len(row) <= max(at):
            raise _wrong(where, ",".join(row), f"{len(head)} cells")
        stamp, *lengths = (row[i].strip() for i in at)
        try:
            seconds = datetime.fromisoformat(stamp).timestamp()
        except (ValueError, OverflowError, OSError):
            raise _wrong(f"{where}, TIMESTAMP", stamp, "a time such as 2023-11-16 18:17:03.9799600") from None
        numbers = [int(x) if x.isascii() and x.isdigit() and len(x) < 12 else x for x in lengths]
        prompt, answer = (_length(where, key, x, least=1) for key, x in zip(wanted[1:], numbers, strict=True))
        yield Arrival(seconds, prompt, answer)
