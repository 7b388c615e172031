"""The tensors of the paged key/value cache.

A *slot* holds the keys and values of one token in one cache layer; slot `b * block_size + i` is token i of block b. A
cache layer is a backbone layer, or the block of an exit head that has one.

Legend: C cache layers, N rows, K key/value heads, E head dim.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from offramp.common.errors import OfframpError
from offramp.serve import memory
from offramp.serve.devices import CPU


class KVStorage:
    """Keys and values of all blocks.

    Attributes:
        data: [C, slots, 2 * K * E]; the keys of all heads, then the values. One row is one token, so that a token is
            written and gathered in one piece.
        block_size: tokens per block.
        scratch_block: number of one more block, which nobody owns; None if there is none.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        poison: bool = False,
        device: torch.device = CPU,
        with_scratch: bool = False,
    ) -> None:
        """Allocate.

        Args:
            num_layers: C.
            num_blocks: blocks.
            block_size: tokens per block.
            num_kv_heads: K.
            head_dim: E.
            dtype: of keys and values.
            poison: fill with NaN, so that a token which attends to a slot never written shows. Otherwise memory stays
                untouched, and the operating system provides it only when it is used.
            device: what holds them.
            with_scratch: have a scratch block, for what rows write that only fill a batch up.

        Raises:
            OfframpError: the operating system, or the device, refuses so much.
        """
        shape = (num_layers, (num_blocks + with_scratch) * block_size, 2 * num_kv_heads * head_dim)
        try:
            self.data = memory.empty(shape, dtype, device)
        except (MemoryError, OSError, OverflowError, RuntimeError) as fault:
            size = num_blocks * self.block_bytes(num_layers, block_size, num_kv_heads, head_dim, dtype)
            raise OfframpError(
                f"there is no memory for a KV cache of {size} bytes; lower kv_cache_bytes or num_blocks."
            ) from fault
        if poison:
            self.data.fill_(torch.nan)
        self.block_size = block_size
        self.scratch_block = num_blocks if with_scratch else None

    @staticmethod
    def block_bytes(num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of one block, all layers together."""
        return num_layers * block_size * 2 * num_kv_heads * head_dim * dtype.itemsize

    def write(self, layer: int, slots: Tensor, keys_values: Tensor) -> None:
        """Store rows [N, 2 * K * E] of one layer at `slots` [N]."""
        self.data[layer].index_copy_(0, slots, keys_values)

    def write_layers(self, first: int, stop: int, slots: Tensor, keys_values: Tensor) -> None:
        """Store rows [stop - first, N, 2 * K * E] of the layers `first` .. `stop` - 1 at `slots` [N]."""
        self.data[first:stop].index_copy_(1, slots, keys_values)

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy blocks at all layers, (from, to), one after the other."""
        size = self.block_size
        for source, target in copies:
            self.data[:, target * size : (target + 1) * size] = self.data[:, source * size : (source + 1) * size]
