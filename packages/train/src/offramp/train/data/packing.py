"""Examples -> rows of one length.

Packed examples do not see each other: each is a segment of its row, attention is block-diagonal over segments and
positions restart at 0, so packing changes the speed and nothing else. For the same reason it does not matter who shares
a row with whom, and rows can be planned once and shuffled whole.

For an encoder-decoder model a row has room for so many source tokens and so many of targets, and a pair needs both.

Legend: B batch (rows), T time (of targets for an encoder-decoder model), M source tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import numpy as np
import torch

from offramp.train.data.batch import IGNORED_LABEL, PairBatch, TokenBatch
from offramp.train.data.tokenize import Example

Item = TypeVar("Item")

OPEN_ROWS = 32
"""Rows that are open at a time. More fill rows a little better and cost time for every example."""


class FirstFit(Generic[Item]):
    """First-fit packing over a bounded number of open rows; the same items in the same order give the same rows.

    Args:
        capacity: T, tokens in a row; or several numbers, where items have several lengths.
        open_rows: rows that still accept examples. When one more is needed the oldest is closed.
    """

    def __init__(self, *capacity: int, open_rows: int = OPEN_ROWS) -> None:
        self.capacity = capacity
        self.open_rows = open_rows
        self._rows: list[list[Item]] = []
        self._free: list[list[int]] = []

    def add(self, item: Item, *length: int) -> list[Item] | None:
        """Places an item of `length` tokens; returns a row when that closed one."""
        fits = all(0 < own <= room for own, room in zip(length, self.capacity, strict=True))
        assert fits, f"length {length} does not fit into a row of {self.capacity}"
        for index, free in enumerate(self._free):
            if all(own <= room for own, room in zip(length, free, strict=True)):
                self._rows[index].append(item)
                self._free[index] = [room - own for own, room in zip(length, free, strict=True)]
                return self._close(index) if 0 in self._free[index] else None
        self._rows.append([item])
        self._free.append([room - own for own, room in zip(length, self.capacity, strict=True)])
        if 0 in self._free[-1]:
            return self._close(len(self._rows) - 1)
        return self._close(0) if len(self._rows) > self.open_rows else None

    def flush(self) -> list[list[Item]]:
        """Closes all rows and returns them, oldest first."""
        rows, self._rows, self._free = self._rows, [], []
        return rows

    def _close(self, index: int) -> list[Item]:
        del self._free[index]
        return self._rows.pop(index)


def plan_rows(
    lengths: Sequence[int] | Sequence[tuple[int, int]] | np.ndarray,
    order: Iterable[int],
    capacity: int,
    pack: bool,
    source_capacity: int | None = None,
) -> list[list[int]]:
    """Which examples lie in which row.

    Args:
        lengths: tokens of each example; of pairs [N, 2], targets first.
        order: indices into `lengths`, in the order in which they are placed.
        capacity: T, tokens in a row.
        pack: several examples in a row; otherwise one.
        source_capacity: M, source tokens in a row of pairs.

    Returns:
        For every row the indices of its examples.
    """
    if not pack:
        return [[int(index)] for index in order]
    capacities = (capacity,) if source_capacity is None else (capacity, source_capacity)
    packer: FirstFit[int] = FirstFit(*capacities)
    needed = np.asarray(lengths).reshape(len(lengths), len(capacities)).tolist()
    rows: list[list[int]] = []
    for index in order:
        closed = packer.add(int(index), *needed[index])
        if closed is not None:
            rows.append(closed)
    return rows + packer.flush()


def collate(rows: Sequence[Sequence[Example]], capacity: int, pad_id: int) -> TokenBatch:
    """Rows of examples -> a batch [B, T].

    A row without examples is legal and has no label; it fills up the last batch of a validation.

    Args:
        rows: B rows, the examples of each.
        capacity: T.
        pad_id: the token that stands in padding. Which one does not matter: padding is a segment of its own, without
            labels.
    """
    shape = (len(rows), capacity)
    input_ids = torch.full(shape, pad_id, dtype=torch.int64)
    labels = torch.full(shape, IGNORED_LABEL, dtype=torch.int64)
    segment_ids = torch.empty(shape, dtype=torch.int64)
    for b, row in enumerate(rows):
        start = 0
        for segment, example in enumerate(row):
            stop = start + len(example.input_ids)
            input_ids[b, start:stop] = torch.as_tensor(example.input_ids, dtype=torch.int64)
            labels[b, start:stop] = torch.as_tensor(example.labels, dtype=torch.int64)
            segment_ids[b, start:stop] = segment
            start = stop
        segment_ids[b, start:] = len(row)
    return TokenBatch(input_ids, labels, segment_ids)


def collate_pairs(rows: Sequence[Sequence[Example]], capacity: int, source_capacity: int, pad_id: int) -> PairBatch:
    """Rows of pairs -> a batch of sources [B, M] and targets [B, T]; see `collate`.

    Args:
        rows: B rows, the pairs of each.
        capacity: T.
        source_capacity: M.
        pad_id: the token that stands in padding.
    """
    sources = torch.full((len(rows), source_capacity), pad_id, dtype=torch.int64)
    source_segments = torch.zeros_like(sources)
    inputs = torch.full((len(rows), capacity), pad_id, dtype=torch.int64)
    labels, segments = torch.full_like(inputs, IGNORED_LABEL), torch.zeros_like(inputs)
    for b, row in enumerate(rows):
        start = source_start = 0
        for segment, example in enumerate(row, 1):
            stop, source_stop = start + len(example.labels), source_start + len(example.source_ids)
            inputs[b, start:stop] = torch.as_tensor(example.input_ids, dtype=torch.int64)
            labels[b, start:stop] = torch.as_tensor(example.labels, dtype=torch.int64)
            segments[b, start:stop] = segment
            sources[b, source_start:source_stop] = torch.as_tensor(example.source_ids, dtype=torch.int64)
            source_segments[b, source_start:source_stop] = segment
            start, source_start = stop, source_stop
    return PairBatch(sources, source_segments, inputs, labels, segments)
