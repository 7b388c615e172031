"""Layer dropout: rows skip layers at random while training, deeper ones more often (LayerSkip, section 4.1.1).

A model that has learned to do without its upper layers gives better answers at early exits. Layer l, counted from 0, of
L is skipped with probability

    p(l, t) = rate * S(t) * (exp(l * ln 2 / (L - 1)) - 1),

which is 0 for the first layer and rate * S(t) for the last. S(t) is 1, or grows as exp(t * ln 2 / (T - 1)) - 1 up to 1
within T steps. What a layer that is not skipped adds is not scaled up.

Legend: B batch, T time, L layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from offramp.common.errors import OfframpError
from offramp.train.data.batch import AnyBatch
from offramp.train.row_draws import row_generator

Ramp = Literal["constant", "exponential"]


@dataclass(frozen=True)
class LayerDropout:
    """How often layers are skipped.

    Attributes:
        rate: probability that a row skips the last layer, in the end.
        ramp: S(t) above.
        ramp_steps: T of the exponential ramp.
    """

    rate: float
    ramp: Ramp = "constant"
    ramp_steps: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.rate < 1.0:
            raise OfframpError(f"layer_dropout.rate is {self.rate}; it must be at least 0 and below 1.")
        if self.ramp not in get_args(Ramp):
            raise OfframpError(f"layer_dropout.ramp is {self.ramp!r}; choose one of {', '.join(get_args(Ramp))}.")
        if self.ramp == "exponential" and (self.ramp_steps is None or self.ramp_steps < 2):
            raise OfframpError(
                f"layer_dropout.ramp_steps is {self.ramp_steps}; an exponential ramp needs it, at least 2."
            )
        if self.ramp == "constant" and self.ramp_steps is not None:
            raise OfframpError("layer_dropout.ramp_steps means nothing to a constant ramp; leave it out.")

    def rates(self, num_layers: int, step: int) -> list[float]:
        """[L] probabilities at an optimizer step, counted from 0."""
        grown = 1.0
        if self.ramp_steps is not None:
            grown = math.expm1(min(step / (self.ramp_steps - 1), 1.0) * math.log(2.0))
        deepest = max(num_layers - 1, 1)
        return [self.rate * grown * math.expm1(layer * math.log(2.0) / deepest) for layer in range(num_layers)]

    def draw(self, batch: AnyBatch, num_layers: int, seed: int, step: int) -> Tensor:
        """[B, L] bool: the layers that each row skips; see `offramp.train.row_draws`.

        Args:
            batch: the rows.
            num_layers: L.
            seed: of the run.
            step: optimizer step.
        """
        rates = torch.tensor(self.rates(num_layers, step))
        rows = batch.input_ids.cpu()
        draws = [torch.rand(num_layers, generator=row_generator(row, seed, step, "layers")) for row in rows]
        return (torch.stack(draws) < rates).to(batch.input_ids.device)
