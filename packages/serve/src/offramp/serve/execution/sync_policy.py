"""Sync policies: which of the rows that are sure leave the iteration at this exit. Small rules, without tensors.

Under `regroup` a row leaves by itself, and its request's tokens depend on nobody else. Under `all` and `quantile`, and
under `regroup` with the cost rule, it is by definition the batch that decides when its rows leave, so there exit layers
(and whatever follows from them) depend on who shares the batch.

Legend: M rows inside that may leave.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from offramp.serve.config import EngineConfig

Mask = npt.NDArray[np.bool_]


class SyncRule(Protocol):
    """Who leaves."""

    def __call__(self, sure: Mask, layer: int, num_rows: int) -> Mask:
        """Decide at an exit.

        Args:
            sure: [M] rows whose confidence exceeded their threshold at this exit or at an earlier one of the same pass.
                Rows of prompts and rows that must run all layers are not asked, so that one request at full depth does
                not keep its neighbours from leaving.
            layer: exit layer.
            num_rows: all rows inside, also those that are not asked.

        Returns:
            [M] rows that leave.
        """
        ...


def leave_alone(sure: Mask, layer: int, num_rows: int) -> Mask:
    """`regroup`: each row leaves as soon as it is sure, and the rest go on as a smaller batch."""
    return sure


@dataclass(frozen=True)
class LeaveTogether:
    """`all` and `quantile`: nobody leaves until enough rows are sure; then everybody does.

    With a share of 1 this is batch-synchronised exit (Algorithm 1 of the batched early-exit framework for CALM): the
    status of a row is OR-ed over the exits of one pass, and the pass ends when it is true for the whole batch.

    Attributes:
        share: of the rows, that must be sure.
    """

    share: float = 1.0

    def __call__(self, sure: Mask, layer: int, num_rows: int) -> Mask:
        """All or none of [M]."""
        return np.full_like(sure, sure.sum() >= self.share * len(sure))


@dataclass
class PassTimes:
    """Running means of what passes cost, by numbers of rows up to the next power of two. Seconds.

    Attributes:
        inertia: weight of what is known already against a new measurement.
    """

    inertia: float = 0.9
    _layers: dict[int, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    _exits: dict[tuple[int, int], float] = field(default_factory=dict)

    def ran(self, start: int, stop: int, num_rows: int, seconds: float) -> None:
        """Take in that layers `start` + 1 .. `stop` took so long."""
        means, each = self._layers[_bucket(num_rows)], seconds / (stop - start)
        for layer in range(start, stop):
            means[layer] = self._mean(means.get(layer), each)

    def left(self, layer: int, num_rows: int, seconds: float) -> None:
        """Take in that a pause at an exit in which rows left (test, fill, regrouping) took so long."""
        key = (layer, _bucket(num_rows))
        self._exits[key] = self._mean(self._exits.get(key), seconds)

    def above(self, layer: int, num_rows: int, num_layers: int) -> float | None:
        """What the layers above an exit cost; None as long as one of them was never measured."""
        means = self._layers[_bucket(num_rows)]
        times = [means.get(index) for index in range(layer, num_layers)]
        known = [time for time in times if time is not None]
        return sum(known) if len(known) == len(times) else None

    def pause(self, layer: int, num_rows: int) -> float | None:
        """What leaving at an exit costs; None as long as it was never measured."""
        return self._exits.get((layer, _bucket(num_rows)))

    def doubt(self, layer: int, num_rows: int) -> None:
        """Believe a little less that leaving costs what was measured: where nobody leaves nothing is learnt, and one
        slow measurement must not hold for ever.
        """
        self._exits[layer, _bucket(num_rows)] *= 0.98

    def _mean(self, known: float | None, new: float) -> float:
        return new if known is None else self.inertia * known + (1 - self.inertia) * new


@dataclass(frozen=True)
class LeaveIfItPays:
    """`regroup` with the cost rule: split the batch only where that saves time.

    A pass over all layers takes t_full; one that is split at an exit takes t_shallow up to there, the split itself
    included, and at most t_deep above. Rows that leave take their share of t_deep with them, so the split pays if that
    share exceeds (t_shallow + t_deep - t_full) / t_deep (the break-even of dynamic rebatching). The numerator is what
    the pause at the exit costs, which is measured as such. What was never measured is tried.

    Attributes:
        times: measured while serving.
        num_layers: L.
    """

    times: PassTimes
    num_layers: int

    def __call__(self, sure: Mask, layer: int, num_rows: int) -> Mask:
        """Those that are sure, or nobody."""
        deep = self.times.above(layer, num_rows, self.num_layers)
        pause = self.times.pause(layer, num_rows)
        if deep is None or pause is None or sure.sum() / num_rows > pause / deep:
            return sure
        if sure.any():
            self.times.doubt(layer, num_rows)
        return np.zeros_like(sure)


def sync_rule(config: EngineConfig, num_layers: int, times: PassTimes | None = None) -> SyncRule:
    """The rule that an engine's settings ask for.

    Args:
        config: the settings.
        num_layers: L.
        times: measured while serving; given where the cost rule is asked for.
    """
    if config.sync_policy == "all":
        return LeaveTogether()
    if config.sync_policy == "quantile":
        return LeaveTogether(config.quantile)
    return leave_alone if times is None else LeaveIfItPays(times, num_layers)


def _bucket(num_rows: int) -> int:
    return 1 << (num_rows - 1).bit_length()
