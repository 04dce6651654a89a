"""q, k, v of a Hugging Face model, on tiny models with random weights."""

from __future__ import annotations

import importlib
import inspect
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.integrations.transformers import capture, save

pytestmark = pytest.mark.transformers

TINY = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GQA = {**TINY, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 16}
MODELS = {
    "llama": ("Llama", GQA),
    "qwen3": ("Qwen3", GQA),
    "mistral": ("Mistral", {**GQA, "sliding_window": 5}),
    "gpt2": ("GPT2", {**TINY, "bos_token_id": 0, "eos_token_id": 0}),
    "gpt-oss": ("GptOss", {**GQA, "sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1}),
}


def torch() -> Any:
    return importlib.import_module("torch")


def model_of(name: str, implementation: str = "sdpa") -> Any:
    transformers: Any = importlib.import_module("transformers")
    family, config = MODELS[name]
    torch().manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**config, attn_implementation=implementation)
    return getattr(transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")(config).eval()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"gpt-oss"}))  # whose sinks no file has
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


def test_a_model_with_attention_of_its_own():
    model = model_of("llama")
    model.forward = lambda **_: None
    with pytest.raises(fl.UsageError, match="ALL_ATTENTION_FUNCTIONS"):
        capture(model, torch().arange(12)[None], layer=0)


def test_the_signatures_name_the_sinks():
    """Transformers looks there, and drops what isn't named."""
    door = importlib.import_module("flashlab.integrations.flash_attn")
    for function in (door.flash_attn_func, door.flash_attn_varlen_func):
        assert {"s_aux", "learnable_sink"} <= inspect.signature(function).parameters.keys()


@pytest.mark.compiler
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_a_model_through_the_functions_of_flash_attn(monkeypatch: pytest.MonkeyPatch, name: str, padded: bool):
    """Logits and gradients are those of the model's own attention: with windows, and with sinks if it has them."""
    model, tokens = model_of(name, "eager"), torch().arange(24).view(2, 12)
    for layer in model.model.layers:
        if hasattr(layer.self_attn, "sinks"):
            torch().nn.init.normal_(layer.self_attn.sinks)
    mask = torch().ones_like(tokens)
    mask[1, : 4 * padded] = 0  # left-padded, and so a ragged batch

    def run() -> tuple[Any, dict[str, Any]]:
        model.zero_grad()
        logits = model(tokens, attention_mask=mask).logits * mask[..., None]
        logits.square().sum().backward()
        return logits.detach(), {at: x.grad.clone() for at, x in model.named_parameters() if "self_attn" in at}

    logits, gradients = run()
    door, utils = ModuleType("flash_attn_interface"), "transformers.modeling_flash_attention_utils"
    functions = importlib.import_module("flashlab.integrations.flash_attn")
    door.__dict__.update({each: getattr(functions, each) for each in functions.__all__})
    door.__dict__.update(flash_attn_with_kvcache=None, __spec__=ModuleSpec(door.__name__, None))
    monkeypatch.setitem(sys.modules, door.__name__, door)
    monkeypatch.setattr(importlib.import_module(utils), "_loaded_implementation", None)
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "flash_attention_3")
    found, theirs = run()
    assert torch().allclose(found, logits, atol=1e-5)
    for at, x in gradients.items():
        assert torch().allclose(theirs[at], x, rtol=1e-3, atol=1e-5), at
