"""A small causal transformer in plain torch, and its training on the text of Python's own library: `python -m studies model`.

RMSNorm, rotary positions, grouped-query attention, SwiGLU. Tokens are bytes. A model of this kind made `flashlab/data/sample.npz`.
A seed draws the same windows of text. Weights still differ a little from run to run: a GPU's atomic sums have no fixed order.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashlab.integrations.torch import attention

HELD_OUT = "calendar csv fractions graphlib heapq queue sched shlex statistics string textwrap tomllib zipapp".split()
"""Modules that are never trained on, nor their tests: pure Python, by many authors and in many styles."""


@dataclass(frozen=True)
class Config:
    layers: int = 8
    width: int = 384
    heads: int = 6
    kv_heads: int = 3
    head_dim: int = 64
    hidden: int = 1024
    context: int = 1024
    vocabulary: int = 256
    dropout: float = 0.2


def sdpa(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend | None = None) -> Tensor:
    """PyTorch's own attention, by a backend of it, or by the one that it chooses."""
    call: Any = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
    if backend is None:
        return call()
    with sdpa_kernel(backend):
        return call()


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention by this project's kernels: of a tensor on a CPU, by the emulator."""
    return attention(q, k, v, causal=True)


ATTENTION: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "flashlab": ours,
    "sdpa": sdpa,
    "sdpa-flash": partial(sdpa, backend=SDPBackend.FLASH_ATTENTION),
    "sdpa-efficient": partial(sdpa, backend=SDPBackend.EFFICIENT_ATTENTION),
    "cudnn": partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    "math": partial(sdpa, backend=SDPBackend.MATH),
}
"""Causal attention of (batch, heads, length, head_dim), by its name. Keys and values may have fewer heads."""


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate each pair (i, i + head_dim/2) of `x` (..., length, head_dim) by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c, self.attend = c, ATTENTION["sdpa"]
        self.query = nn.Linear(c.width, c.heads * c.head_dim, bias=False)
        self.key, self.value = (nn.Linear(c.width, c.kv_heads * c.head_dim, bias=False) for _ in "kv")
        self.out = nn.Linear(c.heads * c.head_dim, c.width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        parts = self.query, self.key, self.value
        q, k, v = (part(x).unflatten(-1, (-1, self.c.head_dim)).transpose(1, 2) for part in parts)
        q, k = rotate(q, angles), rotate(k, angles)
        out = self.attend(q, k, v)
        return self.out(out.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.RMSNorm(c.width), nn.RMSNorm(c.width)
        self.attention = Attention(c)
        self.up, self.gate = (nn.Linear(c.width, c.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(c.hidden, c.width, bias=False)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), angles))
        y = self.norm(x)
        return x + self.dropout(self.down(F.silu(self.gate(y)) * self.up(y)))


class Transformer(nn.Module):
    angles: Tensor

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.embed = nn.Embedding(c.vocabulary, c.width)
        self.dropout = nn.Dropout(c.dropout)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.RMSNorm(c.width)
        self.head = nn.Linear(c.width, c.vocabulary, bias=False)
        speeds = 10_000.0 ** -(torch.arange(c.head_dim // 2) / (c.head_dim // 2))
        self.register_buffer("angles", torch.outer(torch.arange(c.context), speeds), persistent=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                # What adds to the residual stream starts smaller, so that depth does not widen it.
                adds = name.endswith(("attention.out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * c.layers) ** 0.5 if adds else 0.02)

    def use(self, name: str) -> Transformer:
        """Itself, with this attention in each layer."""
        return self.attending(ATTENTION[name])

    def attending(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Transformer:
        """The same, with an attention of one's own."""
        for module in self.modules():
            if isinstance(module, Attention):
                module.attend = attend
        return self

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.embed(tokens))
        for block in self.blocks:
            x = block(x, self.angles[: tokens.shape[1]])
        return self.head(self.norm(x))


def library() -> tuple[Tensor, Tensor]:
    """The bytes to train on, and those held out: the modules of the running interpreter's library, each after a zero byte."""
    root, parts = Path(sysconfig.get_path("stdlib")), (bytearray(), bytearray())
    for path in sorted(path.relative_to(root) for path in root.rglob("*.py")):
        names = {part.removesuffix(".py").removeprefix("test_") for part in path.parts}
        if path.parts[0] != "site-packages" and (
            path.parts[0].removesuffix(".py") in HELD_OUT or not names & {*HELD_OUT}
        ):
            parts[path.parts[0].removesuffix(".py") in HELD_OUT].extend(b"\0" + (root / path).read_bytes())
    train, held = (torch.frombuffer(part, dtype=torch.uint8) for part in parts)
    return train, held


def loss_on(model: nn.Module, text: Tensor, context: int, device: str) -> float:
    """The mean loss in nats per token, over all whole windows of `text`, which lie side by side."""
    count = (len(text) - 1) // context
    x, y = (text[i : count * context + i].view(count, context) for i in (0, 1))
    total = 0.0
    model.eval()
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        for a, b in zip(x.split(32), y.split(32), strict=True):
            logits = model(a.to(device).int()).float().flatten(0, 1)
            total += F.cross_entropy(logits, b.to(device).long().flatten(), reduction="sum").item()
    model.train()
    return total / (count * context)


def loss_of(model: nn.Module, window: Tensor, dtype: torch.dtype) -> Tensor:
    """The mean loss in nats per token of windows (batch, context + 1), in which each token is to tell the next."""
    with torch.autocast(window.device.type, torch.bfloat16, enabled=dtype is torch.bfloat16):
        logits = model(window[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].long().flatten())


def windows(text: Tensor, context: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Windows (batch, context + 1) of `text`, on its device, which a seed draws without end."""
    draw, offsets = torch.Generator().manual_seed(seed), torch.arange(context + 1, device=text.device)
    while True:
        first = torch.randint(len(text) - context, (batch, 1), generator=draw)
        if text.is_cuda:  # a copy from pinned memory doesn't wait for the step before
            first = first.pin_memory().to(text.device, non_blocking=True)
        yield text[first + offsets].int()


def trained(
    model: nn.Module, drawn: Iterator[Tensor], steps: int, rate: float = 1e-3, dtype: torch.dtype = torch.bfloat16,
    loss_of: Callable[[nn.Module, Tensor, torch.dtype], Tensor] = loss_of,
) -> Iterator[Tensor]:  # fmt: skip
    """Train for so many steps by AdamW, one cycle of learning rates up to `rate`, and give the loss of each step."""
    parameters = list(model.parameters())
    fused = parameters[0].device.type == "cuda"
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.1, betas=(0.9, 0.95), fused=fused)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps + 1, pct_start=0.03)
    for _ in range(steps):
        loss = loss_of(model, next(drawn), dtype)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        yield loss.detach()


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("python -m studies model", description="Train the small transformer.")
    parser.add_argument("--out", default="checkpoint.pt", help="weights, float16, and the log (%(default)s)")
    parser.add_argument("--steps", type=int, default=7000)
    parser.add_argument("--batch", type=int, default=32, help="windows per step (%(default)s)")
    parser.add_argument("--rate", type=float, default=1e-3, help="highest learning rate (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=250, help="steps between two measurements (%(default)s)")
    for each in fields(Config):
        parser.add_argument(f"--{each.name.replace('_', '-')}", type=type(each.default), default=each.default)
    given = parser.parse_args(words)
    config = Config(**{each.name: getattr(given, each.name) for each in fields(Config)})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(given.seed)
    train, held = library()
    model = Transformer(config).to(device)
    drawn = windows(train.to(device), config.context, given.batch, given.seed)
    curve, start, running = list[dict[str, float]](), time.monotonic(), list[Tensor]()
    for step, loss in enumerate(trained(model, drawn, given.steps, given.rate), 1):
        running.append(loss)
        if step % given.every == 0 or step == given.steps:
            losses = {
                "train": torch.stack(running).mean().item(),
                "held_out": loss_on(model, held, config.context, device),
            }
            curve.append({"step": step, **losses, "seconds": round(time.monotonic() - start, 1)})
            running.clear()
            print(json.dumps(curve[-1]), flush=True)
    weights = {name: value.half().cpu() for name, value in model.state_dict().items()}
    torch.save({"config": asdict(config), "weights": weights, "curve": curve}, given.out)
