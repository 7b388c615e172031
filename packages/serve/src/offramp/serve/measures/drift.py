"""Drift: whether tokens still leave where, and as sure as, they did when the thresholds were calibrated.

A calibrated threshold promises something about texts like those it was calibrated on. When other texts come, depths and
confidences change before anybody has looked at an answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from offramp.common.exits.profile import TokenProfile, stability_index

WINDOW = 20_000
"""Tokens that are remembered, about: each weighs e times less after so many others."""

ENOUGH = 1_000
"""Tokens from which on anything is said. Fewer differ from calibration by chance alone."""


class Drift:
    """Compares the tokens of the recent past with a profile.

    Args:
        profile: of the calibration's tokens.
        window: see `WINDOW`.
    """

    def __init__(self, profile: TokenProfile, window: int = WINDOW) -> None:
        self._profile, self._window = profile, window
        self._depths: dict[int, float] = dict.fromkeys(profile.depths, 0.0)
        self._confidences = [0.0] * len(profile.confidences)

    def add(self, exit_layers: Sequence[int], confidences: Sequence[float | None]) -> None:
        """Take the tokens of an answer in, without its first.

        Args:
            exit_layers: layers run, of each token.
            confidences: what the exit test measured for each of them; None at the final exit.
        """
        fading = (1 - 1 / self._window) ** len(exit_layers)
        for layer in self._depths:
            self._depths[layer] *= fading
        for layer in exit_layers:
            self._depths[layer] = self._depths.get(layer, 0.0) + 1
        fresh = self._profile.bins(confidences)
        self._confidences = [old * fading + new for old, new in zip(self._confidences, fresh, strict=True)]

    @property
    def depth(self) -> float | None:
        """Stability index of exit depths; None while there are too few tokens."""
        if sum(self._depths.values()) < ENOUGH:
            return None
        layers = sorted(self._depths)
        return stability_index(
            [self._profile.depths.get(layer, 0) for layer in layers], [self._depths[layer] for layer in layers]
        )

    @property
    def confidence(self) -> float | None:
        """Stability index of the confidences of tokens that left early; None while there are too few of them."""
        if sum(self._confidences) < ENOUGH:
            return None
        return stability_index(self._profile.confidences, self._confidences)
