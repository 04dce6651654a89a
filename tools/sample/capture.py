"""Captures one layer's q, k, v on text that the model of `train.py` never saw, and writes the packaged sample.

    python tools/sample/capture.py corpus.npz checkpoint.pt flashlab/data/sample.npz

It runs on a CPU in seconds. First it prints every head's scores on the captured window. `LAYER` and `KV_HEADS` were chosen
by eye from that table and from the attention maps, and `START` among the windows that begin a function or a class.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import bpe
import numpy as np
import torch
import torch.nn.functional as F
from model import Config, Transformer

LAYER, KV_HEADS = 6, (1, 2)
FILE, START = "calendar.py", b"\ndef _nextmonth(year, month):"
TITLES = ["open brackets and line starts", "the tokens just before", "names of this function", "induction"]

Array = np.ndarray[Any, np.dtype[Any]]


def attention(q: Array, k: Array) -> Array:
    """Causal attention probabilities (heads, length, length) in float64; q may have more heads than k."""
    k = np.repeat(k.astype(np.float64), len(q) // len(k), axis=0)
    scores = q.astype(np.float64) @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    scores[..., ~np.tri(scores.shape[-1], dtype=bool)] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def following_repeat(tokens: Array) -> Array:
    """For query i, the keys j <= i that an induction head looks at: the pair (j-2, j-1) is the pair (i-1, i)."""
    same = tokens[:, None] == tokens
    pair = np.zeros_like(same)
    pair[1:, 1:] = same[1:, 1:] & same[:-1, :-1]
    follow = np.zeros_like(same)
    follow[:, 1:] = pair[:, :-1]
    return np.tril(follow)


def open_bracket(pieces: list[str]) -> Array:
    """For query i, the last bracket that is still open there. A query outside brackets has none."""
    found = np.zeros((len(pieces), len(pieces)), bool)
    still_open: list[int] = []
    for index, piece in enumerate(pieces):
        if piece.strip() in ("(", "[", "{"):
            still_open.append(index)
        elif piece.strip() in (")", "]", "}") and still_open:
            still_open.pop()
        found[index, still_open[-1:]] = True
    return found


def score(p: Array, tokens: Array, pieces: list[str]) -> list[dict[str, float]]:
    """What each head looks at: the attention that it gives to certain keys, as means over the queries."""
    follow, bracket = following_repeat(tokens), open_bracket(pieces)
    starts_line = np.array([piece.startswith("\n") for piece in pieces])
    index = np.arange(1, len(tokens))
    columns = {
        "induction": (p * follow).sum(-1)[:, follow.any(-1)].mean(-1),
        "open_bracket": (p * bracket).sum(-1)[:, bracket.any(-1)].mean(-1),
        "previous": p[:, index, index - 1].mean(-1),
        "line_start": (p * starts_line).sum(-1).mean(-1),
        "first": p[:, 1:, 0].mean(-1),
        "entropy": -(p * np.log(np.maximum(p, 1e-300))).sum(-1).mean(-1),
    }
    return [{name: round(float(value[head]), 4) for name, value in columns.items()} for head in range(len(p))]


def longest_shared(text: bytes, other: bytes) -> int:
    """The length of the longest run of bytes in `text` that `other` has too."""
    best = 0
    for start in range(len(text)):
        while start + best < len(text) and text[start : start + best + 1] in other:
            best += 1
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", help="written by corpus.py")
    parser.add_argument("checkpoint", help="written by train.py")
    parser.add_argument("out")
    given = parser.parse_args()

    log = json.loads(Path(given.out).with_name("sample_training.json").read_text())
    corpus = np.load(given.corpus)
    table = bpe.pieces([(int(a), int(b)) for a, b in corpus["merges"]])
    saved = torch.load(given.checkpoint)
    config = Config(**saved["config"])
    model = Transformer(config)
    model.load_state_dict(saved["weights"])
    model.eval()

    held = corpus["held"]
    file = np.split(held, np.flatnonzero(held == 0))[1 + list(corpus["paths"]).index(FILE)]
    ends = np.cumsum([len(table[token]) for token in file])
    text = b"".join(table[token] for token in file)
    begin = text.index(START) + 1
    line = text[:begin].count(b"\n") + 1
    first = int(np.searchsorted(ends, begin, side="right"))
    tokens = file[first : first + config.context]
    pieces = [table[token].decode() for token in tokens]

    for block in model.blocks:
        block.attention.seen = {}
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens.astype(np.int64))[None])[0]
    loss = F.cross_entropy(logits[:-1], torch.from_numpy(tokens[1:].astype(np.int64))).item()

    group = config.heads // config.kv_heads
    for layer, block in enumerate(model.blocks):
        seen = block.attention.seen
        for head, row in enumerate(score(attention(seen["q"][0].numpy(), seen["k"][0].numpy()), tokens, pieces)):
            print(f"layer {layer} head {head} (KV head {head // group})", row)

    kv_heads = list(KV_HEADS)
    heads = [group * kv + member for kv in kv_heads for member in range(group)]
    seen = model.blocks[LAYER].attention.seen
    q, k, v = (
        seen[name][:, chosen].numpy().astype(np.float16)
        for name, chosen in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    p = attention(q[0], k[0])
    model_out = seen["out"][0, heads].numpy().astype(np.float64)
    out = p @ np.repeat(v[0].astype(np.float64), group, axis=0)
    uniform = np.tri(len(tokens)) / np.arange(1, len(tokens) + 1)[:, None]
    note = {
        "schema": 1,
        "model": f"{config.layers} layers, width {config.width}, {config.heads} heads, {config.kv_heads} KV heads of "
        f"{config.head_dim}, context {config.context}, RMSNorm, rotary positions, {log['parameters']:,} parameters",
        "source": f"CPython {corpus['python']}, Lib/{FILE}, {len(tokens):,} tokens from line {line} on",
        "licence": "PSF License Agreement, text in LICENSE-PSF.txt beside the sample; "
        "Copyright (c) 2001-2023 Python Software Foundation; All Rights Reserved",
        "text_sha256": log["sha256"],
        "train_loss": log["train_loss"],
        "held_out_loss": log["held_out_loss"],
        "sample_loss": round(loss, 4),
        "unit": log["unit"],
        "held_out_bytes_per_token": round(sum(len(table[token]) for token in held) / len(held), 4),
        "longest_run_in_training_text": longest_shared(
            "".join(pieces).encode(), b"".join(table[token] for token in corpus["train"])
        ),
        "seed": log["seed"],
        "trained": log["date"],
        "captured": time.strftime("%Y-%m-%d", time.gmtime()),
        "layer": LAYER,
        "heads": heads,
        "kv_heads": kv_heads,
        "titles": TITLES,
        "causal": True,
        "scale": config.head_dim**-0.5,
        "scores": score(p, tokens, pieces),
        "uniform": score(uniform[None], tokens, pieces)[0],
        "error_against_model": float(f"{np.linalg.norm(out - model_out) / np.linalg.norm(model_out):.2e}"),
    }
    print(json.dumps(note, indent=1))
    Path(given.out).parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        given.out, q=q, k=k, v=v, tokens=tokens, pieces=np.array(pieces), note=np.array(json.dumps(note))
    )
    print(f"{Path(given.out).stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
