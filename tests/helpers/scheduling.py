"""Iterations of a scheduler without a model."""

from __future__ import annotations

from helpers.requests import NUM_LAYERS
from offramp.serve.request.iteration_result import IterationResult, SampledToken
from offramp.serve.scheduling.scheduler import Scheduler
from offramp.serve.scheduling.scheduler_output import Phase, SchedulerOutput

EARLY = 1
"""An exit layer."""


def rows(output: SchedulerOutput) -> list[tuple[str, Phase, int, int]]:
    return [(i.request.request_id, i.phase, i.start, i.num_tokens) for i in output.scheduled]


def names(output: SchedulerOutput) -> list[str]:
    return [item.request.request_id for item in output.scheduled]


def step(scheduler: Scheduler, token_id: int = 7, exit_layer: int = NUM_LAYERS) -> SchedulerOutput:
    """One iteration in which every decode leaves at `exit_layer`."""
    output = scheduler.schedule()
    results = {
        item.request.request_id: IterationResult(
            (SampledToken(token_id, exit_layer if item.phase is Phase.DECODE else NUM_LAYERS),)
        )
        for item in output.scheduled
        if item.samples
    }
    scheduler.update(output, results)
    return output


def finish(scheduler: Scheduler, exit_layer: int = NUM_LAYERS) -> None:
    for _ in range(1000):
        if not scheduler.has_unfinished:
            return
        step(scheduler, exit_layer=exit_layer)
    raise AssertionError("did not end")
