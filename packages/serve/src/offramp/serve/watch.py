"""What a served model sees of itself: drift from the day of calibration, and audits of its answers at full depth.

What audits show may raise thresholds, see `adaptation`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from offramp.common.exits.profile import TokenProfile
from offramp.serve.adaptation import Adaptation
from offramp.serve.config import EngineConfig, WatchSettings
from offramp.serve.engine_thread import EngineThread
from offramp.serve.measures.drift import Drift
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.request import Request
from offramp.serve.shadow_audit import Agreement, ShadowAudit


def unlike_calibration(record: Mapping[str, Any] | None, config: EngineConfig) -> str | None:
    """Why the promise of a calibration says nothing about an engine, in a sentence; None if it holds there.

    Args:
        record: Of the calibration, from the checkpoint; None, or one without an engine, promises nothing.
        config: Settings of the engine.
    """
    then = (record or {}).get("engine")
    if not isinstance(then, Mapping):
        return None
    names = ["dtype", "quantization", "sync_policy", "split_rule"]
    if config.sync_policy == "quantile":
        names.append("quantile")
    if config.sync_policy != "regroup" or config.split_rule == "cost":
        names.append("max_num_seqs")  # there a batch decides together when its rows leave
    unlike = [name for name in names if name in then and then[name] != getattr(config, name)]
    if not unlike:
        return None
    differences = ", ".join(f"{name} {then[name]} and not {getattr(config, name)}" for name in unlike)
    return (
        f"The operating points were calibrated with {differences}, so what they promise does not hold here; set that, "
        "or calibrate again."
    )


@dataclass(frozen=True)
class Calibrated:
    """A way of answering that was calibrated.

    Attributes:
        exits: What a request that is answered so carries.
        profile: Of the calibration's tokens.
    """

    exits: ExitOptions
    profile: TokenProfile


@dataclass
class _Followed:
    """A calibrated way of answering, and what is seen of it.

    Attributes:
        exits: As calibrated.
        drift: Of its tokens.
        adaptation: Of its thresholds; None: they stay.
    """

    exits: ExitOptions
    drift: Drift
    adaptation: Adaptation | None

    def covers(self, exits: ExitOptions) -> bool:
        """Whether a request is answered so, with these thresholds or adapted ones."""
        if exits == self.exits:
            return True
        mine, other = self.exits.policy, exits.policy
        if self.adaptation is None or mine is None or other is None:
            return False
        return replace(exits, policy=replace(other, thresholds=mine.thresholds)) == self.exits and all(
            value >= mine.thresholds.get(layer, math.inf) for layer, value in other.thresholds.items()
        )


class Watch:
    """Follows the finished requests of an engine's thread, in that thread.

    Args:
        settings: What is done; the defaults if None.
        calibrated: Only answers to requests that carry the exits of one of these are compared with calibration.
    """

    def __init__(self, settings: WatchSettings | None = None, calibrated: Sequence[Calibrated] = ()) -> None:
        self.settings = settings = settings or WatchSettings()
        self._followed = [
            _Followed(one.exits, Drift(one.profile), _adaptation(one.exits, settings.adapt_to)) for one in calibrated
        ]
        self._audit = ShadowAudit(settings.audit_share, self._compared)

    def adapted(self, exits: ExitOptions) -> ExitOptions:
        """What a request is to carry that would carry these: thresholds as they are now. Any thread may ask."""
        for one in self._followed:
            if one.adaptation is not None and one.exits == exits:
                return replace(exits, policy=one.adaptation.policy)
        return exits

    def finished(self, request: Request) -> None:
        """An answer is whole."""
        self._audit.finished(request)
        followed = self._of(request)
        if followed is not None:
            # The first token comes from the prompt, at full depth.
            followed.drift.add(request.exit_layers[1:], request.confidences[1:])

    def advance(self, thread: EngineThread) -> None:
        """An iteration is over, or all work is."""
        self._audit.advance(thread)

    @property
    def agreement(self) -> Agreement:
        """What audits have found."""
        return self._audit.found

    def gauges(self) -> dict[str, float]:
        """Gauges of `offramp.serve.metrics.METRICS` by name, those that are known: of drift the greatest."""
        found: dict[str, float] = {}
        for name, values in (
            ("offramp_depth_drift", [one.drift.depth for one in self._followed]),
            ("offramp_confidence_drift", [one.drift.confidence for one in self._followed]),
        ):
            if known := [value for value in values if value is not None]:
                found[name] = max(known)
        if found:
            found["offramp_drift_alarm"] = float(max(found.values()) > self.settings.drift_alarm)
        if raises := [one.adaptation.greatest_raise for one in self._followed if one.adaptation is not None]:
            found["offramp_threshold_raise"] = max(raises)
        if self.agreement.texts:
            low, high = self.agreement.interval
            found["offramp_audit_agreement"] = self.agreement.same_texts / self.agreement.texts
            found["offramp_audit_agreement_low"], found["offramp_audit_agreement_high"] = low, high
        return found

    def counts(self) -> dict[str, int]:
        """Counters of `METRICS` by name, since the start."""
        found = self.agreement
        return {
            "offramp_audited_texts_total": found.texts,
            "offramp_audited_same_texts_total": found.same_texts,
            "offramp_audited_tokens_total": found.tokens,
            "offramp_audited_agreeing_tokens_total": found.agreeing_tokens,
        }

    def _of(self, request: Request) -> _Followed | None:
        return next((one for one in self._followed if one.covers(request.exits)), None)

    def _compared(self, request: Request, agreeing: int) -> None:
        followed = self._of(request)
        if followed is not None and followed.adaptation is not None:
            followed.adaptation.compared(request, agreeing)


def _adaptation(exits: ExitOptions, wanted: float | None) -> Adaptation | None:
    if wanted is None or exits.policy is None or exits.policy.decay is not None:
        return None
    return Adaptation(exits.policy, wanted)
