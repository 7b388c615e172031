"""Decoder layers of T5 computed by Offramp's C++ operations: one call for a run of layers, as in `layers_native`.

The reference is `offramp.serve.model.layers_t5`; see `csrc/t5_layers.h`.

Legend: N rows, D model, L layers of a stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from offramp.common.t5.block import DecoderBlock
from offramp.common.t5.config import T5Config
from offramp.serve.kv_cache.storage import KVStorage
from offramp.serve.model.native_stacks import MapStack, Stack
from offramp.serve.model.rows import Rows
from offramp.serve.model.stacking import stacked


class NativeT5Layers:
    """A stack of decoder layers; see `offramp.serve.model.layers.Layers`."""

    def __init__(
        self,
        ops: Any,
        blocks: Sequence[DecoderBlock],
        config: T5Config,
        cache_layers: Sequence[int],
        *,
        int8_for: torch.dtype | None = None,
        release: bool = False,
    ) -> None:
        """Pack; the arguments are those of `NativeLayers`."""
        self._run_layers = ops.run_t5_layers.default
        self._cache_layers, self._num_heads = list(cache_layers), config.num_heads
        self._intermediate, self._eps = config.intermediate_size, config.rms_norm_eps
        self._is_gated = config.feed_forward != "relu"
        count = len(blocks)
        norms = [Stack(count) for _ in range(3)]
        qkv, output, cross_query, cross_output, inner, down = maps = [MapStack(ops, count, int8_for) for _ in range(6)]
        for index, block in enumerate(blocks):
            own, cross, mlp = block.self_attn, block.cross_attn, block.mlp
            weights = (block.input_layernorm, block.cross_attention_layernorm, block.post_attention_layernorm)
            for stack, norm in zip(norms, weights, strict=True):
                stack.put(index, norm.weight)
            qkv.put(index, *stacked(own.q_proj, own.k_proj, own.v_proj))
            output.put(index, *stacked(own.o_proj))
            cross_query.put(index, *stacked(cross.q_proj))
            cross_output.put(index, *stacked(cross.o_proj))
            ups = stacked(mlp.up_proj) if mlp.gate_proj is None else stacked(mlp.gate_proj, mlp.up_proj)
            inner.put(index, *ups, gated=self._is_gated)
            down.put(index, *stacked(mlp.down_proj))
            if release:
                block.to("meta")
        input_norm, cross_norm, mlp_norm = (stack.tensor for stack in norms)
        qkv, output, cross_query, cross_output, inner, down = ((one.tensors[0], one.tensors[2]) for one in maps)
        self._weights = (
            *(input_norm, *qkv, *output, cross_norm, *cross_query, *cross_output),
            *(mlp_norm, *inner, *down),
        )

    def run(self, x: Tensor, rows: Rows, cache: KVStorage, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Run layers `start` + 1 .. `stop` of the stack; see `Layers.run`."""
        sources, context = rows.sources, rows.context
        assert sources is not None
        return self._run_layers(
            x.contiguous(),
            cache.data,
            *(rows.positions, rows.slots, rows.sequences, rows.block_tables),
            *(sources.lengths, sources.block_tables, context.distance_table),
            *self._weights,
            *(self._cache_layers, start, stop, self._num_heads, self._intermediate, self._is_gated),
            *(context.block_size, self._eps),
        )

    def write(self, index: int, x: Tensor, rows: Rows, cache: KVStorage) -> None:
        """See `Layers.write`, which only the blocks of exit heads need."""
        raise NotImplementedError("no exit head of an encoder-decoder model has a block")
