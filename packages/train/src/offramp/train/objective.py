"""What a whole run minimises: the settings of a recipe, and the `Objective` of each step that follows from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from offramp.common.errors import OfframpError
from offramp.train.depth_spread import DepthSpread
from offramp.train.exit_weights import Curriculum, ExitWeights, WeightRule, WeightSchedule
from offramp.train.linear_cross_entropy import TokenLoss
from offramp.train.losses import Objective

TokenWeights = Literal["uniform", "confidence"]


@dataclass(frozen=True)
class ObjectiveConfig:
    """What is minimised beside plain cross-entropy at constant weights; by default, nothing.

    Attributes:
        schedule: weights of early exits over time.
        curriculum: which early exits a step trains.
        exit_scale: LayerSkip's e_scale, for `exit_weights: layerskip`.
        token_weights: `confidence` weighs each token of an early exit by the largest probability there (EE-Tuning).
        temperature: divides logits in the loss, of all early exits or by exit layer. For training only: serving never
            divides by it.
        label_smoothing: share of the target that is spread over the vocabulary, for all early exits or by exit layer.
        distill: share of the divergence to the final exit in the loss of early exits, 0 to 1. Under
            `deepspeed_pipeline` only where all exits lie on the last stage, since others do not see the final logits.
        distill_temperature: T of the divergence, which is multiplied by T^2.
        depth_spread: penalty on the spread of exit depths in a micro-batch. Under `deepspeed_pipeline` only where all
            early exits lie on one stage.
    """

    schedule: WeightSchedule | None = None
    curriculum: Curriculum | None = None
    exit_scale: float = 0.2
    token_weights: TokenWeights = "uniform"
    temperature: float | dict[int, float] = 1.0
    label_smoothing: float | dict[int, float] = 0.0
    distill: float = 0.0
    distill_temperature: float = 1.0
    depth_spread: DepthSpread | None = None

    def __post_init__(self) -> None:
        if self.token_weights not in get_args(TokenWeights):
            choices = ", ".join(get_args(TokenWeights))
            raise OfframpError(f"token_weights is {self.token_weights!r}; choose one of {choices}.")
        if not 0.0 <= self.distill <= 1.0:
            raise OfframpError(f"distill is {self.distill}; it must lie between 0 and 1.")
        if not 0.0 < self.distill_temperature < math.inf:
            raise OfframpError(f"distill_temperature is {self.distill_temperature}; it must be above 0.")
        if any(not 0.0 < value < math.inf for value in _values(self.temperature)):
            raise OfframpError(f"temperature is {self.temperature}; it must be above 0.")
        if any(not 0.0 <= value < 1.0 for value in _values(self.label_smoothing)):
            raise OfframpError(f"label_smoothing is {self.label_smoothing}; it must be at least 0 and below 1.")

    def token_losses(self, early: Sequence[int], num_layers: int) -> dict[int, TokenLoss]:
        """Exit layer -> what a token costs there, for the exits that do not take plain cross-entropy.

        Raises:
            OfframpError: a setting names a layer without an exit.
        """
        temperature = _by_exit("temperature", self.temperature, 1.0, early, num_layers)
        smoothing = _by_exit("label_smoothing", self.label_smoothing, 0.0, early, num_layers)
        kinds = {
            layer: TokenLoss(
                temperature[layer], smoothing[layer], self.token_weights == "confidence" and layer != num_layers
            )
            for layer in (*early, num_layers)
        }
        return {layer: kind for layer, kind in kinds.items() if kind != TokenLoss()}


class RunObjective:
    """The objective of every step of a run, for one model.

    Args:
        config: settings.
        exit_weights: see `ExitWeights`.
        final_weight: see `ExitWeights`.
        early: early exit layers.
        num_layers: L.

    Raises:
        OfframpError: the settings do not fit together, or not to the model.
    """

    def __init__(
        self,
        config: ObjectiveConfig,
        exit_weights: Sequence[float] | WeightRule | None,
        final_weight: float | None,
        early: Sequence[int],
        num_layers: int,
    ) -> None:
        self.config = config
        self.weights = ExitWeights(
            early, num_layers, exit_weights, final_weight, config.exit_scale, config.schedule, config.curriculum
        )
        self._token_losses = config.token_losses(early, num_layers)
        if config.depth_spread is not None and not early:
            raise OfframpError("depth_spread needs early exits, and there are none; add them with 'offramp import'.")
        self.evaluated = self._objective(self.weights.target)
        """What evaluation reports as its loss: weights aimed at, all exits taking part, whatever the step."""

        self.widest = self._objective(self.weights.widest)
        """Of all exits that any step trains: what has to be loaded and may move."""

    def at(self, step: int) -> Objective:
        """What an optimizer step, counted from 0, minimises."""
        return self._objective(self.weights.at(step))

    def _objective(self, weights: Mapping[int, float]) -> Objective:
        config = self.config
        return Objective(weights, config.distill, config.distill_temperature, self._token_losses, config.depth_spread)


def _values(setting: float | dict[int, float]) -> Iterable[float]:
    return setting.values() if isinstance(setting, dict) else (setting,)


def _by_exit(
    name: str, value: float | dict[int, float], default: float, early: Sequence[int], num_layers: int
) -> dict[int, float]:
    if not isinstance(value, dict):
        return {**dict.fromkeys(early, float(value)), num_layers: default}
    exits = (*early, num_layers)
    if unknown := sorted(set(value) - set(exits)):
        raise OfframpError(f"{name} names layers {unknown}, but the model has exits at {list(exits)}.")
    return {layer: float(value.get(layer, default)) for layer in exits}
