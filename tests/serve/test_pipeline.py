"""Stages say what one process with exact keys and values says, in whatever order they go on."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.engines import Job, drain, make_engine, random_jobs, run_jobs
from helpers.stages import staged_engine
from helpers.tiny import tiny_model
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy
from offramp.common.model.transformer import MultiExitTransformer
from offramp.serve.config import EngineConfig
from offramp.serve.pipeline.messages import Kind, Message, decode, encode
from offramp.serve.pipeline.stages import stage_layers
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.request import Request
from offramp.serve.request.sampling_params import SamplingParams

NUM_LAYERS = 5
MARGIN = ExitPolicy("margin", {1: 0.2, 2: 0.2, 4: 0.2})
COSINE = ExitPolicy("cosine", {1: 0.5, 2: 0.5}, decay=2.0)
SHORTLIST = ExitPolicy("margin", {1: 0.1, 4: 0.1}, shortlist=tuple(range(5, 150)))
NEVER = ExitPolicy("margin", {1: 1.5, 2: 1.5, 4: 1.5})


@functools.cache
def model(head: str = "block") -> MultiExitTransformer:
    # The block of a head has a cache of its own, in the stage of its exit.
    return tiny_model(ExitConfig((1, 2, 4), head), seed=1, num_hidden_layers=NUM_LAYERS)  # type: ignore[arg-type]


@functools.cache
def jobs_and_answers(head: str = "block") -> tuple[list[Job], list[tuple[list[int], list[int]]]]:
    jobs = [replace(job, kv_policy="pipeline") for job in random_jobs([MARGIN, COSINE, SHORTLIST, None] * 2, seed=6)]
    return jobs, [job.naive(model(head)) for job in jobs]


def test_layers_are_divided_evenly() -> None:
    assert stage_layers(5, 3) == [range(0, 1), range(1, 3), range(3, 5)]
    assert stage_layers(4, 1) == [range(0, 4)]
    with pytest.raises(OfframpError, match="more than the 4 layers"):
        stage_layers(4, 5)


def test_messages_come_back_as_they_were() -> None:
    arrays = (np.zeros((0, 2), dtype=np.int64), np.arange(6, dtype=np.float32).reshape(2, 3), np.array([-1], np.int32))
    back = decode(encode(Message(Kind.PLAN, 7, arrays)))
    assert back[:2] == (Kind.PLAN, 7)
    for mine, other in zip(arrays, back.arrays, strict=True):
        assert mine.dtype == other.dtype
        assert np.array_equal(mine, other)
    with pytest.raises(ValueError, match=r"not whole|smaller"):
        decode(encode(Message(Kind.PLAN, 7, arrays))[:-1])


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_tokens_are_those_of_naive_generation_for_any_number_of_stages(num_stages: int) -> None:
    jobs, expected = jobs_and_answers()
    engine, _ = staged_engine(model(), num_stages, num_blocks=24, max_num_seqs=6)
    assert run_jobs(engine, jobs, every=num_stages % 3) == expected
    assert {layer for _, layers in expected for layer in layers} == {1, 2, 4, NUM_LAYERS}


@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.data(), num_stages=st.integers(2, 4), seats=st.integers(1, 8), num_blocks=st.integers(14, 40))
def test_requests_come_end_and_are_cancelled_while_stages_go_on_in_any_order(
    data: st.DataObject, num_stages: int, seats: int, num_blocks: int
) -> None:
    # Few blocks: what an end, a cancel or a preemption frees is another's at once, while stages still write the old.
    jobs, expected = jobs_and_answers()
    engine, _ = staged_engine(
        *(model(), num_stages), seed=data.draw(st.integers(0, 99)), num_blocks=num_blocks, max_num_seqs=seats
    )
    asked: dict[str, tuple[Request, int]] = {}
    for number in range(data.draw(st.integers(1, 8))):
        index = data.draw(st.integers(0, len(jobs) - 1))
        request = jobs[index].request(str(number))
        if data.draw(st.booleans()):
            # An end comes whenever the text says so.
            ends = expected[index][0][data.draw(st.integers(0, len(expected[index][0]) - 1)) :][:1]
            request = Request(
                *(request.request_id, request.prompt_token_ids, request.sampling, request.exits), frozenset(ends)
            )
        engine.add_request(request)
        asked[request.request_id] = request, index
        for _ in range(data.draw(st.integers(0, 4))):
            engine.step()
        if data.draw(st.integers(0, 3)) == 0:
            gone = data.draw(st.sampled_from(sorted(asked)))
            engine.cancel(gone)
            del asked[gone]
    drain(engine)
    for request, index in asked.values():
        tokens, layers = expected[index]
        count = next((n for n, token in enumerate(tokens, 1) if token in request.stop_ids), len(tokens))
        assert request.error is None, request.error
        assert (request.output_token_ids, request.exit_layers) == (tokens[:count], layers[:count])
    assert engine.num_free_blocks == num_blocks


def test_keys_and_values_are_those_of_a_full_pass_in_every_stage() -> None:
    job = Job(tuple(range(20, 33)), 12, MARGIN, "pipeline")
    engine, later = staged_engine(model("norm"), 3, prefix_caching=False)
    assert later is not None
    [(tokens, layers)] = run_jobs(engine, [job])
    later.settle()
    assert min(layers) < NUM_LAYERS
    # One request alone gets the same blocks in both.
    whole = make_engine(model("norm"), prefix_caching=False)
    text = Job((*job.prompt, *tokens[:-1]), 1)
    run_jobs(whole, [text])
    assert whole._executor is not None
    wanted = whole._executor._cache.data[:, : len(text.prompt)]
    stages = [engine._pipeline.first, *later.stages]  # type: ignore[union-attr]
    found = torch.cat([stage.cache.data[:, : len(text.prompt)] for stage in stages])
    assert sum(len(stage.cache.data) for stage in stages) == NUM_LAYERS
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_thresholds_above_1_are_full_depth() -> None:
    jobs = [replace(job, policy=NEVER, kv_policy="pipeline") for job in random_jobs([NEVER] * 3)]
    staged, _ = staged_engine(model(), 3)
    full = [replace(job, policy=None) for job in jobs]
    assert run_jobs(staged, jobs) == run_jobs(make_engine(model()), full)


def test_sampling_and_logprobs_are_those_of_one_process() -> None:
    def answers(engine_stages: int) -> list[tuple[list[int], list[object]]]:
        engine, _ = staged_engine(model(), engine_stages)
        requests = [
            Request(
                str(seed),
                tuple(range(30, 40)),
                SamplingParams(max_tokens=12, temperature=0.9 * (seed % 2), seed=seed, logprobs=2),
                ExitOptions("pipeline", MARGIN),
            )
            for seed in range(4)
        ]
        for request in requests:
            engine.add_request(request)
        drain(engine)
        return [(request.output_token_ids, list(request.logprobs)) for request in requests]

    assert answers(3) == answers(1)


def test_a_running_request_gets_its_next_row_before_the_last_stage_has_seen_this_one() -> None:
    always = ExitPolicy("margin", {1: -1.0})
    engine, later = staged_engine(model("norm"), 3)
    assert later is not None
    engine.add_request(Job((5, 6), 20, always, "pipeline").request("a"))
    while len(engine._live["a"].decoding.request.output_token_ids) < 1:
        engine.step()
    later.settle()
    later.receive = lambda *, wait: []  # nothing is heard of later stages any more
    for _ in range(3):
        engine.step()
    assert len(engine._live["a"].decoding.request.output_token_ids) == 4


@pytest.mark.parametrize(
    ("options", "sampling", "match"),
    [
        (ExitOptions("fill"), SamplingParams(), "'fill' is not one of an engine that runs in stages"),
        (ExitOptions("verify"), SamplingParams(), "'verify' is not one"),
        (ExitOptions("static", static_layer=1), SamplingParams(), "'static' is not one"),
        (ExitOptions("pipeline"), SamplingParams(prompt_logprobs=1), "prompt_logprobs are not sent back"),
    ],
)
def test_what_stages_cannot_do_is_refused(options: ExitOptions, sampling: SamplingParams, match: str) -> None:
    engine, _ = staged_engine(model("norm"), 1)
    with pytest.raises(OfframpError, match=match):
        engine.add_request(Request("a", (5,), sampling, options))


def test_one_process_without_stages_refuses_the_policy() -> None:
    with pytest.raises(OfframpError, match="set pipeline_stages"):
        make_engine(model("norm")).add_request(Request("a", (5,), SamplingParams(), ExitOptions("pipeline")))


@pytest.mark.parametrize("setting", [{"sync_policy": "all"}, {"deep_quorum": 0.5}, {"device": "cuda"}])
def test_settings_that_have_no_meaning_in_stages_are_refused(setting: dict[str, object]) -> None:
    with pytest.raises(OfframpError, match="pipeline_stages 2"):
        EngineConfig(pipeline_stages=2, **setting)  # type: ignore[arg-type]
