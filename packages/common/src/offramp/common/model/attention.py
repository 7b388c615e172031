"""Grouped-query attention over whole sequences, and the layout that says who may see whom.

Legend: B batch, T time, D model, H query heads, K key/value heads, E head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offramp.common.model.config import ModelConfig
from offramp.common.model.norm import RMSNorm
from offramp.common.model.rope import inverse_frequencies, rotary_tables, rotate


@dataclass(frozen=True)
class Layout:
    """How the tokens of a batch [B, T] lie: computed once, used by every layer.

    Attributes:
        positions: [B, T], from 0 in each segment.
        cos: [B, T, E] fp32 rotary cosines.
        sin: [B, T, E] fp32 rotary sines.
        mask: [B, 1, T, T] bool, True where the query (third axis) sees the key; None is plain causal.
        exit_depths: [B, T] layers after which a token's state stays as it is; None: no token is frozen. Upper layers
            make their keys and values from the frozen state, which is what *saturated KV fill* does when serving.
        skipped_layers: [B, L] bool: layers that leave a row as it is (LayerSkip's layer dropout); None: no layer does.
    """

    positions: Tensor
    cos: Tensor
    sin: Tensor
    mask: Tensor | None
    exit_depths: Tensor | None
    skipped_layers: Tensor | None = None

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        input_ids: Tensor,
        segment_ids: Tensor | None = None,
        exit_depths: Tensor | None = None,
        rope_length: int | None = None,
        skipped_layers: Tensor | None = None,
    ) -> Layout:
        """Lay out a batch.

        Args:
            config: the model.
            input_ids: [B, T], read for its shape and device only.
            segment_ids: [B, T], equal within one packed example; tokens see earlier tokens of their own segment only.
            exit_depths: [B, T], see the class.
            rope_length: tokens the rotary frequencies are made for (dynamic scaling); those of the longest segment if
                None.
            skipped_layers: [B, L], see the class.
        """
        batch, time = input_ids.shape
        device = input_ids.device
        steps = torch.arange(time, device=device).expand(batch, time)
        positions, mask = steps, None
        if segment_ids is not None:
            starts = torch.ones_like(segment_ids, dtype=torch.bool)
            starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
            positions = steps - torch.where(starts, steps, 0).cummax(dim=1).values
            mask = (segment_ids[:, :, None] == segment_ids[:, None, :]) & (steps[:, :, None] >= steps[:, None, :])
        if config.sliding_window is not None and time > config.sliding_window:
            distance = steps[:, :, None] - steps[:, None, :]
            near = (distance >= 0) & (distance < config.sliding_window)
            mask = near if mask is None else mask & near
        length = rope_length or 0
        if config.rope.type == "dynamic" and not length:
            length = int(positions.max()) + 1  # waits for the device, so only where it matters
        cos, sin = rotary_tables(inverse_frequencies(config.rope, config.head_dim, length), positions)
        return cls(positions, cos, sin, None if mask is None else mask[:, None], exit_depths, skipped_layers)


class Attention(nn.Module):
    """Causal self-attention with rotary positions, grouped key/value heads and optional per-head query/key norms."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        batch, time, _ = x.shape
        q = self.q_proj(x).view(batch, time, self.num_heads, self.head_dim)
        k = self.k_proj(x).view(batch, time, self.num_kv_heads, self.head_dim)
        v = self.v_proj(x).view(batch, time, self.num_kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, layout.cos, layout.sin), rotate(k, layout.cos, layout.sin)
        # Repeating the shared heads is faster than `enable_gqa` on CPU, where that falls back to the plain kernel.
        group = self.num_heads // self.num_kv_heads
        k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=layout.mask, is_causal=layout.mask is None)
        return self.o_proj(out.transpose(1, 2).reshape(batch, time, -1))
