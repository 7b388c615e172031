"""Every KV policy in the engine is what naive generation says it is: alone, batched, preempted, with shared texts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.engines import Job, drain, make_engine, random_jobs, run_jobs
from helpers.tiny import tiny_model
from offramp.common.exits.config import ExitConfig, HeadKind
from offramp.common.exits.kv_policy import KVPolicy
from offramp.common.exits.policy import ExitPolicy
from offramp.common.model.transformer import MultiExitTransformer
from offramp.serve.execution.departures import Departure
from offramp.serve.execution.executor import Executor
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.request import Request
from offramp.serve.request.sampling_params import SamplingParams
from offramp.serve.scheduling.scheduler_output import ScheduledRequest

MARGIN = ExitPolicy("margin", {1: 0.3, 2: 0.3, 3: 0.3})
SHORTLIST = ExitPolicy("margin", {1: 0.2, 2: 0.2, 3: 0.2}, shortlist=tuple(range(3, 200)))
COSINE = ExitPolicy("cosine", {1: 0.6, 2: 0.55, 3: 0.6})
DECAY = ExitPolicy("max_probability", {1: 0.3, 3: 0.3}, decay=2.0)
LATE = ExitPolicy("entropy", {1: 0.3, 2: 0.3, 3: 0.3}, min_layer=2)
LISTED = replace(SHORTLIST, shortlist_only=True)
LISTED_COSINE = replace(COSINE, shortlist=SHORTLIST.shortlist, shortlist_only=True)
CLASSIFIER = ExitPolicy("classifier", {1: 0.7, 2: 0.65, 3: 0.6})
POLICIES = [MARGIN, SHORTLIST, COSINE, DECAY, LATE, LISTED, LISTED_COSINE, CLASSIFIER]
KV_POLICIES: tuple[KVPolicy, ...] = ("fill", "recompute", "verify")
VARIANTS: list[tuple[HeadKind, dict[str, Any]]] = [
    ("norm", {}),
    ("block", {}),
    ("adapter", {"model_type": "mistral", "sliding_window": 7}),
    ("block", {"model_type": "qwen3", "head_dim": 16}),
]


@functools.cache
def example(number: int) -> tuple[MultiExitTransformer, list[Job], list[tuple[list[int], list[int]]]]:
    """A model, jobs of every kind, and what they come to."""
    head, variant = VARIANTS[number]
    model = tiny_model(ExitConfig((1, 2, 3), head, classifier=True), seed=number, **variant)
    jobs: list[Job] = []
    for kv_policy in KV_POLICIES:
        for index, job in enumerate(random_jobs(POLICIES, seed=number)):
            # The same prompts under every policy: what one leaves in the cache is another's prefix.
            jobs.append(Job(job.prompt, job.max_tokens, job.policy, kv_policy, (1, 2, 3, 8, 8, 3, 8, 3)[index]))
    jobs += [Job(jobs[index].prompt, 20, None, "static", static_layer=1 + index) for index in range(3)]
    jobs += [Job(jobs[index].prompt, 12) for index in range(2)]
    return model, jobs, [job.naive(model) for job in jobs]


def shuffled(number: int, seed: int) -> tuple[MultiExitTransformer, list[Job], list[tuple[list[int], list[int]]]]:
    model, jobs, expected = example(number)
    order = torch.randperm(len(jobs), generator=torch.Generator().manual_seed(seed)).tolist()
    return model, [jobs[index] for index in order], [expected[index] for index in order]


def assert_same(
    jobs: Sequence[Job], got: Sequence[tuple[list[int], list[int]]], expected: Sequence[tuple[list[int], list[int]]]
) -> None:
    for job, one, other in zip(jobs, got, expected, strict=True):
        assert one == other, job


def test_the_examples_take_every_exit_and_drafts_are_kept_and_rejected() -> None:
    for number in range(len(VARIANTS)):
        _, jobs, expected = example(number)
        for kv_policy in ("fill", "recompute"):
            taken = {
                layer
                for job, (_, layers) in zip(jobs, expected, strict=True)
                if job.kv_policy == kv_policy
                for layer in layers
            }
            assert taken == {1, 2, 3, 4}
        judged = [layers for job, (_, layers) in zip(jobs, expected, strict=True) if job.kv_policy == "verify"]
        assert {layer for layers in judged for layer in layers} > {4}


@pytest.mark.parametrize("number", range(len(VARIANTS)))
def test_alone(number: int) -> None:
    model, jobs, expected = example(number)
    for sync_policy in ("regroup", "all"):
        engine = make_engine(model, sync_policy=sync_policy, prefix_caching=False)
        assert_same(jobs, [run_jobs(engine, [job])[0] for job in jobs], expected)
        assert engine.num_kept_tokens == 0


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("number", range(len(VARIANTS)))
def test_side_by_side(number: int, prefix_caching: bool) -> None:
    model, jobs, expected = shuffled(number, seed=number)
    kernels = "auto" if prefix_caching else "plain"
    engine = make_engine(
        model, max_num_seqs=6, max_tokens_per_iteration=17, prefix_caching=prefix_caching, kernels=kernels
    )
    assert_same(jobs, run_jobs(engine, jobs), expected)
    assert engine.num_kept_tokens == 0
    assert engine.num_free_blocks == 256
    assert (engine.metrics.totals.prefix_hit_tokens > 0) == prefix_caching


@pytest.mark.parametrize("number", range(len(VARIANTS)))
def test_preempted(number: int) -> None:
    model, jobs, expected = shuffled(number, seed=number + 8)
    # The longest takes 13 blocks; now and then comes somebody who takes them all.
    engine = make_engine(model, num_blocks=16, max_num_seqs=4, max_tokens_per_iteration=23)
    requests = [job.request(str(index)) for index, job in enumerate(jobs)]
    for request in sorted(requests, key=lambda request: request.exits.kv_policy != "static"):
        engine.add_request(request)
    for bully in range(40):
        for _ in range(7):
            engine.step()
        prompt = tuple(torch.randint(300, (62,), generator=torch.Generator().manual_seed(bully)).tolist())
        sampling = SamplingParams(max_tokens=1, temperature=0)
        engine.add_request(Request(f"bully {bully}", prompt, sampling, ExitOptions("full"), priority=-1))
    drain(engine)
    assert_same(jobs, [(request.output_token_ids, request.exit_layers) for request in requests], expected)
    again = {job.kv_policy for job, request in zip(jobs, requests, strict=True) if request.num_preemptions}
    assert again == {*KV_POLICIES, "static"}
    assert engine.num_kept_tokens == 0
    assert engine.num_free_blocks == 16


def slots_of(item: ScheduledRequest, count: int, block_size: int = 4) -> list[int]:
    return [item.block_table[p // block_size] * block_size + p % block_size for p in range(count)]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("number", range(len(VARIANTS)))
def test_recomputed_keys_and_values_are_those_of_a_full_pass(
    number: int, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, jobs, _ = example(number)
    last: list[ScheduledRequest] = []
    run = Executor.run

    def spy(self: Executor, scheduled: Sequence[ScheduledRequest], *rest: Any) -> list[Departure]:
        last[:] = scheduled
        return run(self, scheduled, *rest)

    monkeypatch.setattr(Executor, "run", spy)
    jobs = [job for job in jobs if job.kv_policy == "recompute" and (together or job.max_pending == 3)]
    engine = make_engine(model, prefix_caching=False)
    requests = [job.request(str(index)) for index, job in enumerate(jobs if together else jobs[:1])]
    for request in requests:
        engine.add_request(request)
    full = make_engine(model, prefix_caching=False)
    waited, mixtures, taken = set(), set(), set()
    while engine.has_unfinished:
        engine.step()
        items = list(last)
        assert engine.num_kept_tokens == sum(one.num_pending for one in requests if not one.status.is_finished)
        mixtures.add(len({item.request.num_pending for item in items}))
        taken.add(len({item.request.exit_layers[-1] for item in items if item.request.exit_layers}))
        for item in items:
            request, exact = item.request, item.request.num_exact_tokens
            known = tuple(request.tokens(0, request.num_tokens))
            full.add_request(Request("full", known, SamplingParams(max_tokens=1, temperature=0), ExitOptions("full")))
            full.step()
            (other,) = last
            waited.add(request.num_tokens - 1 - exact)
            assert engine._executor is not None
            assert full._executor is not None
            got = engine._executor._cache.data[:, slots_of(item, exact)]
            expected = full._executor._cache.data[:, slots_of(other, exact)]
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    if together:
        assert max(mixtures) > 2, "in one iteration some have waited longer than others"
        assert max(taken) > 2, "in one iteration rows leave at different exits"
    else:
        assert waited == {0, 1, 2, 3}, "in the example up to 3 tokens wait, and then a pass completes them"
