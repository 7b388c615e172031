"""Attention over the paged cache in torch: which cached keys each row sees, gathered. Native kernels need none of this.

Single rows (decodes, and a few waiting tokens beside them) are computed all at once over padded keys; longer runs of
rows of one sequence (chunks of prompts) one by one, so that their keys are gathered once for all of their rows.

The models of one family scale scores and rotate keys; those of the other add a bias for each distance instead, and
attend to a source besides, whose keys lie in blocks of their own.

Legend: N rows, M single rows, P rows of one run, T keys that are seen at most, H query heads, K key/value heads, E head
dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from offramp.serve.devices import on_device

LONG_RUN = 12
"""From this many rows on, a run of one sequence gathers its keys once instead of once for each row."""


class Attention(Protocol):
    """What some rows see, and how they attend to it."""

    def attend(self, query: Tensor, cache: Tensor, num_kv_heads: int) -> Tensor:
        """Causal attention of rows over their sequences' cached keys and values, their own included.

        Args:
            query: [N, H, E], rotated.
            cache: [slots, 2 * K * E], one layer of `KVStorage.data`.
            num_kv_heads: K.

        Returns:
            [N, H * E].
        """
        ...


@dataclass(frozen=True)
class SingleRows:
    """Rows that are attended for one by one, in a batch.

    Attributes:
        index: [M] which rows; None: all there are.
        slots: [M, T] cache slots of the keys each row sees. Rows that see fewer than T keys repeat their first one, so
            that a slot which was never written is never read, not even to be masked.
        bias: [M, 1 or H, 1, T] added to the scores, -inf at a repetition. None if there is nothing to add.
        scale: of the scores; None is E**-0.5.
    """

    index: Tensor | None
    slots: Tensor
    bias: Tensor | None
    scale: float | None = None

    def attend(self, query: Tensor, cache: Tensor, num_kv_heads: int) -> Tensor:
        """[M, H, E] -> [M, H * E], all at once over padded keys; see `Attention`.

        The query heads that share a key/value head go in as if they were queries of one head; the CPU kernel is then
        several times faster than with `enable_gqa`.
        """
        num_rows, num_heads, head_dim = query.shape
        slots = self.slots
        gathered = cache.index_select(0, slots.flatten()).view(num_rows, slots.shape[1], 2, num_kv_heads, head_dim)
        keys, values = gathered[:, :, 0].transpose(1, 2), gathered[:, :, 1].transpose(1, 2)
        query = query.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=self.bias, scale=self.scale)
        return out.reshape(num_rows, num_heads * head_dim)


@dataclass(frozen=True)
class Run:
    """Rows `start` .. `stop` - 1, of one sequence.

    Attributes:
        start: the first row.
        stop: after the last row.
        slots: [T] cache slots of all keys that any of the rows sees.
        bias: [P, T] or [H, 1, P, T] added to the scores, -inf where the row does not see the key. None if there is
            nothing to add.
        scale: see `SingleRows`.
    """

    start: int
    stop: int
    slots: Tensor
    bias: Tensor | None
    scale: float | None = None

    def attend(self, query: Tensor, cache: Tensor, num_kv_heads: int) -> Tensor:
        """The queries of one sequence, [P, H, E] -> [P, H * E]; see `Attention`."""
        num_rows, num_heads, head_dim = query.shape
        group = num_heads // num_kv_heads
        gathered = cache.index_select(0, self.slots).view(-1, 2, num_kv_heads, 1, head_dim)
        gathered = gathered.permute(1, 2, 3, 0, 4).expand(2, num_kv_heads, group, -1, head_dim)
        query = query.transpose(0, 1).reshape(num_kv_heads, group, num_rows, head_dim)
        out = F.scaled_dot_product_attention(query, gathered[0], gathered[1], attn_mask=self.bias, scale=self.scale)
        return out.reshape(num_heads, num_rows, head_dim).transpose(0, 1).reshape(num_rows, num_heads * head_dim)


@dataclass(frozen=True)
class Attended:
    """What all rows see.

    Attributes:
        single: None if there are only runs.
        runs: none if there are only single rows.
    """

    single: SingleRows | None
    runs: tuple[Run, ...]

    @classmethod
    def of(
        cls,
        positions: Tensor,
        sequences: Tensor,
        block_tables: Tensor,
        block_size: int,
        sliding_window: int | None,
        dtype: torch.dtype,
        device: torch.device,
        distance_bias: Tensor | None = None,
    ) -> Attended:
        """What rows see of their own sequences.

        Args:
            positions: see `Rows`; this and the next two are on the host.
            sequences: see `Rows`.
            block_tables: see `Rows`.
            block_size: see `RowContext`.
            sliding_window: see `RowContext`.
            dtype: of queries and cache.
            device: of queries and cache.
            distance_bias: [H, longest sequence] of `dtype`, on `device`: what is added to scores that are not scaled,
                by how far back a key lies; then without a window. None: scores are scaled, and nothing is added.
        """
        scale = None if distance_bias is None else 1.0
        long, index = _long_runs(sequences)
        runs: list[Run] = []
        for sequence, start, stop in long:
            slots, distances = _run_keys(
                positions[start:stop], block_tables[sequence], block_size, sliding_window, device
            )
            seen = distances >= 0
            if sliding_window is not None:
                seen &= distances < sliding_window
            if distance_bias is None:
                bias = _bias(seen, dtype)
            else:
                bias = distance_bias[:, distances.clamp(min=0)].masked_fill_(~seen, -torch.inf)[:, None]
            runs.append(Run(start, stop, slots, bias, scale))
        if index is not None:
            if not len(index):
                return cls(None, tuple(runs))
            positions, sequences = positions[index], sequences[index]
            index = on_device(index.numpy(), device)
        num_keys = positions + 1 if sliding_window is None else (positions + 1).clamp(max=sliding_window)
        most = int(num_keys.max())
        tables = block_tables[sequences.long()]
        positions, tables = on_device(positions.numpy(), device), on_device(tables.numpy(), device)
        slots, seen = single_keys(positions, tables, block_size, sliding_window, most)
        if distance_bias is not None:
            distances = (positions[:, None] - torch.arange(most, device=device)).clamp(min=0)
            bias = distance_bias[:, distances].masked_fill_(~seen, -torch.inf).transpose(0, 1)[:, :, None]
        else:
            bias = None if bool((num_keys == most).all()) else single_bias(seen, dtype)
        return cls(SingleRows(index, slots, bias, scale), tuple(runs))

    @classmethod
    def of_sources(
        cls,
        sequences: Tensor,
        lengths: Tensor,
        block_tables: Tensor,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Attended:
        """What rows see of their sequences' sources: all of it. Scores are not scaled.

        Args:
            sequences: see `Rows`; this and the next two are on the host.
            lengths: see `Sources`.
            block_tables: see `Sources`.
            block_size: see `RowContext`.
            dtype: of queries and cache.
            device: of queries and cache.
        """
        long, index = _long_runs(sequences)
        runs: list[Run] = []
        for sequence, start, stop in long:
            table = on_device(block_tables[sequence].numpy(), device)
            keys = torch.arange(int(lengths[sequence]), device=device)
            slots = table[keys // block_size].long() * block_size + keys % block_size
            runs.append(Run(start, stop, slots, None, 1.0))
        if index is not None:
            if not len(index):
                return cls(None, tuple(runs))
            sequences = sequences[index]
            index = on_device(index.numpy(), device)
        # A row sees what one at the source's last position would.
        last = lengths[sequences.long()] - 1
        most = int(last.max()) + 1
        tables = block_tables[sequences.long()]
        is_padded = bool((last + 1 < most).any())
        last, tables = on_device(last.numpy(), device), on_device(tables.numpy(), device)
        slots, seen = single_keys(last, tables, block_size, None, most)
        return cls(SingleRows(index, slots, single_bias(seen, dtype) if is_padded else None, 1.0), tuple(runs))

    def attend(self, query: Tensor, cache: Tensor, num_kv_heads: int) -> Tensor:
        """See `Attention`."""
        single = self.single
        if single is not None and single.index is None:
            return single.attend(query, cache, num_kv_heads)
        out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        if single is not None and single.index is not None:
            out[single.index] = single.attend(query[single.index], cache, num_kv_heads)
        for run in self.runs:
            out[run.start : run.stop] = run.attend(query[run.start : run.stop], cache, num_kv_heads)
        return out


def single_keys(
    positions: Tensor, tables: Tensor, block_size: int, window: int | None, num_keys: int
) -> tuple[Tensor, Tensor]:
    """The keys that rows see, padded.

    Args:
        positions: [M].
        tables: [M, blocks] of each row's sequence.
        block_size: tokens of a block.
        window: tokens that a token sees; None: all before it.
        num_keys: T.

    Returns:
        Slots [M, T], and [M, T] where they are keys.
    """
    first = torch.zeros_like(positions) if window is None else (positions + 1 - window).clamp(min=0)
    steps = torch.arange(num_keys, device=positions.device)
    seen = steps <= (positions - first)[:, None]
    keys = torch.where(seen, first[:, None] + steps, first[:, None])
    return tables.gather(1, keys // block_size).long() * block_size + keys % block_size, seen


def single_bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores, [M, 1, 1, T], of keys that are `seen` [M, T] or not."""
    return _bias(seen, dtype)[:, None, None]


def _long_runs(sequences: Tensor) -> tuple[list[tuple[int, int, int]], Tensor | None]:
    """Long runs of rows of one sequence.

    Returns:
        Sequence, first row and row after the last of each; and the places of all other rows, None if these are all.
    """
    if len(sequences) < LONG_RUN:
        return [], None
    members, counts = torch.unique_consecutive(sequences, return_counts=True)
    if int(counts.max()) < LONG_RUN:
        return [], None
    runs: list[tuple[int, int, int]] = []
    is_single = torch.ones(len(sequences), dtype=torch.bool)
    start = 0
    for sequence, count in zip(members.tolist(), counts.tolist(), strict=True):
        if count >= LONG_RUN:
            runs.append((sequence, start, start + count))
            is_single[start : start + count] = False
        start += count
    return runs, is_single.nonzero()[:, 0]


def _run_keys(
    positions: Tensor, table: Tensor, block_size: int, window: int | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Slots [T] of the keys of a run, and [P, T] how far before its row each of them lies."""
    first = 0 if window is None else max(0, int(positions[0]) + 1 - window)
    keys = torch.arange(first, int(positions[-1]) + 1, device=device)
    distances = on_device(positions.numpy(), device)[:, None] - keys
    return on_device(table.numpy(), device)[keys // block_size].long() * block_size + keys % block_size, distances


def _bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
