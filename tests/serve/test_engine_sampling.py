"""How tokens are chosen, through the whole engine: alone, among others, in chunks, preempted, drafted and judged."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.engines import drain
from helpers.tiny import EOS_ID, VOCAB_SIZE, tiny_model, tiny_tokenizer
from offramp.common.checkpoint import Checkpoint
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy
from offramp.serve.config import EngineConfig
from offramp.serve.engine import Engine
from offramp.serve.request.constraint import Constraint
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.output import RequestOutput, Usage
from offramp.serve.request.request import Request, RequestStatus
from offramp.serve.request.sampling_params import SamplingParams

EASY = ExitPolicy(thresholds={1: 0.05, 2: 0.1, 3: 0.1})
MODEL = tiny_model(ExitConfig(layers=(1, 2, 3), head="norm"))
TOKENIZER = tiny_tokenizer()
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "yy"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
)
DEPTHS = {
    "full": ExitOptions("full"),
    "fill": ExitOptions("fill", EASY),
    "recompute": ExitOptions("recompute", EASY, max_pending=3),
    "verify": ExitOptions("verify", EASY, max_pending=3),
    "static": ExitOptions("static", static_layer=2),
}
SETTINGS = [
    SamplingParams(seed=1, max_tokens=14),
    SamplingParams(seed=1, max_tokens=14, sequence=1, logprobs=2),
    SamplingParams(seed=2, max_tokens=12, top_k=20, temperature=0.7, min_tokens=12, stop_token_ids=tuple(range(5, 60))),
    SamplingParams(seed=3, max_tokens=12, top_p=0.8, repetition_penalty=1.4, prompt_logprobs=1),
    SamplingParams(temperature=0, max_tokens=12, frequency_penalty=1.5, presence_penalty=0.5),
    SamplingParams(seed=4, max_tokens=12, min_p=0.02, logit_bias=((7, 5.0), (8, -100.0)), logprobs=0),
    SamplingParams(temperature=0, max_tokens=40, constraint=Constraint("json_schema", SCHEMA)),
    SamplingParams(seed=5, max_tokens=40, constraint=Constraint("regex", "[a-c]{2}(x|yz)*")),
]


def make_engine(**config: Any) -> Engine:
    settings = {"block_size": 4, "num_blocks": 256, "max_model_len": 128, **config}
    return Engine(Checkpoint(MODEL, {}), EngineConfig(**settings), TOKENIZER, poison_cache=True)


def make_requests(exits: ExitOptions) -> list[Request]:
    source = torch.Generator().manual_seed(1)
    return [
        Request(
            str(index),
            tuple(torch.randint(5, 300, (3 + 4 * index % 17,), generator=source).tolist()),
            params,
            exits,
            frozenset({EOS_ID}),
        )
        for index, params in enumerate(SETTINGS)
    ]


def run(engine: Engine, requests: list[Request]) -> list[Request]:
    return [request for request, _ in answers(engine, requests)]


def answers(engine: Engine, requests: list[Request]) -> list[tuple[Request, RequestOutput]]:
    """The requests with the last output of each."""
    outputs: list[RequestOutput] = []
    for request in requests:
        engine.add_request(request)
        outputs += engine.step()
    outputs += drain(engine)
    assert [request.error for request in requests] == [None] * len(requests)
    last = {output.request_id: output for output in outputs if output.finish_reason is not None}
    return [(request, last[request.request_id]) for request in requests]


def assert_same(one: tuple[Request, RequestOutput], other: tuple[Request, RequestOutput]) -> None:
    (expected, expected_end), (found, found_end) = one, other
    assert found.output_token_ids == expected.output_token_ids, found.sampling
    assert (found.exit_layers, found.status) == (expected.exit_layers, expected.status)
    assert (found_end.finish_reason, found_end.usage) == (expected_end.finish_reason, expected_end.usage)
    assert found_end.usage == Usage(len(found.prompt_token_ids), len(found.output_token_ids))
    for ours, theirs in (
        (found.logprobs, expected.logprobs),
        (found.prompt_logprobs, expected.prompt_logprobs),
    ):
        assert [pair.token_id for pair in ours] == [pair.token_id for pair in theirs]
        assert [pair.logprob for pair in ours] == pytest.approx([pair.logprob for pair in theirs], abs=1e-4)
        for our, their in zip(ours, theirs, strict=True):
            assert [token for token, _ in our.top] == [token for token, _ in their.top]
            assert [value for _, value in our.top] == pytest.approx([value for _, value in their.top], abs=1e-4)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_request_says_the_same_alone_among_others_in_chunks_and_preempted(depth: str) -> None:
    alone = [answers(make_engine(), [request])[0] for request in make_requests(DEPTHS[depth])]
    if depth != "full":
        assert any(layer < 4 for request, _ in alone for layer in request.exit_layers)
    crowded = make_engine(num_blocks=18, max_tokens_per_iteration=9, max_num_seqs=8)
    for engine in (make_engine(), crowded):
        batch = answers(engine, make_requests(DEPTHS[depth]))
        assert (engine is crowded) == any(request.num_preemptions for request, _ in batch)
        for one, other in zip(alone, batch, strict=True):
            assert_same(one, other)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_request_says_the_same_where_others_have_left_its_prefix(depth: str) -> None:
    def asked() -> list[Request]:
        """With logprobs of every answer, and behind a text of 9 tokens that all share."""
        requests = make_requests(DEPTHS[depth])
        for request in requests:
            request.prompt_token_ids = (*range(30, 39), *request.prompt_token_ids)
            request.sampling = replace(request.sampling, logprobs=2, prompt_logprobs=None)
        return requests

    alone = [answers(make_engine(prefix_caching=False), [request])[0] for request in asked()]
    assert not any(request.num_cached_tokens for request, _ in alone)
    engine = make_engine(prefix_caching=True)
    for lot in range(2):  # the first shares what its members have in common, the second has been asked before
        found = answers(engine, asked())
        hits = [request.num_cached_tokens for request, _ in found]
        assert all(hits[1:] if lot == 0 else hits)
        assert sum(hits) > lot * 8 * len(hits), "more than the common text"
        for one, other in zip(alone, found, strict=True):
            assert len(other[0].logprobs) == len(other[0].output_token_ids)
            assert_same(one, other)
    assert engine.metrics.totals.prefix_hit_tokens > 0


@pytest.mark.parametrize("depth", DEPTHS)
def test_settings_hold_at_every_depth(depth: str) -> None:
    requests = run(make_engine(), make_requests(DEPTHS[depth]))
    assert requests[0].output_token_ids != requests[1].output_token_ids  # two sequences of one seed
    assert all(one.logprob <= 0 and len(one.top) == 2 for one in requests[1].logprobs)
    assert len(requests[1].logprobs) == len(requests[1].output_token_ids)
    assert len(requests[2].output_token_ids) == 12
    assert not requests[2].stop_ids & set(requests[2].output_token_ids)
    assert [one.token_id for one in requests[3].prompt_logprobs] == list(requests[3].prompt_token_ids[1:])
    assert len(set(requests[4].output_token_ids)) >= 10  # what was said is made improbable
    assert 8 not in requests[5].output_token_ids
    for request, pattern in ((requests[6], None), (requests[7], "[a-c]{2}(x|yz)*")):
        if request.status is RequestStatus.FINISHED_STOP:
            text = TOKENIZER.decode(request.output_token_ids, skip_special_tokens=True)
            assert isinstance(text, str)
            if pattern is None:
                value = json.loads(text)
                assert (type(value["a"]), value["b"] in ("x", "yy")) == (bool, True)
            else:
                assert re.fullmatch(pattern, text)
    assert requests[6].status is RequestStatus.FINISHED_STOP


def test_judged_answers_of_greedy_requests_are_those_of_the_full_model() -> None:
    greedy = [replace(params, temperature=0) for params in SETTINGS]
    answers = []
    for depth in ("full", "verify"):
        requests = make_requests(DEPTHS[depth])
        for request, params in zip(requests, greedy, strict=True):
            request.sampling = params
        answers.append([request.output_token_ids for request in run(make_engine(), requests)])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("sampling", "early", "words"),
    [
        ({"logit_bias": ((VOCAB_SIZE, 1.0),)}, "check", f"logit_bias names token {VOCAB_SIZE}, outside the vocabulary"),
        ({"constraint": Constraint("regex", "(")}, "prepare", "the regex cannot be followed: unclosed group."),
    ],
)
def test_settings_that_this_model_cannot_follow_are_refused_and_leave_nothing(
    sampling: Any, early: str, words: str
) -> None:
    engine = make_engine()
    request = Request("a", (5,), SamplingParams(**sampling), eos_token_ids=frozenset({EOS_ID}))
    for ask in (getattr(engine, early), engine.add_request):
        with pytest.raises(OfframpError, match=re.escape(words)):
            ask(request)
    assert not engine.has_unfinished


def test_a_constraint_without_a_tokenizer_is_refused() -> None:
    engine = Engine(Checkpoint(MODEL, {}), EngineConfig(num_blocks=8, max_model_len=32))
    request = Request("a", (5,), SamplingParams(constraint=Constraint("json")), eos_token_ids=frozenset({EOS_ID}))
    with pytest.raises(OfframpError, match="needs a tokenizer"):
        engine.check(request)
