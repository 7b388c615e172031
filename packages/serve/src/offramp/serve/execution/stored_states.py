"""States of rows that have left or wait, of all requests in one tensor.

However many requests rows belong to, putting them away is one operation, and so is getting them back: between two
segments every operation comes from a cold cache, so their number is what they cost.

Legend: N rows, D model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from offramp.serve.devices import on_device, rows_at

_FEWEST = 64
"""Rows that there is room for at least."""

_SMALL = 1024
"""Rows whose room is not worth giving back: it would only be asked for again."""

_FAR_BELOW = 4
"""Room is given back when this part of it, at its beginning, holds all rows."""


class StoredStates:
    """Rows of states under numbers. It grows as it must, and gives room back that a burst of rows has left empty.

    Small numbers are given out first, so that the rows that stay gather at the beginning and the end can be cut off.
    """

    def __init__(self) -> None:
        self._states: Tensor | None = None
        self._free: deque[int] = deque()  # those that are given out next are the last
        self._num_returned = 0  # since the room was looked at

    @property
    def num_rows(self) -> int:
        """Rows that there is room for."""
        return 0 if self._states is None else len(self._states)

    def put(self, states: Tensor) -> list[int]:
        """Store rows [N, D]; the number of each."""
        count = len(states)
        stored = self._states
        if stored is None or len(self._free) < count:
            stored = self._grown(states)
        slots = [self._free.pop() for _ in range(count)]
        stored.index_copy_(0, on_device(np.array(slots, dtype=np.int64), stored.device), states)
        return slots

    def take(self, slots: Sequence[int]) -> Tensor:
        """Get rows [N, D] back, for good."""
        assert self._states is not None, "nothing was put"
        rows = rows_at(self._states, np.array(slots, dtype=np.int64))
        self.forget(slots)
        return rows

    def forget(self, slots: Sequence[int]) -> None:
        """Drop rows."""
        size = self.num_rows
        if size <= _SMALL:
            self._free += slots
            return
        for slot in slots:
            (self._free.append if slot < size // _FAR_BELOW else self._free.appendleft)(slot)
        self._num_returned += len(slots)
        # Looking takes about as long as returning so many rows; and where nobody is left, nobody returns one later.
        if self._num_returned >= size or len(self._free) == size:
            self._shrink(size)

    def _grown(self, states: Tensor) -> Tensor:
        """Make room for further rows."""
        known = self.num_rows
        size = max(2 * known, known + len(states), _FEWEST)
        grown = states.new_empty(size, states.shape[1])
        if self._states is not None:
            grown[:known] = self._states
        self._free.extendleft(range(known, size))
        self._states = grown
        return grown

    def _shrink(self, size: int) -> None:
        """Where the last row is far below the end, leave twice the room that is needed up to it."""
        assert self._states is not None
        self._num_returned = 0
        is_used = np.ones(size, dtype=np.bool_)
        is_used[np.fromiter(self._free, np.int64)] = False
        used = np.flatnonzero(is_used)
        needed = int(used[-1]) + 1 if len(used) else 0
        if needed <= size // _FAR_BELOW:
            size = max(2 * needed, _SMALL)
            self._states = self._states[:size].clone()
        self._free = deque(np.flatnonzero(~is_used[:size])[::-1].tolist())
