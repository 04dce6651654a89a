"""flash-attention's cache door on a GPU: the plain computation's numbers, and Transformers' continuous batching through it."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.filterwarnings("default")]

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    "name", ["new keys in pages", "RoPE of pairs", "several new keys, and more queries", "a window and a soft cap"]
)
def test_the_door_is_the_plain_computation(name: str) -> None:
    from tests.flashlab.integrations.test_kvcache import CASES, door, plain

    given, options = CASES[name]
    on_gpu = {key: x.cuda() if isinstance(x, torch.Tensor) else x for key, x in (given | options).items()}
    out, lse = door().flash_attn_with_kvcache(**on_gpu, return_softmax_lse=True)
    theirs = {key: x.clone() for key, x in given.items()}
    right, logs = plain(**theirs, **options)
    assert torch.allclose(out.cpu().double(), right, atol=3e-3, rtol=3e-3) and torch.allclose(
        lse.cpu().double(), logs, atol=1e-3
    )
    for key in ("k_cache", "v_cache"):
        assert torch.allclose(on_gpu[key].cpu(), theirs[key], atol=1e-3)


def test_continuous_batching_decodes_through_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are those of SDPA, request by request, and the door was called."""
    transformers: Any = pytest.importorskip("transformers")
    utils: Any = importlib.import_module("transformers.modeling_flash_attention_utils")
    if not hasattr(utils, "_process_with_kvcache_kwargs_fn"):
        pytest.skip("Transformers before 5.23 doesn't decode through flash_attn_with_kvcache")
    door = importlib.import_module("flashlab.integrations.flash_attn")
    from flashlab.integrations.transformers import as_flash_attention

    called: list[Any] = []
    real = door.flash_attn_with_kvcache

    def noted(*arrays: Any, **options: Any) -> Any:
        called.append(arrays[0].shape)
        return real(*arrays, **options)

    noted.__signature__ = importlib.import_module("inspect").signature(real)  # type: ignore[attr-defined]
    monkeypatch.setattr(door, "flash_attn_with_kvcache", noted)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        initializer_range=0.3,
    )  # fmt: skip
    model = (
        transformers.LlamaForCausalLM(config).cuda().eval()
    )  # float32, and weights so large that no two logits are close
    prompts = [torch.randint(2, 64, (n,)).tolist() for n in (3, 17, 9, 30)]
    model.set_attn_implementation("sdpa")
    right = [
        model.generate(torch.tensor([each]).cuda(), max_new_tokens=8, do_sample=False)[0, len(each) :].tolist()
        for each in prompts
    ]
    asked = transformers.GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = transformers.ContinuousBatchingConfig(use_cuda_graph=(False, True))
    with as_flash_attention():
        model.set_attn_implementation("flash_attention_3")
        found = model.generate_batch(
            prompts, generation_config=asked, continuous_batching_config=batching, warmup=False
        )
    assert [found[at].generated_tokens for at in sorted(found)] == right
    assert called
