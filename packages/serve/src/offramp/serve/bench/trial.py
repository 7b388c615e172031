"""One run over one workload: what is asked, and when each token came. All figures are made of that."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from offramp.serve.measures.records import IterationRecord


@dataclass(frozen=True)
class Question:
    """What a contestant is asked in one run.

    Attributes:
        prompts: token ids of each.
        new_tokens: tokens to generate for each; the most, with `until_eos`.
        in_flight: sequences at once; the next prompt is asked when a sequence ends.
        until_eos: sequences end at the model's end-of-sequence tokens.
        hard_share: share of the sequences that run at full depth, evenly spread over the prompts.
    """

    prompts: Sequence[Sequence[int]]
    new_tokens: int
    in_flight: int
    until_eos: bool = False
    hard_share: float = 0.0

    @property
    def closed_loop(self) -> bool:
        """Whether somebody has to wait for a seat."""
        return self.in_flight < len(self.prompts)

    def is_hard(self, index: int) -> bool:
        """Whether a sequence runs at full depth whatever the rest does."""
        return int((index + 1) * self.hard_share + 1e-9) > int(index * self.hard_share + 1e-9)


@dataclass(frozen=True)
class Trial:
    """One run over one workload. All times are seconds from its start.

    What counts lies in its window: where all sequences start together, from the moment when each of them has a token
    to the end; in a closed loop, from the moment when as many have ended as there are seats (so that no more beginnings
    coincide than chance wants) to the moment when the last one starts (so that every seat is taken).

    Attributes:
        token_times: for each sequence, when each of its tokens came.
        starts: for each sequence, when it was asked for; empty: all at the start.
        in_flight: of a closed loop; None: all started together.
        exit_layers: (when, layers run) of every token that follows another one of its sequence; empty if not known.
        iterations: (when it was over, record) of the engine's iterations; empty for others.
        texts: of the sequences; empty if nobody keeps them.
    """

    token_times: Sequence[Sequence[float]]
    starts: Sequence[float] = ()
    in_flight: int | None = None
    exit_layers: Sequence[tuple[float, int]] = ()
    iterations: Sequence[tuple[float, IterationRecord]] = ()
    texts: Sequence[str] = field(default=())

    @property
    def window(self) -> tuple[float, float]:
        """Begin and end of what counts: an event belongs to it if begin < moment <= end."""
        if self.in_flight is None:
            return max(times[0] for times in self.token_times), self.total_s
        ends = sorted(times[-1] for times in self.token_times)
        return ends[self.in_flight - 1], max(self.starts)

    def counts(self, moment: float) -> bool:
        """Whether something that happened then belongs to the window."""
        begin, end = self.window
        return begin < moment <= end

    @property
    def total_s(self) -> float:
        """Seconds until every sequence had all its tokens."""
        return max(times[-1] for times in self.token_times)

    @property
    def num_tokens(self) -> int:
        """All tokens generated."""
        return sum(map(len, self.token_times))

    @property
    def window_s(self) -> float:
        """Length of the window."""
        begin, end = self.window
        return end - begin

    @property
    def rate(self) -> float | None:
        """Tokens per second in the window; None if nothing happens in it."""
        begin, end = self.window
        count = sum(begin < moment <= end for times in self.token_times for moment in times)
        return count / (end - begin) if end > begin else None

    @property
    def request_rate(self) -> float | None:
        """Sequences that end per second in the window of a closed loop."""
        if self.in_flight is None or self.window_s <= 0:
            return None
        return sum(self.counts(times[-1]) for times in self.token_times) / self.window_s

    @property
    def mean_in_flight(self) -> float | None:
        """Sequences asked for and not ended, on average over the window; None if it is empty."""
        begin, end = self.window
        if end <= begin:
            return None
        starts = self.starts or [0.0] * len(self.token_times)
        spans = zip(starts, (times[-1] for times in self.token_times), strict=True)
        return sum(max(0.0, min(last, end) - max(first, begin)) for first, last in spans) / (end - begin)

    @property
    def first_token_s(self) -> list[float]:
        """Seconds from when a sequence was asked for to its first token; in a closed loop of those in the window."""
        starts = self.starts or [0.0] * len(self.token_times)
        return [
            times[0] - start
            for start, times in zip(starts, self.token_times, strict=True)
            if self.in_flight is None or self.counts(times[0])
        ]

    @property
    def gaps(self) -> list[float]:
        """Seconds between neighbouring tokens of a sequence; in a closed loop of those in the window."""
        return [
            b - a
            for times in self.token_times
            for a, b in itertools.pairwise(times)
            if self.in_flight is None or self.counts(b)
        ]

    @property
    def window_layers(self) -> list[int]:
        """Layers run for the tokens of the window that follow another one of their sequence."""
        return [layers for moment, layers in self.exit_layers if self.counts(moment)]

    @property
    def window_iterations(self) -> list[IterationRecord]:
        """The engine's iterations in the window."""
        return [record for moment, record in self.iterations if self.counts(moment)]
