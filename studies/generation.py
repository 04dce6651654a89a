"""Requests of several lengths, batched continuously by Transformers, on our kernels and on SDPA's, in turn."""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from importlib import import_module
from typing import Any

from studies.families import OURS, bar

Row = dict[str, Any]
_ON_GPU: Row = {
    "vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 12, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 8192,
}  # fmt: skip
_ON_CPU: Row = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.3,
}  # fmt: skip
REQUESTS, NEW = 128, 128
"""Requests of a batch, and tokens that each is continued by. Prompts are lognormal, of a median of 300 tokens, at most 4,000."""


def prompts(torch: Any, requests: int, median: float, most: int, vocabulary: int) -> list[list[int]]:
    drawn = torch.Generator().manual_seed(0)
    lengths = (median * torch.randn(requests, generator=drawn).exp()).round().clamp(1, most).int().tolist()
    return [torch.randint(2, vocabulary, (n,), generator=drawn).tolist() for n in lengths]


def generate(torch: Any, given: Any) -> Row:
    """Tokens per second of `generate_batch`, a row for each attention: the median of the rounds."""
    from flashlab.integrations.transformers import as_flash_attention

    library: Any = import_module("transformers")
    gpu = torch.cuda.is_available() and not given.tiny
    sizes = _ON_GPU if gpu else _ON_CPU
    torch.manual_seed(0)
    config = library.LlamaConfig(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=None)
    model = (
        library.LlamaForCausalLM(config).to("cuda" if gpu else "cpu", torch.bfloat16 if gpu else torch.float32).eval()
    )
    asked = prompts(torch, *((REQUESTS, 300, 4000) if gpu else (4, 8, 20)), sizes["vocab_size"])
    new, rounds = (NEW, given.rounds) if gpu else (4, 1)
    how = library.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small: Row = {} if gpu else {"page_size": 16, "num_blocks": 32, "max_batch_tokens": 12}
    took: dict[str, list[float]] = {OURS: [], "sdpa": []}
    tokens = dict[str, list[list[int]]]()
    for i in bar(range(-gpu, rounds), "generate"):  # on a GPU, the first round compiles
        for name in took:
            graphs = (False, True) if name == OURS else None  # ours captures decoding alone
            batching = library.ContinuousBatchingConfig(auto_switch_to_flash=False, use_cuda_graph=graphs, **small)
            with as_flash_attention() if name == OURS else nullcontext():
                model.set_attn_implementation("flash_attention_3" if name == OURS else name)
                begun = time.perf_counter()
                done = model.generate_batch(
                    asked, generation_config=how, continuous_batching_config=batching, warmup=False
                )
            if i >= 0:
                took[name].append(time.perf_counter() - begun)
            tokens[name] = [done[at].generated_tokens for at in sorted(done)]
    rows = list[Row]()
    for name, seconds in took.items():
        pairs = [a == b for x, y in zip(tokens[name], tokens["sdpa"], strict=True) for a, b in zip(x, y, strict=True)]
        rows.append({
            "attention": name, "requests": len(asked), "prompt_tokens": sum(map(len, asked)), "new_tokens": len(pairs),
            "equal": sum(pairs), "tokens_per_s": len(pairs) / statistics.median(seconds), "rounds": rounds,
        })  # fmt: skip
    return {"dtype": "bfloat16" if gpu else "float32", "model": sizes, "batch": None, "generations": rows}
