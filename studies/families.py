"""Six families of Transformers' models on our kernels, with random weights, against eager attention in float32.

On a CPU, where both compute in float32, the tokens that they generate are compared, too: of prompts that are padded at their left,
and of prompts that are batched continuously, in batches of few tokens.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

from rich.console import Console
from rich.progress import track

Row = dict[str, Any]
OURS = "flashlab"


def bar(of: Sequence[Any], what: str) -> Iterable[Any]:
    return track(of, what, console=Console(stderr=True))


def mean_error(found: Mapping[str, Any], right: Mapping[str, Any]) -> float:
    """The root mean square, over arrays, of the norm of the error over the norm of the array."""
    shares = [((found[x] - y).norm() / y.norm()).item() for x, y in right.items()]
    return statistics.mean(x * x for x in shares) ** 0.5


def worst_error(found: Mapping[str, Any], right: Mapping[str, Any]) -> float:
    """The largest, over arrays, of the largest error over the largest magnitude."""
    return max(((found[x] - y).abs().max() / y.abs().max()).item() for x, y in right.items())


WINDOW: Row = {"sliding_window": 24}
FAMILIES: Mapping[str, tuple[str, str, Row]] = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "Qwen 3": ("Qwen3ForCausalLM", "Qwen3Config", {}),
    "Mistral": ("MistralForCausalLM", "MistralConfig", WINDOW),
    "Gemma 2": ("Gemma2ForCausalLM", "Gemma2Config", {**WINDOW, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 64}),
    "Gemma 3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}),
    "gpt-oss": (
        "GptOssForCausalLM", "GptOssConfig",
        {**WINDOW, "num_local_experts": 2, "num_experts_per_tok": 2, "experts_implementation": "eager"},
    ),
}  # fmt: skip
"""By family: the classes of the model and of its configuration, and what the configuration says beside `_SIZES`."""
_SIZES: Row = {"vocab_size": 256, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
_ON_GPU: Row = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
_ON_CPU: Row = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


NEW, PROMPTS = 4, (3, 17, 9, 1)
"""Tokens that each prompt is continued by, and the lengths of prompts that are batched: one is longer than a batch."""


def families(torch: Any, given: Any) -> Row:
    """Errors of a family's logits and gradients, in a batch that is padded at its left, a row for each attention."""
    from flashlab.integrations.transformers import register

    library: Any = import_module("transformers")
    gpu = torch.cuda.is_available() and not given.tiny
    device, dtype, length = ("cuda", torch.bfloat16, 256) if gpu else ("cpu", torch.float32, 40)
    register("fl_attention")
    tokens = torch.randint(2, 256, (2, length), generator=torch.Generator().manual_seed(0)).to(device)
    mask = torch.ones_like(tokens)
    mask[1, : length // 4] = 0
    rows = list[Row]()
    for family, (made, configured, more) in bar(list(FAMILIES.items()), "families"):
        torch.manual_seed(0)
        config = getattr(library, configured)(
            **_SIZES, **(_ON_GPU if gpu else _ON_CPU), **more, attn_implementation="eager"
        )
        model = getattr(library, made)(config).to(device).eval()
        for name, x in model.named_parameters():
            if name.endswith("sinks"):
                torch.nn.init.normal_(x)
        model.to(dtype).float()  # weights that both dtypes have
        right = _logits_and_gradients(model, tokens, mask)
        generated = [] if gpu else _generated(torch, model, tokens, mask)
        for name, implementation in ((OURS, "fl_attention"), *([("sdpa", "sdpa"), ("eager", "eager")] if gpu else [])):
            try:
                model.set_attn_implementation(implementation)
                found = _logits_and_gradients(model.to(dtype), tokens, mask)
            except ValueError as error:  # SDPA has neither soft caps nor sinks
                print(f"not run: {family} by {name} ({str(error).splitlines()[0]})", file=sys.stderr)
                continue
            ways = {"worst": worst_error, "mean": mean_error}
            errors = {f"{x}_{way}": error(found[x], right[x]) for x in right for way, error in ways.items()}
            said: Row = {"family": family, "attention": name, "dtype": str(dtype).removeprefix("torch."), **errors}
            if generated:
                ours = _generated(torch, model, tokens, mask, batched=True)
                equal = [a == b for x, y in zip(ours, generated, strict=True) for a, b in zip(x, y, strict=True)]
                said |= {"tokens": len(equal), "equal": sum(equal)}
            rows.append(said)
            if name == "sdpa":
                break  # eager stands in where there is no SDPA
    return {"dtype": str(dtype).removeprefix("torch."), "model": {}, "batch": 2, "families": rows}


def _logits_and_gradients(model: Any, tokens: Any, mask: Any) -> dict[str, dict[str, Any]]:
    """Of all that is no padding, in float32."""
    model.zero_grad(set_to_none=True)
    logits = model(tokens, attention_mask=mask, use_cache=False).logits.float() * mask[..., None]
    logits.square().mean().backward()
    grads = {name: x.grad.float() for name, x in model.named_parameters() if x.grad is not None}
    return {"logits": {"logits": logits.detach()}, "gradients": grads}


def _generated(torch: Any, model: Any, tokens: Any, mask: Any, batched: bool = False) -> list[list[int]]:
    """What `generate` adds to the padded prompts, and to each of the prompts of several lengths; the latter `batched`, by
    `generate_batch`, which is asked for flash-attention's functions."""
    library: Any = import_module("transformers")
    more: Row = {"max_new_tokens": NEW, "do_sample": False}
    found = [x[-NEW:].tolist() for x in model.generate(tokens, attention_mask=mask, **more)]
    prompts = [tokens[0, :n].tolist() for n in PROMPTS]
    if not batched:
        return found + [model.generate(torch.tensor([each]), **more)[0, len(each) :].tolist() for each in prompts]
    from flashlab.integrations.transformers import as_flash_attention

    asked = library.GenerationConfig(**more, eos_token_id=-1, pad_token_id=0)
    small = library.ContinuousBatchingConfig(page_size=16, num_blocks=32, max_batch_tokens=12)
    model._compatible_flash_implementations = None  # gpt-oss names kernels of the Hub alone
    with as_flash_attention():
        model.set_attn_implementation("flash_attention_3")
        done = model.generate_batch(prompts, generation_config=asked, continuous_batching_config=small, warmup=False)
    return found + [done[at].generated_tokens for at in sorted(done)]
