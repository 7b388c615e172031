"""One Transformer block: pre-norm attention and a gated feed-forward.

Legend: B batch, T time, D model, F feed-forward.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from offramp.common.model.attention import Attention, Layout
from offramp.common.model.config import ModelConfig
from offramp.common.model.norm import RMSNorm


class MLP(nn.Module):
    """SwiGLU feed-forward (Shazeer, 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A layer of the backbone."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, h: Tensor, layout: Layout) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        h = h + self.self_attn(self.input_layernorm(h), layout)
        return h + self.mlp(self.post_attention_layernorm(h))
