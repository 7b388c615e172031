"""Layers on CUDA: those of torch, replayed from captured graphs where few rows are computed.

Decoding few rows is hundreds of small operations, and the host takes longer to ask for them than the device to do them.
So one graph is captured for each range of layers, number of rows and length of block tables, each rounded up to one of
a few, when it is first wanted. Rows that only fill the batch up stand at position 0 of a block that nobody owns
(`KVStorage.scratch_block`). Chunks of prompts run as they come: there the device has enough to do.

Legend: N rows, B rows of a graph, W blocks of a block table, D model, L layers of a stack.
"""

from __future__ import annotations

import logging
import time

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offramp.serve.devices import copy_into, on_device
from offramp.serve.kv_cache.storage import KVStorage
from offramp.serve.model.attended import LONG_RUN, Attention, SingleRows, single_bias, single_keys
from offramp.serve.model.flash_attention import FlashRuns
from offramp.serve.model.graphs import Capture
from offramp.serve.model.layers_torch import TorchLayers
from offramp.serve.model.rows import PlacedRows, RowContext, Rows

log = logging.getLogger(__name__)

MAX_ROWS = 256
"""More rows than this are computed as they come."""


def row_bucket(num_rows: int) -> int:
    """The number of rows of the graph for `num_rows`: a power of two, or from 16 on also three times one."""
    power = 1 << (num_rows - 1).bit_length()
    return power * 3 // 4 if power >= 32 and num_rows <= power * 3 // 4 else power


def table_bucket(num_blocks: int, most: int) -> int:
    """The blocks of the graph for tables of `num_blocks`: a power of two, but never more than `most`."""
    return min(1 << (num_blocks - 1).bit_length(), most)


class GraphedLayers:
    """A stack of layers; see `offramp.serve.model.layers.Layers`."""

    def __init__(self, layers: TorchLayers, capture: Capture) -> None:
        """Wrap.

        Args:
            layers: what computes.
            capture: what records it.
        """
        self._layers, self._capture = layers, capture
        self._graphs: dict[tuple[int, int, int, int], _Graph] = {}
        self._seconds = 0.0

    @property
    def num_graphs(self) -> int:
        """Captured so far."""
        return len(self._graphs)

    def run(self, x: Tensor, rows: Rows, cache: KVStorage, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Run layers `start` + 1 .. `stop` of the stack; see `Layers.run`. One cache has a scratch block, or none."""
        if cache.scratch_block is None or len(rows) > MAX_ROWS or _longest_run(rows) >= LONG_RUN:
            return self._layers.run(x, rows, cache, start, stop)
        context = rows.context
        most = -(-len(context.cos) // context.block_size)
        # With FlashAttention a long table costs nothing, for a row reads no further than it sees.
        num_blocks = most if context.has_flash else table_bucket(rows.block_tables.shape[1], most)
        key = (start, stop, row_bucket(len(rows)), num_blocks)
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._captured(key, x, context, cache)
        return graph.run(x, rows)

    def write(self, index: int, x: Tensor, rows: Rows, cache: KVStorage) -> None:
        """Write keys and values of layer `index` + 1 of the stack; see `Layers.write`."""
        self._layers.write(index, x, rows, cache)

    def _captured(self, key: tuple[int, int, int, int], x: Tensor, context: RowContext, cache: KVStorage) -> _Graph:
        began = time.perf_counter()
        graph = _Graph(self._layers, self._capture, key, x, context, cache)
        seconds = time.perf_counter() - began
        self._seconds += seconds
        log.info(
            "graph %d captured in %.0f ms: layers %d to %d, %d rows, tables of %d blocks (%.1f s for all so far)",
            *(len(self._graphs) + 1, 1000 * seconds, key[0] + 1, *key[1:], self._seconds),
        )
        return graph


class _Graph:
    """One range of layers for one number of rows, with its inputs and results."""

    def __init__(
        self,
        layers: TorchLayers,
        capture: Capture,
        key: tuple[int, int, int, int],
        x: Tensor,
        context: RowContext,
        cache: KVStorage,
    ) -> None:
        start, stop, num_rows, num_blocks = key
        assert cache.scratch_block is not None
        self._scratch_block, self._scratch_slot = cache.scratch_block, cache.scratch_block * cache.block_size
        self._x = x.new_zeros(num_rows, x.shape[1])
        # Positions, slots and block tables in one tensor, and so in one transfer.
        self._numbers = on_device(self._padding(num_rows, 2 + num_blocks), x.device)

        def compute() -> tuple[Tensor, Tensor]:
            return layers.run_placed(self._x, _placed(self._numbers, context), cache, start, stop)

        self._replay, self._results = capture(compute)

    def run(self, x: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        num_rows = len(rows)
        numbers = self._padding(*self._numbers.shape)
        tables = rows.block_tables.numpy()
        numbers[:num_rows, 0], numbers[:num_rows, 1] = rows.positions.numpy(), rows.slots.numpy()
        numbers[:num_rows, 2 : 2 + tables.shape[1]] = tables[rows.sequences.numpy()]
        copy_into(self._numbers, numbers)
        self._x[:num_rows].copy_(x)
        self._replay()
        after, before = self._results
        return after[:num_rows].clone(), before[:num_rows].clone()

    def _padding(self, num_rows: int, width: int) -> npt.NDArray[np.int32]:
        numbers = np.full((num_rows, width), self._scratch_block, dtype=np.int32)
        numbers[:, :2] = 0, self._scratch_slot
        return numbers


def _placed(numbers: Tensor, context: RowContext) -> PlacedRows:
    """Rows by their numbers [B, 2 + W] int32: positions, slots and block tables. All is part of the graph."""
    positions, tables = numbers[:, 0].long(), numbers[:, 2:]
    size, window = context.block_size, context.sliding_window

    def attention() -> Attention:
        if context.has_flash:
            return FlashRuns.of_single(numbers[:, 0], tables, size, window)
        num_keys = tables.shape[1] * size if window is None else min(tables.shape[1] * size, window)
        slots, seen = single_keys(positions, tables, size, window, num_keys)
        return SingleRows(None, slots, single_bias(seen, context.dtype))

    return PlacedRows(positions, numbers[:, 1].long(), context, attention)


def _longest_run(rows: Rows) -> int:
    """Most rows of one sequence."""
    if len(rows) < LONG_RUN:
        return len(rows)
    return int(torch.bincount(rows.sequences).max())
