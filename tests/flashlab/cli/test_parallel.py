"""`flashlab parallel`: schemes by formula, the demo in NumPy, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

import flashlab as fl
from tests.flashlab.cli.typed import document, one_line, run

LONG = ["--heads", 64, "--kv-heads", 8, "--len-q", 1 << 20, "--head-dim", 128]


def test_the_demo_says_who_sends_what_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    text = run("parallel", "--demo").stdout
    assert "backward 3 │ 0→1 1→2 2→3 3→0 │ dk, dv │ 256 KiB" in " ".join(text.split()).replace("  ", " ")
    for scheme in ("ring, contiguous", "ring, zigzag", "all_gather", "ulysses", "heads"):
        assert scheme in text
    assert "rank 0 waits for rank 3" in text and "152 GB/s" in text
    assert (tmp_path / "parallel.svg").read_text(encoding="utf-8").startswith("<?xml")


def test_a_million_tokens_by_formula():
    told = document("parallel", *LONG, "--ranks", 8)
    p = fl.Problem(batch=1, heads=64, kv_heads=8, len_q=1 << 20, head_dim=128, dtype="float16", causal=True)
    assert [one["scheme"] for one in told["runs"]] == ["ring", "all_gather", "ulysses", "heads"]
    for one in told["runs"]:
        counted = fl.parallel.count(one["scheme"], p, ranks=8)
        assert [rank["sent"] for rank in one["ranks"]] == list(counted.sent)
        assert one["predicted"]["seconds"] == fl.parallel.timeline(counted).seconds
        assert one["error"] is None
    assert told["alone"] > 7 * told["runs"][0]["predicted"]["seconds"]


def test_what_a_scheme_can_t_share_is_said_beside_the_others():
    told = document("parallel", "--heads", 6, "--ranks", 4)
    assert {one["scheme"] for one in told["runs"]} == {"ring", "all_gather"}
    assert told["not_run"][0] == {
        "scheme": "ulysses",
        "reason": "heads = 6: expected a multiple of ranks = 4 for ulysses",
    }
    assert "heads: not run, heads = 6" in run("parallel", "--heads", 6, "--ranks", 4).stdout


def test_rates_are_options():
    slow, fast = (
        document("parallel", "ring", *LONG, "--ranks", 16, "--per-host", 8, "--network", rate)["runs"][0]["predicted"]
        for rate in (1, 50)
    )
    assert slow["seconds"] > 2 * fast["seconds"]
    assert document("parallel", "ring", "--link", 450, "--latency", 5)["rates"]["link"] == 450e9


def test_decoding():
    told = document("parallel", "dcp", "--heads", 64, "--len-q", 1, "--len-kv", 1000, "--ranks", 8, "--interleave", 16)
    assert {rank["sent"] for rank in told["runs"][0]["ranks"]} == {7 * 8 * (64 * 2 + 64 * 2 + 4)}
    paged = ["--page-size", 16, "--algorithm", "paged"]
    told = document("parallel", "dcp", "--heads", 64, "--len-q", 1, "--len-kv", 1000, "--ranks", 8, *paged)
    assert told["alone"] is None and len(told["runs"]) == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["rings"], "SCHEME = 'rings': expected one of ring, all_gather, ulysses, heads, dcp (did you mean ring?)"),
        (["ring", "--demo"], "SCHEME = 'ring': expected nothing with --demo"),
        (["--ranks", "0"], "--ranks = 0: expected an integer of at least 1"),
        (["--layout", "zag"], "--layout = 'zag': expected one of contiguous, zigzag (did you mean zigzag?)"),
        (["--link", "0"], "--link = 0.0: expected a number from 1 to 1e+30"),
        (["--device", "a100"], "--device = 'a100': expected one of h100, h200 (did you mean h100?)"),
        (["ring", "--len-q", "100"], "len_q = 100: expected a multiple of 8: zigzag deals 8 chunks to 4 ranks"),
        (["--len-q", "100"], "SCHEME = None: expected a problem that ranks can share (len_q = 100: expected a multiple of 8: zigzag deals 8 chunks to 4 ranks)"),  # noqa: E501
        (["dcp", "--backward", "--len-q", "1"], "--backward = given: expected None: dcp has a forward pass only"),
        (["--window", "3,0"], "window = (3, 0): expected nothing: of what bends scores, ranks know causal, scale and soft_cap"),
    ],
)  # fmt: skip
def test_bad_usage_is_a_line(words: list[str], line: str):
    assert one_line("parallel", *words) == f"flashlab: {line}\n"
