"""How much every exit counts at every step: the weights a recipe aims at, the way there, and which exits take turns.

Legend: L layers, X exits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from offramp.common.errors import OfframpError

WeightRule = Literal["uniform", "calm", "geometric", "layerskip"]
"""Weights that follow from depth and add up to one at every step, over the exits that take part in it.

- `uniform`: all equal.
- `calm`: w_e ~ e (CALM, section 3.3).
- `geometric`: each exit counts twice as much as the one before it.
- `layerskip`: w_e ~ s * (0 + .. + (e - 1)) for early exits, w_L ~ L - 1 + s * (0 + .. + (L - 2)) (LayerSkip, eq. 4).
"""
Shape = Literal["constant", "linear", "cosine"]
CurriculumKind = Literal["rotational", "gradual"]


@dataclass(frozen=True)
class WeightSchedule:
    """From the first weights of early exits to those that the recipe aims at (EE-LLM, section 3.3).

    After p = step / steps of the way, `linear` has gone p of the distance and `cosine` (1 - cos(pi p)) / 2 of it.

    Attributes:
        steps: optimizer steps until the weights are those aimed at.
        shape: of the way; `constant` is at its end from the start.
        initial: weights of early exits at step 0, in the order of their layers; zeros if None.
    """

    steps: int
    shape: Shape = "linear"
    initial: list[float] | None = None

    def __post_init__(self) -> None:
        if self.shape not in get_args(Shape):
            raise OfframpError(f"schedule.shape is {self.shape!r}; choose one of {', '.join(get_args(Shape))}.")
        if self.steps < 1:
            raise OfframpError(f"schedule.steps is {self.steps}; it must be at least 1.")
        if any(not 0.0 <= weight < math.inf for weight in self.initial or ()):
            raise OfframpError(f"schedule.initial {self.initial} must not be negative.")

    def progress(self, step: int) -> float:
        """Share of the distance that is done at an optimizer step, counted from 0."""
        done = 1.0 if self.shape == "constant" else min(step / self.steps, 1.0)
        return 0.5 * (1.0 - math.cos(math.pi * done)) if self.shape == "cosine" else done


@dataclass(frozen=True)
class Curriculum:
    """Which early exits a step trains (LayerSkip, section 4.1.2); the final exit is always trained.

    Attributes:
        kind: `rotational` trains every `interval`-th early exit, beginning one further at every step; `gradual` adds
            one early exit after the other, the deepest first, and has all of them after `steps`.
        interval: of `rotational`.
        steps: of `gradual`. LayerSkip takes half of the run.
    """

    kind: CurriculumKind
    interval: int | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(CurriculumKind):
            choices = ", ".join(get_args(CurriculumKind))
            raise OfframpError(f"curriculum.kind is {self.kind!r}; choose one of {choices}.")
        needed, other = ("interval", "steps") if self.kind == "rotational" else ("steps", "interval")
        value = getattr(self, needed)
        if value is None or value < 1:
            raise OfframpError(f"curriculum.{needed} is {value}; a {self.kind} curriculum needs it, at least 1.")
        if getattr(self, other) is not None:
            raise OfframpError(f"curriculum.{other} means nothing to a {self.kind} curriculum; leave it out.")

    def trains(self, index: int, num_early: int, step: int) -> bool:
        """Whether an early exit is trained at an optimizer step.

        Args:
            index: of the exit among the early ones, from 0.
            num_early: how many there are.
            step: counted from 0.
        """
        if self.interval is not None:
            return step % self.interval == index % self.interval
        assert self.steps is not None
        return step * num_early >= self.steps * (num_early - index)


@dataclass(frozen=True)
class ExitWeights:
    """The weights of one model's exits over a run.

    Attributes:
        early: early exit layers, ascending.
        num_layers: L.
        exit_weights: of early exits, in their order, or a rule that makes those of all exits; 0.3 each if None.
        final_weight: of the final exit; 1 if None. A rule makes its own.
        exit_scale: s of `layerskip`.
        schedule: of the weights of early exits.
        curriculum: which exits take part in a step.
    """

    early: Sequence[int]
    num_layers: int
    exit_weights: Sequence[float] | WeightRule | None = None
    final_weight: float | None = None
    exit_scale: float = 0.2
    schedule: WeightSchedule | None = None
    curriculum: Curriculum | None = None

    def __post_init__(self) -> None:
        weights = self.exit_weights
        if isinstance(weights, str):
            self._check_rule(weights)
            return
        self._check_length("exit_weights", weights)
        if self.schedule is not None:
            self._check_length("schedule.initial", self.schedule.initial)
        values = [*(weights or ()), self._final]
        if any(not 0.0 <= weight < math.inf for weight in values):
            raise OfframpError(f"exit_weights {weights} and final_weight {self.final_weight} must not be negative.")
        if self._final == 0.0 and (self.schedule is not None or self.curriculum is not None):
            raise OfframpError(
                "final_weight is 0, so that a schedule or a curriculum could leave a step with nothing to train; give "
                "the final exit a weight, or leave them out."
            )

    def _check_rule(self, rule: str) -> None:
        if rule not in get_args(WeightRule):
            choices = ", ".join(get_args(WeightRule))
            raise OfframpError(f"exit_weights is {rule!r}; choose one of {choices}, or give a list of numbers.")
        if self.final_weight is not None:
            raise OfframpError(
                f"exit_weights {rule!r} weighs the final exit too; leave final_weight {self.final_weight} out."
            )
        if self.schedule is not None and self.schedule.shape != "constant":
            raise OfframpError(f"exit_weights {rule!r} always adds up to one; a schedule needs a list of numbers.")
        if not 0.0 < self.exit_scale < math.inf:
            raise OfframpError(f"exit_scale is {self.exit_scale}; it must be above 0.")

    def _check_length(self, name: str, values: Sequence[float] | None) -> None:
        if values is not None and len(values) != len(self.early):
            raise OfframpError(
                f"{name} has {len(values)} values, but the model has {len(self.early)} early exits, at layers "
                f"{list(self.early)}; give one for each."
            )

    @property
    def _final(self) -> float:
        return 1.0 if self.final_weight is None else self.final_weight

    def at(self, step: int) -> dict[int, float]:
        """Exit layer -> weight at an optimizer step, counted from 0; the final exit last."""
        trained = [
            self.curriculum is None or self.curriculum.trains(index, len(self.early), step)
            for index in range(len(self.early))
        ]
        return self._weights(trained, 1.0 if self.schedule is None else self.schedule.progress(step))

    @property
    def target(self) -> dict[int, float]:
        """Where the schedule leads, all exits taking part: what evaluation weighs exits by."""
        return self._weights([True] * len(self.early), 1.0)

    @property
    def widest(self) -> dict[int, float]:
        """The largest weight that each exit has at either end of the schedule, all exits taking part."""
        first = self._weights([True] * len(self.early), 0.0)
        return {layer: max(weight, first[layer]) for layer, weight in self.target.items()}

    def _weights(self, trained: Sequence[bool], progress: float) -> dict[int, float]:
        if isinstance(self.exit_weights, str):
            values = self._by_rule(self.exit_weights)
        else:
            values = [0.3] * len(self.early) if self.exit_weights is None else list(self.exit_weights)
            first = [0.0] * len(values) if self.schedule is None else self.schedule.initial or [0.0] * len(values)
            values = [start + progress * (end - start) for start, end in zip(first, values, strict=True)]
            values.append(self._final)
        values = [value * on for value, on in zip(values, (*trained, True), strict=True)]
        total = sum(values) if isinstance(self.exit_weights, str) else 1.0
        return {layer: value / total for layer, value in zip((*self.early, self.num_layers), values, strict=True)}

    def _by_rule(self, rule: WeightRule) -> list[float]:
        if rule == "uniform":
            return [1.0] * (len(self.early) + 1)
        if rule == "calm":
            return [float(layer) for layer in (*self.early, self.num_layers)]
        if rule == "geometric":
            return [2.0**index for index in range(len(self.early) + 1)]
        last = self.num_layers - 1
        early = [self.exit_scale * layer * (layer - 1) / 2 for layer in self.early]
        return [*early, max(last + self.exit_scale * last * (last - 1) / 2, 1.0)]
