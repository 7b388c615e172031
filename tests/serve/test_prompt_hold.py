"""Prompts start together with a deep pass, and never wait for long."""

from __future__ import annotations

from helpers.requests import make_request
from offramp.common.exits.kv_policy import KVPolicy
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.request import Request
from offramp.serve.scheduling.prompt_hold import PromptHold
from offramp.serve.scheduling.sequence import SequenceState


def decoding(name: str, kv_policy: KVPolicy = "fill") -> SequenceState:
    request: Request = make_request(name, exits=ExitOptions(kv_policy))
    request.num_computed_tokens = request.num_prompt_tokens
    return SequenceState(request)


RUNNING = [decoding(f"r{index}") for index in range(8)]


def test_prompts_wait_until_they_and_the_parked_rows_make_the_quorum() -> None:
    hold = PromptHold(0.5, 8)
    assert hold.holds(1, RUNNING)
    hold.update(["r0"], is_deep=False)  # one more like it is expected: 1 + 1 + 1 of 4
    assert hold.holds(1, RUNNING)
    assert not hold.holds(2, RUNNING)
    hold.update(["r0", "r1"], is_deep=False)
    assert not hold.holds(1, RUNNING)  # 1 + 2 + 1
    hold.update(["r0", "r1"], is_deep=False)  # nobody new was parked
    assert hold.holds(1, RUNNING)


def test_rows_of_requests_that_have_ended_are_not_counted() -> None:
    hold = PromptHold(0.5, 8)
    hold.update(["gone", "r1"], is_deep=False)
    hold.update(["gone", "r1"], is_deep=False)
    assert hold.holds(2, RUNNING)


def test_prompts_never_wait_longer_than_a_parked_row() -> None:
    hold = PromptHold(1.0, 3)
    assert [hold.holds(1, RUNNING) for _ in range(5)] == [True, True, True, False, True]


def test_prompts_do_not_wait_where_the_pass_is_deep_anyway_or_nothing_runs() -> None:
    hold = PromptHold(0.5, 8)
    prefilling = SequenceState(make_request("new"))
    assert not hold.holds(1, [])
    assert not hold.holds(1, [*RUNNING, prefilling])
    assert not hold.holds(1, [*RUNNING, decoding("deep", "full")])
    assert not PromptHold(0.0, 8).holds(1, RUNNING)


def test_prompts_do_not_wait_where_one_deep_pass_follows_the_other() -> None:
    hold = PromptHold(1.0, 8)
    hold.update([], is_deep=True)
    assert hold.holds(1, RUNNING)
    hold.update([], is_deep=True)
    assert not hold.holds(1, RUNNING)
    hold.update([], is_deep=True, has_prompts=True)  # prompts that came one after the other would never be held again
    assert hold.holds(1, RUNNING)


def test_prompts_do_not_wait_where_all_that_runs_has_a_fixed_depth() -> None:
    static = [SequenceState(make_request(name, exits=ExitOptions("static", static_layer=1))) for name in "abcd"]
    for sequence in static:
        sequence.request.num_computed_tokens = sequence.request.num_prompt_tokens
    assert not PromptHold(1.0, 8).holds(1, static)
    assert PromptHold(1.0, 8).holds(1, [*static, *RUNNING])
