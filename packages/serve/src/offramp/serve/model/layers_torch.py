"""Layers computed by torch: with weights packed by oneDNN, or plain. The fallback, and the reference of the C++ ones.

Legend: N rows, D model, F feed-forward, H query heads, K key/value heads, E head dim, L layers of a stack.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from offramp.common.model.attention import Attention
from offramp.common.model.block import Block
from offramp.common.model.config import ModelConfig
from offramp.serve.kv_cache.storage import KVStorage
from offramp.serve.model import ops
from offramp.serve.model.linear import ChosenKernels, PackedLinear
from offramp.serve.model.rows import PlacedRows, Rows
from offramp.serve.model.stacking import fill_weights, stacked


class TorchLayers:
    """A stack of layers; see `offramp.serve.model.layers.Layers`."""

    def __init__(
        self,
        blocks: Sequence[Block],
        config: ModelConfig,
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
            kernels: `packed` or `plain`.
            int8_for: see `PackedLinear`.
            release: give up each block's own weights once it is packed.
        """
        self._layers: list[_TorchLayer] = []
        for block, cache_layer in zip(blocks, cache_layers, strict=True):
            self._layers.append(_TorchLayer(block, config, cache_layer, kernels, int8_for))
            if release:
                block.to("meta")

    def run(self, x: Tensor, rows: Rows, cache: KVStorage, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Run layers `start` + 1 .. `stop` of the stack; see `Layers.run`."""
        return self.run_placed(x, rows.placed, cache, start, stop)

    def run_placed(self, x: Tensor, rows: PlacedRows, cache: KVStorage, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """As `run`, of rows that are on the states' device already."""
        previous = x
        for layer in self._layers[start:stop]:
            x, previous = layer.run(x, rows, cache), x
        return x, previous

    def write(self, index: int, x: Tensor, rows: Rows, cache: KVStorage) -> None:
        """Write keys and values of layer `index` + 1 of the stack; see `Layers.write`."""
        self._layers[index].project(x, rows.placed, cache)


class _TorchLayer:
    def __init__(
        self,
        block: Block,
        config: ModelConfig,
        cache_layer: int,
        kernels: ChosenKernels,
        int8_for: torch.dtype | None,
    ) -> None:
        linear = functools.partial(PackedLinear, kernels=kernels, int8_for=int8_for)
        attention, mlp = block.self_attn, block.mlp
        self._cache_layer = cache_layer
        self._num_heads, self._num_kv_heads, self._head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._eps = config.rms_norm_eps
        self._input_norm = block.input_layernorm.weight.detach()
        self._qkv = linear(*stacked(attention.q_proj, attention.k_proj, attention.v_proj))
        self._qk_norm = _head_norms(attention, config)
        self._output = linear(*stacked(attention.o_proj))
        self._mlp_norm = block.post_attention_layernorm.weight.detach()
        self._gate_up = linear(*stacked(mlp.gate_proj, mlp.up_proj))
        self._down = linear(*stacked(mlp.down_proj))

    def run(self, x: Tensor, rows: PlacedRows, cache: KVStorage) -> Tensor:
        """States [N, D] -> [N, D]."""
        query = self.project(x, rows, cache)
        x = x + self._output(rows.attention.attend(query, cache.data[self._cache_layer], self._num_kv_heads))
        return x + self._down(ops.gated_silu(self._gate_up(ops.rms_norm(x, self._mlp_norm, self._eps))))

    def project(self, x: Tensor, rows: PlacedRows, cache: KVStorage) -> Tensor:
        """Write keys and values of states [N, D], return queries [N, H, E]."""
        num_rotated = self._num_heads + self._num_kv_heads
        qkv = self._qkv(ops.rms_norm(x, self._input_norm, self._eps)).view(len(x), -1, self._head_dim)
        rotated, values = qkv[:, :num_rotated], qkv[:, num_rotated:]
        if self._qk_norm is not None:
            rotated = ops.rms_norm(rotated, None, self._eps) * self._qk_norm
        rotated = ops.rotate(rotated, rows.cos, rows.sin)
        keys_values = torch.cat((rotated[:, self._num_heads :], values), dim=1)
        cache.write(self._cache_layer, rows.slots, keys_values.view(len(x), -1))
        return rotated[:, : self._num_heads]


class TorchFill:
    """Keys and values of the cache layers above an exit; see `offramp.serve.model.layers.Fill`.

    One product for all layers between two exits, so that no weight has to be there once for each exit.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        config: ModelConfig,
        first: int,
        starts: Sequence[int],
        *,
        kernels: ChosenKernels,
        int8_for: torch.dtype | None = None,
    ) -> None:
        """Pack.

        Args:
            blocks: what the cache layers belong to, ascending.
            config: of the model.
            first: cache layer of the first of them.
            starts: cache layers after the exits, ascending; the first of them is `first`.
            kernels: `packed` or `plain`.
            int8_for: see `PackedLinear`.
        """
        self._eps = config.rms_norm_eps
        stops = [*starts[1:], first + len(blocks)]
        self._runs = [
            _TorchFillRun(blocks[start - first : stop - first], config, start, kernels, int8_for)
            for start, stop in zip(starts, stops, strict=True)
        ]

    def write(self, first: int, x: Tensor, rows: Rows, cache: KVStorage) -> None:
        """Fill all cache layers from `first` on; see `Fill.write`."""
        normed = ops.rms_norm(x, None, self._eps)
        for run in self._runs:
            if run.first >= first:
                run.write(normed, rows.placed, cache)


class _TorchFillRun:
    def __init__(
        self,
        blocks: Sequence[Block],
        config: ModelConfig,
        first: int,
        kernels: ChosenKernels,
        int8_for: torch.dtype | None,
    ) -> None:
        self.first, self._stop = first, first + len(blocks)
        self._num_kv_heads, self._head_dim, self._eps = config.num_kv_heads, config.head_dim, config.rms_norm_eps
        folded = (fill_weights(block, keep_fp32=int8_for is not None) for block in blocks)
        weights, biases = zip(*folded, strict=True)
        bias = None if biases[0] is None else torch.cat(biases)
        self._kv = PackedLinear(torch.cat(weights), bias, kernels=kernels, int8_for=int8_for)
        norms = [block.self_attn.k_norm for block in blocks]
        self._key_norm: Tensor | None = None
        if norms[0] is not None:
            self._key_norm = torch.stack([cast(torch.nn.Module, norm).get_parameter("weight") for norm in norms])
            self._key_norm = self._key_norm.detach()[:, None]

    def write(self, normed: Tensor, rows: PlacedRows, cache: KVStorage) -> None:
        """Fill this run's slots of `rows` from states [N, D] that were normed without a weight."""
        shape = (len(normed), self._stop - self.first, 2 * self._num_kv_heads, self._head_dim)
        keys_values = self._kv(normed).view(shape)
        keys, values = keys_values[:, :, : self._num_kv_heads], keys_values[:, :, self._num_kv_heads :]
        if self._key_norm is not None:
            keys = ops.rms_norm(keys, None, self._eps) * self._key_norm
        keys = ops.rotate(keys, rows.cos[:, None], rows.sin[:, None])
        filled = torch.cat((keys, values), dim=2).flatten(2)
        cache.write_layers(self.first, self._stop, rows.slots, filled.transpose(0, 1))


def _head_norms(attention: Attention, config: ModelConfig) -> Tensor | None:
    """Norm weights of all query and key heads, [H + K, E]."""
    if attention.q_norm is None or attention.k_norm is None:
        return None
    query = attention.q_norm.weight.detach().expand(config.num_heads, -1)
    key = attention.k_norm.weight.detach().expand(config.num_kv_heads, -1)
    return torch.cat((query, key))
