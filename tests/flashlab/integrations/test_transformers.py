"""Hugging Face's models with random weights: q, k, v of a layer, and whole models on our kernels."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.integrations import transformers as door
from flashlab.integrations.transformers import as_flash_attention, attend, capture, register, save

pytestmark = pytest.mark.transformers

TINY = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GQA = {**TINY, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 16}
WINDOW = {**GQA, "sliding_window": 5}
MODELS = {
    "llama": ("Llama", GQA),
    "qwen3": ("Qwen3", GQA),
    "mistral": ("Mistral", WINDOW),
    "gemma2": ("Gemma2", {**WINDOW, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3", {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}),
    "gpt-oss": ("GptOss", {**WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "gpt2": ("GPT2", TINY),
}
FAMILIES = sorted(MODELS.keys() - {"gpt2"})


def torch() -> Any:
    return importlib.import_module("torch")


def model_of(name: str, implementation: str = "sdpa") -> Any:
    transformers: Any = importlib.import_module("transformers")
    family, given = MODELS[name]
    torch().manual_seed(0)
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    config = getattr(transformers, "Gemma3TextConfig" if name == "gemma3" else f"{family}Config")
    made = getattr(transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")
    model = made(config(**given, **tokens, attn_implementation=implementation)).eval()
    for at, x in model.named_parameters():
        if at.endswith("sinks"):
            torch().nn.init.normal_(x)
    return model


@pytest.mark.alike("gpt2-sdpa", "mistral-eager")
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "qwen3"])
def test_the_file_gives_the_models_own_output(tmp_path: Path, name: str, implementation: str):
    model, tokens = model_of(name, implementation), torch().arange(24).view(2, 12)
    before = model(tokens).logits
    seen = capture(model, tokens, layer=1)
    assert torch().equal(model(tokens).logits, before)  # and the model is as it was
    save(seen, tmp_path / "a.safetensors")
    q, k, v = data = fl.load_inputs(tmp_path / "a.safetensors")
    assert q.shape[:3] == (2, 4, 12)
    assert k.shape[:3] == v.shape[:3] == (2, 4 if name == "gpt2" else 2, 12)  # not repeated
    assert data.causal is True and data.note["layer"] == "1"
    window = tuple(map(int, data.note["window"].split(","))) if "window" in data.note else None
    assert (window == (4, 0)) == (name == "mistral")
    ours = fl.naive(q, k, v, causal=True, window=window, scale=float(data.note["scale"]))
    np.testing.assert_allclose(ours.out, seen["out"].numpy(), atol=2e-6)


def test_some_heads_in_another_dtype(tmp_path: Path):
    seen = capture(model_of("llama"), torch().arange(12)[None], layer=0)
    save(seen, tmp_path / "a.safetensors", "bfloat16", range(2, 4))
    q, k, v = fl.load_inputs(tmp_path / "a.safetensors")
    assert q.shape == (1, 2, 12, 16) and k.shape == v.shape == (1, 1, 12, 16)
    assert {str(x.dtype) for x in (q, k, v)} == {"bfloat16"}
    np.testing.assert_array_equal(k.astype(np.float32), seen["k"][:, 1:2].bfloat16().float().numpy())
    with pytest.raises(fl.UsageError, match="heads = '1:3': expected multiples of 2, up to 4"):
        save(seen, tmp_path / "a.safetensors", heads=range(1, 3))


def test_a_layer_that_is_not_there():
    with pytest.raises(fl.UsageError, match="layer = 2: expected 0 to 1"):
        capture(model_of("llama"), torch().arange(12)[None], layer=2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda ids: {"model": 5}, "model = 'int': expected a model of Transformers"),
        (lambda ids: {"layer": "a"}, "layer = 'a': expected 0 to 1"),
        (lambda ids: {"layer": -1}, "layer = -1: expected 0 to 1"),
        (lambda ids: {"tokens": [1, 2]}, "tokens = 'list': expected a torch tensor of integers"),
        (lambda ids: {"tokens": ids[0]}, r"tokens.shape = \(12,\): expected"),
        (lambda ids: {"tokens": ids[:, :0]}, r"tokens.shape = \(1, 0\): expected"),
        (lambda ids: {"tokens": ids.float()}, "tokens.dtype = 'torch.float32': expected"),
        (lambda ids: {"tokens": ids - 1}, "tokens = -1: expected 0 to"),
        (lambda ids: {"tokens": ids + 10**6}, "tokens = 1000011: expected 0 to"),
    ],
)
def test_what_cannot_be_captured(given: Any, said: str) -> None:
    ids = torch().arange(12)[None]
    with pytest.raises(fl.UsageError, match=said):
        capture(**{"model": model_of("llama"), "tokens": ids, "layer": 0, **given(ids)})


def test_a_model_with_attention_of_its_own():
    model = model_of("llama")
    model.forward = lambda **_: None
    with pytest.raises(fl.UsageError, match="ALL_ATTENTION_FUNCTIONS"):
        capture(model, torch().arange(12)[None], layer=0)


# Whole models on our kernels, on the emulator


def tokens() -> Any:
    return torch().arange(24).view(2, 12) + 2


def padding(tokens: Any, left: int) -> Any:
    mask = torch().ones_like(tokens)
    mask[1, :left] = 0
    return mask


def logits_and_gradients(model: Any, tokens: Any, mask: Any) -> dict[str, Any]:
    """Of all that is no padding."""
    model.zero_grad()
    logits = model(tokens, attention_mask=mask, use_cache=False).logits
    logits = logits if mask is None else logits * mask[..., None]
    logits.square().sum().backward()
    return {"logits": logits.detach()} | {at: x.grad for at, x in model.named_parameters() if x.grad is not None}


def off(found: dict[str, Any], right: dict[str, Any]) -> float:
    """The largest error of any array, over the largest magnitude of that array."""
    assert found.keys() == right.keys()
    return max(((found[at] - x).abs().max() / x.abs().max()).item() for at, x in right.items())


@pytest.mark.compiler
@pytest.mark.alike("gpt-oss-", "mistral-padded")
@pytest.mark.parametrize("left", [0, 4], ids=["", "padded"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_are_eagers(name: str, left: int):
    """To 2e-6 of the size of each: GQA, windows, soft cap, sinks, and padding, which is a ragged batch."""
    mask = padding(tokens(), left)
    right = logits_and_gradients(model_of(name, "eager"), tokens(), mask)
    assert off(logits_and_gradients(model_of(name, register()), tokens(), mask), right) <= 2e-6


@pytest.mark.compiler
@pytest.mark.alike("llama")
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_sdpa_by_our_kernels_is_eager(name: str, monkeypatch: pytest.MonkeyPatch):
    """Transformers' own `sdpa`, behind which our kernels are active: the same bound, and each layer calls them."""
    sdpa, choices = importlib.import_module("flashlab.integrations.sdpa"), importlib.import_module("torch.nn.attention")
    made, forward = list[int](), sdpa.forward_pass
    monkeypatch.setattr(sdpa, "forward_pass", lambda *x, **named: made.append(1) or forward(*x, **named))
    right = logits_and_gradients(model_of(name, "eager"), tokens(), padding(tokens(), 0))
    sdpa.register_sdpa(cpu=True)
    choices.activate_flash_attention_impl("flashlab")
    try:
        found = logits_and_gradients(model_of(name, "sdpa"), tokens(), None)
    finally:
        choices.restore_flash_attention_impl(_raise_warn=False)
    assert off(found, right) <= 2e-6 and len(made) == 2


@pytest.mark.compiler
@pytest.mark.long
def test_a_wrong_mask_is_seen(monkeypatch: pytest.MonkeyPatch):
    """A window that is longer by one key, and padding that is looked at."""
    mask, registry = padding(tokens(), 4), door._torch_and_registry()[1]
    right = logits_and_gradients(model_of("mistral", "eager"), tokens(), mask)
    for wrong in (
        lambda *x, sliding_window, **named: attend(*x, sliding_window=sliding_window + 1, **named),
        lambda module, q, k, v, mask, **named: attend(module, q, k, v, None, **named),
    ):
        model = model_of("mistral", register())
        monkeypatch.setitem(registry._global_mapping, "fl_attention", wrong)
        assert off(logits_and_gradients(model, tokens(), mask), right) > 1e-3
        monkeypatch.undo()


@pytest.mark.compiler
@pytest.mark.alike("llama")
@pytest.mark.parametrize("name", FAMILIES)
def test_generated_tokens_are_eagers(name: str):
    """With left padding; with a static cache, too, whose empty rows the mask names."""
    given: dict[str, Any] = {"attention_mask": padding(tokens(), 4), "max_new_tokens": 3, "do_sample": False}
    right, model = model_of(name, "eager").generate(tokens(), **given), model_of(name, register())
    assert torch().equal(model.generate(tokens(), **given), right)
    assert torch().equal(model.generate(tokens(), **given, cache_implementation="static"), right)


@pytest.mark.compiler
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.alike("llama")
@pytest.mark.parametrize("name", FAMILIES)
def test_continuous_batching_generates_eagers_tokens(name: str):
    """A prompt longer than a batch's tokens is cut, and goes with others that are decoding."""
    transformers: Any = importlib.import_module("transformers")
    random, model = torch().manual_seed(1), model_of(name, "eager")
    prompts = [torch().randint(2, 64, (n,), generator=random).tolist() for n in (3, 17, 9, 1)]
    right = [
        model.generate(torch().tensor([each]), max_new_tokens=3, do_sample=False)[0, len(each) :].tolist()
        for each in prompts
    ]
    asked = transformers.GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = transformers.ContinuousBatchingConfig(page_size=16, num_blocks=32, max_batch_tokens=12)
    model._compatible_flash_implementations = None  # gpt-oss names kernels of the Hub alone
    with as_flash_attention():
        model.set_attn_implementation("flash_attention_3")
        found = model.generate_batch(prompts, generation_config=asked, continuous_batching_config=small, warmup=False)
    assert [found[at].generated_tokens for at in sorted(found)] == right


@pytest.mark.compiler
def test_lent_functions_have_the_sinks():
    """Transformers hands them to a function whose signature names them, and drops them otherwise."""
    mask, model = padding(tokens(), 4), model_of("gpt-oss", "eager")
    right = logits_and_gradients(model, tokens(), mask)
    model._compatible_flash_implementations = None  # it names kernels of the Hub alone
    with as_flash_attention():
        model.set_attn_implementation("flash_attention_3")
        assert off(logits_and_gradients(model, tokens(), mask), right) <= 2e-6
    assert "flash_attn_interface" not in sys.modules
    with pytest.raises(ImportError):
        model(tokens())
    with pytest.raises(ImportError):
        model_of("llama", "flash_attention_3")


def test_lending_is_refused_where_the_module_is_loaded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    with pytest.raises(fl.UsageError, match="version = 3, whose module flash_attn_interface is loaded: expected a"):
        as_flash_attention().__enter__()
    with pytest.raises(fl.UsageError, match="version = 2: expected 3"):
        as_flash_attention(2).__enter__()


CAUSAL = SimpleNamespace(is_causal=True)


def drawn(rows: int = 9, keys: int = 9, batch: int = 1) -> list[Any]:
    random = torch().manual_seed(2)
    return [torch().randn(batch, h, n, 16, generator=random) for h, n in ((4, rows), (2, keys), (2, keys))]


@pytest.mark.compiler
@pytest.mark.parametrize("by", ["position_ids", "cu_seq_lens"])
def test_packed_sequences(by: str):
    """Each is as if it were alone."""
    q, k, v = drawn()
    ends = torch().tensor([0, 4, 9], dtype=torch().int32)
    positions = {"position_ids": torch().tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])}
    said = positions if by == "position_ids" else {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 5}
    out, weights = attend(CAUSAL, q, k, v, None, **said)
    parts = [attend(CAUSAL, *(x[:, :, a:b] for x in (q, k, v)), None)[0] for a, b in ((0, 4), (4, 9))]
    assert weights is None and torch().equal(out, torch().cat(parts, 1))


@pytest.mark.compiler
def test_queries_see_all_keys_but_padding():
    """As in an encoder, where a mask says nothing of queries."""
    q, k, v = drawn(4, 9)
    mask = torch().tensor([[1, 1, 1, 0, 1, 1, 0, 0, 0]])
    kept = [x[:, :, mask[0].bool()] for x in (k, v)]
    out, right = (attend(CAUSAL, q, *x, is_causal=False)[0] for x in ((k, v, mask), (*kept, None)))
    assert torch().equal(out, right)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"position_bias": 1}, "position_bias = int: expected None: the kernels don't have it"),
        ({"output_attentions": True}, "output_attentions = bool: expected None: the kernels don't have it"),
        ({"cache": 1}, "cache = int: expected None"),
        ({"block_table": 1}, "block_table = int: expected None"),
        ({"softcap": -1.0}, r"softcap = -1.0: expected"),
        ({"cu_seq_lens_q": [0, 9]}, "cu_seqlens_q = 'list': expected a torch tensor"),
        ({"position_ids": (2, 9)}, r"position_ids.shape = \(2, 9\): expected \(1, length\) for a batch of one"),
        ({"attention_mask": (1, 1, 9, 9)}, r"attention_mask.shape = \(1, 1, 9, 9\): expected \(1, 9\): batch and keys"),
        ({"attention_mask": (1, 10)}, r"attention_mask.shape = \(1, 10\): expected \(1, 9\)"),
        ({"sliding_window": 3, "attention_mask": (1, 9)}, "attention_mask = a mask with padding between two tokens: expected"),
    ],
)  # fmt: skip
def test_what_attend_refuses(change: dict[str, Any], line: str):
    made = {at: torch().arange(9).fmod(4).expand(x) if isinstance(x, tuple) and x[-1] == 9 else
            torch().ones(x) if isinstance(x, tuple) else x for at, x in change.items()}  # fmt: skip
    with pytest.raises(fl.UsageError, match=line) as refused:
        attend(CAUSAL, *drawn(), **{"attention_mask": None} | made)
    assert "\n" not in str(refused.value)


def masks(name: str) -> Any:
    return getattr(importlib.import_module("transformers.masking_utils"), name)


CHUNKED = {"q_length": 9, "kv_length": 9}
MASKS: list[tuple[Callable[[], dict[str, Any]], str]] = [
    (
        lambda: {"mask_function": masks("chunked_causal_mask_function")(4, torch().zeros(1)), **CHUNKED},
        "mask_function = chunked_overlay: expected a causal, bidirectional or sliding mask",
    ),
    (
        lambda: {"mask_function": masks("or_masks")(masks("causal_mask_function"), lambda *_: True), **CHUNKED},
        "mask_function = or_masks: expected",
    ),
    (
        lambda: {
            "mask_function": masks("packed_sequence_compatibility_function")(
                masks("causal_mask_function"), torch().zeros(2, 9), torch().zeros(2, 9)
            ),
            **CHUNKED, "batch_size": 2,
        },
        "position_ids = packed sequences in a batch of 2: expected them in a batch of 1",
    ),
    (
        lambda: {"mask_function": masks("causal_mask_function"), "q_length": 4, "kv_length": 32, "q_offset": 3},
        "attention_mask = None with a static cache: expected one that names the 7 of 32 rows in use",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("make", "line"), MASKS, ids=[line for _, line in MASKS])
def test_masks_that_no_kernel_would_see(make: Callable[[], dict[str, Any]], line: str):
    """Of a window, or of chunks that are longer than the text, nothing is lost."""
    with pytest.raises(fl.UsageError, match=line) as refused:
        door._padding(**{"batch_size": 1} | make())
    assert "\n" not in str(refused.value)
    for function in (masks("sliding_window_causal_mask_function")(5), masks("chunked_causal_mask_function")(9, None)):
        assert door._padding(batch_size=1, q_length=9, kv_length=9, mask_function=function) is None


def test_a_static_cache_without_a_mask():
    transformers: Any = importlib.import_module("transformers")
    model = model_of("llama", register())
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    with pytest.raises(fl.UsageError, match="one that names the 12 of 32 rows in use"):
        model(tokens(), past_key_values=cache)


@pytest.mark.parametrize("name", ["sdpa", "eager", "my_flash", "paged|mine", "a b", "", 5])
def test_names_that_are_not_free(name: Any):
    with pytest.raises(fl.UsageError, match="name = .*: expected a name of your own") as refused:
        register(name)
    assert "\n" not in str(refused.value)
