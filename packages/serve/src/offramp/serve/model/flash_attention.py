"""FlashAttention over the blocks of the cache, on CUDA: torch's own kernel reads them where they lie.

It takes a batch of runs of neighbouring rows, each of one sequence with its block table; a decode is a run of one row.
So chunks of prompts and decodes are one call for each layer, and no keys are gathered.

Legend: N rows, S runs, H query heads, K key/value heads, E head dim.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offramp.serve.devices import on_device
from offramp.serve.model.attended import Attended

log = logging.getLogger(__name__)

BLOCK_MULTIPLE = 256
"""The kernel takes blocks of so many tokens, or of a multiple."""

_MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class FlashRuns:
    """What runs of rows see.

    Attributes:
        starts: [S + 1] int32, the first row of each run, and N.
        lengths: [S] int32, keys of each run's last row, from the beginning of its sequence.
        tables: [S, blocks] int32, the sequence's block table.
        longest: most rows of a run.
        block_size: tokens of a block.
        sliding_window: tokens that a token sees, itself included; None is all before it.
        kernel: has the signature of `torch.nn.attention.varlen.varlen_attn`.
    """

    starts: Tensor
    lengths: Tensor
    tables: Tensor
    longest: int
    block_size: int
    sliding_window: int | None
    kernel: Callable[..., Tensor]

    @classmethod
    def of(
        cls,
        positions: Tensor,
        sequences: Tensor,
        block_tables: Tensor,
        block_size: int,
        sliding_window: int | None,
        device: torch.device,
        kernel: Callable[..., Tensor] | None = None,
    ) -> FlashRuns:
        """Find the runs: rows of one sequence at consecutive positions. All but the last two arguments are `Rows`'."""
        follows = (positions.diff() == 1) & (sequences.diff() == 0)
        first = torch.cat((torch.tensor([0]), (~follows).nonzero()[:, 0] + 1))
        starts = torch.cat((first, torch.tensor([len(positions)])))
        lengths = positions[starts[1:] - 1] + 1
        tables = block_tables[sequences[first].long()]
        # One transfer for all.
        numbers = torch.cat((starts, lengths, tables.flatten())).to(torch.int32)
        numbers = on_device(numbers.numpy(), device)
        parts = numbers.split([len(starts), len(first), tables.numel()])
        longest = int(starts.diff().max())
        return cls(
            *(parts[0], parts[1], parts[2].view(tables.shape), longest, block_size, sliding_window),
            kernel or _kernel(),
        )

    @classmethod
    def of_single(
        cls,
        positions: Tensor,
        tables: Tensor,
        block_size: int,
        sliding_window: int | None,
        kernel: Callable[..., Tensor] | None = None,
    ) -> FlashRuns:
        """Rows one by one: positions [N] int32 and each row's block table [N, blocks] int32, both on the device."""
        starts = torch.arange(len(positions) + 1, dtype=torch.int32, device=positions.device)
        return cls(starts, positions + 1, tables, 1, block_size, sliding_window, kernel or _kernel())

    def attend(self, query: Tensor, cache: Tensor, num_kv_heads: int) -> Tensor:
        """See `offramp.serve.model.attended.Attention`."""
        pages = cache.view(-1, self.block_size, 2, num_kv_heads, query.shape[-1])
        # One row sees all keys of its run anyway; and the kernel is faster where nothing is to be masked.
        after = -1 if self.longest == 1 and self.sliding_window is None else 0
        before = -1 if self.sliding_window is None else self.sliding_window - 1
        out = self.kernel(
            query,
            pages[:, :, 0],
            pages[:, :, 1],
            self.starts,
            self.starts,  # of keys: not looked at, where there is a block table, but the kernel wants some
            self.longest,
            self.tables.shape[1] * self.block_size,
            window_size=(before, after),
            enable_gqa=query.shape[1] != num_kv_heads,
            seqused_k=self.lengths,
            block_table=self.tables,
        )
        return out.flatten(1)


@functools.cache
def can_flash(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> bool:
    """Whether attention over such a cache can be FlashAttention here: it is tried, and compared with the reference."""
    if device.type != "cuda":
        return False
    if block_size % BLOCK_MULTIPLE or dtype != torch.bfloat16 or head_dim % 8 or head_dim > _MAX_HEAD_DIM:
        log.info(
            "attention on %s gathers keys: FlashAttention takes bf16, blocks of %d tokens or a multiple (not %d), and "
            "heads of at most %d channels, a multiple of 8 (not %d)",
            *(device, BLOCK_MULTIPLE, block_size, _MAX_HEAD_DIM, head_dim),
        )
        return False
    try:
        error = _error(device, dtype, head_dim, block_size)
    except Exception as fault:  # whatever a version of torch or a device has against it
        log.warning("attention on %s gathers keys: FlashAttention does not run here: %s", device, fault)
        return False
    if error > 0.05:  # of numbers of size 1, which bf16 rounds at 0.004; one key too many makes 0.1
        log.warning("attention on %s gathers keys: FlashAttention is off by %.3g there", device, error)
        return False
    log.info("attention on %s is FlashAttention over the cache's blocks", device)
    return True


def _error(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> float:
    """The largest difference between both kinds of attention: a chunk of a prompt, and decodes beside it."""
    generator = torch.Generator().manual_seed(0)
    num_kv_heads, group, chunk = 2, 3, 37
    cache = torch.randn(7 * block_size, 2 * num_kv_heads * head_dim, generator=generator).to(device, dtype)
    positions = torch.cat((torch.arange(block_size + 5, block_size + 5 + chunk), torch.tensor([0, 2 * block_size - 1])))
    sequences = torch.cat((torch.zeros(chunk, dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32)))
    tables = torch.tensor([[4, 1], [2, 2], [6, 0]], dtype=torch.int32)
    query = torch.randn(len(positions), group * num_kv_heads, head_dim, generator=generator).to(device, dtype)
    # What nobody has written yet may be anything, so it must not even be multiplied by 0.
    lengths = torch.tensor([block_size + 5 + chunk, 1, 2 * block_size])
    keys = torch.arange(2 * block_size)
    slots = tables[:, keys // block_size].long() * block_size + keys % block_size
    is_written = torch.zeros(len(cache), dtype=torch.bool)
    is_written[slots[keys < lengths[:, None]]] = True
    cache[(~is_written).to(device)] = torch.nan
    worst = 0.0
    for window in (None, block_size // 2):
        gathered = Attended.of(positions, sequences, tables, block_size, window, dtype, device)
        wanted = gathered.attend(query, cache, num_kv_heads)
        runs = FlashRuns.of(positions, sequences, tables, block_size, window, device)
        single = FlashRuns.of_single(
            positions.to(device, torch.int32), tables[sequences.long()].to(device), block_size, window
        )
        for found in (runs, single):
            error = (found.attend(query, cache, num_kv_heads) - wanted).abs().max()
            worst = max(worst, float(error.nan_to_num(torch.inf)))
    return worst


def _kernel() -> Callable[..., Tensor]:
    from torch.nn.attention import varlen  # not in older versions

    kernel: Any = varlen.varlen_attn  # a tuple only where more is asked of it
    return kernel
