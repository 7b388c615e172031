"""What the engine shows of itself: a record of each iteration, sums since the start, and the times of each request.

Plain numbers, no tensors. Always on: an iteration costs one record, a token one reading of the clock.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from offramp.serve.measures.iteration_clock import PARTS, Part

RECORDS_KEPT: Final = 4096


@dataclass(frozen=True)
class SegmentRun:
    """One run of layers on the rows inside.

    Attributes:
        start: layers run before it.
        stop: layers run after it.
        rows: rows it was run on.
        seconds: its share of `layers`.
    """

    start: int
    stop: int
    rows: int
    seconds: float


@dataclass
class Trace:
    """What the executor does in one iteration, noted as it goes.

    Attributes:
        segments: the layers that ran.
        filled_rows: rows whose skipped layers were filled.
        pending_rows: rows that had left earlier and were carried on from there.
        vetoed_rows: rows that had left and went on, because their best token is not on their shortlist.
        parked_requests: decoding requests that got no token, because their newest row waits at an exit.
    """

    segments: list[SegmentRun] = field(default_factory=list)
    filled_rows: int = 0
    pending_rows: int = 0
    vetoed_rows: int = 0
    parked_requests: int = 0


@dataclass(frozen=True)
class Gauges:
    """How the engine stands after an iteration.

    Attributes:
        running: requests admitted and unfinished.
        waiting: requests in the queue.
        live_blocks: blocks of the cache that requests hold.
        cached_blocks: blocks that nobody holds and whose keys and values may be used again.
        free_blocks: blocks that can be allocated, the cached ones included.
    """

    running: int = 0
    waiting: int = 0
    live_blocks: int = 0
    cached_blocks: int = 0
    free_blocks: int = 0


@dataclass(frozen=True)
class IterationRecord:
    """One iteration.

    Attributes:
        iteration: its number, from 0.
        parts: seconds by part; together they are the whole iteration.
        segments: the layers that ran, and on how many rows.
        decode_rows: newest tokens of requests that generate.
        prefill_rows: known tokens: of prompts, and of answers that run again after a preemption.
        source_rows: tokens of sources that the encoder read.
        filled_rows: rows whose skipped layers were filled.
        pending_rows: rows that had left earlier and were carried on from there by a deeper pass.
        vetoed_rows: rows that had left and went on, because their best token is not on their shortlist.
        parked_requests: decoding requests that got no token, because their newest row waits at an exit.
        new_tokens: tokens handed to requests.
        token_layers: layers run for those tokens, all together.
        preemptions: requests that lost their blocks before it.
        prefix_hit_tokens: tokens that requests did not have to compute, because the cache held them already.
        after: how the engine stood when it was over.
    """

    iteration: int
    parts: Mapping[Part, float]
    segments: tuple[SegmentRun, ...] = ()
    decode_rows: int = 0
    prefill_rows: int = 0
    source_rows: int = 0
    filled_rows: int = 0
    pending_rows: int = 0
    vetoed_rows: int = 0
    parked_requests: int = 0
    new_tokens: int = 0
    token_layers: int = 0
    preemptions: int = 0
    prefix_hit_tokens: int = 0
    after: Gauges = Gauges()

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self.parts.values())

    @property
    def row_layers(self) -> int:
        """Layers run, times the rows they were run on."""
        return sum(run.rows * (run.stop - run.start) for run in self.segments)


@dataclass
class Totals:
    """Sums over iterations; the attributes mean what they mean in `IterationRecord`.

    Attributes:
        iterations: how many.
    """

    iterations: int = 0
    parts: dict[Part, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    row_layers: int = 0
    decode_rows: int = 0
    prefill_rows: int = 0
    source_rows: int = 0
    filled_rows: int = 0
    pending_rows: int = 0
    vetoed_rows: int = 0
    parked_requests: int = 0
    new_tokens: int = 0
    token_layers: int = 0
    preemptions: int = 0
    prefix_hit_tokens: int = 0

    @classmethod
    def of(cls, records: Iterable[IterationRecord]) -> Totals:
        """The sums over some iterations."""
        totals = cls()
        for record in records:
            totals.add(record)
        return totals

    def add(self, record: IterationRecord) -> None:
        """Take one more iteration in."""
        self.iterations += 1
        for part, seconds in record.parts.items():
            self.parts[part] += seconds
        self.row_layers += record.row_layers
        self.decode_rows += record.decode_rows
        self.prefill_rows += record.prefill_rows
        self.source_rows += record.source_rows
        self.filled_rows += record.filled_rows
        self.pending_rows += record.pending_rows
        self.vetoed_rows += record.vetoed_rows
        self.parked_requests += record.parked_requests
        self.new_tokens += record.new_tokens
        self.token_layers += record.token_layers
        self.preemptions += record.preemptions
        self.prefix_hit_tokens += record.prefix_hit_tokens

    @property
    def seconds(self) -> float:
        """Time of all iterations."""
        return sum(self.parts.values())


class EngineMetrics:
    """The last iterations and the sums over all of them. Read it in the engine's thread, between iterations.

    Attributes:
        records: the last iterations, at most `RECORDS_KEPT`, oldest first.
        totals: over all iterations since the start.
    """

    def __init__(self) -> None:
        self.records: deque[IterationRecord] = deque(maxlen=RECORDS_KEPT)
        self.totals = Totals()

    def add(self, record: IterationRecord) -> None:
        """Take an iteration in."""
        self.records.append(record)
        self.totals.add(record)


@dataclass
class RequestMetrics:
    """The times of one request, in seconds of `time.perf_counter`, and what happened to it.

    Attributes:
        arrived_at: when the engine took it in.
        scheduled_at: when the first iteration that ran rows of it began; None if none has.
        token_times: for each token of the output, when the iteration that gave it ended. Tokens that one iteration
            gives together (`verify`) have the same time.
        finished_at: when it ended; None while it has not.
        exit_layers: for each token of the output, the layers run.
        confidences: for each of them, what the exit test measured; None at the final exit.
        preemptions: how often it lost its blocks and ran again.
        cached_tokens: tokens of its prompt that were not computed, because the cache held them when it was admitted
            for the first time.
    """

    arrived_at: float
    scheduled_at: float | None = None
    token_times: list[float] = field(default_factory=list)
    finished_at: float | None = None
    exit_layers: list[int] = field(default_factory=list)
    confidences: list[float | None] = field(default_factory=list)
    preemptions: int = 0
    cached_tokens: int = 0

    @property
    def queue_s(self) -> float | None:
        """Seconds it waited for its first iteration; None if it never had one."""
        return None if self.scheduled_at is None else self.scheduled_at - self.arrived_at

    @property
    def first_token_s(self) -> float | None:
        """Seconds from its arrival to its first token (TTFT); None if it has none."""
        return self.token_times[0] - self.arrived_at if self.token_times else None

    @property
    def inter_token_s(self) -> list[float]:
        """Seconds between neighbouring tokens: one fewer than there are tokens."""
        return [later - earlier for earlier, later in itertools.pairwise(self.token_times)]

    @property
    def total_s(self) -> float | None:
        """Seconds from its arrival to its end; None while it has not ended."""
        return None if self.finished_at is None else self.finished_at - self.arrived_at

    @property
    def mean_layers(self) -> float | None:
        """Layers run per token; None if it has no token."""
        return statistics.fmean(self.exit_layers) if self.exit_layers else None
