"""The exit policy: what is measured, what it must exceed at each exit, and from which layer on. Plain data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from offramp.common.errors import OfframpError

Measure = Literal["max_probability", "margin", "entropy", "cosine", "classifier"]
STATE_MEASURES: frozenset[Measure] = frozenset(("cosine", "classifier"))
"""Measures of states: they look at no logits, so it is nothing to them which tokens are on a shortlist."""


@dataclass(frozen=True)
class ExitPolicy:
    """When a token may leave.

    Attributes:
        measure: confidence measure, in (-inf, 1].
        thresholds: exit layer -> value that the confidence must exceed; an exit without one is not used. A threshold of
            1 or more means never.
        min_layer: exits below this layer are not used.
        decay: tau of CALM's decaying threshold (section 3.3, eq. 5): at step t of at most N the threshold is
            clip(0.9 lambda + 0.1 exp(-tau t / N), 0, 1), so early tokens, whose errors everything later inherits, must
            be surer. None keeps thresholds constant, and those of 1 or more, which mean never, are kept in any case.
        shortlist: token ids that may be said at an exit, and over which logit measures are computed, which is far
            cheaper than over the whole vocabulary (None). A row that is sure enough on the shortlist leaves only if its
            best token there is its best token of the whole vocabulary; otherwise it goes on. Measures of states look at
            no logits, so with them it leaves with any token. Where tokens are drawn, the one drawn need not be on the
            list.
        shortlist_only: whether the best token of the shortlist is what an exit says, whatever the measure, and nobody
            asks for the best of the whole vocabulary. Then a row that is sure leaves, and an exit never reads the whole
            unembedding, which at small batches costs as much as several layers. Not where tokens are chosen by more
            than the largest logit (sampling, penalties, biases, constraints): there it changes nothing.
            Log-probabilities, if asked for, are those of the whole vocabulary. The drafts of the KV policy `verify`,
            which the full model judges, are taken so in any case.
    """

    measure: Measure = "margin"
    thresholds: Mapping[int, float] = field(default_factory=dict)
    min_layer: int = 0
    decay: float | None = None
    shortlist: tuple[int, ...] | None = None
    shortlist_only: bool = False

    def __post_init__(self) -> None:
        if self.measure not in get_args(Measure):
            raise OfframpError(
                f"confidence measure {self.measure!r} is unknown; choose one of {', '.join(get_args(Measure))}."
            )
        if any(math.isnan(value) for value in self.thresholds.values()):
            raise OfframpError("an exit threshold is NaN; give a number.")
        if isinstance(self.min_layer, bool) or not isinstance(self.min_layer, int):
            raise OfframpError(f"min_layer {self.min_layer!r} must be a whole number.")
        if self.decay is not None and (not isinstance(self.decay, (int, float)) or not self.decay >= 0):
            raise OfframpError(f"decay {self.decay!r} must be 0 or more.")
        if self.shortlist is not None and len(self.shortlist) < 2:
            raise OfframpError(f"a shortlist of {len(self.shortlist)} tokens is too short; it needs at least 2.")
        if self.shortlist is not None and len(set(self.shortlist)) < len(self.shortlist):
            raise OfframpError("the shortlist names a token twice, which no margin can tell apart; name each once.")
        if not isinstance(self.shortlist_only, bool):
            raise OfframpError(f"shortlist_only {self.shortlist_only!r} must be true or false.")
        if self.shortlist_only and self.shortlist is None:
            raise OfframpError("shortlist_only needs a shortlist; give one, or leave it out.")

    def threshold(self, layer: int, step: int, max_steps: int) -> float:
        """Value the confidence must exceed at an exit; infinity where the exit is not used.

        Args:
            layer: exit layer.
            step: tokens generated so far by this sequence.
            max_steps: most tokens it may generate.
        """
        value = self.thresholds.get(layer)
        if value is None or layer < self.min_layer:
            return math.inf
        if self.decay is None or value >= 1.0:
            return value
        value = 0.9 * value + 0.1 * math.exp(-self.decay * step / max(max_steps, 1))
        return min(max(value, 0.0), 1.0)

    def with_threshold(self, value: float, layers: Iterable[int]) -> ExitPolicy:
        """The same policy with one threshold at all of `layers`."""
        return replace(self, thresholds=dict.fromkeys(layers, value))

    def check(self, exit_layers: Iterable[int], vocab_size: int | None = None) -> None:
        """Raise `OfframpError` if a threshold names a layer without an exit, or the shortlist a token out of range."""
        known = set(exit_layers)
        if wrong := sorted(set(self.thresholds) - known):
            raise OfframpError(f"thresholds name layers {wrong}, but the model has exits at {sorted(known)}.")
        if vocab_size is not None and self.shortlist:
            for token in (min(self.shortlist), max(self.shortlist)):  # of thousands, and asked for every request
                if not 0 <= token < vocab_size:
                    raise OfframpError(f"the shortlist names token {token}, outside the vocabulary of {vocab_size}.")

    def check_measure(self, *, has_classifiers: bool) -> None:
        """Raise `OfframpError` if the measure needs what exits do not have; see `ExitConfig.classifier`."""
        if self.measure == "classifier" and not has_classifiers:
            raise OfframpError(
                "measure 'classifier' asks the exits' classifiers, and this model has none; train them, or choose "
                "another measure."
            )

    def to_json(self) -> dict[str, Any]:
        """Plain containers for `exits.json`."""
        return {
            "measure": self.measure,
            "thresholds": {str(layer): value for layer, value in sorted(self.thresholds.items())},
            "min_layer": self.min_layer,
            "decay": self.decay,
            "shortlist": None if self.shortlist is None else list(self.shortlist),
            "shortlist_only": self.shortlist_only,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ExitPolicy:
        """Inverse of `to_json`; an unknown field is an error."""
        try:
            fields = dict(data)
            fields["thresholds"] = {int(layer): float(value) for layer, value in fields["thresholds"].items()}
            if fields.get("shortlist") is not None:
                fields["shortlist"] = tuple(int(token) for token in fields["shortlist"])
            return cls(**fields)
        except (TypeError, KeyError, ValueError, AttributeError) as fault:
            raise OfframpError(f"exits.json: the section 'policy' is not understood: {fault}.") from None
