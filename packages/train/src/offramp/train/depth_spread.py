"""A penalty on how unequal the exit depths of a micro-batch are: the slowest sequence decides how deep a batch runs.

Serving compares an exit's confidence p with a threshold, which has no gradient. Here an exit is taken with probability

    c_e = sigmoid((p_e - threshold) / softness),

so a token leaves first at exit e with probability c_e * prod_{i<e} (1 - c_i), at the final one with what is left, and
its expected depth, as a share of the model's, is d = sum_e P(first exit is e) * e / L. Tokens that sequences of the
micro-batch generate at the same position would be computed together; of n such tokens with depths d_1 .. d_n the
penalty is the gap between a soft maximum and the mean,

    G = log(1/n * sum_i exp(sharpness * d_i)) / sharpness - 1/n * sum_i d_i.

G is at least 0 (Jensen), and 0 only where all depths are equal. It tends to half of sharpness times the variance for a
small sharpness, and to the maximum minus the mean for a large one. Its gradient pulls the slowest sequences up and
pushes the others down by as much: on its own it favours no depth, which is left to the losses.

Legend: N tokens, L layers, X early exits, P positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offramp.common.errors import OfframpError


@dataclass(frozen=True)
class DepthSpread:
    """The penalty.

    Attributes:
        weight: factor on the mean of G over tokens in the objective.
        threshold: largest probability above which serving would let a token leave.
        softness: how wide around the threshold the decision is smeared; further away there is little gradient.
        sharpness: of the soft maximum, for depths from 0 to 1.
    """

    weight: float
    threshold: float = 0.9
    softness: float = 0.1
    sharpness: float = 10.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.threshold <= 1.0:
            raise OfframpError(f"depth_spread.threshold is {self.threshold}; it must lie between 0 and 1.")
        for name in ("weight", "softness", "sharpness"):
            value = getattr(self, name)
            if not 0.0 < value < math.inf:
                raise OfframpError(f"depth_spread.{name} is {value}; it must be above 0.")

    def __call__(self, confidences: Tensor, layers: Sequence[int], num_layers: int, positions: Tensor) -> Tensor:
        """G times its number of tokens, summed over positions: a scalar.

        Args:
            confidences: [X, N] largest probability at each early exit.
            layers: [X] exit layers, ascending.
            num_layers: L.
            positions: [N] tokens with the same number would be computed together.
        """
        depths = self.expected_depths(confidences, layers, num_layers)
        if not len(depths):
            return depths.sum()
        _, group = positions.unique(return_inverse=True)
        total = depths.new_zeros(int(group.max()) + 1)
        count = total.index_add(0, group, torch.ones_like(depths))
        mean = total.index_add(0, group, depths) / count
        # Depths are at most 1, so no exponent is above 0.
        power = total.index_add(0, group, ((depths - 1.0) * self.sharpness).exp()) / count
        return (count * (1.0 + power.log() / self.sharpness - mean)).sum()

    def expected_depths(self, confidences: Tensor, layers: Sequence[int], num_layers: int) -> Tensor:
        """[X, N] confidences -> [N] expected depths as shares of L."""
        taken = ((confidences - self.threshold) / self.softness).sigmoid()
        depth, still_there = torch.zeros_like(confidences[0]), torch.ones_like(confidences[0])
        for layer, here in zip(layers, taken, strict=True):
            depth = depth + still_there * here * (layer / num_layers)
            still_there = still_there * (1.0 - here)
        return depth + still_there
