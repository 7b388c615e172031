"""Tokens that wait for a deeper pass, drafts that are judged, and passes of similar depth."""

from __future__ import annotations

import pytest

from helpers.requests import NUM_LAYERS, make_request, make_scheduler
from helpers.scheduling import EARLY, names, step
from offramp.common.errors import OfframpError
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.iteration_result import IterationResult, SampledToken
from offramp.serve.scheduling.scheduler_output import Phase


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
