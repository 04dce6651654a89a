"""q, k and v of one layer of any Hugging Face causal model, as its attention function receives them.

At every call, a model looks up its attention function in transformers' registry `ALL_ATTENTION_FUNCTIONS`. For one pass
we put another function there, under the same name. It calls the old one and keeps what one layer gave it.
docs/capture.md says what the saved file means.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from flashlab.base.files import replace_file
from simulator.errors import Unavailable, UsageError, unknown

__all__ = ["DTYPES", "Seen", "capture", "capture_text", "capturing", "check_dtype", "check_path", "save"]

DTYPES = ("float16", "bfloat16", "float32")
_SUFFIX = ".safetensors"
_INSTALL = "pip install torch transformers"


class Seen(dict[str, Any]):
    """q, k, v and out of a layer: torch tensors (batch, heads, length, head_dim). `.note` says how they were used."""

    def __init__(self) -> None:
        super().__init__()
        self.note: dict[str, str] = {}


def _torch_and_registry() -> tuple[Any, Any]:
    """torch, and the registry of attention functions that transformers' models choose from."""
    try:
        torch, modeling = import_module("torch"), import_module("transformers.modeling_utils")
    except ImportError as error:
        raise Unavailable(f"capturing from a model needs PyTorch and Transformers ({error}): {_INSTALL}") from None
    registry = getattr(modeling, "ALL_ATTENTION_FUNCTIONS", None)
    if registry is None:
        raise Unavailable("capturing from a model needs Transformers 4.56 or newer: pip install --upgrade transformers")
    return torch, registry


@contextmanager
def capturing(layer: int, implementation: str) -> Generator[Seen, None, None]:
    """While this is open, the attention function that models call by the name `implementation` keeps `layer`'s arrays.

    The name stays the same so that a model builds the same masks as without the capture. Keys and values are captured
    before they are repeated for grouped queries, q and k after rotary positions are applied.

    >>> with capturing(12, "sdpa") as seen:  # doctest: +SKIP
    ...     model(input_ids=tokens)
    """
    _, registry = _torch_and_registry()
    function = registry.get(implementation)  # "eager" is not in the registry: every architecture has its own
    seen = Seen()

    def attend(module: Any, q: Any, k: Any, v: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
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
                # transformers' window counts the query's own key, flashlab's `left` does not
                **({"window": f"{window - 1},0"} if window and window <= k.shape[-2] else {}),
                **{name: "used" for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None},
            }
        return out

    registry[implementation] = attend
    try:
        yield seen
    finally:
        del registry[implementation]


def capture(model: Any, tokens: Any, layer: int) -> Seen:
    """What the attention of `layer` receives and returns in one pass of `model` over `tokens` (batch, length).

    Raises `UsageError` for a layer that the model lacks, or a model with attention functions of its own; `Unavailable`
    without PyTorch and Transformers.

    >>> seen = capture(model, input_ids, layer=12)  # doctest: +SKIP
    >>> seen["q"].shape, seen.note["scale"]  # doctest: +SKIP
    (torch.Size([1, 16, 1024, 128]), '0.08838834764831845')
    """
    torch, _ = _torch_and_registry()
    config = model.config.get_text_config()
    layers: int = config.num_hidden_layers
    if not 0 <= layer < layers:
        raise UsageError("layer", layer, f"0 to {layers - 1}")
    with capturing(layer, config._attn_implementation) as seen, torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    if not seen:
        name = type(model).__name__
        raise UsageError(
            "model", name, "one that takes its attention function from transformers' ALL_ATTENTION_FUNCTIONS"
        )
    return seen


def capture_text(model: str, text: str | PathLike[str], *, layer: int = 0, tokens: int = 1024) -> Seen:
    """`capture` for a model on the Hub or in a folder, which reads the first `tokens` tokens of the text file `text`.

    >>> seen = capture_text("Qwen/Qwen3-0.6B", "some-text.txt", layer=12)  # doctest: +SKIP
    """
    if tokens < 1:
        raise UsageError("tokens", tokens, "at least 1")
    try:
        read = Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it isn't UTF-8"
        raise UsageError("text", fspath(text), f"a text file that can be read ({why})") from None
    _torch_and_registry()
    library: Any = import_module("transformers")
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(model)
        loaded = library.AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
    except (OSError, ValueError) as error:  # transformers' messages have many lines
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(
            "model", model, f"a causal model on the Hugging Face Hub, or a folder with one ({why})"
        ) from None
    seen = capture(loaded, tokenizer(read, return_tensors="pt").input_ids[:, :tokens], layer)
    seen.note["model"] = model
    return seen


def save(seen: Seen, path: str | PathLike[str], dtype: str | None = None, heads: range | None = None) -> dict[str, Any]:
    """Write q, k, v to a .safetensors file that `load_inputs` reads, and return them.

    `heads` keeps only these query heads, in whole GQA groups, with their KV heads. `dtype` is what they are rounded to.

    >>> tensors = save(seen, "mine.safetensors", heads=range(0, 4))  # doctest: +SKIP
    """
    check_path(path)
    check_dtype(dtype)
    torch, _ = _torch_and_registry()
    q, k, v = seen["q"], seen["k"], seen["v"]
    if heads is not None:
        group = q.shape[1] // k.shape[1]
        if heads.start % group or heads.stop % group or not 0 <= heads.start < heads.stop <= q.shape[1]:
            raise UsageError("heads", f"{heads.start}:{heads.stop}", f"multiples of {group}, up to {q.shape[1]}")
        q = q[:, heads.start : heads.stop]
        k, v = (x[:, heads.start // group : heads.stop // group] for x in (k, v))
    to = None if dtype is None else getattr(torch, dtype)
    tensors = {name: x.to(to).cpu().contiguous() for name, x in (("q", q), ("k", k), ("v", v))}
    replace_file(path, import_module("safetensors.torch").save(tensors, metadata=seen.note))
    return tensors


def check_path(path: str | PathLike[str]) -> None:
    """Raise `UsageError` for a name that doesn't end in .safetensors.

    >>> check_path("mine.bin")
    Traceback (most recent call last):
        ...
    simulator.errors.UsageError: path = 'mine.bin': expected a file whose name ends in .safetensors
    """
    if Path(path).suffix != _SUFFIX:
        raise UsageError("path", fspath(path), f"a file whose name ends in {_SUFFIX}")


def check_dtype(dtype: str | None) -> None:
    """Raise `UsageError` for a dtype that none of `DTYPES` is.

    >>> check_dtype("bfloat61")
    Traceback (most recent call last):
        ...
    simulator.errors.UsageError: dtype = 'bfloat61': expected one of float16, bfloat16, float32 (did you mean bfloat16?)
    """
    if dtype is not None and dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
