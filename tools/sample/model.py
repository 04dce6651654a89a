"""A small causal transformer in plain torch: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    layers: int = 8
    width: int = 384
    heads: int = 6
    kv_heads: int = 3
    head_dim: int = 64
    hidden: int = 1024
    context: int = 1024
    vocabulary: int = 1024
    dropout: float = 0.2


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate each pair (i, i + head_dim/2) of `x` (..., length, head_dim) by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.query = nn.Linear(c.width, c.heads * c.head_dim, bias=False)
        self.key = nn.Linear(c.width, c.kv_heads * c.head_dim, bias=False)
        self.value = nn.Linear(c.width, c.kv_heads * c.head_dim, bias=False)
        self.out = nn.Linear(c.heads * c.head_dim, c.width, bias=False)
        self.seen: dict[str, Tensor] | None = None
        """Set it to a dict, and the next pass stores in it what attention received and returned."""

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.c.head_dim)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        q, k = rotate(q, angles), rotate(k, angles)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        if self.seen is not None:
            self.seen.update(q=q, k=k, v=v, out=out)
        return self.out(out.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(c.width)
        self.attention = Attention(c)
        self.norm = nn.RMSNorm(c.width)
        self.up = nn.Linear(c.width, c.hidden, bias=False)
        self.gate = nn.Linear(c.width, c.hidden, bias=False)
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

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.embed(tokens))
        for block in self.blocks:
            x = block(x, self.angles[: tokens.shape[1]])
        return self.head(self.norm(x))
