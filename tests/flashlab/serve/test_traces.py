"""Traces: what is read, and what is wrong with a line that can't be."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import flashlab as fl
from flashlab.serve.traces import LOGNORMAL, read

MOONCAKE = """\
{"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}
{"timestamp": 27, "input_length": 512, "output_length": 1, "hash_ids": [7]}

{"timestamp": 3000, "input_length": 1, "output_length": 52}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
"""


def written(folder: Path, text: str | bytes) -> str:
    path = folder / "day.trace"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_mooncake(tmp_path: Path) -> None:
    found = read(written(tmp_path, MOONCAKE))
    assert [(x.seconds, x.prompt, x.answer) for x in found] == [(0, 512, 1), (0.973, 600, 5), (2.973, 1, 52)]
    short, long, other = (x.request(i) for i, x in enumerate(found))
    assert short.tokens == long.tokens[:512] and len(long.tokens) == 600
    assert not set(other.tokens) & set(long.tokens)
    assert len(read(written(tmp_path, MOONCAKE), requests=1)) == 1


@pytest.mark.parametrize("head", ["", "\ufeff"])
def test_azure(tmp_path: Path, head: str) -> None:
    first, second = read(written(tmp_path, head + AZURE))
    assert (first[:3], second[1:3]) == ((0.0, 4808, 10), (3180, 8))
    assert second.seconds == pytest.approx(0.052, abs=1e-5)
    assert not set(first.request(0).tokens) & set(second.request(1).tokens)


@pytest.mark.parametrize("name", LOGNORMAL)
def test_lognormal(name: str) -> None:
    """Of many draws, the middle of the logarithms is μ, and equal seeds draw the same."""
    found = read(f"lognormal:{name}", requests=4000, seed=3, rate=8.0)
    assert found == read(f"lognormal:{name}", requests=4000, seed=3, rate=8.0)
    assert found != read(f"lognormal:{name}", requests=4000, seed=4, rate=8.0)
    for lengths, (mean, _) in zip(([x.prompt for x in found], [x.answer for x in found]), LOGNORMAL[name], strict=True):
        assert math.log(sorted(lengths)[2000]) == pytest.approx(mean, abs=0.08)
    assert fmean(x.prompt for x in found) == pytest.approx({"sharegpt": 161.31, "alpaca": 19.31}[name], rel=0.05)
    assert fmean(x.answer for x in found) == pytest.approx({"sharegpt": 337.99, "alpaca": 58.45}[name], rel=0.05)
    assert found[-1].seconds == pytest.approx(4000 / 8, rel=0.1)


LINE = '{"timestamp": %s, "input_length": %s, "output_length": %s, "hash_ids": %s}'
HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (MOONCAKE + "{", "day.trace:5 = '{': expected a JSON object"),
        ("[1]", "day.trace:1 = '[1]': expected a JSON object"),
        ("[" * 5000, "day.trace:1 = '[[["),
        (LINE % ('"now"', 5, 5, "[1]"), "day.trace:1, timestamp = 'now': expected milliseconds"),
        (LINE % ("1e999", 5, 5, "[1]"), "day.trace:1, timestamp = inf: expected milliseconds"),
        (LINE % ("NaN", 5, 5, "[1]"), "day.trace:1, timestamp = nan: expected milliseconds"),
        (LINE % (1, 0, 5, "[1]"), "day.trace:1, input_length = 0: expected an integer from 1"),
        (LINE % (1, 5, -1, "[1]"), "day.trace:1, output_length = -1: expected an integer from 1"),
        (LINE % (1, 5, 1.5, "[1]"), "day.trace:1, output_length = 1.5: expected an integer from 1"),
        (LINE % (1, 10**30, 1, "[1]"), "day.trace:1, input_length = 1000000"),
        (LINE % (1, 5, "true", "[1]"), "day.trace:1, output_length = True: expected an integer from 1"),
        (LINE % (1, 600, 1, "[1]"), "day.trace:1, hash_ids = [1]: expected 2 integers of at least 0"),
        (LINE % (1, 5, 1, "[-1]"), "day.trace:1, hash_ids = [-1]: expected 1 integers"),
        (LINE % (1, 5, 1, '"x"'), "day.trace:1, hash_ids = 'x': expected 1 integers"),
        ('{"timestamp": 1}', "day.trace:1, input_length = None: expected an integer"),
        ("TIMESTAMP,Tokens\n", "day.trace:1 = 'TIMESTAMP,Tokens': expected the columns"),
        (HEAD + "2023-11-16 18:17:03,5", "day.trace:2 = '2023-11-16 18:17:03,5': expected 3 cells"),
        (HEAD + "soon,5,5", "day.trace:2, TIMESTAMP = 'soon': expected a time"),
        (HEAD + "2023-11-16 18:17:03,x,5", "day.trace:2, ContextTokens = 'x': expected an integer"),
        (HEAD + "2023-11-16 18:17:03,5,0", "day.trace:2, GeneratedTokens = 0: expected an integer"),
        (HEAD, "trace = "), ("", "trace = "), (b"\xff\xfe\x00", "trace = "),
    ],
)  # fmt: skip
def test_a_malformed_line_is_named_in_one_line(tmp_path: Path, text: Any, said: str) -> None:
    with pytest.raises(fl.UsageError) as refused:
        read(written(tmp_path, text))
    assert str(refused.value).startswith(said) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("trace", "keywords", "said"),
    [
        ("nowhere.jsonl", {}, "trace = 'nowhere.jsonl': expected a file that can be read (No such file or directory)"),
        ("lognormal:sharegtp", {}, "did you mean lognormal:sharegpt?"),
        ("lognormal:alpaca", {"rate": 0.0}, "rate = 0.0: expected requests per second, above 0"),
        ("lognormal:alpaca", {"requests": 0}, "requests = 0: expected an integer of at least 1"),
    ],
)
def test_what_is_no_trace(trace: str, keywords: Any, said: str) -> None:
    with pytest.raises(fl.UsageError) as refused:
        read(trace, **keywords)
    assert said in str(refused.value)
