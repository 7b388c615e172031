"""What policies do inside the engine: who leaves, who goes on, what is computed for it, and whose faults are whose."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.engines import Job, drain, make_engine, run_jobs
from helpers.tiny import tiny_model
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy
from offramp.common.model.transformer import MultiExitTransformer
from offramp.serve.execution.executor import PROMPT_SLICE
from offramp.serve.model.head_output import HeadOutput
from offramp.serve.model.linear import PackedLinear
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.request import Request
from offramp.serve.request.sampling_params import SamplingParams
from offramp.serve.sampling import iteration_results
from offramp.serve.sampling.iteration_results import IterationResults
from offramp.serve.sampling.sampler import Sample, SamplingState
from offramp.serve.sampling.verification import Drafting

EXITS = ExitConfig((1, 2, 3), "norm")
MARGIN = ExitPolicy("margin", {1: 0.2, 2: 0.2, 3: 0.2})
AT_2 = ExitPolicy("cosine", {2: -2.0})
NEVER_SURE = ExitPolicy("cosine", {2: 0.9999999, 3: 0.9999999})


@functools.cache
def model() -> MultiExitTransformer:
    return tiny_model(EXITS, seed=2)


def verify(request_id: str, prompt: Sequence[int] = (5, 6, 7), **sampling: Any) -> Request:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 12, **sampling})
    return Request(request_id, tuple(prompt), params, ExitOptions("verify", MARGIN, max_pending=3))


def test_a_quantile_takes_everybody_along_but_those_at_full_depth() -> None:
    jobs = [Job((5, 6), 6, AT_2), Job((7, 8), 6, NEVER_SURE), Job((9, 10), 6, NEVER_SURE), Job((11,), 6, None)]
    half = run_jobs(make_engine(model(), sync_policy="quantile", quantile=0.3), jobs, every=0)
    assert [layers for _, layers in half] == [[4] + [2] * 5] * 3 + [[4] * 6]
    most = run_jobs(make_engine(model(), sync_policy="quantile", quantile=0.4), jobs, every=0)
    assert [layers for _, layers in most] == [[4] * 6] * 4


def test_nobody_is_taken_along_below_its_minimum_layer() -> None:
    late = ExitPolicy("cosine", {2: -2.0, 3: 0.9999999}, min_layer=3)
    jobs = [Job((5, 6), 6, AT_2), Job((7, 8), 6, late)]
    results = run_jobs(make_engine(model(), sync_policy="quantile", quantile=0.5), jobs, every=0)
    assert results[0][1] == [4] + [2] * 5
    # At 2 it stays; at 3 nobody who is left is sure.
    assert results[1][1] == [4] * 6


def test_nobody_is_taken_along_through_an_exit_that_is_closed_to_it() -> None:
    for closed in ({3: 0.9999999}, {2: 1.0, 3: 0.9999999}):
        jobs = [Job((5, 6), 6, AT_2), Job((7, 8), 6, ExitPolicy("cosine", closed))]
        results = run_jobs(make_engine(model(), sync_policy="quantile", quantile=0.5), jobs, every=0)
        assert results[0][1] == [4] + [2] * 5
        assert results[1][1] == [4] * 6
    # Who was sure before may leave wherever the others do.
    jobs = [Job((5, 6), 6, ExitPolicy("cosine", {1: -2.0})), Job((7, 8), 6, AT_2)]
    results = run_jobs(make_engine(model(), sync_policy="all"), jobs, every=0)
    assert [layers for _, layers in results] == [[4] + [2] * 5] * 2


def test_the_cost_rule_gives_an_answer_of_the_same_model() -> None:
    engine = make_engine(model(), split_rule="cost")
    results = run_jobs(engine, [Job((5, 6), 20, AT_2), Job((7, 8), 20, None)], every=0)
    assert set(results[0][1]) <= {2, 4}
    assert results[1] == Job((7, 8), 20, None).naive(model())


def test_exits_that_share_an_unembedding_read_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    head = PackedLinear.head

    def counting(self: PackedLinear, x: Tensor) -> HeadOutput:
        rows.append(len(x))
        return head(self, x)

    monkeypatch.setattr(PackedLinear, "head", counting)
    policies = [ExitPolicy("cosine", {layer: -2.0}) for layer in (1, 2, 3)]
    jobs = [Job((5 + index, 6), 9, policy) for index, policy in enumerate([*policies, None])]
    results = run_jobs(make_engine(model(), kernels="plain"), jobs, every=0)
    assert [layers[-1] for _, layers in results] == [1, 2, 3, 4]
    assert rows == [4] * 9


def test_confidence_is_reported_where_a_token_left() -> None:
    engine = make_engine(model())
    request = Job((5, 6, 7), 20, MARGIN).request("a")
    engine.add_request(request)
    drain(engine)
    for layer, confidence in zip(request.exit_layers, request.confidences, strict=True):
        assert (confidence is None) == (layer == 4)
        assert confidence is None or 0.2 < confidence <= 1
    assert {1, 4} <= set(request.exit_layers)


def test_a_veto_sends_a_row_on_as_if_it_had_never_left() -> None:
    # Sure of nearly everything, but allowed to say little.
    policy = ExitPolicy("margin", dict.fromkeys((1, 2, 3), 0.01), shortlist=tuple(range(0, 300, 3)))
    for kv_policy in ("fill", "recompute", "verify"):
        jobs = [Job((5 + index, 6, 7), 16, policy, kv_policy, max_pending=4) for index in range(4)]
        engine = make_engine(model())
        assert run_jobs(engine, jobs, every=0) == [job.naive(model()) for job in jobs]
        # Drafts are judged, so nothing is vetoed under `verify`.
        assert (engine.metrics.totals.vetoed_rows > 10) == (kv_policy != "verify")
        assert engine.num_kept_tokens == 0


def test_the_prompts_log_probabilities_come_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    slices: list[int] = []
    add_prompt = IterationResults.add_prompt

    def spy(self: IterationResults, item: int, start: int, logits: Tensor) -> None:
        slices.append(len(logits))
        add_prompt(self, item, start, logits)

    monkeypatch.setattr(IterationResults, "add_prompt", spy)
    prompt = tuple(torch.randint(300, (100,), generator=torch.Generator().manual_seed(0)).tolist())
    logits = model()(torch.tensor([prompt])).logits[4][0].detach().log_softmax(dim=-1)
    expected = [float(logits[place, token]) for place, token in enumerate(prompt[1:])]
    for budget, max_tokens in ((512, 4), (30, 0)):
        engine = make_engine(model(), max_tokens_per_iteration=budget, max_num_seqs=4)
        params = SamplingParams(max_tokens=max_tokens, temperature=0, prompt_logprobs=1)
        request = Request("a", prompt, params, ExitOptions("fill", MARGIN))
        engine.add_request(request)
        engine.add_request(Job((7, 8), 4, MARGIN).request("b"))
        (last,) = [output for output in drain(engine) if output.request_id == "a" and output.finish_reason]
        assert [one.token_id for one in request.prompt_logprobs] == list(prompt[1:])
        assert [one.logprob for one in request.prompt_logprobs] == pytest.approx(expected, abs=1e-4)
        assert last.finish_reason == "length"
        assert len(request.output_token_ids) == max_tokens
    assert max(slices) == PROMPT_SLICE
    assert sum(slices) == 2 * 99


def test_a_fault_in_judging_is_its_requests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Drafting.judge_choices

    def failing(self: Drafting, choices: Sequence[int]) -> Any:
        if self._request.request_id == "bad":
            raise RuntimeError("no verdict")
        return judge(self, choices)

    monkeypatch.setattr(Drafting, "judge_choices", failing)
    engine = make_engine(model())
    good, bad = verify("good"), verify("bad")
    engine.add_request(good)
    engine.add_request(bad)
    outputs = drain(engine)
    assert "no verdict" in str(bad.error)
    assert [output.finish_reason for output in outputs if output.request_id == "bad"][-1] == "error"
    assert good.error is None
    assert len(good.output_token_ids) == 12
    assert engine.num_kept_tokens == 0
    assert engine.num_free_blocks == 256


def test_a_fault_in_sampling_is_its_requests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = iteration_results.sample

    def failing(logits: Tensor, rows: Sequence[SamplingState]) -> list[Sample | None]:
        if any(row.request.request_id == "bad" and len(row.request.output_token_ids) == 5 for row in rows):
            raise RuntimeError("no dice")
        return choose(logits, rows)

    monkeypatch.setattr(iteration_results, "sample", failing)
    drawn = {"temperature": 0.8, "seed": 4, "max_tokens": 12}
    alone = verify("alone", **drawn)
    engine = make_engine(model())
    engine.add_request(alone)
    drain(engine)
    requests = [
        Request(name, (5, 6, 7), SamplingParams(**drawn), ExitOptions("recompute", MARGIN))
        for name in ("bad", "beside")
    ]
    crowd = [verify("good", **drawn), *requests]
    for request in crowd:
        engine.add_request(request)
    drain(engine)
    assert "no dice" in str(requests[0].error)
    assert len(requests[0].output_token_ids) == 5
    assert requests[1].error is None
    assert crowd[0].output_token_ids == alone.output_token_ids
    assert engine.num_kept_tokens == 0
    assert engine.num_free_blocks == 256


def test_cancelled_and_failed_requests_keep_nothing() -> None:
    broken = tiny_model(EXITS, seed=2)
    with torch.no_grad():
        broken.embed_tokens.weight[99] = torch.nan
    engine = make_engine(broken)
    for name in ("a", "b"):
        engine.add_request(verify(name, max_tokens=40))
    engine.add_request(verify("nan", (5, 99)))
    for _ in range(30):
        engine.step()
        if engine.num_kept_tokens > 1:
            break
    assert engine.num_kept_tokens > 1
    engine.cancel("a")
    engine.cancel("b")
    assert engine.num_kept_tokens == 0
    drain(engine)
    assert engine.num_free_blocks == 256


def test_a_static_layer_must_be_an_exit() -> None:
    engine = make_engine(tiny_model(ExitConfig((1, 3), "norm")))
    with pytest.raises(OfframpError, match="static_layer 2 is no exit"):
        engine.add_request(Request("a", (5,), SamplingParams(), ExitOptions("static", static_layer=2)))


def test_thresholds_that_decay_do_so_while_the_requests_stay_the_same() -> None:
    model = tiny_model(ExitConfig((1, 2, 3), "norm"))
    policy = ExitPolicy("max_probability", {1: 0.3, 2: 0.3, 3: 0.3}, decay=6.0)
    jobs = [Job((5 + index, 6, 7), 24, policy) for index in range(4)]
    expected = [job.naive(model) for job in jobs]
    at_first = policy.threshold(1, 1, 24)
    steady = ExitPolicy("max_probability", {1: at_first, 2: at_first, 3: at_first})
    assert expected != [Job(job.prompt, 24, steady).naive(model) for job in jobs], "decay changes nothing here"
    assert run_jobs(make_engine(model), jobs) == expected
