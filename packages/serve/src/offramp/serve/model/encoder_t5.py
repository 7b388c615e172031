"""T5's encoder, packed: sources to the keys and values of cross-attention of all decoder layers, made once.

Sources are neighbours in one matrix, without padding, so a row costs the same whatever the others' lengths are. Only
attention takes them apart: sources of one length together.

Legend: N rows (tokens of all sources), M tokens of one source, D model, H heads, E head dim, L decoder layers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from offramp.common.t5.block import DecoderBlock, EncoderBlock
from offramp.common.t5.config import T5Config
from offramp.common.t5.model import MultiExitT5
from offramp.serve.kv_cache.storage import KVStorage
from offramp.serve.model import ops
from offramp.serve.model.layers_t5 import PackedFeedForward
from offramp.serve.model.linear import ChosenKernels, PackedLinear
from offramp.serve.model.stacking import stacked

_WRITE_SLICE = 512
"""Most rows whose keys and values of all layers are in memory beside the cache."""


class _Group(NamedTuple):
    """Sources of one length, neighbours in the matrix.

    Attributes:
        start: the first row.
        stop: after the last row.
        length: M.
        bias: [1, H, M, M] what is added to scores.
    """

    start: int
    stop: int
    length: int
    bias: Tensor


class PackedEncoder:
    """The encoder, and the matrices of cross-attention that read what it makes."""

    def __init__(
        self,
        model: MultiExitT5,
        dtype: torch.dtype,
        *,
        kernels: ChosenKernels,
        int8_for: torch.dtype | None = None,
        release: bool = False,
    ) -> None:
        """Pack; before the decoder's blocks are given up.

        Args:
            model: weights.
            dtype: of states.
            kernels: what computes the matrices.
            int8_for: see `PackedLinear`.
            release: give up each block's own weights once it is packed.
        """
        config, encoder = model.config, model.encoder
        linear = functools.partial(PackedLinear, kernels=kernels, int8_for=int8_for)
        self._eps, self._dtype = config.rms_norm_eps, dtype
        self._num_layers, self._width = config.num_layers, 2 * config.num_heads * config.head_dim
        self._bias = encoder.relative_attention_bias
        self._layers: list[_EncoderLayer] = []
        for block in encoder.layers:
            own = cast(EncoderBlock, block)
            self._layers.append(_EncoderLayer(own, config, linear))
            if release:
                own.to("meta")
        self._norm = encoder.norm.weight.detach()
        attentions = [cast(DecoderBlock, block).cross_attn for block in model.layers]
        self._keys_values = linear(*stacked(*(w for one in attentions for w in (one.k_proj, one.v_proj))))

    def write(self, x: Tensor, lengths: Sequence[int], slots: Tensor, cache: KVStorage) -> None:
        """Read sources, and write what decoder layers attend to.

        Args:
            x: [N, D] embedded tokens of the sources, one after the other.
            lengths: tokens of each of them, ascending.
            slots: [N] cache slots of their tokens.
            cache: of the decoder.
        """
        groups = self._groups(lengths, x.device)
        for layer in self._layers:
            x = layer.run(x, groups)
        x = ops.rms_norm(x, self._norm, self._eps)
        for part, its_slots in zip(x.split(_WRITE_SLICE), slots.split(_WRITE_SLICE), strict=True):
            made = self._keys_values(part).view(len(part), self._num_layers, self._width)
            cache.write_layers(0, self._num_layers, its_slots, made.transpose(0, 1))

    def _groups(self, lengths: Sequence[int], device: torch.device) -> list[_Group]:
        groups: list[_Group] = []
        start = 0
        for length, members in itertools.groupby(lengths):
            stop = start + length * len(list(members))
            positions = torch.arange(length, device=device)
            groups.append(_Group(start, stop, length, self._bias(positions, positions).to(self._dtype)))
            start = stop
        return groups


class _EncoderLayer:
    def __init__(self, block: EncoderBlock, config: T5Config, linear: Callable[..., PackedLinear]) -> None:
        attention = block.self_attn
        self._num_heads, self._head_dim, self._eps = config.num_heads, config.head_dim, config.rms_norm_eps
        self._input_norm = block.input_layernorm.weight.detach()
        self._qkv = linear(*stacked(attention.q_proj, attention.k_proj, attention.v_proj))
        self._output = linear(*stacked(attention.o_proj))
        self._mlp_norm = block.post_attention_layernorm.weight.detach()
        self._mlp = PackedFeedForward(block.mlp, linear)

    def run(self, x: Tensor, groups: Sequence[_Group]) -> Tensor:
        """States [N, D] -> [N, D]."""
        qkv = self._qkv(ops.rms_norm(x, self._input_norm, self._eps))
        seen = x.new_empty(len(x), self._num_heads * self._head_dim)
        for start, stop, length, bias in groups:
            parts = qkv[start:stop].view(-1, length, 3, self._num_heads, self._head_dim).permute(2, 0, 3, 1, 4)
            out = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], attn_mask=bias, scale=1.0)
            seen[start:stop] = out.transpose(1, 2).flatten(2).flatten(0, 1)
        x = x + self._output(seen)
        return x + self._mlp(ops.rms_norm(x, self._mlp_norm, self._eps))
