"""What a token is drawn from, and the draw.

Legend: M rows, C candidates (tokens that may be drawn).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

ONE = 2.0**50
"""What `mass` makes of probability 1."""

_BLOCK = 256

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Distribution:
    """Tokens with their probabilities.

    Attributes:
        token_ids: [C] int64, ascending.
        probabilities: [C] of them, in proportion; they need not sum to 1.
    """

    token_ids: Tensor
    probabilities: Tensor

    def normalised(self) -> Tensor:
        """Probabilities [C] in float64 that sum to 1."""
        p = self.probabilities.double()
        return p / p.sum()

    def find(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """For tokens [n]: where each lies among the candidates, and whether it is one of them."""
        places = torch.searchsorted(self.token_ids, token_ids).clamp(max=len(self.token_ids) - 1)
        return places, self.token_ids[places] == token_ids

    def draw(self, point: float) -> int:
        """The token at `point` in [0, 1) of the running sum; never one of probability 0."""
        return int(self.token_ids[draw(self.normalised()[None], [point])[0]])


def mass(p: Tensor) -> Tensor:
    """Probabilities, float32 or float64, as whole numbers of the same type, 2^50 for 1.

    Sums of them in float64 stay below 2^53 and are therefore exact: the same in whatever order, so in any batch.
    """
    return p.mul(ONE).floor_()


def draw(p: Tensor, points: Sequence[float]) -> list[int]:
    """Indices into probabilities, by the inverse of their running sums; never one of probability 0.

    Args:
        p: [M, C]; a row sums to at most 1, but for rounding, and one of it is above 0.
        points: M numbers in [0, 1).
    """
    weights = mass(p)
    if weights.shape[-1] <= _BLOCK:
        return [pick(row, point) for row, point in zip(weights.double().cpu().numpy(), points, strict=True)]
    # First the block, then the place in it: a running sum over a whole vocabulary is slow.
    if weights.shape[-1] % _BLOCK:
        weights = F.pad(weights, (0, -weights.shape[-1] % _BLOCK))
    weights = weights.unflatten(-1, (-1, _BLOCK))
    running = weights.sum(dim=-1, dtype=torch.float64).cpu().numpy().cumsum(axis=-1)
    places = [_place(until, point) for until, point in zip(running, points, strict=True)]
    blocks = [int(until.searchsorted(place, side="right")) for until, place in zip(running, places, strict=True)]
    inside = (
        torch.stack([weights[row, block] for row, block in enumerate(blocks)]).double().cpu().numpy().cumsum(axis=-1)
    )
    chosen: list[int] = []
    for row, block in enumerate(blocks):
        before = running[row, block] - inside[row, -1]
        chosen.append(block * _BLOCK + int(inside[row].searchsorted(places[row] - before, side="right")))
    return chosen


def pick(weights: Floats, point: float) -> int:
    """As `draw`, of whole numbers [C] that `mass` gave."""
    until = weights.cumsum()
    # The first index whose running sum exceeds the place.
    return int(until.searchsorted(_place(until, point), side="right"))


def _place(until: Floats, point: float) -> float:
    """A whole number below the sum, which is the last of running sums [C]."""
    total = float(until[-1])
    return min(float(int(point * total)), total - 1)
