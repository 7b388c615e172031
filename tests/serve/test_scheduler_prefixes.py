"""Blocks that requests share, and those that are not exact."""

from __future__ import annotations

import pytest

from helpers.requests import NUM_LAYERS, make_request, make_scheduler
from helpers.scheduling import EARLY, finish, names, rows, step
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.iteration_result import IterationResult, TokenLogprobs
from offramp.serve.request.request import Blame, Request
from offramp.serve.scheduling.scheduler import Scheduler
from offramp.serve.scheduling.scheduler_output import Phase


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


@pytest.mark.parametrize("blame", ["numbers", "request", "engine"])
def test_what_a_request_with_wrong_numbers_computed_is_not_used_again(blame: Blame) -> None:
    scheduler = cached_scheduler(budget=8)
    prompt = tuple(range(12))
    scheduler.add(make_request("bad", prompt=prompt, max_tokens=4))
    step(scheduler)
    output = scheduler.schedule()
    scheduler.fail("bad", "its logits are not finite.", blame)
    scheduler.update(output, {})
    good = make_request("good", prompt=prompt, max_tokens=4)
    scheduler.add(good)
    finish(scheduler)
    assert good.num_cached_tokens == (0 if blame == "numbers" else 8)


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
