"""What an operator sees at the metrics address. Sums over a second: each update is a line of log to TorchServe."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

from offramp.serve.request import RequestOutput

Kind = Literal["COUNTER", "GAUGE", "HISTOGRAM"]
METRICS: dict[str, tuple[Kind, str]] = {
    "offramp_generated_tokens_total": ("COUNTER", "count"),
    "offramp_running_requests": ("GAUGE", "count"),
    "offramp_waiting_requests": ("GAUGE", "count"),
    "offramp_mean_layers": ("GAUGE", "count"),
    # Seconds: the histogram's buckets are Prometheus' defaults, 0.005 to 10.
    "offramp_first_token_seconds": ("HISTOGRAM", "seconds"),
    "offramp_request_seconds": ("HISTOGRAM", "seconds"),
}
"""Every metric's kind and unit by its name."""


class EngineMetrics:
    """Adds up what the engine does and emits it once per period, and when it goes idle.

    Args:
        emit: Takes a name of `METRICS` and a value (of a counter, what has been added).
        period_s: Seconds between two emissions.
        clock: Seconds.
    """

    def __init__(
        self,
        emit: Callable[[str, float], None],
        period_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._emit = emit
        self._period_s = period_s
        self._clock = clock
        self._emitted_at = -period_s
        self._num_tokens = 0
        self._num_layers = 0

    def observe(self, outputs: Sequence[RequestOutput], running: int, waiting: int) -> None:
        """Takes in an iteration.

        Args:
            outputs: What it gave.
            running: Requests that have had a token.
            waiting: Requests that have not.
        """
        for output in outputs:
            self._num_tokens += len(output.new_token_ids)
            self._num_layers += sum(output.exit_layers)
        now = self._clock()
        idle = not running and not waiting
        if now - self._emitted_at < self._period_s and not idle:
            return
        self._emitted_at = now
        self._emit("offramp_running_requests", running)
        self._emit("offramp_waiting_requests", waiting)
        if self._num_tokens:
            self._emit("offramp_generated_tokens_total", self._num_tokens)
            self._emit("offramp_mean_layers", self._num_layers / self._num_tokens)
        self._num_tokens = self._num_layers = 0

    def first_token(self, seconds: float) -> None:
        """Takes in the time from a stream's arrival to its first content."""
        self._emit("offramp_first_token_seconds", seconds)

    def finished(self, seconds: float) -> None:
        """Takes in the time from a request's arrival to its end."""
        self._emit("offramp_request_seconds", seconds)
