"""The rows of one iteration, on the host: which token each is, and where its keys and values lie.

A row attends to the keys 0 .. position of its own sequence (or to its sliding window), whatever other rows there are:
so rows may leave, join and be regrouped, and nothing but what is stored here has to follow them.

Legend: N rows, S sequences, E head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from offramp.serve.devices import CPU, on_device
from offramp.serve.model.attended import Attended, Attention
from offramp.serve.model.flash_attention import FlashRuns
from offramp.serve.scheduling.scheduler_output import ScheduledRequest

Places = npt.NDArray[np.intp]

_DISTANCE_PADDING = 16
"""As in `csrc/attention.h`."""


class RowContext:
    """What the rows of all iterations of one engine share.

    Attributes:
        cos: [max_model_len, E/2] fp32 rotary cosines.
        sin: [max_model_len, E/2] fp32 rotary sines.
        dtype: of the model's states.
        block_size: tokens per block of the cache.
        sliding_window: tokens that a token sees, itself included; None is all before it.
        device: of states and cache.
        has_flash: whether attention there is FlashAttention over blocks.
        distance_bias: [H, max_model_len] see `Attended.of`; then no channel is rotated, and E of the tables is 0.
    """

    def __init__(
        self,
        cos: Tensor,
        sin: Tensor,
        dtype: torch.dtype,
        block_size: int,
        sliding_window: int | None,
        device: torch.device = CPU,
        has_flash: bool = False,
        distance_bias: Tensor | None = None,
    ) -> None:
        self.cos, self.sin = cos.contiguous(), sin.contiguous()
        self.dtype = dtype
        self.block_size = block_size
        self.sliding_window = sliding_window
        self.device, self.has_flash = device, has_flash
        self.distance_bias = distance_bias

    @cached_property
    def distance_table(self) -> Tensor:
        """[H, max_model_len + 16] fp32 biases as native kernels take them: the longest distance first, then padding."""
        assert self.distance_bias is not None, "there is no relative bias"
        return F.pad(self.distance_bias.float().flip(1), (0, _DISTANCE_PADDING)).contiguous()

    @cached_property
    def wide_tables(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines for both halves of a head, each [max_model_len, 1, E] of the states' dtype and device.

        The first half of the sines is negated; see `ops.rotate`.
        """
        cos = torch.cat((self.cos, self.cos), dim=-1)
        sin = torch.cat((-self.sin, self.sin), dim=-1)
        return cos[:, None].to(self.device, self.dtype), sin[:, None].to(self.device, self.dtype)


class PlacedRows:
    """What torch operations need of N rows, on the device of the states.

    Attributes:
        slots: [N] int64 cache slots of their own keys and values.
    """

    def __init__(
        self,
        positions: Tensor,
        slots: Tensor,
        context: RowContext,
        attention: Callable[[], Attention],
        cross_attention: Callable[[], Attention] | None = None,
    ) -> None:
        """Take what is there already; `attention` is asked for once, if at all, and `cross_attention` too."""
        self.slots = slots
        self._positions, self._context = positions, context
        self._attention, self._cross_attention = attention, cross_attention

    @cached_property
    def cos(self) -> Tensor:
        """[N, 1, E] rotary cosines."""
        return self._context.wide_tables[0][self._positions]

    @cached_property
    def sin(self) -> Tensor:
        """[N, 1, E] signed rotary sines."""
        return self._context.wide_tables[1][self._positions]

    @cached_property
    def attention(self) -> Attention:
        """What each row sees of its own sequence."""
        return self._attention()

    @cached_property
    def cross_attention(self) -> Attention:
        """What each row sees of its sequence's source."""
        assert self._cross_attention is not None, "there are no sources"
        return self._cross_attention()


@dataclass(frozen=True, eq=False)
class Sources:
    """Where the sources of an iteration's sequences have their keys and values of cross-attention.

    Attributes:
        lengths: [S] int64 tokens.
        block_tables: [S, blocks] int32; entries that a shorter source does not use repeat its first.
    """

    lengths: Tensor
    block_tables: Tensor


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of one iteration; those of one sequence are neighbours in order of position.

    Attributes:
        positions: [N] int64 positions in their sequences, from 0.
        slots: [N] int64 cache slots of their own keys and values.
        sequences: [N] int32 which row of `block_tables` is theirs.
        block_tables: [S, blocks] int32; entries that a shorter sequence does not use repeat its first.
        context: what all rows share.
        sources: of the sequences; None: they have none.
    """

    positions: Tensor
    slots: Tensor
    sequences: Tensor
    block_tables: Tensor
    context: RowContext
    sources: Sources | None = None

    def __len__(self) -> int:
        return self.positions.shape[0]

    @cached_property
    def placed(self) -> PlacedRows:
        """These rows for torch operations."""
        positions, slots, device = self.positions, self.slots, self.context.device
        if device.type != "cpu":
            both = on_device(np.stack((positions.numpy(), slots.numpy())), device)
            positions, slots = both[0], both[1]
        cross_attention = None if self.sources is None else self._cross_attention
        return PlacedRows(positions, slots, self.context, self._attention, cross_attention)

    def _attention(self) -> Attention:
        context = self.context
        where = (self.positions, self.sequences, self.block_tables, context.block_size, context.sliding_window)
        if context.has_flash:
            return FlashRuns.of(*where, context.device)
        return Attended.of(*where, context.dtype, context.device, context.distance_bias)

    def _cross_attention(self) -> Attention:
        context, sources = self.context, self.sources
        assert sources is not None
        where = (self.sequences, sources.lengths, sources.block_tables, context.block_size)
        return Attended.of_sources(*where, context.dtype, context.device)

    def select(self, places: Places | slice) -> Rows:
        """The rows at `places` [n], which keeps those of one sequence neighbours in order of position."""
        return Rows(
            _at(self.positions, places),
            _at(self.slots, places),
            _at(self.sequences, places),
            self.block_tables,
            self.context,
            self.sources,
        )

    def at(self, sequences: Places, positions: npt.NDArray[np.int64]) -> Rows:
        """Other rows of the same sequences.

        Args:
            sequences: [n] ascending.
            positions: [n] ascending within a sequence.
        """
        size = self.context.block_size
        blocks, offsets = np.divmod(positions, size)
        slots = self.block_tables.numpy()[sequences, blocks] * np.int64(size) + offsets
        return Rows(
            torch.from_numpy(positions),
            torch.from_numpy(slots),
            torch.from_numpy(sequences.astype(np.int32)),
            self.block_tables,
            self.context,
            self.sources,
        )

    def join(self, sequences: Places, positions: npt.NDArray[np.int64]) -> tuple[Rows, Places]:
        """These rows, and further ones of the same sequences.

        Args:
            sequences: [n] of the further ones.
            positions: [n].

        Returns:
            All rows, and [N + n] which of these rows (counting the further ones on from N) lies at each place.
        """
        other = self.at(sequences, positions)
        joined = Rows(
            _joined(self.positions, other.positions),
            _joined(self.slots, other.slots),
            _joined(self.sequences, other.sequences),
            self.block_tables,
            self.context,
            self.sources,
        )
        order = np.lexsort((joined.positions.numpy(), joined.sequences.numpy()))
        return joined.select(order), order


def _joined(one: Tensor, other: Tensor) -> Tensor:
    return torch.from_numpy(np.concatenate((one.numpy(), other.numpy())))


def _at(column: Tensor, places: Places | slice) -> Tensor:
    # Of a few numbers, and cheaper than an operation of torch.
    return torch.from_numpy(column.numpy()[places])


def build_rows(
    scheduled: Sequence[ScheduledRequest], context: RowContext, is_parked: Sequence[bool] | None = None
) -> Rows:
    """Lay out an iteration: the rows of one request after those of the other; sequences count as the requests do.

    Args:
        scheduled: the requests.
        context: what all rows share.
        is_parked: for each request, whether its row exists already and joins later, by its block table; None: for none.
    """
    size = context.block_size
    starts = np.array([item.start for item in scheduled])
    counts = np.array([item.num_tokens for item in scheduled])
    used = [-(-(item.start + item.num_tokens) // size) for item in scheduled]
    widest = max(used)
    tables = np.array(
        [_padded(item.block_table, number, widest) for item, number in zip(scheduled, used, strict=True)],
        dtype=np.int32,
    )
    sequences = np.arange(len(scheduled), dtype=np.int32)
    positions = starts
    if is_parked is not None and any(is_parked):
        counts = np.where(is_parked, 0, counts)
    if (counts != 1).any():
        sequences = sequences.repeat(counts)
        positions = np.arange(len(sequences)) + (starts - counts.cumsum() + counts).repeat(counts)
    blocks, offsets = np.divmod(positions, size)
    slots = tables[sequences, blocks] * np.int64(size) + offsets
    return Rows(
        torch.from_numpy(positions),
        torch.from_numpy(slots),
        torch.from_numpy(sequences),
        torch.from_numpy(tables),
        context,
        _sources(scheduled),
    )


def _sources(scheduled: Sequence[ScheduledRequest]) -> Sources | None:
    """Those of an iteration; either all requests have one or none has."""
    widest = max(len(item.source_table) for item in scheduled)
    if not widest:
        return None
    tables = np.array([_padded(item.source_table, len(item.source_table), widest) for item in scheduled], np.int32)
    lengths = torch.tensor([item.request.num_source_tokens for item in scheduled])
    return Sources(lengths, torch.from_numpy(tables))


def _padded(block_table: tuple[int, ...], used: int, length: int) -> tuple[int, ...]:
    return (*block_table[:used], *block_table[:1] * (length - used))
