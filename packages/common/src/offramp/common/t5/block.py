"""Layers of T5: pre-norm attention and feed-forward, without a bias anywhere.

Legend: B batch, T time, M source tokens, D model, F feed-forward.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from offramp.common.model.norm import RMSNorm
from offramp.common.t5.attention import Attention
from offramp.common.t5.config import T5Config
from offramp.common.t5.layout import TargetLayout


class FeedForward(nn.Module):
    """ReLU between two matrices (T5), or a gate through GELU (v1.1, Flan-T5)."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(size, inner, bias=False) if config.feed_forward == "gated-gelu" else None
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        if self.gate_proj is None:
            return self.down_proj(F.relu(self.up_proj(x)))
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class EncoderBlock(nn.Module):
    """A layer of the encoder."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        """[B, M, D] -> [B, M, D].

        Args:
            h: states.
            mask: see `source_mask`.
        """
        x = self.input_layernorm(h)
        h = h + self.self_attn(x, self.self_attn.keys_values(x), mask)
        return h + self.mlp(self.post_attention_layernorm(h))


class DecoderBlock(nn.Module):
    """A layer of the decoder."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.cross_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.cross_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, h: Tensor, layout: TargetLayout) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        x = self.input_layernorm(h)
        seen = self.self_attn.keys_values(x)
        if layout.cache is not None:
            seen = layout.cache.extend(self.self_attn, seen)
        h = h + self.self_attn(x, seen, layout.self_mask)
        source = layout.cross_keys_values(self.cross_attn, self.cross_attn.keys_values)
        h = h + self.cross_attn(self.cross_attention_layernorm(h), source, layout.cross_mask)
        return h + self.mlp(self.post_attention_layernorm(h))
