"""The sample's tokens: byte pairs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

SPEC = importlib.util.spec_from_file_location(
    "bpe", Path(__file__).resolve().parents[2] / "tools" / "sample" / "bpe.py"
)
assert SPEC and SPEC.loader
bpe = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(bpe)

TEXT = b"def low(lower):\n    return lower.lowest or lower\n" * 3


@given(st.binary(max_size=60) | st.sampled_from([TEXT, TEXT[5:90]]))
def test_tokens_spell_the_text(text: bytes):
    merges = bpe.learn(TEXT, 270)
    table = bpe.pieces(merges)
    assert b"".join(table[token] for token in bpe.encode(text, merges)) == text


def test_the_most_frequent_pair_is_merged_first():
    merges = bpe.learn(TEXT, 260)
    # "lo" and "ow" are equally frequent: the greater pair goes first
    assert bpe.pieces(merges)[256:258] == [b"ow", b"low"]
    assert max(bpe.encode(TEXT, merges)) == 259


def test_no_token_reaches_past_a_word():
    assert all(bpe.WORD.fullmatch(piece) for piece in bpe.pieces(bpe.learn(TEXT, 280))[256:])
