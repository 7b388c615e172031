"""Decoder layers of T5, computed by torch: the fallback, and the reference of the C++ ones.

Attention has no scale and no rotation, and goes to the text and then to the source.

Keys and values of both attentions of a layer lie in the same cache layer, in blocks of their own.

Legend: N rows, D model, F feed-forward, H heads, E head dim, L layers of a stack.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from offramp.common.t5.attention import RelativeAttentionBias, relative_buckets
from offramp.common.t5.block import DecoderBlock, FeedForward
from offramp.common.t5.config import T5Config
from offramp.serve.kv_cache.storage import KVStorage
from offramp.serve.model import ops
from offramp.serve.model.linear import ChosenKernels, PackedLinear
from offramp.serve.model.rows import PlacedRows, Rows
from offramp.serve.model.stacking import fill_weights, stacked


def distance_bias(bias: RelativeAttentionBias, num_tokens: int, dtype: torch.dtype) -> Tensor:
    """[H, num_tokens] what a decoder's relative bias adds, by how far back a key lies."""
    distances = -torch.arange(num_tokens, device=bias.weight.device)
    buckets = relative_buckets(distances, len(bias.weight), bias.max_distance, bias.both_ways)
    return bias.weight.detach()[buckets].T.contiguous().to(dtype)


class PackedFeedForward:
    """T5's feed-forward, of either kind."""

    def __init__(self, mlp: FeedForward, linear: Callable[..., PackedLinear]) -> None:
        """Pack.

        Args:
            mlp: its weights.
            linear: packs a matrix.
        """
        self._is_gated = mlp.gate_proj is not None
        self._inner = linear(*(stacked(mlp.up_proj) if mlp.gate_proj is None else stacked(mlp.gate_proj, mlp.up_proj)))
        self._down = linear(*stacked(mlp.down_proj))

    def __call__(self, x: Tensor) -> Tensor:
        """[N, D] -> [N, D]."""
        inner = self._inner(x)
        return self._down(ops.gated_gelu(inner) if self._is_gated else F.relu(inner))


class T5Layers:
    """A stack of decoder layers; see `offramp.serve.model.layers.Layers`."""

    def __init__(
        self,
        blocks: Sequence[DecoderBlock],
        config: T5Config,
        cache_layers: Sequence[int],
        *,
        kernels: ChosenKernels,
        int8_for: torch.dtype | None = None,
        release: bool = False,
    ) -> None:
        """Pack.

        Args:
            blocks: L of them.
            config: of the model.
            cache_layers: [L] where in the cache each of them has its keys and values.
            kernels: what computes the matrices.
            int8_for: see `PackedLinear`.
            release: give up each block's own weights once it is packed.
        """
        linear = functools.partial(PackedLinear, kernels=kernels, int8_for=int8_for)
        self._layers: list[_T5Layer] = []
        for block, cache_layer in zip(blocks, cache_layers, strict=True):
            self._layers.append(_T5Layer(block, config, cache_layer, linear))
            if release:
                block.to("meta")

    def run(self, x: Tensor, rows: Rows, cache: KVStorage, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Run layers `start` + 1 .. `stop` of the stack; see `Layers.run`."""
        previous, placed = x, rows.placed
        for layer in self._layers[start:stop]:
            x, previous = layer.run(x, placed, cache), x
        return x, previous

    def write(self, index: int, x: Tensor, rows: Rows, cache: KVStorage) -> None:
        """See `Layers.write`, which only the blocks of exit heads need."""
        raise NotImplementedError("no exit head of an encoder-decoder model has a block")


class _T5Layer:
    def __init__(
        self, block: DecoderBlock, config: T5Config, cache_layer: int, linear: Callable[..., PackedLinear]
    ) -> None:
        own, cross = block.self_attn, block.cross_attn
        self._cache_layer = cache_layer
        self._num_heads, self._head_dim, self._eps = config.num_heads, config.head_dim, config.rms_norm_eps
        self._input_norm = block.input_layernorm.weight.detach()
        self._qkv, self._output = linear(*stacked(own.q_proj, own.k_proj, own.v_proj)), linear(*stacked(own.o_proj))
        self._cross_norm = block.cross_attention_layernorm.weight.detach()
        self._cross_query, self._cross_output = linear(*stacked(cross.q_proj)), linear(*stacked(cross.o_proj))
        self._mlp_norm = block.post_attention_layernorm.weight.detach()
        self._mlp = PackedFeedForward(block.mlp, linear)

    def run(self, x: Tensor, rows: PlacedRows, cache: KVStorage) -> Tensor:
        """States [N, D] -> [N, D]."""
        query, keys_values = self._project(x, rows, cache), cache.data[self._cache_layer]
        x = x + self._output(rows.attention.attend(query, keys_values, self._num_heads))
        query = self._cross_query(ops.rms_norm(x, self._cross_norm, self._eps))
        query = query.view(len(x), self._num_heads, self._head_dim)
        x = x + self._cross_output(rows.cross_attention.attend(query, keys_values, self._num_heads))
        return x + self._mlp(ops.rms_norm(x, self._mlp_norm, self._eps))

    def _project(self, x: Tensor, rows: PlacedRows, cache: KVStorage) -> Tensor:
        """Write keys and values of states [N, D], return queries [N, H, E]."""
        qkv = self._qkv(ops.rms_norm(x, self._input_norm, self._eps))
        inner = self._num_heads * self._head_dim
        cache.write(self._cache_layer, rows.slots, qkv[:, inner:])
        return qkv[:, :inner].view(len(x), self._num_heads, self._head_dim)


class T5Fill:
    """Keys and values of self-attention in the cache layers above an exit; see `offramp.serve.model.layers.Fill`.

    Those of cross-attention are the source's, and there already. One product for all layers between two exits.
    """

    def __init__(
        self,
        blocks: Sequence[DecoderBlock],
        config: T5Config,
        first: int,
        starts: Sequence[int],
        *,
        kernels: ChosenKernels,
        int8_for: torch.dtype | None = None,
    ) -> None:
        """Pack; the arguments are those of `TorchFill`."""
        self._eps, self._width = config.rms_norm_eps, 2 * config.num_heads * config.head_dim
        stops = [*starts[1:], first + len(blocks)]
        self._runs: list[tuple[int, int, PackedLinear]] = []
        for start, stop in zip(starts, stops, strict=True):
            between = blocks[start - first : stop - first]
            weights = [fill_weights(block, keep_fp32=int8_for is not None)[0] for block in between]
            self._runs.append((start, stop, PackedLinear(torch.cat(weights), kernels=kernels, int8_for=int8_for)))

    def write(self, first: int, x: Tensor, rows: Rows, cache: KVStorage) -> None:
        """Fill all cache layers from `first` on; see `Fill.write`."""
        normed = ops.rms_norm(x, None, self._eps)
        for start, stop, keys_values in self._runs:
            if start >= first:
                filled = keys_values(normed).view(len(x), stop - start, self._width)
                cache.write_layers(start, stop, rows.placed.slots, filled.transpose(0, 1))
