"""Iterations under way in a pipeline, and how what comes back of them moves requests on.

What a request gets is known when its newest row was sure somewhere; then it can be scheduled again, though the row has
not been through all stages. Rows that predict nothing, chunks of prompts, count as computed as soon as they are sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from offramp.serve.execution.departures import Departure
from offramp.serve.execution.exit_test import RequestExits
from offramp.serve.measures.iteration_clock import IterationClock
from offramp.serve.pipeline.pipeline import Pipeline
from offramp.serve.request.request import Request
from offramp.serve.sampling.iteration_results import DecodingState, IterationResults
from offramp.serve.scheduling.progress import TextStops
from offramp.serve.scheduling.scheduler import Scheduler
from offramp.serve.scheduling.scheduler_output import SchedulerOutput


@dataclass
class _Pass:
    """One iteration under way.

    Attributes:
        output: what it runs.
        states: of its requests.
        num_asked: rows of it that have not been answered.
    """

    output: SchedulerOutput
    states: Sequence[DecodingState]
    num_asked: int


class Passes:
    """Sends iterations into a pipeline, and takes in what comes back."""

    def __init__(
        self, pipeline: Pipeline, scheduler: Scheduler, read: TextStops, num_layers: int, clock: IterationClock
    ) -> None:
        """Start with nothing under way.

        Args:
            pipeline: where iterations run.
            scheduler: whose iterations.
            read: told every token; see `Scheduler.update`.
            num_layers: of the model.
            clock: told what time is spent on.
        """
        self._pipeline, self._scheduler, self._read = pipeline, scheduler, read
        self._num_layers, self._clock = num_layers, clock
        self._passes: dict[int, _Pass] = {}

    def advance(
        self, output: SchedulerOutput, exits: Sequence[RequestExits | None], states: Sequence[DecodingState]
    ) -> Iterator[tuple[Request, int]]:
        """Begin an iteration, if it has rows, and take in what has come back meanwhile; wait for it if it has none.

        Args:
            output: what to run.
            exits: for each of its requests, the exits its tokens may take.
            states: of its requests.

        Yields:
            Requests that may have got a token or ended, and how many tokens they had before.

        Raises:
            OfframpError: a stage has ended.
        """
        if output.scheduled:
            self._pipeline.submit(output, exits, [state.logits_use for state in states])
            # Nobody will answer these.
            silent = tuple(item for item in output.scheduled if not item.samples)
            num_asked = len(output.scheduled) - len(silent)
            if num_asked:
                self._passes[output.iteration] = _Pass(output, states, num_asked)
            if silent:
                self._scheduler.update(replace(output, scheduled=silent), {}, self._read)
                yield from ((item.request, len(item.request.output_token_ids)) for item in silent)
        yield from self.take_in(wait=not output.scheduled)

    def take_in(self, *, wait: bool) -> Iterator[tuple[Request, int]]:
        """Take in what has come back; with `wait` not before something has, if anything is under way."""
        for number, departures in self._pipeline.collect(wait=wait):
            self._clock.lap("other")
            one = self._passes[number]
            answered = [item for departure in departures for item in departure.items]
            # What was cancelled or preempted meanwhile is not asked any more: its request may be elsewhere by now.
            wanted = {item for item in answered if self._scheduler.awaits(one.output.scheduled[item])}
            items = tuple(one.output.scheduled[item] for item in sorted(wanted))
            starts = [len(item.request.output_token_ids) for item in items]
            results = IterationResults(one.states, self._num_layers, self._scheduler.fail)
            results.add(_of(departure, wanted) for departure in departures)
            self._clock.lap("sampling")
            self._scheduler.update(replace(one.output, scheduled=items), results.by_id, self._read)
            one.num_asked -= len(answered)
            if not one.num_asked:
                del self._passes[number]
            yield from zip((item.request for item in items), starts, strict=True)


def _of(departure: Departure, wanted: set[int]) -> Departure:
    """The rows of some requests."""
    places = [place for place, item in enumerate(departure.items) if item in wanted]
    if len(places) == len(departure.items):
        return departure
    return Departure(
        [departure.items[place] for place in places],
        departure.exit_layer,
        [departure.confidence[place] for place in places],
        None if departure.best is None else departure.best.select(np.array(places, dtype=np.intp)),
        None if departure.logits is None else departure.logits[places],
    )
