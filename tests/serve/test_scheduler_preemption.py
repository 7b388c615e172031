"""Blocks that run out, and who loses them."""

from __future__ import annotations

import pytest

from helpers.requests import NUM_LAYERS, make_request, make_scheduler
from helpers.scheduling import EARLY, finish, names, rows, step
from offramp.common.errors import OfframpError
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.request import Request, RequestStatus
from offramp.serve.scheduling.scheduler import QueueFullError, Scheduler
from offramp.serve.scheduling.scheduler_output import Phase


def crowd(exits: ExitOptions | None = None) -> tuple[Scheduler, Request, Request]:
    """Two requests that cannot both grow to their end in the 6 blocks of 2 tokens that there are."""
    scheduler, _ = make_scheduler(num_blocks=6, block_size=2)
    older = make_request("older", prompt=2, max_tokens=8)
    newer = make_request("newer", prompt=3, max_tokens=8, exits=exits)
    scheduler.add(older)
    scheduler.add(newer)
    return scheduler, older, newer


def test_without_blocks_the_newest_waits_and_then_runs_again_as_before() -> None:
    scheduler, older, newer = crowd(ExitOptions("fill"))
    outputs = [step(scheduler, exit_layer=EARLY)]
    while not outputs[-1].preempted:
        assert names(outputs[-1])[0] == "older"
        outputs.append(step(scheduler, exit_layer=EARLY))
    assert outputs[-1].preempted == ("newer",)
    assert names(outputs[-1]) == ["older"]
    assert (newer.status, newer.num_preemptions, newer.num_computed_tokens) == (RequestStatus.WAITING, 1, 0)
    assert (scheduler.num_preemptions, scheduler.num_waiting, scheduler.num_running) == (1, 1, 1)
    generated = len(newer.output_token_ids)
    replay = step(scheduler)
    while names(replay) == ["older"]:
        replay = step(scheduler)
    assert older.finish_reason == "length"
    (item,) = replay.scheduled
    assert rows(replay) == [("newer", Phase.PREFILL, 0, 3 + generated - 1)]
    assert not item.samples
    assert item.exit_layers == (NUM_LAYERS,) * 3 + (EARLY,) * (generated - 1)
    assert rows(step(scheduler)) == [("newer", Phase.DECODE, 3 + generated - 1, 1)]
    finish(scheduler)
    assert len(newer.output_token_ids) == 8


@pytest.mark.parametrize("exits", [ExitOptions("full"), ExitOptions("recompute"), ExitOptions("verify")])
def test_exact_policies_run_again_at_full_depth(exits: ExitOptions) -> None:
    scheduler, _, newer = crowd(exits)
    while not newer.num_preemptions:
        step(scheduler)
    replay = step(scheduler)
    while names(replay) == ["older"]:
        replay = step(scheduler)
    assert replay.scheduled[0].phase is Phase.PREFILL
    assert replay.scheduled[0].exit_layers is None


def test_a_preempted_request_goes_before_new_ones_and_is_not_counted_as_one_too_many() -> None:
    scheduler, _ = make_scheduler(num_blocks=6, block_size=2, max_waiting=1)
    scheduler.add(make_request("older", prompt=2, max_tokens=8))
    step(scheduler)
    newer = make_request("newer", prompt=3, max_tokens=8)
    scheduler.add(newer)
    while not newer.num_preemptions:
        step(scheduler)
    scheduler.add(make_request("new", prompt=1, max_tokens=1))
    with pytest.raises(QueueFullError):
        scheduler.add(make_request("more", max_tokens=1))
    with pytest.raises(OfframpError, match="'newer' is in use"):
        scheduler.add(make_request("newer", max_tokens=1))
    assert scheduler.num_waiting == 2
    seen: list[str] = []
    while scheduler.has_unfinished:
        seen += [name for name in names(step(scheduler)) if name not in seen]
    assert seen == ["older", "newer", "new"]


def test_a_preempted_request_can_be_cancelled() -> None:
    scheduler, _, newer = crowd()
    while not newer.num_preemptions:
        step(scheduler)
    assert scheduler.cancel("newer") is newer
    assert (newer.status, scheduler.num_waiting) == (RequestStatus.CANCELLED, 0)
    finish(scheduler)


def test_what_was_preempted_does_not_come_back_for_a_block_or_two() -> None:
    scheduler, older, newer = crowd()
    finish(scheduler)
    assert (older.num_preemptions, newer.num_preemptions) == (0, 1)


def test_a_more_urgent_request_takes_the_seat_of_the_least_urgent_and_newest() -> None:
    scheduler, _ = make_scheduler(max_num_seqs=3)
    for name, priority in (("usual", 0), ("late1", 1), ("late2", 1)):
        scheduler.add(make_request(name, priority=priority, max_tokens=8))
    step(scheduler)
    scheduler.add(make_request("same", priority=1, max_tokens=8))
    assert names(step(scheduler)) == ["usual", "late1", "late2"]
    scheduler.add(make_request("urgent", priority=-1, max_tokens=8))
    output = step(scheduler)
    assert output.preempted == ("late2",)
    assert names(output) == ["usual", "late1", "urgent"]
    finish(scheduler)


def test_a_more_urgent_request_takes_blocks() -> None:
    scheduler, _ = make_scheduler(num_blocks=4, block_size=4)
    late = make_request("late", prompt=12, max_tokens=2, priority=1)
    scheduler.add(late)
    step(scheduler)
    scheduler.add(make_request("urgent", prompt=8, max_tokens=1))
    assert names(step(scheduler)) == ["urgent"]
    assert late.num_preemptions == 1
    finish(scheduler)
    assert late.finish_reason == "length"


def test_a_chunk_is_as_long_as_there_are_blocks() -> None:
    scheduler, _ = make_scheduler(num_blocks=19, block_size=4, budget=6)
    for name in "abc":
        scheduler.add(make_request(name, prompt=1, max_tokens=30))
    for _ in range(3):
        step(scheduler)
    scheduler.add(make_request("long", prompt=30, max_tokens=1))
    chunks: list[int] = []
    while not scheduler.num_preemptions:
        chunks += [item.num_tokens for item in step(scheduler).scheduled if item.phase is Phase.PREFILL]
    assert chunks == [3] * 9 + [1]
    finish(scheduler)
