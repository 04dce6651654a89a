"""Hugging Face's models: on our kernels, and what one layer's attention function receives.

    from flashlab.integrations.transformers import register

    model.set_attn_implementation(register())

At every call, a model looks up its attention function in transformers' registry `ALL_ATTENTION_FUNCTIONS`. `register` puts ours
there. For continuous batching, which takes flash-attention's names alone, `as_flash_attention` lends our functions in its place.
Tensors on a CPU run on the emulator, which is slow. `capture` puts another function there for one pass, under the same name: it
calls the old one and keeps what one layer gave it. docs/capture.md says what the saved file means.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from inspect import getclosurevars
from itertools import accumulate
from os import PathLike, fspath
from pathlib import Path
from types import ModuleType
from typing import Any

from flashlab.base.files import replace_file
from flashlab.base.host import refused
from simulator.errors import Unavailable, UsageError, unknown
from simulator.fields import integer

__all__ = [
    "DTYPES", "Seen", "as_flash_attention", "attend", "capture", "capture_text", "capturing", "check_dtype", "check_path",
    "register", "save",
]  # fmt: skip

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

    Raises `UsageError` for a layer that the model lacks, tokens that it can't read, or a model with attention functions of its
    own; `Unavailable` without PyTorch and Transformers.

    >>> seen = capture(model, input_ids, layer=12)  # doctest: +SKIP
    >>> seen["q"].shape, seen.note["scale"]  # doctest: +SKIP
    (torch.Size([1, 16, 1024, 128]), '0.08838834764831845')
    """
    torch, _ = _torch_and_registry()
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        raise UsageError("model", type(model).__name__, "a model of Transformers")
    config = model.config.get_text_config()
    layers: int = config.num_hidden_layers
    if integer("layer", layer, 0, f"0 to {layers - 1}") >= layers:
        raise UsageError("layer", layer, f"0 to {layers - 1}")
    _check_tokens(torch, tokens, config.vocab_size)
    with capturing(layer, config._attn_implementation) as seen, torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    if not seen:
        name = type(model).__name__
        raise UsageError(
            "model", name, "one that takes its attention function from transformers' ALL_ATTENTION_FUNCTIONS"
        )
    return seen


def _check_tokens(torch: Any, tokens: Any, vocabulary: int) -> None:
    """Raises `UsageError` for what isn't a tensor of a model's tokens."""
    accepted = "a torch tensor of integers, (batch, length), with a token at least"
    if not isinstance(tokens, torch.Tensor):
        raise UsageError("tokens", type(tokens).__name__, accepted)
    if tokens.dtype not in (torch.int32, torch.int64):
        raise UsageError("tokens.dtype", str(tokens.dtype), accepted)
    if tokens.ndim != 2 or not tokens.numel():
        raise UsageError("tokens.shape", tuple(tokens.shape), accepted)
    least, most = int(tokens.min()), int(tokens.max())
    if least < 0 or most >= vocabulary:
        raise UsageError("tokens", least if least < 0 else most, f"0 to {vocabulary - 1}, the model's vocabulary")


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


# A model on our kernels

_HARMLESS = (
    "cache_position", "layer_idx", "logits_to_keep", "max_length_k", "max_length_q", "num_items_in_batch", "output_hidden_states",
    "output_router_logits", "past_key_values", "position_embeddings", "return_dict", "seq_idx", "target_dtype", "use_cache",
)  # fmt: skip
"""What models hand to each attention function, and no result depends on."""

_KNOWN = {
    "causal_mask_function", "bidirectional_mask_function", "sliding_window_overlay", "sliding_window_bidirectional_overlay",
    "packed_sequence_mask_function", "remap_positions_for_packed_sequence",
}  # fmt: skip
"""What Transformers composes masks of, as far as `attend` learns it: from keywords and positions."""


def register(name: str = "fl_attention") -> str:
    """Make our kernels an attention implementation of Transformers 5, and return its name.

    Models of `transformers` then take it as any other, by `attn_implementation=` or `set_attn_implementation`. Registering twice
    is no error. Raises `UsageError` for a name that Transformers itself uses, and `Unavailable` without torch or Transformers.

    >>> model.set_attn_implementation(register())  # doctest: +SKIP
    """
    _, registry = _torch_and_registry()
    masks = import_module("transformers.masking_utils").ALL_MASK_ATTENTION_FUNCTIONS
    known = isinstance(name, str) and registry.get(name) in (None, attend)  # pyright: ignore
    if not known or name == "eager" or "flash" in name or "|" in name or not name.isidentifier():
        raise UsageError("name", name, "a name of your own, without 'flash' in it, by which Transformers knows its own")
    registry.register(name, attend)
    masks.register(name, _padding)
    return name


def attend(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, dropout: float = 0.0, scaling: float | None = None,
    sliding_window: int | None = None, softcap: float | None = None, is_causal: bool | None = None, s_aux: Any = None,
    position_ids: Any = None, cu_seq_lens_q: Any = None, cu_seq_lens_k: Any = None, deterministic: bool | None = None,
    **others: Any,
) -> tuple[Any, None]:  # fmt: skip
    """Attention as Transformers calls it: tensors (batch, heads, length, head_dim) in, (batch, length, heads, head_dim) out.

    `attention_mask` (batch, keys) is 1, or True, where a key is no padding. A causal query at the place of padding has output 0.
    Where keys lie in a static cache, the mask names its first rows, and the others aren't read. Padding, `cu_seq_lens_*` and
    `position_ids` of packed sequences, which begin anew in a batch of one, become a ragged batch: their lengths are waited for.
    `sliding_window` counts a query's own key. Raises `UsageError` for another keyword on which the result depends.
    """
    for name, x in others.items():
        if name not in _HARMLESS and x is not None and x is not False:
            raise refused(name, type(x).__name__, "None: the kernels don't have it")
    door, operator = (import_module(f"flashlab.{at}") for at in ("integrations.flash_attn", "run.autograd"))
    operator.check_axes("(batch, heads, length, head_dim)", query=query, key=key, value=value)
    if sliding_window is not None and (type(sliding_window) is not int or sliding_window < 1):
        raise UsageError("sliding_window", sliding_window, "None, or how many keys a query sees, its own among them")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    rows, keys = query.shape[2], key.shape[2]
    left = None if sliding_window is None or sliding_window >= keys else sliding_window - 1
    options: dict[str, Any] = {
        "dropout_p": dropout, "softmax_scale": scaling, "causal": causal, "softcap": softcap or 0.0, "s_aux": s_aux,
        "window_size": (-1, -1) if left is None else (left, left), "deterministic": bool(deterministic),
    }  # fmt: skip
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if attention_mask is not None:
        operator.check_tensors(attention_mask=attention_mask)
        kept, mask = _seen(attention_mask, q, keys)
        return _over_padding(door, q, k[:, :kept], v[:, :kept], mask, left is not None, options), None
    if (
        cu_seq_lens_q is None
        and cu_seq_lens_k is None
        and len(q) == 1
        and rows == keys > 1
        and position_ids is not None
    ):
        operator.check_tensors(position_ids=position_ids)
        cu_seq_lens_q = cu_seq_lens_k = _packed(position_ids)
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        flat = (x.flatten(0, 1) for x in (q, k, v))
        return door.flash_attn_varlen_func(*flat, cu_seq_lens_q, cu_seq_lens_k, **options).unflatten(
            0, (len(q), rows)
        ), None
    return door.flash_attn_func(q, k, v, **options), None


def _seen(mask: Any, q: Any, keys: int) -> tuple[int, Any]:
    """How many keys a mask names, and the mask as a boolean one. Raises `UsageError` for one of another shape, or elsewhere."""
    if mask.ndim != 2 or len(mask) != len(q) or mask.shape[1] > keys:
        raise UsageError(
            "attention_mask.shape", tuple(mask.shape), f"({len(q)}, {keys}): batch and keys, or fewer keys"
        )
    if mask.device != q.device:
        raise UsageError("attention_mask.device", str(mask.device), f"{q.device}, where the query lies")
    return mask.shape[1], mask.bool()


def _over_padding(door: Any, q: Any, k: Any, v: Any, mask: Any, window: bool, options: dict[str, Any]) -> Any:
    """Attention of (batch, length, heads, head_dim) without the rows where the mask is 0: a sequence a row of the mask.

    Queries are as many as the mask's last columns. Where they see all keys, the mask says nothing of queries.
    """
    batch, rows = q.shape[:2]
    if window and bool((mask[:, 1:] > mask[:, :-1]).sum(1).add(mask[:, 0]).gt(1).any()):
        raise refused(
            "attention_mask", "a mask with padding between two tokens", "padding at the ends where there is a window"
        )
    asked = mask[:, -rows:] if options["causal"] else mask.new_ones(batch, rows)
    counts = [[0, *accumulate(x.sum(1).tolist())] for x in (asked, mask)]
    at_q, at_k = (x.flatten().nonzero().flatten() for x in (asked, mask))
    torch = import_module("torch")
    found = door.flash_attn_varlen_func(
        q.flatten(0, 1)[at_q], k.flatten(0, 1)[at_k], v.flatten(0, 1)[at_k],
        *(torch.tensor(each, dtype=torch.int32) for each in counts), **options,
    )  # fmt: skip
    return found.new_zeros(batch * rows, *found.shape[1:]).index_copy(0, at_q, found).unflatten(0, (batch, rows))


def _packed(position_ids: Any) -> Any:
    """The offsets of sequences, where positions (1, length) don't go up by 1. None if there is one sequence."""
    if position_ids.ndim != 2 or len(position_ids) != 1:
        raise UsageError("position_ids.shape", tuple(position_ids.shape), "(1, length) for a batch of one")
    (positions,) = position_ids.tolist()
    starts = [i for i in range(1, len(positions)) if positions[i] != positions[i - 1] + 1]
    if not starts:
        return None
    torch = import_module("torch")
    return torch.tensor([0, *starts, len(positions)], dtype=torch.int32)


def _padding(
    *, batch_size: int, q_length: int, kv_length: int, mask_function: Callable[..., Any], q_offset: Any = 0, kv_offset: Any = 0,
    attention_mask: Any = None, **others: Any,
) -> Any:  # fmt: skip
    """The mask of padding (batch, keys), or None: Transformers' `flash_attention_mask`, which looks at nothing else.

    Raises `UsageError` for what it would leave out in silence: masks that aren't causal, windows or packed sequences, and rows of
    a static cache that hold nothing yet.
    """
    masking = import_module("transformers.masking_utils")
    for name, inside in _parts(mask_function):
        fits = name == "chunked_overlay" and kv_length + kv_offset <= inside["chunk_size"]
        if name not in _KNOWN and not fits:
            raise refused("mask_function", name, "a causal, bidirectional or sliding mask, and padding")
        if name == "packed_sequence_mask_function" and batch_size > 1:
            raise refused("position_ids", f"packed sequences in a batch of {batch_size}", "them in a batch of 1")
    if attention_mask is None and kv_length > q_length and (named := int(q_offset) + q_length - kv_offset) < kv_length:
        raise refused(
            "attention_mask", "None with a static cache", f"one that names the {named} of {kv_length} rows in use"
        )
    return masking.flash_attention_mask(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask
    )


def _parts(function: Callable[..., Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What a mask function is composed of: the name of each part's maker, and what the part knows."""
    name, inside = function.__qualname__.partition(".")[0], dict(getclosurevars(function).nonlocals)
    for each in (
        inside["mask_functions"]
        if name == "and_masks"
        else [inside["mask_function"]]
        if "mask_function" in inside
        else []
    ):
        yield from _parts(each)
    if name != "and_masks":
        yield name, inside


@contextmanager
def as_flash_attention(version: int = 3) -> Generator[None, None, None]:
    """While this is open, Transformers finds our functions where it looks for FlashAttention-3's: in `flash_attn_interface`.

    `attn_implementation="flash_attention_3"` then means ours, on a CPU, too, and continuous batching (`generate_batch`) takes it.
    On a GPU, batches in which all requests decode go through `flash_attn_with_kvcache`. A CUDA graph can capture those alone: say
    `ContinuousBatchingConfig(use_cuda_graph=(False, True))`. At the end all is as before, and a model that keeps the name can't
    run. Raises `UsageError` for another version, and where the real module, or ours, is loaded.

    >>> with as_flash_attention():  # doctest: +SKIP
    ...     model.set_attn_implementation("flash_attention_3")
    ...     model.generate_batch(prompts)
    """
    if version != 3:
        raise UsageError("version", version, "3: FlashAttention-3's functions are lent")
    if _LENT in sys.modules:
        raise refused("version", f"3, whose module {_LENT} is loaded", f"a process that hasn't imported {_LENT}")
    _torch_and_registry()
    ours: Any = import_module("flashlab.integrations.flash_attn")
    utils: Any = import_module("transformers.modeling_flash_attention_utils")
    lent = ModuleType(_LENT)
    vars(lent).update({name: getattr(ours, name) for name in ours.__all__})
    vars(lent).update(__spec__=ModuleSpec(_LENT, None))
    rules: dict[str, Any] = utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[version]
    before, loaded = dict(rules), {name: getattr(utils, name) for name in _LOADED if hasattr(utils, name)}
    sys.modules[_LENT] = lent
    utils._loaded_implementation = None
    rules["general_availability_check"] = lambda: True
    rules["supported_devices"] = (*before["supported_devices"], (lambda: True, "cpu"))
    try:
        yield
    finally:
        del sys.modules[_LENT]
        rules.update(before)
        for name, x in loaded.items():
            setattr(utils, name, x)


_LENT = "flash_attn_interface"
_LOADED = (
    "_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn", "_pad_fn", "_unpad_fn",
    "_process_flash_kwargs_fn", "_process_with_kvcache_kwargs_fn",
)  # fmt: skip
"""What Transformers remembers of the functions that it loaded. Releases before 5.23 lack the last."""
