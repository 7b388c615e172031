from __future__ import annotations

from typing import Any

import pytest

from helpers.requests import NUM_LAYERS, make_request, make_scheduler, say
from offramp.common.errors import OfframpError
from offramp.serve.request.iteration_result import IterationResult, SampledToken, TokenLogprobs
from offramp.serve.request.request import Request, RequestStatus
from offramp.serve.scheduling.scheduler import QueueFullError, Scheduler
from offramp.serve.scheduling.scheduler_output import Phase, SchedulerOutput


def rows(output: SchedulerOutput) -> list[tuple[str, Phase, int, int, bool]]:
    return [(i.request.request_id, i.phase, i.start, i.num_tokens, i.samples) for i in output.scheduled]


def step(scheduler: Scheduler, token_id: int = 7) -> SchedulerOutput:
    output = scheduler.schedule()
    scheduler.update(output, say(output, token_id))
    return output


def run(scheduler: Scheduler, token_id: int = 7, limit: int = 1000) -> None:
    for _ in range(limit):
        if not scheduler.has_unfinished:
            return
        step(scheduler, token_id)
    raise AssertionError("did not end")


def test_a_long_prompt_is_prefilled_in_chunks_beside_decodes() -> None:
    scheduler, _ = make_scheduler(budget=8)
    scheduler.add(make_request("short", prompt=3))
    step(scheduler)
    scheduler.add(make_request("long", prompt=16))
    assert rows(step(scheduler)) == [("short", Phase.DECODE, 3, 1, True), ("long", Phase.PREFILL, 0, 7, False)]
    assert rows(step(scheduler)) == [("short", Phase.DECODE, 4, 1, True), ("long", Phase.PREFILL, 7, 7, False)]
    assert rows(step(scheduler)) == [("short", Phase.DECODE, 5, 1, True), ("long", Phase.PREFILL, 14, 2, True)]
    assert rows(step(scheduler)) == [("short", Phase.DECODE, 6, 1, True), ("long", Phase.DECODE, 16, 1, True)]


def test_the_rows_carry_their_tokens() -> None:
    scheduler, _ = make_scheduler(budget=4)
    scheduler.add(make_request("a", prompt=(10, 11, 12, 13, 14), max_tokens=3))
    seen = []
    while scheduler.has_unfinished:
        output = scheduler.schedule()
        seen.append(output.scheduled[0].token_ids)
        scheduler.update(output, say(output, token_id=20 + output.iteration))
    assert seen == [[10, 11, 12, 13], [14], [21], [22]]


def test_one_prompt_token_is_still_a_prefill() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_request("a", prompt=1))
    assert rows(step(scheduler)) == [("a", Phase.PREFILL, 0, 1, True)]
    assert rows(step(scheduler)) == [("a", Phase.DECODE, 1, 1, True)]


def test_decodes_advance_even_when_they_fill_the_budget() -> None:
    scheduler, _ = make_scheduler(max_num_seqs=3, budget=3)
    for name in "ab":
        scheduler.add(make_request(name, prompt=1))
    step(scheduler)
    scheduler.add(make_request("c", prompt=5))
    for start in range(5):
        assert rows(step(scheduler))[2:] == [("c", Phase.PREFILL, start, 1, start == 4)]


def test_the_head_of_the_queue_is_never_overtaken() -> None:
    scheduler, _ = make_scheduler(num_blocks=8, block_size=4)
    scheduler.add(make_request("running", prompt=12, max_tokens=16))
    step(scheduler)
    scheduler.add(make_request("big", prompt=20, max_tokens=1))
    scheduler.add(make_request("small", prompt=1, max_tokens=1))
    assert [row[0] for row in rows(step(scheduler))] == ["running"]
    scheduler.cancel("running")
    assert [row[0] for row in rows(step(scheduler))] == ["big"]
    assert [row[0] for row in rows(step(scheduler))] == ["big", "small"]


def test_blocks_are_taken_as_tokens_come() -> None:
    scheduler, pool = make_scheduler(num_blocks=8, block_size=4)
    scheduler.add(make_request("a", prompt=3, max_tokens=6))
    tables = []
    while scheduler.has_unfinished:
        tables.append(step(scheduler).scheduled[0].block_table)
    assert [len(table) for table in tables] == [1, 1, 2, 2, 2, 2]
    assert pool.num_live == 0


@pytest.mark.parametrize(
    ("limits", "numbers"), [({"max_model_len": 19}, ("20", "19")), ({"num_blocks": 4, "block_size": 4}, ("20", "16"))]
)
def test_what_can_never_fit_is_refused_with_both_numbers(limits: dict[str, Any], numbers: tuple[str, str]) -> None:
    scheduler, _ = make_scheduler(**limits)
    with pytest.raises(OfframpError, match=rf"make {numbers[0]} tokens, more than the {numbers[1]}") as fault:
        scheduler.add(make_request(prompt=12, max_tokens=8))
    assert not isinstance(fault.value, QueueFullError)
    assert not scheduler.has_unfinished
    scheduler.add(make_request(prompt=8, max_tokens=8))


def test_a_full_queue_is_its_own_error() -> None:
    scheduler, _ = make_scheduler(max_num_seqs=1, max_waiting=2)
    scheduler.add(make_request("a"))
    step(scheduler)
    scheduler.add(make_request("b"))
    scheduler.add(make_request("c"))
    with pytest.raises(QueueFullError, match="2 requests are waiting"):
        scheduler.add(make_request("d"))
    with pytest.raises(OfframpError, match="more than"):  # never fits: must not be told to come back
        scheduler.add(make_request("e", max_tokens=10**6))
    scheduler.cancel("b")
    scheduler.add(make_request("d"))


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_request("a", max_tokens=1))
    with pytest.raises(OfframpError, match="'a' is in use"):
        scheduler.add(make_request("a"))
    run(scheduler)
    scheduler.add(make_request("a", max_tokens=1))


def test_one_token_allowed_is_one_token_and_length() -> None:
    scheduler, pool = make_scheduler()
    request = make_request(max_tokens=1)
    scheduler.add(request)
    step(scheduler)
    assert (request.output_token_ids, request.exit_layers, request.finish_reason) == ([7], [NUM_LAYERS], "length")
    assert pool.num_live == 0


def test_a_stop_token_ends_the_request_from_the_first_token_to_the_last() -> None:
    for before in range(3):
        scheduler, pool = make_scheduler()
        request = make_request(max_tokens=3, eos=(1, 2))
        scheduler.add(request)
        for _ in range(before):
            step(scheduler)
        step(scheduler, token_id=2)
        assert request.finish_reason == "stop"
        assert request.output_token_ids == [7] * before + [2]
        assert pool.num_live == 0


def test_ignored_end_of_sequence_goes_on() -> None:
    scheduler, _ = make_scheduler()
    request = make_request(max_tokens=3, eos=(2,), ignore_eos=True)
    scheduler.add(request)
    run(scheduler, token_id=2)
    assert (request.output_token_ids, request.finish_reason) == ([2, 2, 2], "length")


def test_a_stop_string_ends_the_request_but_not_before_min_tokens() -> None:
    scheduler, _ = make_scheduler()
    request = make_request(max_tokens=5, min_tokens=2, eos=(9,))
    scheduler.add(request)
    asked: list[tuple[int, bool]] = []

    def stops(of: Request, token_id: int) -> bool:
        asked.append((token_id, of.may_stop))
        return True

    while scheduler.has_unfinished:
        output = scheduler.schedule()
        scheduler.update(output, say(output), stops)
    assert asked == [(7, False), (7, False), (7, True)]
    assert (len(request.output_token_ids), request.finish_reason) == (3, "stop")


def test_a_stop_string_on_the_last_allowed_token_is_a_stop() -> None:
    scheduler, _ = make_scheduler()
    request = make_request(max_tokens=1)
    scheduler.add(request)
    output = scheduler.schedule()
    scheduler.update(output, say(output), lambda *_: True)
    assert request.finish_reason == "stop"


def test_a_stop_token_is_no_text() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_request(eos=(7,)))
    output = scheduler.schedule()
    scheduler.update(output, say(output), lambda *_: pytest.fail("asked about a stop token"))


def test_logprobs_are_kept_only_where_asked_for() -> None:
    scheduler, _ = make_scheduler()
    requests = [make_request("a", logprobs=0, max_tokens=1), make_request("b", max_tokens=1)]
    for request in requests:
        scheduler.add(request)
    logprobs = TokenLogprobs(7, -0.5)
    output = scheduler.schedule()
    scheduler.update(output, {name: IterationResult((SampledToken(7, 1, logprobs=logprobs),)) for name in "ab"})
    assert [request.logprobs for request in requests] == [[logprobs], []]


@pytest.mark.parametrize("when", ["waiting", "prefill", "decode", "in flight"])
def test_cancel_gives_the_blocks_back_at_once(when: str) -> None:
    scheduler, pool = make_scheduler(budget=4, max_num_seqs=1)
    request, other = make_request("a", prompt=6), make_request("b", max_tokens=1)
    scheduler.add(request)
    scheduler.add(other)
    for _ in range({"waiting": 0, "prefill": 1, "decode": 3, "in flight": 3}[when]):
        step(scheduler)
    output = scheduler.schedule() if when == "in flight" else None
    num_tokens = len(request.output_token_ids)
    assert scheduler.cancel("a") is request
    assert (pool.num_live, request.status) == (0, RequestStatus.CANCELLED)
    if output is not None:
        assert scheduler.update(output, say(output)) == []
    assert len(request.output_token_ids) == num_tokens
    assert scheduler.cancel("a") is None
    run(scheduler)
    assert other.finish_reason == "length"
    assert pool.num_live == 0


def test_a_failed_request_leaves_its_neighbours_alone() -> None:
    scheduler, pool = make_scheduler()
    bad, good = make_request("bad"), make_request("good", max_tokens=2)
    scheduler.add(bad)
    scheduler.add(good)
    output = scheduler.schedule()
    assert scheduler.fail("bad", "its logits are not finite.") is bad
    assert scheduler.update(output, {"good": IterationResult((SampledToken(7, 1),))}) == [good]
    assert (bad.finish_reason, bad.error) == ("error", "its logits are not finite.")
    run(scheduler)
    assert good.finish_reason == "length"
    assert pool.num_live == 0


def test_a_missing_token_is_a_fault_of_the_caller() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_request("a"))
    with pytest.raises(KeyError):
        scheduler.update(scheduler.schedule(), {})


def test_what_is_in_flight_is_not_scheduled_again() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_request("a"))
    first = scheduler.schedule()
    assert not scheduler.schedule().scheduled
    scheduler.add(make_request("b"))
    second = scheduler.schedule()
    assert [item.request.request_id for item in second.scheduled] == ["b"]
    scheduler.update(second, say(second))
    scheduler.update(first, say(first))
    assert len(scheduler.schedule().scheduled) == 2


def test_what_is_answered_after_an_end_is_passed_over() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_request("a"))
    first = scheduler.schedule()
    scheduler.cancel("a")
    scheduler.add(again := make_request("a"))
    second = scheduler.schedule()
    assert not scheduler.awaits(first.scheduled[0])
    assert not scheduler.update(first, say(first))
    assert not again.output_token_ids
    assert scheduler.update(second, say(second)) == [again]
