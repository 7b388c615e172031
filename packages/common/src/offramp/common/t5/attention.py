"""T5's attention: no scale on the scores, no rotation, and a learned bias for each class of distances instead.

Legend: B batch, T time (queries), U time (keys), D model, H heads, E head dim.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offramp.common.t5.config import T5Config


def relative_buckets(distances: Tensor, num_buckets: int, max_distance: int, both_ways: bool) -> Tensor:
    """Class of each distance (Raffel et al., 2020, section 2.1).

    Half of the classes hold one distance each, the others grow with the logarithm of the distance, and the last one
    holds everything from `max_distance` on.

    Args:
        distances: position of the key minus that of the query, of any shape.
        num_buckets: classes.
        max_distance: in tokens.
        both_ways: the encoder's classes tell before from after; the decoder sees nothing after, so all of its classes
            look back.
    """
    if both_ways:
        num_buckets //= 2
        first, distances = (distances > 0) * num_buckets, distances.abs()
    else:
        first, distances = 0, (-distances).clamp(min=0)
    exact = num_buckets // 2
    # In fp32 and in this order, as the models were trained: another rounding moves distances between classes.
    growth = torch.log(distances.float() / exact) / math.log(max_distance / exact) * (num_buckets - exact)
    # The logarithm of no distance is no number of a class; it is not taken, but must not be cast either.
    far = exact + growth.clamp(min=0).long()
    return first + torch.where(distances < exact, distances, far.clamp(max=num_buckets - 1))


class RelativeAttentionBias(nn.Module):
    """What distances add to attention scores: learned once, shared by all layers of an encoder or a decoder."""

    def __init__(self, config: T5Config, both_ways: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.relative_buckets, config.num_heads))
        self.max_distance, self.both_ways = config.relative_max_distance, both_ways

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Biases [1, H, T, U] between positions [T] and [U]."""
        distances = keys[None, :] - queries[:, None]
        buckets = relative_buckets(distances, len(self.weight), self.max_distance, self.both_ways)
        return F.embedding(buckets, self.weight).permute(2, 0, 1)[None]


class Attention(nn.Module):
    """Attention of a layer to its own states, or to those of the encoder."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        size, inner = config.hidden_size, config.num_heads * config.head_dim
        self.q_proj = nn.Linear(size, inner, bias=False)
        self.k_proj = nn.Linear(size, inner, bias=False)
        self.v_proj = nn.Linear(size, inner, bias=False)
        self.o_proj = nn.Linear(inner, size, bias=False)

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, U, E] of states [B, U, D]."""
        return self._heads(self.k_proj(x)), self._heads(self.v_proj(x))

    def forward(self, x: Tensor, keys_values: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """[B, T, D] -> [B, T, D].

        Args:
            x: [B, T, D] what asks.
            keys_values: each [B, H, U, E]; see `keys_values`.
            mask: broadcast to [B, H, T, U]: True where a query sees a key, or what is added to the scores. None: every
                query sees every key.
        """
        keys, values = keys_values
        out = F.scaled_dot_product_attention(self._heads(self.q_proj(x)), keys, values, attn_mask=mask, scale=1.0)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
