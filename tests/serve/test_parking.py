"""Rows that wait at an exit for company: answers stay the same, nobody waits too long, and nothing is left over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from helpers.engines import Job, drain, layer_runs, make_engine, run_jobs
from helpers.native import loaded
from helpers.tiny import tiny_model
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig, HeadKind
from offramp.common.exits.kv_policy import KVPolicy
from offramp.common.exits.policy import ExitPolicy
from offramp.serve.config import EngineConfig
from offramp.serve.model.native import supported_isa_levels
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.request import Request
from offramp.serve.request.sampling_params import SamplingParams

EXITS = ExitConfig((1, 2, 3), "norm")
MARGIN = ExitPolicy("margin", {1: 0.3, 2: 0.3, 3: 0.3})
SHORTLIST = ExitPolicy("margin", {1: 0.1, 3: 0.3}, shortlist=tuple(range(3, 200)))
COSINE = ExitPolicy("cosine", {1: 0.6, 2: 0.55, 3: 0.6})
DECAY = ExitPolicy("max_probability", {1: 0.3, 2: 0.3, 3: 0.3}, decay=2.0)
ALWAYS = ExitPolicy("cosine", {1: -2.0})
NEVER = ExitPolicy("cosine", {1: 1 - 1e-12})

JOBS = [
    Job((9, 8, 7), 12, MARGIN),
    Job((5, 6), 12, MARGIN, "recompute", 3),
    Job((11,), 12, MARGIN, "verify", 3),
    Job((20, 21, 22, 23, 24), 10, SHORTLIST),
    Job((20, 21, 22, 23, 25), 10, replace(SHORTLIST, shortlist_only=True), "recompute", 8),
    Job((31, 32), 10, SHORTLIST, "verify", 2),
    Job((9, 8, 7), 12, COSINE),
    Job((41, 42, 43), 9, DECAY, "recompute", 1),
]


@pytest.mark.parametrize("quorum", [0.5, 1.0])
@pytest.mark.parametrize("head", ["norm", "block"])
def test_answers_are_those_of_naive_generation(head: HeadKind, quorum: float) -> None:
    model = tiny_model(replace(EXITS, head=head))
    expected = [job.naive(model) for job in JOBS]
    crowds: list[dict[str, Any]] = [
        {},
        {"max_parked_iterations": 1, "max_num_seqs": 5},
        {"num_blocks": 16, "max_num_seqs": 6, "max_tokens_per_iteration": 16},
        {"group_by_depth": True, "max_num_seqs": 6},
    ]
    for settings in crowds:
        for every in (0, 2):
            engine = make_engine(model, deep_quorum=quorum, **settings)
            assert run_jobs(engine, JOBS, every) == expected, (settings, every)
            assert engine.metrics.totals.parked_requests > 0
            assert engine.num_kept_tokens == engine.num_parked_rows == 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bits_do_not_depend_on_when_a_row_goes_on(dtype: str) -> None:
    loaded(supported_isa_levels()[0])
    model = tiny_model(replace(EXITS, head="adapter"))
    answers = []
    for quorum in (0.0, 0.5, 1.0):
        engine = make_engine(model, deep_quorum=quorum, dtype=dtype, kernels="native")
        requests = [
            Request(
                str(index),
                job.prompt,
                SamplingParams(max_tokens=job.max_tokens, temperature=0.7 * (index % 2), seed=3, logprobs=2),
                ExitOptions(job.kv_policy, job.policy, job.max_pending),
            )
            for index, job in enumerate(JOBS)
        ]
        for request in requests:
            engine.add_request(request)
        drain(engine)
        assert (engine.metrics.totals.parked_requests > 0) == (quorum > 0)
        answers.append([(one.output_token_ids, one.exit_layers, one.confidences, one.logprobs) for one in requests])
    assert answers[0] == answers[1] == answers[2]


def iterations_of_tokens(policies: list[ExitPolicy], **settings: Any) -> list[list[int]]:
    """For each request, the iterations that gave it a token, without the prompt's; all of them start together."""
    engine = make_engine(tiny_model(EXITS), **settings)
    requests = [Job((5 + index, 6), 13, policy).request(str(index)) for index, policy in enumerate(policies)]
    for request in requests:
        engine.add_request(request)
    engine.step()
    given: list[list[int]] = [[] for _ in requests]
    for iteration in range(12):
        known = [len(request.output_token_ids) for request in requests]
        engine.step()
        for index, request in enumerate(requests):
            given[index] += [iteration] * (len(request.output_token_ids) - known[index])
    return given


@pytest.mark.parametrize("patience", [1, 2, 5])
def test_nobody_waits_longer_than_he_may(patience: int) -> None:
    hard, easy = iterations_of_tokens([NEVER, ALWAYS], deep_quorum=1.0, max_parked_iterations=patience)
    assert easy == list(range(12))
    assert hard == list(range(patience, 12, patience + 1))


def test_a_quorum_goes_on_at_once() -> None:
    everybody = list(range(12))
    assert iterations_of_tokens([NEVER, ALWAYS], deep_quorum=0.5) == [everybody] * 2
    assert iterations_of_tokens([NEVER, NEVER], deep_quorum=1.0) == [everybody] * 2
    # Nobody is sure, one must go past: so do all.
    assert iterations_of_tokens([NEVER, replace(NEVER, min_layer=2)], deep_quorum=1.0) == [everybody] * 2


def test_deep_layers_run_less_often_and_records_say_so() -> None:
    engine = make_engine(tiny_model(EXITS), deep_quorum=1.0, max_parked_iterations=3)
    run_jobs(engine, [Job((5, 6), 13, NEVER), Job((8, 9), 49, ALWAYS)], every=0)
    # The prompts; then 12 deep passes, each after three iterations in which only the easy one got a token.
    calls, rows = layer_runs(engine)
    assert calls == [1 + 48 - 12 + 12, 13, 13, 13]
    assert rows == [4 + 48 + 12, 16, 16, 16]
    parked = [record.parked_requests for record in engine.metrics.records]
    assert sum(parked) == engine.metrics.totals.parked_requests == 36
    assert max(parked) == 1


def test_who_is_cancelled_while_parked_leaves_nothing() -> None:
    engine = make_engine(tiny_model(EXITS), deep_quorum=1.0)
    free = engine.num_free_blocks
    policies: list[tuple[str, ExitPolicy, KVPolicy]] = [
        ("a", NEVER, "fill"),
        ("b", ALWAYS, "fill"),
        ("c", NEVER, "recompute"),
    ]
    for name, policy, kv_policy in policies:
        engine.add_request(Job((5, 6, 7), 30, policy, kv_policy).request(name))
    engine.step()
    engine.step()
    assert engine.num_parked_rows == 2
    engine.cancel("a")
    assert engine.num_parked_rows == 1
    engine.cancel("c")
    engine.cancel("b")
    assert engine.num_parked_rows == engine.num_kept_tokens == 0
    assert engine.num_free_blocks == free
    assert not engine.has_unfinished


def test_a_prompt_does_not_wait_for_company_where_nobody_may_leave() -> None:
    engine = make_engine(tiny_model(EXITS), deep_quorum=1.0, max_parked_iterations=20)
    closed = ExitPolicy("margin", {1: 1.0})
    for index in range(3):
        engine.add_request(Job((5 + index, 6), 30, closed).request(str(index)))
    for _ in range(4):
        engine.step()
    late = Job((8, 9), 3, closed).request("late")
    engine.add_request(late)
    engine.step()
    assert late.output_token_ids


@pytest.mark.parametrize(
    "settings",
    [{"sync_policy": "all"}, {"sync_policy": "quantile"}, {"split_rule": "cost"}, {"deep_quorum": 1.5}],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any]) -> None:
    with pytest.raises(OfframpError, match="deep_quorum"):
        EngineConfig(**{"deep_quorum": 0.5, **settings})
