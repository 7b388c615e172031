"""Sources of encoder-decoder requests: read once, in the budget, into blocks of their own."""

from __future__ import annotations

import pytest

from helpers.requests import make_request, make_scheduler
from helpers.scheduling import finish, names, step
from offramp.common.errors import OfframpError
from offramp.serve.request.request import Request
from offramp.serve.scheduling.scheduler_output import SchedulerOutput

START = (0,)


def request(name: str, source: int, max_tokens: int = 8) -> Request:
    return make_request(name, START, source=tuple(range(1, source + 1)), max_tokens=max_tokens)


def encoded(output: SchedulerOutput) -> list[str]:
    return [item.request.request_id for item in output.scheduled if item.encodes]


def test_sources_are_read_once_and_together_as_far_as_the_budget_goes() -> None:
    scheduler, pool = make_scheduler(budget=16)
    for name, source in (("a", 5), ("b", 6), ("c", 4), ("d", 9)):
        scheduler.add(request(name, source))
    first = step(scheduler)
    assert encoded(first) == ["a", "b"]  # 5 + 1 + 6 + 1, and c would be 5 more
    assert first.num_source_tokens == 11
    assert pool.num_live >= 2 + 2 + 2  # blocks of 4 for a, b and one of each text
    second = step(scheduler)
    assert encoded(second) == ["c"]  # beside two decodes; d would be 10 more
    assert sorted(names(second)) == ["a", "b", "c"]
    assert encoded(step(scheduler)) == ["d"]
    assert encoded(step(scheduler)) == []
    finish(scheduler)
    assert pool.num_live == pool.num_cached == 0


def test_a_source_that_is_more_than_what_decodes_leave_is_read_alone() -> None:
    scheduler, _ = make_scheduler(budget=8, max_num_seqs=4)
    for name in "abc":
        scheduler.add(request(name, 2, max_tokens=30))
        step(scheduler)
    scheduler.add(request("d", 8))
    scheduler.add(request("e", 1))
    output = step(scheduler)
    assert sorted(names(output)) == ["a", "b", "c", "d"]
    assert encoded(output) == ["d"]


def test_a_preempted_request_reads_its_source_again() -> None:
    scheduler, pool = make_scheduler(num_blocks=8, budget=32)
    first, second = request("a", 8, max_tokens=15), request("b", 8, max_tokens=15)
    scheduler.add(first)
    scheduler.add(second)
    seen = []
    while scheduler.has_unfinished:
        seen += encoded(step(scheduler))
    assert second.num_preemptions >= 1
    assert seen.count("a") == 1
    assert seen.count("b") == 1 + second.num_preemptions
    assert pool.num_live == 0


def test_nothing_is_shared() -> None:
    scheduler, pool = make_scheduler(prefix_caching=True, budget=64)
    prompt = tuple(range(20))
    for name in "ab":
        scheduler.add(make_request(name, prompt, source=(1, 2, 3), max_tokens=4))
        finish(scheduler)
        assert pool.num_cached == 0


def test_whose_source_can_never_be_read_is_refused() -> None:
    scheduler, _ = make_scheduler(budget=16, max_model_len=100, num_blocks=8, block_size=4)
    with pytest.raises(OfframpError, match=r"a source of 17 tokens is more than the 16 that are read; shorten it, or"):
        scheduler.add(request("a", 17))
    with pytest.raises(OfframpError, match="make 24 tokens beside 9 of the source, more than the 32"):
        scheduler.add(request("a", 9, max_tokens=23))
    scheduler.add(request("a", 8, max_tokens=23))
