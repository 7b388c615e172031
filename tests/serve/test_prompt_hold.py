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


def holding(quorum: float, max_iterations: int = 8) -> PromptHold:
    """Where somebody was parked lately, and nobody is now."""
    hold = PromptHold(quorum, max_iterations)
    hold.update(["somebody"], has_prompts=False)
    hold.update([], has_prompts=False)
    return hold


def test_prompts_wait_until_they_and_the_parked_rows_make_the_quorum() -> None:
    hold = holding(0.5)
    assert hold.holds(1, RUNNING)
    hold.update(["r0"], has_prompts=False)  # one more like it is expected: 1 + 1 + 1 of 4
    assert hold.holds(1, RUNNING)
    assert not hold.holds(2, RUNNING)
    hold.update(["r0", "r1"], has_prompts=False)
    assert not hold.holds(1, RUNNING)  # 1 + 2 + 1
    hold.update(["r0", "r1"], has_prompts=False)  # nobody new was parked
    assert hold.holds(1, RUNNING)


def test_rows_of_requests_that_have_ended_are_not_counted() -> None:
    hold = holding(0.5)
    hold.update(["gone", "r1"], has_prompts=False)
    hold.update(["gone", "r1"], has_prompts=False)
    assert hold.holds(2, RUNNING)


def test_prompts_never_wait_longer_than_a_parked_row() -> None:
    hold = holding(1.0, 3)
    assert [hold.holds(1, RUNNING) for _ in range(5)] == [True, True, True, False, True]


def test_prompts_do_not_wait_where_the_pass_is_deep_anyway_or_nothing_runs() -> None:
    prefilling = SequenceState(make_request("new"))
    assert holding(0.5).holds(1, RUNNING)
    assert not holding(0.5).holds(1, [])
    assert not holding(0.5).holds(1, [*RUNNING, prefilling])
    assert not holding(0.5).holds(1, [*RUNNING, decoding("deep", "full")])
    assert not holding(0.0).holds(1, RUNNING)


def test_prompts_do_not_wait_where_nobody_is_parked() -> None:
    assert not PromptHold(1.0, 8).holds(1, RUNNING)
    hold = holding(1.0)
    hold.update([], has_prompts=True)  # prompts that came one after the other would never be held again
    assert hold.holds(1, RUNNING)
    hold.update([], has_prompts=False)
    assert not hold.holds(1, RUNNING)
