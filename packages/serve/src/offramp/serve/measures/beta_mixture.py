"""From confidences and whether full depth agreed to the probability of agreement at any confidence.

Confidences of tokens that full depth agrees with, and of those that it does not, are taken for two Beta distributions
that are fitted by their first two moments; Bayes' rule gives the rest. That is the model of FREE (Bae et al., 2023,
section 3.3), where labels come from full passes as well.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

_EDGE = 1e-4
"""Distance from 0 and 1 that values keep: a Beta density may be infinite there."""

_GRID = 1000


@dataclass(frozen=True)
class Beta:
    """A Beta distribution on 0 to 1.

    Attributes:
        a: first shape.
        b: second shape.
    """

    a: float
    b: float

    @classmethod
    def fit(cls, mean: float, variance: float) -> Beta:
        """By its moments, of values that keep away from 0 and 1."""
        spread = min(max(variance, 1e-6), 0.999 * mean * (1 - mean))
        strength = mean * (1 - mean) / spread - 1
        return cls(mean * strength, (1 - mean) * strength)

    def log_density(self, x: float) -> float:
        """At 0 < x < 1."""
        normaliser = math.lgamma(self.a) + math.lgamma(self.b) - math.lgamma(self.a + self.b)
        return (self.a - 1) * math.log(x) + (self.b - 1) * math.log1p(-x) - normaliser


class BetaMixture:
    """The pairs of the recent past.

    Args:
        floor: no confidence is at or below it: what is not above a threshold is never seen.
        window: pairs that are remembered.
        enough: pairs of each kind, agreeing or not, from which on anything is said.
    """

    def __init__(self, floor: float, window: int = 2000, enough: int = 20) -> None:
        self._floor, self._enough = floor, enough
        self._pairs: deque[tuple[float, bool]] = deque(maxlen=window)

    def add(self, confidence: float, agreed: bool) -> None:
        """Take a token in: how sure its exit was, and whether full depth says the same after the same text."""
        place = (confidence - self._floor) / (1 - self._floor)
        self._pairs.append((min(max(place, _EDGE), 1 - _EDGE), agreed))

    def forget(self, count: int) -> None:
        """Let go of the oldest pairs: time has passed in which none came."""
        for _ in range(min(count, len(self._pairs))):
            self._pairs.popleft()

    def threshold(self, wanted: float) -> float:
        """The least confidence from which on a token agrees with probability `wanted`; the floor if all of them do.

        The floor, too, while too little is known; 1, where nothing leaves, if no confidence is enough.
        """
        kinds = [[place for place, agreed in self._pairs if agreed is kind] for kind in (True, False)]
        if min(map(len, kinds)) < self._enough:
            # Without enough disagreement there is no reason to be stricter; without agreement every reason.
            return 1.0 if len(kinds[1]) >= self._enough else self._floor
        good, bad = (Beta.fit(*_moments(places)) for places in kinds)
        prior = math.log(len(kinds[0]) / len(kinds[1]))
        odds = math.log(wanted / (1 - wanted))
        # From above, so that a confidence counts only if all higher ones are enough too.
        lowest = 1.0
        for step in reversed(range(_GRID)):
            x = min(max(step / _GRID, _EDGE), 1 - _EDGE)
            if prior + good.log_density(x) - bad.log_density(x) < odds:
                break
            lowest = step / _GRID
        return self._floor + lowest * (1 - self._floor)


def _moments(values: list[float]) -> tuple[float, float]:
    mean = math.fsum(values) / len(values)
    return mean, math.fsum((value - mean) ** 2 for value in values) / len(values)
