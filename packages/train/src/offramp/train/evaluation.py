"""A validation or a test: the sums of its batches, and the means that are logged of them.

Legend: X exits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from offramp.train.losses import ExitSums, Objective


class Evaluation:
    """Sums over the tokens and exits that are this rank's alone.

    Args:
        objective: what is reported.
        device: of the sums.
    """

    def __init__(self, objective: Objective, device: torch.device) -> None:
        self._objective = objective
        self._sums = ExitSums(objective.layers, device)

    def add(self, sums: ExitSums) -> None:
        """Add a batch; what its exits said is not kept."""
        self._sums.values += sums.values

    def means(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Means over the tokens of all ranks by name, equal on all of them; see `ExitSums.report`."""
        self._sums.values = sum_over_ranks(self._sums.values)
        return self._sums.report(self._objective)
