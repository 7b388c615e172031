"""Which cached keys each row sees, gathered for the torch attention (`ops.attend`). Native kernels need none of this.

Single rows (decodes, and a few waiting tokens beside them) are computed all at once over padded keys; longer runs of
rows of one sequence (chunks of prompts) one by one, so that their keys are gathered once for all of their rows.

Legend: N rows, M single rows, P rows of one run, T keys that are seen at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_LONG_RUN = 12
"""From this many rows on, a run of one sequence gathers its keys once instead of once for each row."""


@dataclass(frozen=True)
class SingleRows:
    """Rows that are attended for one by one, in a batch.

    Attributes:
        index: [M] which rows; None: all there are.
        slots: [M, T] cache slots of the keys each row sees. Rows that see fewer than T keys repeat their first one, so
            that a slot which was never written is never read, not even to be masked.
        bias: [M, 1, 1, T] added to the scores: 0, or -inf at a repetition. None if all rows see T keys.
    """

    index: Tensor | None
    slots: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Run:
    """Rows `start` .. `stop` - 1, of one sequence.

    Attributes:
        start: the first row.
        stop: after the last row.
        slots: [T] cache slots of all keys that any of the rows sees.
        bias: [P, T] added to the scores: 0 where the row sees the key, else -inf.
    """

    start: int
    stop: int
    slots: Tensor
    bias: Tensor


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
    ) -> Attended:
        """Work it out; the arguments are those of `Rows` and `RowContext`."""
        runs: list[Run] = []
        index: Tensor | None = None
        if len(positions) >= _LONG_RUN:
            members, counts = torch.unique_consecutive(sequences, return_counts=True)
            if int(counts.max()) >= _LONG_RUN:
                start = 0
                is_single = torch.ones(len(positions), dtype=torch.bool)
                for sequence, count in zip(members.tolist(), counts.tolist(), strict=True):
                    stop = start + count
                    if count >= _LONG_RUN:
                        is_single[start:stop] = False
                        seen = _run_keys(positions[start:stop], block_tables[sequence], block_size, sliding_window)
                        runs.append(Run(start, stop, seen[0], _bias(seen[1], dtype)))
                    start = stop
                index = is_single.nonzero()[:, 0]
                if not len(index):
                    return cls(None, tuple(runs))
                positions, sequences = positions[index], sequences[index]
        slots, seen = _single_keys(positions, block_tables[sequences.long()], block_size, sliding_window)
        bias = None if bool(seen.all()) else _bias(seen, dtype)[:, None, None]
        return cls(SingleRows(index, slots, bias), tuple(runs))


def _single_keys(positions: Tensor, tables: Tensor, block_size: int, window: int | None) -> tuple[Tensor, Tensor]:
    """Slots [M, T] of padded keys, and [M, T] where they are keys."""
    first = torch.zeros_like(positions) if window is None else (positions + 1 - window).clamp(min=0)
    num_keys = positions - first + 1
    steps = torch.arange(int(num_keys.max()))
    seen = steps < num_keys[:, None]
    keys = torch.where(seen, first[:, None] + steps, first[:, None])
    return tables.gather(1, keys // block_size).long() * block_size + keys % block_size, seen


def _run_keys(positions: Tensor, table: Tensor, block_size: int, window: int | None) -> tuple[Tensor, Tensor]:
    """Slots [T] of the keys of a run, and [P, T] who sees which."""
    first = 0 if window is None else max(0, int(positions[0]) + 1 - window)
    keys = torch.arange(first, int(positions[-1]) + 1)
    distance = positions[:, None] - keys
    seen = distance >= 0
    if window is not None:
        seen &= distance < window
    return table[keys // block_size].long() * block_size + keys % block_size, seen


def _bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)
