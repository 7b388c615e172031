"""Which decoding sequences should share an iteration: those that are likely to leave at similar depths.

Where rows wait for each other (sync policies `all` and `quantile`), one deep sequence holds every shallow one down; and
where they do not, layers that few rows reach cost nearly as much as layers that many reach. How deep a sequence goes is
predicted from how deep it went: the mean of its exit layers, which follows it as it changes.
"""

from __future__ import annotations

from collections.abc import Sequence

WINDOW = 16
"""Tokens after which the mean begins to forget."""


class DepthMean:
    """Running mean of the layers that a sequence's tokens ran: plain over the first `WINDOW`, then exponential.

    Attributes:
        value: the mean; None before the first token.
    """

    def __init__(self) -> None:
        self.value: float | None = None
        self._count = 0

    def add(self, layers: int) -> None:
        """Take in how deep a token went."""
        self._count = min(self._count + 1, WINDOW)
        self.value = layers if self.value is None else self.value + (layers - self.value) / self._count


def similar_depths(depths: Sequence[float | None], leader: int, num_layers: int) -> list[int]:
    """The sequences that should run with a leader.

    Args:
        depths: for each sequence, the layers it is expected to run; None where nothing is known yet.
        leader: index of one that runs in any case.
        num_layers: layers of the model.

    Returns:
        Indices, ascending, of those within a quarter of the model of the leader, and of the unknown ones: to learn
        about them they must run. An unknown leader takes everybody along.
    """
    depth = depths[leader]
    if depth is None:
        return list(range(len(depths)))
    reach = num_layers / 4
    return [index for index, other in enumerate(depths) if other is None or abs(other - depth) <= reach]
