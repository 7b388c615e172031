"""The rows of one iteration as tensors: which tokens, where their keys and values go, and what they attend to.

Rows are packed: first the decode rows, one for each request that decodes, then the rows of the prompts, request by
request. Computed once per iteration, used by every layer.

Legend: N rows, M decode rows, T keys that a row sees at most, P rows of one prompt's chunk, E head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offramp.serve.scheduler_output import Phase, ScheduledRequest


@dataclass(frozen=True)
class DecodeKeys:
    """What the decode rows attend to.

    Attributes:
        slots: [M, T] cache slots of the keys each row sees. Rows that see fewer than T keys repeat their first one, so
            that a slot which was never written is never read, not even to be masked.
        bias: [M, 1, 1, T] added to the scores: 0, or -inf at a repetition. None if all rows see T keys.
    """

    slots: Tensor
    bias: Tensor | None

    def select(self, rows: Tensor) -> DecodeKeys:
        """Only `rows` [m] of them."""
        return DecodeKeys(self.slots[rows], None if self.bias is None else self.bias[rows])


@dataclass(frozen=True)
class ChunkKeys:
    """What the rows of one prompt's chunk attend to.

    Attributes:
        num_rows: P.
        slots: [T] cache slots of all keys that any of the rows sees.
        bias: [P, T] added to the scores: 0 where the row sees the key, else -inf. None if every row sees every key.
    """

    num_rows: int
    slots: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Rows:
    """The rows that are still inside.

    Attributes:
        slots: [N] cache slot of each row's own key and value.
        cos: [N, 1, E] rotary cosines, in the model's dtype.
        sin: [N, 1, E] rotary sines; the first half is negated (see `ops.rotate`).
        num_decode: M; the first rows.
        decode: what they attend to; None if there are none.
        chunks: what the others attend to.
    """

    slots: Tensor
    cos: Tensor
    sin: Tensor
    num_decode: int
    decode: DecodeKeys | None
    chunks: tuple[ChunkKeys, ...]

    def __len__(self) -> int:
        return self.slots.shape[0]

    def select(self, decode_rows: Tensor) -> Rows:
        """Without the decode rows that are not in `decode_rows` [m]; the prompts' rows stay."""
        kept = torch.cat((decode_rows, torch.arange(self.num_decode, len(self)))) if self.chunks else decode_rows
        decode = self.decode.select(decode_rows) if self.decode is not None and len(decode_rows) else None
        return Rows(self.slots[kept], self.cos[kept], self.sin[kept], len(decode_rows), decode, self.chunks)

    def only_decode(self, decode_rows: Tensor) -> Rows:
        """Only the decode rows `decode_rows` [m], m > 0, without the prompts."""
        assert self.decode is not None
        return Rows(
            self.slots[decode_rows],
            self.cos[decode_rows],
            self.sin[decode_rows],
            len(decode_rows),
            self.decode.select(decode_rows),
            (),
        )


class RowBuilder:
    """Makes the rows of an iteration for one model and one cache."""

    def __init__(self, cos: Tensor, sin: Tensor, block_size: int, sliding_window: int | None) -> None:
        """Remember what does not change.

        Args:
            cos: [max_model_len, E] fp32 or the model's dtype.
            sin: [max_model_len, E].
            block_size: tokens per block of the cache.
            sliding_window: tokens that a token sees, itself included; None is all before it.
        """
        half = sin.shape[-1] // 2
        self._cos = cos[:, None].contiguous()
        self._sin = torch.cat((-sin[:, :half], sin[:, half:]), dim=-1)[:, None].contiguous()
        self._block_size = block_size
        self._window = sliding_window

    def build(self, scheduled: Sequence[ScheduledRequest]) -> Rows:
        """Lay out an iteration.

        Args:
            scheduled: decodes first.
        """
        decodes = [item for item in scheduled if item.phase is Phase.DECODE]
        prompts = scheduled[len(decodes) :]
        assert all(item.num_tokens == 1 for item in decodes)
        assert all(item.phase is Phase.PREFILL for item in prompts), "decodes come first"
        positions = torch.tensor([p for item in scheduled for p in range(item.start, item.start + item.num_tokens)])
        slots: list[Tensor] = []
        decode: DecodeKeys | None = None
        if decodes:
            own, decode = self._decode_keys(decodes, positions[: len(decodes)])
            slots.append(own)
        chunks: list[ChunkKeys] = []
        for item in prompts:
            keys = self._chunk_keys(item)
            slots.append(keys.slots[-item.num_tokens :])
            chunks.append(keys)
        return Rows(
            slots=torch.cat(slots),
            cos=self._cos[positions],
            sin=self._sin[positions],
            num_decode=len(decodes),
            decode=decode,
            chunks=tuple(chunks),
        )

    def _decode_keys(self, decodes: Sequence[ScheduledRequest], positions: Tensor) -> tuple[Tensor, DecodeKeys]:
        """Slots [M] of the rows themselves, and of the keys they see."""
        last = max(item.start for item in decodes)
        num_blocks = last // self._block_size + 1
        tables = torch.tensor([_padded(item.block_table, num_blocks) for item in decodes])
        own = _slots(tables, positions[:, None], self._block_size)[:, 0]
        first = torch.zeros_like(positions)
        if self._window is not None:
            first = (positions + 1 - self._window).clamp(min=0)
        num_keys = positions - first + 1
        steps = torch.arange(int(num_keys.max()))
        seen = steps < num_keys[:, None]
        keys = torch.where(seen, first[:, None] + steps, first[:, None])
        bias = None if bool(seen.all()) else _bias(seen, self._cos.dtype)[:, None, None]
        return own, DecodeKeys(_slots(tables, keys, self._block_size), bias)

    def _chunk_keys(self, item: ScheduledRequest) -> ChunkKeys:
        stop = item.start + item.num_tokens
        first = 0 if self._window is None else max(0, item.start + 1 - self._window)
        keys = torch.arange(first, stop)
        table = torch.tensor(item.block_table)
        slots = table[keys // self._block_size] * self._block_size + keys % self._block_size
        if item.num_tokens == 1:
            return ChunkKeys(1, slots, None)
        distance = torch.arange(item.start, stop)[:, None] - keys
        seen = distance >= 0
        if self._window is not None:
            seen &= distance < self._window
        return ChunkKeys(item.num_tokens, slots, _bias(seen, self._cos.dtype))


def _padded(block_table: tuple[int, ...], length: int) -> tuple[int, ...]:
    """The first `length` blocks; a shorter table repeats its first block, which no position then refers to."""
    return (*block_table[:length], *block_table[:1] * (length - len(block_table)))


def _slots(tables: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Slots [M, T] of positions [M, T] by block tables [M, blocks]."""
    return tables.gather(1, positions // block_size) * block_size + positions % block_size


def _bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)
