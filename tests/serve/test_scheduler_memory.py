"""Blocks that run out, are shared, or are not exact; tokens that wait or are judged."""

from __future__ import annotations

import pytest

from helpers.requests import NUM_LAYERS, make_request, make_scheduler
from offramp.common.errors import OfframpError
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.iteration_result import IterationResult, SampledToken, TokenLogprobs
from offramp.serve.request.request import Request, RequestStatus
from offramp.serve.scheduling.scheduler import QueueFullError, Scheduler
from offramp.serve.scheduling.scheduler_output import Phase, SchedulerOutput

EARLY = 1


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


# Preemption


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


# Prefix cache


def cached_scheduler(budget: int = 16) -> Scheduler:
    return make_scheduler(num_blocks=16, block_size=4, budget=budget, prefix_caching=True)[0]


def test_a_beginning_that_is_known_is_not_computed_again() -> None:
    scheduler = cached_scheduler()
    scheduler.add(make_request("first", prompt=tuple(range(10)), max_tokens=1))
    table = step(scheduler).scheduled[0].block_table
    second = make_request("second", prompt=(*range(8), 50, 51, 52), max_tokens=1)
    scheduler.add(second)
    output = step(scheduler)
    assert rows(output) == [("second", Phase.PREFILL, 8, 3)]
    assert output.scheduled[0].block_table[:2] == table[:2]
    assert output.copies == ()
    assert second.num_cached_tokens == 8


def test_the_last_token_of_a_prompt_runs_in_a_copy_of_its_block() -> None:
    scheduler = cached_scheduler()
    prompt = tuple(range(8))
    scheduler.add(make_request("first", prompt=prompt, max_tokens=4))
    table = step(scheduler).scheduled[0].block_table
    scheduler.add(make_request("second", prompt=prompt, max_tokens=4))
    output = step(scheduler)
    item = output.scheduled[1]
    assert rows(output)[1] == ("second", Phase.PREFILL, 7, 1)
    assert item.block_table[0] == table[0]
    assert item.block_table[1] not in table
    assert output.copies == ((table[1], item.block_table[1]),)
    # Once it is full it is the known block again, and the copy is free.
    assert scheduler.schedule().scheduled[1].block_table[:2] == table[:2]


def test_a_turn_that_goes_on_finds_prompt_and_answer_of_the_one_before() -> None:
    scheduler = cached_scheduler()
    first = make_request("first", prompt=tuple(range(5)), max_tokens=4)
    scheduler.add(first)
    finish(scheduler)
    second = make_request("second", prompt=(*first.prompt_token_ids, *first.output_token_ids, 9), max_tokens=1)
    scheduler.add(second)
    finish(scheduler)
    assert second.num_cached_tokens == 8


@pytest.mark.parametrize(
    ("exits", "num_exact"),
    [
        (ExitOptions("fill"), 6),
        (ExitOptions("static", static_layer=EARLY), 6),
        (ExitOptions("recompute", max_pending=8), 6),
    ],
)
def test_a_block_with_a_token_that_left_early_is_never_taken_for_exact(exits: ExitOptions, num_exact: int) -> None:
    scheduler = cached_scheduler()
    first = make_request("first", prompt=tuple(range(6)), max_tokens=8, exits=exits)
    scheduler.add(first)
    finish(scheduler, exit_layer=EARLY)
    assert first.num_exact_tokens == num_exact
    second = make_request("second", prompt=(*first.prompt_token_ids, *first.output_token_ids), max_tokens=1)
    scheduler.add(second)
    finish(scheduler)
    assert second.num_cached_tokens == 4


def test_a_complete_pass_makes_tokens_exact_under_recompute_and_not_under_fill() -> None:
    found: dict[str, int] = {}
    for exits in (ExitOptions("recompute"), ExitOptions("fill")):
        scheduler = cached_scheduler()
        first = make_request("first", prompt=tuple(range(6)), max_tokens=8, exits=exits)
        scheduler.add(first)
        for layer in (NUM_LAYERS, EARLY, EARLY, NUM_LAYERS):
            step(scheduler, exit_layer=layer)
        found[exits.kv_policy] = first.num_exact_tokens
    assert found == {"recompute": 9, "fill": 6}


def test_prompt_logprobs_are_computed_and_so_nothing_is_taken_over() -> None:
    scheduler = cached_scheduler(budget=6)
    prompt = tuple(range(10))
    scheduler.add(make_request("first", prompt=prompt, max_tokens=1))
    finish(scheduler)
    asking = make_request("asking", prompt=prompt, max_tokens=0, prompt_logprobs=0)
    scheduler.add(asking)
    ended: list[list[Request]] = []
    for start, stop in ((0, 6), (6, 10)):
        output = scheduler.schedule()
        assert rows(output) == [("asking", Phase.PREFILL, start, stop - start)]
        assert not output.scheduled[0].samples
        told = tuple(TokenLogprobs(prompt[index + 1], -0.5) for index in range(start, min(stop, 9)))
        ended.append(scheduler.update(output, {"asking": IterationResult(prompt_logprobs=told)}))
    assert ended == [[], [asking]]
    assert (asking.finish_reason, asking.output_token_ids, asking.num_cached_tokens) == ("length", [], 0)
    assert [one.token_id for one in asking.prompt_logprobs] == list(prompt[1:])


def test_a_prompt_that_fills_the_cache_and_is_known_can_run_again() -> None:
    scheduler, _ = make_scheduler(num_blocks=4, block_size=4, budget=15, prefix_caching=True)
    prompt = tuple(range(16))
    told = tuple(TokenLogprobs(token, -0.5) for token in prompt[1:])
    asking, urgent = (
        make_request(name, prompt=prompt, priority=priority, max_tokens=0, prompt_logprobs=0)
        for name, priority in (("asking", 1), ("urgent", 0))
    )
    ran: list[str] = []
    for arriving in (asking, urgent, None, None, None):
        if arriving is not None:
            scheduler.add(arriving)
        output = scheduler.schedule()
        ran += names(output)
        results = {
            item.request.request_id: IterationResult(prompt_logprobs=told[item.start : item.start + item.num_tokens])
            for item in output.scheduled
        }
        scheduler.update(output, results)
    # The last token is run in a copy, for which there is a block only if one that is known is given up.
    assert ran == ["asking", "urgent", "urgent", "asking"]
    assert (asking.num_preemptions, asking.finish_reason) == (1, "length")


def test_equal_prompts_at_the_same_time_are_computed_once() -> None:
    scheduler = cached_scheduler()
    for name in "abc":
        scheduler.add(make_request(name, prompt=tuple(range(9)), max_tokens=4))
    assert names(step(scheduler)) == ["a"]
    assert rows(step(scheduler))[1:] == [("b", Phase.PREFILL, 8, 1), ("c", Phase.PREFILL, 8, 1)]


@pytest.mark.parametrize("is_numeric", [True, False])
def test_what_a_request_with_wrong_numbers_computed_is_not_used_again(is_numeric: bool) -> None:
    scheduler = cached_scheduler(budget=8)
    prompt = tuple(range(12))
    scheduler.add(make_request("bad", prompt=prompt, max_tokens=4))
    step(scheduler)
    output = scheduler.schedule()
    scheduler.fail("bad", "its logits are not finite.", is_numeric=is_numeric)
    scheduler.update(output, {})
    good = make_request("good", prompt=prompt, max_tokens=4)
    scheduler.add(good)
    finish(scheduler)
    assert good.num_cached_tokens == (0 if is_numeric else 8)


def test_without_prefix_caching_nothing_is_shared() -> None:
    scheduler, pool = make_scheduler(block_size=4)
    for name in "ab":
        request = make_request(name, prompt=tuple(range(9)), max_tokens=1)
        scheduler.add(request)
        finish(scheduler)
        assert (request.num_cached_tokens, pool.num_cached) == (0, 0)


def test_of_a_beginning_that_must_be_lost_the_end_is_lost_first() -> None:
    scheduler, pool = make_scheduler(num_blocks=4, block_size=4, prefix_caching=True)
    prompt = tuple(range(12))
    scheduler.add(make_request("first", prompt=prompt, max_tokens=1))
    finish(scheduler)
    assert (pool.num_cached, pool.num_free) == (3, 1)
    scheduler.add(make_request("other", prompt=(50, 51, 52, 53, 54), max_tokens=1))
    finish(scheduler)
    again = make_request("again", prompt=prompt, max_tokens=1)
    scheduler.add(again)
    finish(scheduler)
    assert again.num_cached_tokens == 8


def test_a_request_that_runs_again_takes_nothing_exact_for_what_it_had_filled() -> None:
    scheduler, _ = make_scheduler(block_size=4, max_num_seqs=2, prefix_caching=True)
    filled = make_request("filled", prompt=tuple(range(6)), max_tokens=12, priority=1)
    scheduler.add(filled)
    for layer in (NUM_LAYERS, NUM_LAYERS, NUM_LAYERS, EARLY, NUM_LAYERS, EARLY, EARLY, EARLY):
        step(scheduler, exit_layer=layer)
    assert filled.num_exact_tokens == 8
    tokens = tuple(filled.tokens(0, filled.num_tokens))
    scheduler.add(make_request("exact", prompt=(*tokens, 7, 7), max_tokens=1))
    while len(names(step(scheduler))) < 2:
        pass
    for name in "ab":  # both seats
        scheduler.add(make_request(name, prompt=(50, 51), max_tokens=2))
    while not filled.num_preemptions:
        step(scheduler, exit_layer=EARLY)
    output = step(scheduler)
    while "filled" not in names(output):
        output = step(scheduler)
    (item,) = (item for item in output.scheduled if item.request is filled)
    assert item.start == 8
    assert item.exit_layers is not None
    assert item.exit_layers[:2] == (EARLY, NUM_LAYERS)


def test_what_ran_again_at_full_depth_is_exact_even_if_it_had_left_early() -> None:
    scheduler, _ = make_scheduler(block_size=4, max_num_seqs=1)
    request = make_request("a", prompt=3, max_tokens=12, priority=1, exits=ExitOptions("recompute"))
    scheduler.add(request)
    for _ in range(4):
        step(scheduler, exit_layer=EARLY)
    assert (request.num_computed_tokens, request.num_exact_tokens) == (6, 3)
    scheduler.add(make_request("urgent", max_tokens=1))
    while request.num_computed_tokens != 6 or not request.num_preemptions:
        step(scheduler, exit_layer=EARLY)
    assert (request.num_exact_tokens, request.num_pending) == (6, 3)


# Tokens that wait, and tokens that are judged


def test_waiting_tokens_count_against_the_budget_and_decodes_take_turns() -> None:
    scheduler, _ = make_scheduler(budget=6, max_num_seqs=3)
    exits = ExitOptions("recompute", max_pending=3)
    for name in "abc":
        scheduler.add(make_request(name, prompt=1, max_tokens=12, exits=exits))
    waited = dict.fromkeys("abc", 0)
    for _ in range(14):
        output = scheduler.schedule()
        assert sum(1 + item.request.num_pending for item in output.scheduled if item.phase is Phase.DECODE) <= 6
        waited = {name: 0 if name in names(output) else waited[name] + 1 for name in waited}
        assert max(waited.values()) <= 2
        forced = {item.request.request_id for item in output.scheduled if item.request.runs_full_depth}
        results = {
            name: IterationResult((SampledToken(7, NUM_LAYERS if name in forced else EARLY),)) for name in names(output)
        }
        scheduler.update(output, results)


def test_a_pass_that_cannot_leave_room_for_others_is_refused() -> None:
    scheduler, _ = make_scheduler(budget=6)
    with pytest.raises(OfframpError, match=r"max_pending 5 lets 5 tokens .* max_tokens_per_iteration 6"):
        scheduler.add(make_request(exits=ExitOptions("verify", max_pending=5)))
    scheduler.add(make_request("b", exits=ExitOptions("verify", max_pending=4)))
    scheduler.add(make_request("c", exits=ExitOptions("fill")))


def test_drafts_are_continued_from_and_those_refused_are_rolled_back() -> None:
    scheduler, _ = make_scheduler()
    request = make_request("a", prompt=4, max_tokens=10, exits=ExitOptions("verify"))
    scheduler.add(request)
    step(scheduler)
    for draft in (20, 21, 22):
        output = scheduler.schedule()
        assert output.scheduled[0].samples
        assert scheduler.update(output, {"a": IterationResult(draft=SampledToken(draft, EARLY))}) == [request]
    assert (request.num_tokens, request.num_computed_tokens, request.num_exact_tokens) == (8, 7, 4)
    assert (request.num_pending, request.output_token_ids) == (3, [7])
    output = scheduler.schedule()
    assert output.scheduled[0].token_ids == [22]
    scheduler.update(output, {"a": IterationResult((SampledToken(20, EARLY), SampledToken(30, NUM_LAYERS)))})
    assert (request.output_token_ids, request.exit_layers) == ([7, 20, 30], [NUM_LAYERS, EARLY, NUM_LAYERS])
    assert (request.drafts, request.num_pending) == ([], 0)
    assert (request.num_tokens, request.num_computed_tokens, request.num_exact_tokens) == (7, 6, 6)
    assert scheduler.schedule().scheduled[0].token_ids == [30]


@pytest.mark.parametrize(
    ("max_tokens", "judged", "left", "reason"),
    [
        (10, (20, 2, 22), [7, 20, 2], "stop"),
        (3, (20, 21, 22), [7, 20, 21], "length"),
        (3, (20, 2, 5), [7, 20, 2], "stop"),
    ],
)
def test_the_end_may_lie_within_the_tokens_of_one_pass(
    max_tokens: int, judged: tuple[int, ...], left: list[int], reason: str
) -> None:
    scheduler, pool = make_scheduler()
    request = make_request("a", max_tokens=max_tokens, eos=(2,), exits=ExitOptions("verify"))
    scheduler.add(request)
    step(scheduler)
    output = scheduler.schedule()
    scheduler.update(output, {"a": IterationResult(tuple(SampledToken(token, NUM_LAYERS) for token in judged))})
    assert (request.output_token_ids, request.finish_reason) == (left, reason)
    assert pool.num_live == 0


def test_preemption_drops_drafts_but_not_the_time_of_the_next_complete_pass() -> None:
    for exits, num_pending in ((ExitOptions("recompute"), 2), (ExitOptions("verify"), 0)):
        scheduler, _ = make_scheduler(max_num_seqs=1)
        request = make_request("a", max_tokens=9, priority=1, exits=exits)
        scheduler.add(request)
        step(scheduler)
        for _ in range(2):
            token = SampledToken(9, EARLY)
            result = IterationResult((token,)) if num_pending else IterationResult(draft=token)
            scheduler.update(scheduler.schedule(), {"a": result})
        assert request.num_pending == 2
        scheduler.add(make_request("urgent"))
        assert step(scheduler).preempted == ("a",)
        assert (request.num_pending, request.drafts) == (num_pending, [])


# Grouping by depth


def test_iterations_run_sequences_of_similar_depth_and_none_waits_for_long() -> None:
    scheduler, _ = make_scheduler(group_by_depth=True)
    depths = {"deep1": NUM_LAYERS, "shallow1": EARLY, "deep2": NUM_LAYERS, "shallow2": EARLY}
    for name in depths:
        scheduler.add(make_request(name, max_tokens=20))
    groups: list[set[str]] = []
    for _ in range(12):
        output = scheduler.schedule()
        groups.append(set(names(output)))
        scheduler.update(
            output,
            {
                name: IterationResult((SampledToken(7, depths[name] if output.iteration else NUM_LAYERS),))
                for name in names(output)
            },
        )
    assert groups[0] == groups[1] == set(depths)  # nothing is known yet
    assert groups[2:] == [{"deep1", "deep2"}, {"shallow1", "shallow2"}] * 5
