"""What an operator sees at the metrics address, whatever server has it.

Sums over a second: each update is a line of log to TorchServe.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Literal

from offramp.serve.measures.iteration_clock import PARTS
from offramp.serve.measures.records import EngineMetrics, Totals
from offramp.serve.request.output import RequestOutput
from offramp.serve.watch import Watch

Kind = Literal["COUNTER", "GAUGE", "HISTOGRAM"]
METRICS: dict[str, tuple[Kind, str]] = {
    "offramp_generated_tokens_total": ("COUNTER", "count"),
    "offramp_prefill_tokens_total": ("COUNTER", "count"),
    "offramp_source_tokens_total": ("COUNTER", "count"),
    "offramp_prefix_hit_tokens_total": ("COUNTER", "count"),
    "offramp_preemptions_total": ("COUNTER", "count"),
    "offramp_iterations_total": ("COUNTER", "count"),
    **{f"offramp_{part}_seconds_total": ("COUNTER", "seconds") for part in PARTS},
    "offramp_running_requests": ("GAUGE", "count"),
    "offramp_waiting_requests": ("GAUGE", "count"),
    "offramp_mean_layers": ("GAUGE", "count"),
    "offramp_live_blocks": ("GAUGE", "count"),
    "offramp_cached_blocks": ("GAUGE", "count"),
    "offramp_free_blocks": ("GAUGE", "count"),
    # What a served model sees of itself; see `offramp.serve.watch`.
    "offramp_depth_drift": ("GAUGE", "count"),
    "offramp_confidence_drift": ("GAUGE", "count"),
    "offramp_drift_alarm": ("GAUGE", "count"),
    "offramp_threshold_raise": ("GAUGE", "count"),
    "offramp_audited_texts_total": ("COUNTER", "count"),
    "offramp_audited_same_texts_total": ("COUNTER", "count"),
    "offramp_audited_tokens_total": ("COUNTER", "count"),
    "offramp_audited_agreeing_tokens_total": ("COUNTER", "count"),
    "offramp_audit_agreement": ("GAUGE", "count"),
    "offramp_audit_agreement_low": ("GAUGE", "count"),
    "offramp_audit_agreement_high": ("GAUGE", "count"),
    # Seconds: the histogram's buckets are Prometheus' defaults, 0.005 to 10.
    "offramp_queue_seconds": ("HISTOGRAM", "seconds"),
    "offramp_first_token_seconds": ("HISTOGRAM", "seconds"),
    "offramp_inter_token_seconds": ("HISTOGRAM", "seconds"),
    "offramp_request_seconds": ("HISTOGRAM", "seconds"),
}
"""Every metric's kind and unit by its name. The seconds by part are what an iteration's time went into, so that their
rates say where the engine is busy; `offramp_inter_token_seconds` takes each request's mean. Shadow audits are in the
engine's tokens and seconds, and nowhere else."""


class MetricsReporter:
    """Emits what the engine has added up once per period, and when it goes idle.

    Args:
        emit: Takes a name of `METRICS` and a value (of a counter, what has been added).
        engine: The engine's own sums.
        watch: What the model sees of itself; None sees nothing.
        period_s: Seconds between two emissions.
        clock: Seconds.
    """

    def __init__(
        self,
        emit: Callable[[str, float], None],
        engine: EngineMetrics,
        watch: Watch | None = None,
        period_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._emit = emit
        self._engine = engine
        self._watch = watch or Watch()
        self._period_s = period_s
        self._clock = clock
        self._emitted_at = -period_s
        self._emitted = Totals()
        self._emitted_counts: dict[str, int] = {}
        self._tokens = self._token_layers = 0

    def observe(self, outputs: Sequence[RequestOutput], running: int, waiting: int) -> None:
        """Takes in an iteration. Called in the engine's thread, whose sums are read.

        Args:
            outputs: What it gave.
            running: Requests that have had a token.
            waiting: Requests that have not.
        """
        for output in outputs:
            self._tokens += len(output.exit_layers)
            self._token_layers += sum(output.exit_layers)
            if output.metrics is not None:
                if output.metrics.queue_s is not None:
                    self._emit("offramp_queue_seconds", output.metrics.queue_s)
                if gaps := output.metrics.inter_token_s:
                    self._emit("offramp_inter_token_seconds", statistics.fmean(gaps))
        now = self._clock()
        idle = not running and not waiting
        if now - self._emitted_at < self._period_s and not idle:
            return
        self._emitted_at = now
        self._emit("offramp_running_requests", running)
        self._emit("offramp_waiting_requests", waiting)
        if self._engine.totals.iterations != self._emitted.iterations:
            self._emit_sums()
            self._emit_watch()

    def first_token(self, seconds: float) -> None:
        """Takes in the time from a stream's arrival to its first content."""
        self._emit("offramp_first_token_seconds", seconds)

    def finished(self, seconds: float) -> None:
        """Takes in the time from a request's arrival to its end."""
        self._emit("offramp_request_seconds", seconds)

    def _emit_sums(self) -> None:
        before, totals = self._emitted, self._engine.totals
        self._emitted = copy.deepcopy(totals)
        added = {
            "offramp_generated_tokens_total": totals.new_tokens - before.new_tokens,
            "offramp_prefill_tokens_total": totals.prefill_rows - before.prefill_rows,
            "offramp_source_tokens_total": totals.source_rows - before.source_rows,
            "offramp_prefix_hit_tokens_total": totals.prefix_hit_tokens - before.prefix_hit_tokens,
            "offramp_preemptions_total": totals.preemptions - before.preemptions,
            "offramp_iterations_total": totals.iterations - before.iterations,
            **{f"offramp_{part}_seconds_total": totals.parts[part] - before.parts[part] for part in PARTS},
        }
        for name, value in added.items():
            if value:
                self._emit(name, value)
        if self._tokens:  # of answers alone: audits run all layers
            self._emit("offramp_mean_layers", self._token_layers / self._tokens)
            self._tokens = self._token_layers = 0
        after = self._engine.records[-1].after
        self._emit("offramp_live_blocks", after.live_blocks)
        self._emit("offramp_cached_blocks", after.cached_blocks)
        self._emit("offramp_free_blocks", after.free_blocks)

    def _emit_watch(self) -> None:
        for name, value in self._watch.gauges().items():
            self._emit(name, value)
        counts = self._watch.counts()
        for name, value in counts.items():
            if added := value - self._emitted_counts.get(name, 0):
                self._emit(name, added)
        self._emitted_counts = counts
