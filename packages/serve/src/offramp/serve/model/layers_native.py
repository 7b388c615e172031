"""Layers computed by Offramp's C++ operations: stacked, packed weights, and one call for a run of layers.

What a row gets depends on nothing but itself and its sequence's keys and values, bit for bit: not on the rows beside
it, on chunks, or on the number of threads. See `csrc/layers.h`; the reference is `offramp.serve.model.layers_torch`.

Legend: N rows, D model, L layers of a stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from offramp.common.model.block import Block
from offramp.common.model.config import ModelConfig
from offramp.serve.kv_cache.storage import KVStorage
from offramp.serve.model.native_stacks import MapStack, Stack
from offramp.serve.model.rows import Rows
from offramp.serve.model.stacking import fill_weights, stacked


class NativeLayers:
    """A stack of layers; see `offramp.serve.model.layers.Layers`."""

    def __init__(
        self,
        ops: Any,
        blocks: Sequence[Block],
        config: ModelConfig,
        cache_layers: Sequence[int],
        *,
        int8_for: torch.dtype | None = None,
        release: bool = False,
    ) -> None:
        """Pack.

        Args:
            ops: namespace of the C++ operations.
            blocks: L of them.
            config: of the model.
            cache_layers: [L] where in the cache each of them has its keys and values.
            int8_for: see `PackedLinear`.
            release: give up each block's own weights once it is packed.
        """
        self._run_layers, self._write_kv = ops.run_layers.default, ops.write_kv.default
        self._cache_layers = list(cache_layers)
        self._num_heads, self._intermediate = config.num_heads, config.intermediate_size
        self._eps = config.rms_norm_eps
        count = len(blocks)
        input_norm, query_norm, key_norm, mlp_norm = (Stack(count) for _ in range(4))
        qkv, output, gate_up, down = (MapStack(ops, count, int8_for) for _ in range(4))
        for index, block in enumerate(blocks):
            attention, mlp = block.self_attn, block.mlp
            input_norm.put(index, block.input_layernorm.weight)
            qkv.put(index, *stacked(attention.q_proj, attention.k_proj, attention.v_proj))
            query_norm.put(index, None if attention.q_norm is None else attention.q_norm.weight)
            key_norm.put(index, None if attention.k_norm is None else attention.k_norm.weight)
            output.put(index, *stacked(attention.o_proj))
            mlp_norm.put(index, block.post_attention_layernorm.weight)
            gate_up.put(index, *stacked(mlp.gate_proj, mlp.up_proj), gated=True)
            down.put(index, *stacked(mlp.down_proj))
            if release:
                block.to("meta")
        self._key_weights = (input_norm.tensor, *qkv.tensors, key_norm.tensor)
        self._weights = (
            *(input_norm.tensor, *qkv.tensors, query_norm.tensor, key_norm.tensor, *output.tensors),
            *(mlp_norm.tensor, *gate_up.tensors, *down.tensors),
        )

    def run(self, x: Tensor, rows: Rows, cache: KVStorage, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Run layers `start` + 1 .. `stop` of the stack; see `Layers.run`."""
        return self._run_layers(
            x.contiguous(),
            cache.data,
            *(rows.positions, rows.slots, rows.sequences, rows.block_tables, rows.context.cos, rows.context.sin),
            *self._weights,
            *(self._cache_layers, start, stop, self._num_heads, self._intermediate),
            *(rows.context.block_size, rows.context.sliding_window or 0, self._eps),
        )

    def write(self, index: int, x: Tensor, rows: Rows, cache: KVStorage) -> None:
        """Write keys and values of layer `index` + 1 of the stack; see `Layers.write`."""
        self._write_kv(
            x.contiguous(),
            cache.data,
            *(rows.positions, rows.slots, rows.context.cos, rows.context.sin),
            *self._key_weights,
            *(self._cache_layers[index], index, self._num_heads, self._eps),
        )


class NativeFill:
    """Keys and values of the cache layers above an exit, in one product; see `offramp.serve.model.layers.Fill`."""

    def __init__(
        self,
        ops: Any,
        blocks: Sequence[Block],
        config: ModelConfig,
        first: int,
        *,
        int8_for: torch.dtype | None = None,
    ) -> None:
        """Pack.

        Args:
            ops: namespace of the C++ operations.
            blocks: what the cache layers belong to, ascending.
            config: of the model.
            first: cache layer of the first of them.
            int8_for: see `PackedLinear`.
        """
        self._fill, self._first, self._eps = ops.fill.default, first, config.rms_norm_eps
        maps, key_norm = MapStack(ops, len(blocks), int8_for), Stack(len(blocks))
        for index, block in enumerate(blocks):
            maps.put(index, *fill_weights(block, keep_fp32=int8_for is not None))
            norm = block.self_attn.k_norm
            key_norm.put(index, None if norm is None else norm.weight)
        self._weights = (*maps.tensors, key_norm.tensor)

    def write(self, first: int, x: Tensor, rows: Rows, cache: KVStorage) -> None:
        """Fill all cache layers from `first` on; see `Fill.write`."""
        self._fill(
            x.contiguous(),
            cache.data,
            *(rows.positions, rows.slots, rows.context.cos, rows.context.sin),
            *self._weights,
            *(self._first, first - self._first, self._eps),
        )
