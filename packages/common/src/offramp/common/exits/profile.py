"""How deep generated tokens went and how sure their exits were: what serving compares with the day of calibration."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offramp.common.errors import OfframpError

_BINS = 10
_SMOOTHING = 0.5
"""Tokens added to every bin, so that an empty one is rare and not impossible (Jeffreys)."""


@dataclass(frozen=True)
class TokenProfile:
    """Histograms of generated tokens, without the first of each answer, which its prompt says at full depth.

    Attributes:
        depths: layers run -> tokens.
        edges: between neighbouring bins of confidence, rising; a value on an edge belongs to the bin above it.
        confidences: tokens in each bin, those that left early alone; one more than there are edges.
    """

    depths: Mapping[int, int]
    edges: tuple[float, ...]
    confidences: tuple[int, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in itertools.pairwise(self.edges))
        counts = (*self.depths.values(), *self.confidences)
        if len(self.confidences) != len(self.edges) + 1 or not rising or any(count < 0 for count in counts):
            raise OfframpError("a profile of tokens needs rising edges and a count of each bin between them.")

    @classmethod
    def of(cls, exit_layers: Sequence[int], confidences: Sequence[float | None]) -> TokenProfile:
        """Of tokens, with bins that hold about a tenth of the confidences each.

        Args:
            exit_layers: layers run, of each token.
            confidences: what the exit test measured for each of them; None at the final exit.
        """
        known = sorted(value for value in confidences if value is not None)
        edges = sorted({known[len(known) * cut // _BINS] for cut in range(1, _BINS)}) if known else []
        empty = cls({}, tuple(edges), (0,) * (len(edges) + 1))
        return cls(Counter(exit_layers), empty.edges, tuple(empty.bins(known)))

    def bins(self, confidences: Iterable[float | None]) -> list[int]:
        """How many of some confidences lie in each bin; None, at the final exit, in none."""
        counts = [0] * len(self.confidences)
        for value in confidences:
            if value is not None:
                counts[bisect_right(self.edges, value)] += 1
        return counts

    def to_json(self) -> dict[str, Any]:
        """Plain containers for `exits.json`."""
        depths = {str(layer): count for layer, count in sorted(self.depths.items())}
        return {"depths": depths, "edges": list(self.edges), "confidences": list(self.confidences)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TokenProfile:
        """Inverse of `to_json`.

        Raises:
            OfframpError: it is none.
        """
        try:
            return cls(
                {int(layer): int(count) for layer, count in data["depths"].items()},
                tuple(float(edge) for edge in data["edges"]),
                tuple(int(count) for count in data["confidences"]),
            )
        except (TypeError, KeyError, ValueError, AttributeError) as fault:
            raise OfframpError(f"exits.json: a profile of tokens is not understood: {fault}.") from None


def stability_index(expected: Sequence[float], found: Sequence[float]) -> float:
    """Population stability index of two histograms over the same bins: sum of (q - p) ln(q / p).

    The symmetric relative entropy of two distributions. By convention below 0.1 nothing has changed and above 0.25 much
    has; without any change it is about (bins - 1) (1 / n + 1 / m) for n and m independent tokens.

    Args:
        expected: tokens in each bin once.
        found: tokens in each bin now.
    """
    bins = len(expected)
    n, m = sum(expected) + bins * _SMOOTHING, sum(found) + bins * _SMOOTHING
    shares = (((p + _SMOOTHING) / n, (q + _SMOOTHING) / m) for p, q in zip(expected, found, strict=True))
    return math.fsum((q - p) * math.log(q / p) for p, q in shares)
