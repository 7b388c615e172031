"""Follows the engine through its iterations and writes down what `offramp.serve.measures.records` describes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from offramp.serve.measures.iteration_clock import Part
from offramp.serve.measures.records import EngineMetrics, Gauges, IterationRecord, RequestMetrics, Trace
from offramp.serve.request.request import Request
from offramp.serve.scheduling.scheduler_output import Phase, SchedulerOutput


class Recorder:
    """Makes a record of each iteration, and keeps the times of unfinished requests.

    Its owner calls `scheduled` when the rows of an iteration are chosen, `advanced` when its tokens are taken in and
    `finished` when it is over; `arrived` and `forget` between iterations, and `left` between `advanced` and `finished`.

    Attributes:
        metrics: where iterations are recorded.
    """

    def __init__(self) -> None:
        self.metrics = EngineMetrics()
        self._requests: dict[str, RequestMetrics] = {}
        self._preempted: set[str] = set()
        self._output: SchedulerOutput | None = None
        self._hit_tokens = self._new_tokens = self._token_layers = 0

    @property
    def num_requests(self) -> int:
        """Requests that are followed: the unfinished ones."""
        return len(self._requests)

    def arrived(self, request_id: str) -> None:
        """A request was taken in."""
        self._requests[request_id] = RequestMetrics(time.perf_counter())

    def left(self, request: Request) -> RequestMetrics:
        """A request has ended; its metrics."""
        times = self._requests[request.request_id]
        self.forget(request.request_id)
        times.finished_at = time.perf_counter()
        times.preemptions, times.cached_tokens = request.num_preemptions, request.num_cached_tokens
        return times

    def forget(self, request_id: str) -> None:
        """Nobody will ask about a request any more."""
        self._requests.pop(request_id, None)
        self._preempted.discard(request_id)

    def scheduled(self, output: SchedulerOutput) -> None:
        """The rows of an iteration are chosen."""
        self._output = output
        self._hit_tokens = self._new_tokens = self._token_layers = 0
        self._preempted.update(request_id for request_id in output.preempted if request_id in self._requests)
        now = time.perf_counter()
        for item in output.scheduled:
            request_id = item.request.request_id
            times = self._requests[request_id]
            # Rows of a request that has nothing in the cache yet begin after what the cache held already.
            if times.scheduled_at is None:
                times.scheduled_at = now
                self._hit_tokens += item.start
            elif request_id in self._preempted:
                self._preempted.discard(request_id)
                self._hit_tokens += item.start

    def advanced(self, requests: Iterable[Request]) -> None:
        """Some requests have new tokens, or may have."""
        now = time.perf_counter()
        for request in requests:
            times = self._requests.get(request.request_id)
            if times is None:
                continue
            known = len(times.token_times)
            layers = request.exit_layers[known:]
            if layers:
                times.token_times += [now] * len(layers)
                times.exit_layers += layers
                times.confidences += request.confidences[known:]
                self._new_tokens += len(layers)
                self._token_layers += sum(layers)

    def finished(self, parts: Mapping[Part, float], trace: Trace, after: Gauges) -> None:
        """The iteration is over.

        Args:
            parts: seconds by part.
            trace: what the executor did.
            after: how the engine stands now.
        """
        output, self._output = self._output, None
        assert output is not None
        decode_rows = sum(item.num_tokens for item in output.scheduled if item.phase is Phase.DECODE)
        self.metrics.add(
            IterationRecord(
                iteration=output.iteration,
                parts=parts,
                segments=tuple(trace.segments),
                decode_rows=decode_rows,
                prefill_rows=output.num_tokens - decode_rows,
                source_rows=output.num_source_tokens,
                filled_rows=trace.filled_rows,
                pending_rows=trace.pending_rows,
                vetoed_rows=trace.vetoed_rows,
                parked_requests=trace.parked_requests,
                new_tokens=self._new_tokens,
                token_layers=self._token_layers,
                preemptions=len(output.preempted),
                prefix_hit_tokens=self._hit_tokens,
                after=after,
            )
        )
