"""Capture q, k and v of one layer of any Hugging Face causal model, as its attention function receives them.

    python tools/capture_hf.py MODEL TEXT_FILE out.safetensors --layer 6 --tokens 1024
    flashlab compare --input out.safetensors --causal

Needs torch, transformers (4.48 or newer) and safetensors. See docs/capture.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


class Seen(dict[str, torch.Tensor]):
    """q, k, v and out of a layer, and in `.note` how the model used them."""

    def __init__(self) -> None:
        super().__init__()
        self.note: dict[str, str] = {}


@contextmanager
def capturing(layer: int, implementation: str) -> Generator[Seen, None, None]:
    """While this is open, the attention function that models call under this name also keeps what `layer` gave it.

    It stands in the registry under the name it had, so that a model builds the very masks it builds without it. Keys
    and values are seen before they are repeated for grouped queries, and all after rotary positions.
    """
    function = ALL_ATTENTION_FUNCTIONS.get(implementation)  # "eager" is not in it: every architecture has its own
    seen = Seen()

    def attend(module: torch.nn.Module, q: Any, k: Any, v: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        call = function or sys.modules[type(module).__module__].eager_attention_forward
        out = call(module, q, k, v, mask, *args, **kwargs)
        if getattr(module, "layer_idx", None) == layer:
            # attention functions take (batch, heads, length, head_dim) and return (batch, length, heads, head_dim)
            seen.update(q=q.detach(), k=k.detach(), v=v.detach(), out=out[0].detach().transpose(1, 2))
            window = kwargs.get("sliding_window")
            seen.note = {
                "layer": str(layer),
                "scale": str(kwargs.get("scaling") or q.shape[-1] ** -0.5),
                "causal": str(bool(getattr(module, "is_causal", True))).lower(),
                # theirs counts the query's own key, flashlab's `left` does not
                **({"window": f"{window - 1},0"} if window and window <= k.shape[-2] else {}),
                **{name: "used" for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None},
            }
        return out

    ALL_ATTENTION_FUNCTIONS[implementation] = attend
    try:
        yield seen
    finally:
        del ALL_ATTENTION_FUNCTIONS[implementation]


def capture(model: Any, tokens: torch.Tensor, layer: int) -> Seen:
    """What attention of `layer` receives and returns in one pass of `model` over `tokens` (batch, length)."""
    config = model.config.get_text_config()
    layers = config.num_hidden_layers
    if not 0 <= layer < layers:
        raise SystemExit(f"layer = {layer}: expected 0 to {layers - 1}")
    with capturing(layer, config._attn_implementation) as seen, torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    if not seen:
        raise SystemExit("this model does not look its attention function up in transformers' ALL_ATTENTION_FUNCTIONS")
    return seen


def save(seen: Seen, path: str | Path, dtype: str | None = None, heads: range | None = None) -> dict[str, torch.Tensor]:
    """Write q, k, v, and return them; of `heads` (whole groups of query heads) and rounded to `dtype` if asked."""
    q, k, v = seen["q"], seen["k"], seen["v"]
    if heads is not None:
        group = q.shape[1] // k.shape[1]
        if heads.start % group or heads.stop % group or not 0 <= heads.start < heads.stop <= q.shape[1]:
            raise SystemExit(f"heads = {heads.start}:{heads.stop}: expected multiples of {group}, up to {q.shape[1]}")
        q = q[:, heads.start : heads.stop]
        k, v = (x[:, heads.start // group : heads.stop // group] for x in (k, v))
    tensors = {name: x.to(DTYPES.get(dtype or "")).cpu().contiguous() for name, x in (("q", q), ("k", k), ("v", v))}
    save_file(tensors, path, metadata=seen.note)
    return tensors


def main() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a name on the Hub, or a folder")
    parser.add_argument("text", help="a text file")
    parser.add_argument("out", help="a name that ends in .safetensors")
    parser.add_argument("--layer", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=1024, help="how many, from the beginning of the text")
    parser.add_argument("--heads", help="FIRST:LAST, LAST not included; default: all")
    parser.add_argument("--dtype", choices=DTYPES, help="default: the model's own")
    given = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype="auto").eval()
    tokens = tokenizer(Path(given.text).read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, : given.tokens]
    seen = capture(model, tokens, given.layer)
    seen.note["model"] = given.model
    saved = save(seen, given.out, given.dtype, range(*map(int, given.heads.split(":"))) if given.heads else None)
    print(json.dumps({**{name: list(x.shape) for name, x in saved.items()}, **seen.note}))


if __name__ == "__main__":
    main()
