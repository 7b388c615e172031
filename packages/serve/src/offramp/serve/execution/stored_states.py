"""States of rows that have left or wait, of all requests in one tensor.

However many requests rows belong to, putting them away is one operation, and so is getting them back: between two
segments every operation comes from a cold cache, so their number is what they cost.

Legend: N rows, D model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from offramp.serve.devices import on_device, rows_at

_FEWEST = 64
"""Rows that there is room for at least."""


class StoredStates:
    """Rows of states under numbers. It grows and never shrinks: the KV cache has many times as much for a row."""

    def __init__(self) -> None:
        self._states: Tensor | None = None
        self._free: list[int] = []

    def put(self, states: Tensor) -> list[int]:
        """Store rows [N, D]; the number of each."""
        count = len(states)
        stored = self._states
        if stored is None or len(self._free) < count:
            stored = self._grown(states)
        slots = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        stored.index_copy_(0, on_device(np.array(slots, dtype=np.int64), stored.device), states)
        return slots

    def take(self, slots: Sequence[int]) -> Tensor:
        """Get rows [N, D] back, for good."""
        assert self._states is not None, "nothing was put"
        self._free += slots
        return rows_at(self._states, np.array(slots, dtype=np.int64))

    def forget(self, slots: Sequence[int]) -> None:
        """Drop rows."""
        self._free += slots

    def _grown(self, states: Tensor) -> Tensor:
        """Make room for further rows."""
        known = 0 if self._states is None else len(self._states)
        size = max(2 * known, known + len(states), _FEWEST)
        grown = states.new_empty(size, states.shape[1])
        if self._states is not None:
            grown[:known] = self._states
        self._free += range(known, size)
        self._states = grown
        return grown
