"""Thresholds that follow what audits show: stricter than calibrated where tokens agree too seldom, and never looser.

Only what is above a threshold is ever seen to leave, and only a stricter threshold is covered by the promise of
calibration, whose candidates were certified from strict to loose. So the calibrated threshold is the floor, and where
people ask what calibration did not (FREE, Bae et al., 2023, adapts to the data at hand in this way) the threshold
rises until tokens above it are expected to agree.
"""

from __future__ import annotations

from dataclasses import replace

from offramp.common.exits.policy import ExitPolicy
from offramp.serve.measures.beta_mixture import BetaMixture
from offramp.serve.request.request import Request


class Adaptation:
    """The thresholds of one calibrated policy, as they are now.

    Args:
        certified: The policy; its thresholds are the floor. They must not decay: what left under a threshold that has
            fallen says nothing about the one that it fell from.
        wanted: Probability of agreement from which on a token may leave.
    """

    def __init__(self, certified: ExitPolicy, wanted: float) -> None:
        self._certified, self._wanted = certified, wanted
        self._mixtures = {layer: BetaMixture(floor) for layer, floor in certified.thresholds.items() if floor < 1}
        self.policy = certified
        """To be read in any thread; it is replaced, never changed."""

    @property
    def greatest_raise(self) -> float:
        """Of a threshold above the certified one."""
        floors = self._certified.thresholds
        return max((value - floors[layer] for layer, value in self.policy.thresholds.items()), default=0.0)

    def compared(self, request: Request, agreeing: int) -> None:
        """Take in an answer that was made again at full depth.

        Args:
            request: The answer.
            agreeing: Its tokens before the first difference. The one that differs was said after the same text, too;
                what follows it was not.
        """
        judged = slice(1, agreeing + 1)  # the first token comes from the prompt
        layers, confidences = request.exit_layers[judged], request.confidences[judged]
        for index, (layer, confidence) in enumerate(zip(layers, confidences, strict=True), 1):
            if layer in self._mixtures and confidence is not None:
                self._mixtures[layer].add(confidence, index < agreeing)
        for layer, mixture in self._mixtures.items():
            if layer not in layers:
                # An exit that nobody takes any more is tried again when what closed it is long ago.
                mixture.forget(len(layers))
        raised = {layer: mixture.threshold(self._wanted) for layer, mixture in self._mixtures.items()}
        self.policy = replace(self._certified, thresholds={**self._certified.thresholds, **raised})
