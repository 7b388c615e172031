"""What a served model sees of itself: drift from the day of calibration, and audits of its answers at full depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from offramp.common.exits.profile import TokenProfile
from offramp.serve.config import WatchSettings
from offramp.serve.engine_thread import EngineThread
from offramp.serve.measures.drift import Drift
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.request import Request
from offramp.serve.shadow_audit import Agreement, ShadowAudit


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
class Watch:
    """Follows the finished requests of an engine's thread, in that thread.

    Args:
        settings: What is done.
        calibrated: Only answers to requests that carry the exits of one of these are compared with calibration.
    """

    settings: WatchSettings = field(default_factory=WatchSettings)
    calibrated: Sequence[Calibrated] = ()

    def __post_init__(self) -> None:
        self._drifts = [(one.exits, Drift(one.profile)) for one in self.calibrated]
        self._audit = ShadowAudit(self.settings.audit_share)

    def finished(self, request: Request) -> None:
        """An answer is whole."""
        self._audit.finished(request)
        for exits, drift in self._drifts:
            if request.exits == exits:
                # The first token comes from the prompt, at full depth.
                drift.add(request.exit_layers[1:], request.confidences[1:])
                break

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
            ("offramp_depth_drift", [drift.depth for _, drift in self._drifts]),
            ("offramp_confidence_drift", [drift.confidence for _, drift in self._drifts]),
        ):
            if known := [value for value in values if value is not None]:
                found[name] = max(known)
        if found:
            found["offramp_drift_alarm"] = float(max(found.values()) > self.settings.drift_alarm)
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
