"""The policy network: a small decoder of today's usual parts.

RMSNorm, rotary positions, grouped-query attention with normalized queries and keys, SwiGLU, tied embeddings. Weights
are stored as float16 and computed as float32. The same forward serves training, prefill, batched decode and
re-scoring, so that what is recomputed later agrees with what was sampled.

Shapes: B sequences, T new tokens, L layers, H heads, K key-value heads, D head width, C model width, V vocabulary.
"""

# The stubs of torch and safetensors leave these partly unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

__all__ = ["KVCache", "TinyConfig", "TinyModel", "load_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyConfig:
    """Sizes of the network, as `config.json` holds them."""

    name: str = "tokenlake-tiny"
    vocab_size: int = 1024
    d_model: int = 160
    n_layers: int = 4
    n_heads: int = 5
    n_kv_heads: int = 5
    head_dim: int = 32
    d_ff: int = 448
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    max_model_len: int = 2048

    @classmethod
    def read(cls, path: Path) -> TinyConfig:
        """From a JSON file; TypeError for a field that does not exist."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


class KVCache:
    """Keys and values of up to `slots` sequences: float32 `[L, slots, K, max_model_len, D]`, zero where unwritten.

    numpy's zeros come from the operating system, which commits a page when it is first written; torch's are written at
    once. So an idle cache is nearly free.
    """

    def __init__(self, config: TinyConfig, slots: int) -> None:
        shape = (config.n_layers, slots, config.n_kv_heads, config.max_model_len, config.head_dim)
        self.keys = torch.from_numpy(np.zeros(shape, dtype=np.float32))
        self.values = torch.from_numpy(np.zeros(shape, dtype=np.float32))

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot over another."""
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]


class _Attention(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = config.n_heads, config.n_kv_heads, config.head_dim
        self.query = nn.Linear(config.d_model, self.heads * self.width, bias=False)
        self.key = nn.Linear(config.d_model, self.kv_heads * self.width, bias=False)
        self.value = nn.Linear(config.d_model, self.kv_heads * self.width, bias=False)
        self.out = nn.Linear(self.heads * self.width, config.d_model, bias=False)
        self.query_norm = nn.RMSNorm(self.width, eps=config.norm_eps)
        self.key_norm = nn.RMSNorm(self.width, eps=config.norm_eps)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[B, T, C]` to queries `[B, H, T, D]`, keys and values `[B, K, T, D]`."""
        batch, length, _ = x.shape
        q = self.query(x).view(batch, length, self.heads, self.width).transpose(1, 2)
        k = self.key(x).view(batch, length, self.kv_heads, self.width).transpose(1, 2)
        v = self.value(x).view(batch, length, self.kv_heads, self.width).transpose(1, 2)
        return _rotate(self.query_norm(q), cos, sin), _rotate(self.key_norm(k), cos, sin), v

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attend and project back to `[B, T, C]`; without a mask, causally over equal lengths."""
        grouped = self.heads != self.kv_heads
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
        return self.out(y.transpose(1, 2).flatten(2))


class _Block(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.attention = _Attention(config)
        self.mlp_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.gate = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.up = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=False)

    def mlp(self, x: Tensor) -> Tensor:
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class TinyModel(nn.Module):
    """The network; `forward` for whole sequences, `prefill` and `decode` over a `KVCache`."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        rates = config.rope_theta ** (-torch.arange(0, config.head_dim, 2).float() / config.head_dim)
        angles = torch.outer(torch.arange(config.max_model_len).float(), rates)
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=config.d_model**-0.5)

    @classmethod
    def from_state(cls, config: TinyConfig, state: Mapping[str, Tensor]) -> TinyModel:
        """A float32 copy of these weights, in evaluation mode; ValueError when names or shapes do not fit."""
        model = cls(config)
        model.load(state)
        return model.eval().requires_grad_(False)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy weights of any float type in; ValueError when names or shapes do not fit, and then nothing is copied."""
        self.check(state)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(state[name])

    def check(self, state: Mapping[str, Tensor]) -> None:
        """ValueError that names the first tensor that is missing, unknown, misshapen or not of a float type."""
        mine = dict(self.named_parameters())
        if unknown := sorted(set(state) ^ set(mine)):
            raise ValueError(f"weights do not fit the tiny model: {unknown[0]!r} is missing or unknown")
        for name, parameter in mine.items():
            if state[name].shape != parameter.shape or not state[name].is_floating_point():
                raise ValueError(
                    f"weights do not fit the tiny model: {name!r} is {state[name].dtype} {tuple(state[name].shape)}, "
                    f"wanted a float type and {tuple(parameter.shape)}"
                )

    def forward(self, ids: Tensor) -> Tensor:
        """Ids `[B, T]` to logits `[B, T, V]`, causal, positions from 0."""
        return self.logits(self.hidden(ids))

    def hidden(self, ids: Tensor) -> Tensor:
        """Ids `[B, T]` to the normalized last states `[B, T, C]`; `logits` of chosen ones saves the large product."""
        x = self.embedding(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for block in self._blocks():
            q, k, v = block.attention.project(block.attention_norm(x), cos, sin)
            x = block.mlp(x + block.attention.mix(q, k, v, None))
        return self.norm(x)

    def prefill(self, ids: Tensor, cache: KVCache, slot: int) -> Tensor:
        """Run one prompt `[T]` from position 0, fill its slot, and return the logits `[V]` after its last token."""
        length = ids.shape[0]
        x = self.embedding(ids[None])
        cos, sin = self.cos[:length], self.sin[:length]
        for layer, block in enumerate(self._blocks()):
            q, k, v = block.attention.project(block.attention_norm(x), cos, sin)
            cache.keys[layer, slot, :, :length] = k[0]
            cache.values[layer, slot, :, :length] = v[0]
            x = block.mlp(x + block.attention.mix(q, k, v, None))
        return self.logits(self.norm(x[0, -1]))

    def decode(self, ids: Tensor, lengths: Tensor, cache: KVCache) -> Tensor:
        """One token for each of the first B slots.

        `ids` `[B]` are the newest tokens, `lengths` `[B]` how many tokens each slot holds before them. Writes position
        `lengths[b]` of slot b; returns logits `[B, V]`.
        """
        batch = ids.shape[0]
        longest = int(lengths.max()) + 1
        slots = torch.arange(batch)
        mask = (torch.arange(longest)[None] <= lengths[:, None])[:, None, None]
        x = self.embedding(ids[:, None])
        cos, sin = self.cos[lengths][:, None, None], self.sin[lengths][:, None, None]
        for layer, block in enumerate(self._blocks()):
            q, k, v = block.attention.project(block.attention_norm(x), cos, sin)
            cache.keys[layer, slots, :, lengths] = k[:, :, 0]
            cache.values[layer, slots, :, lengths] = v[:, :, 0]
            keys, values = cache.keys[layer, :batch, :, :longest], cache.values[layer, :batch, :, :longest]
            x = block.mlp(x + block.attention.mix(q, keys, values, mask))
        return self.logits(self.norm(x[:, 0]))

    def logits(self, hidden: Tensor) -> Tensor:
        """States `[..., C]` to logits `[..., V]`, through the tied embedding."""
        return F.linear(hidden, self.embedding.weight)

    def _blocks(self) -> list[_Block]:
        return [cast("_Block", block) for block in self.blocks]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def load_model(weights_dir: Path) -> TinyModel:
    """The model of a directory with `config.json` and `model.safetensors`."""
    config = TinyConfig.read(weights_dir / "config.json")
    return TinyModel.from_state(config, load_file(weights_dir / "model.safetensors"))
