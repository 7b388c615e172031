"""What a token is drawn from, and the draw.

Legend: M rows, C candidates (tokens that may be drawn).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

ONE = 2.0**50
"""What `mass` makes of probability 1."""

_BLOCK = 256


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
        return int(self.token_ids[draw(self.normalised()[None], [point])])


def mass(p: Tensor) -> Tensor:
    """Probabilities as whole numbers in float64, 2^50 for 1.

    Sums of them stay below 2^53 and are therefore exact: the same in whatever order, so in any batch.
    """
    return p.double().mul_(ONE).floor_()


def draw(p: Tensor, points: Sequence[float]) -> Tensor:
    """Indices [M] into probabilities, by the inverse of their running sums; never one of probability 0.

    Args:
        p: [M, C]; a row sums to at most 1, but for rounding, and one of it is above 0.
        points: M numbers in [0, 1).
    """
    weights = mass(p)
    if weights.shape[-1] <= _BLOCK:
        until = weights.cumsum(dim=-1)
        # The first index whose running sum exceeds the point.
        return torch.searchsorted(until, _points(points, until), right=True)[:, 0]
    # First the block, then the place in it: a running sum over a whole vocabulary is slow.
    if weights.shape[-1] % _BLOCK:
        weights = F.pad(weights, (0, -weights.shape[-1] % _BLOCK))
    blocks = weights.unflatten(-1, (-1, _BLOCK))
    until = blocks.sum(dim=-1).cumsum(dim=-1)
    point = _points(points, until)
    block = torch.searchsorted(until, point, right=True)
    inside = blocks.take_along_dim(block[..., None], dim=1)[:, 0].cumsum(dim=-1)
    point = point - (until.gather(-1, block) - inside[:, -1:])
    return (block * _BLOCK + torch.searchsorted(inside, point, right=True))[:, 0]


def _points(points: Sequence[float], until: Tensor) -> Tensor:
    """Whole numbers [M, 1] below the sums, which are the last of running sums [M, C]."""
    total = until[:, -1:]
    at = torch.tensor(points, dtype=torch.float64, device=until.device)[:, None]
    return torch.minimum((at * total).floor_(), total - 1)
