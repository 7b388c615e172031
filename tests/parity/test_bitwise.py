"""With the engine's own kernels a request's numbers are bitwise its own, whoever shares its batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from helpers.engines import drain, make_engine, random_jobs
from helpers.native import loaded
from helpers.tiny import tiny_model
from offramp.common.exits.config import ExitConfig, HeadKind
from offramp.common.exits.policy import ExitPolicy
from offramp.serve.model.native import supported_isa_levels
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.request import Request
from offramp.serve.request.sampling_params import SamplingParams

MARGIN = ExitPolicy("margin", {1: 0.3, 2: 0.3, 3: 0.3})
SHORTLIST = ExitPolicy("margin", {1: 0.2, 2: 0.2, 3: 0.2}, shortlist=tuple(range(3, 200)))
OPTIONS = [
    ExitOptions("fill", MARGIN),
    ExitOptions("fill", ExitPolicy("cosine", {1: 0.6, 2: 0.6, 3: 0.6})),
    ExitOptions("recompute", MARGIN, max_pending=3),
    ExitOptions("verify", MARGIN, max_pending=3),
    ExitOptions("recompute", SHORTLIST),
    ExitOptions("verify", SHORTLIST, max_pending=3),
    ExitOptions("fill", replace(SHORTLIST, shortlist_only=True)),
    ExitOptions("static", static_layer=2),
    ExitOptions("full"),
    ExitOptions("fill", ExitPolicy("classifier", {1: 0.7, 2: 0.7, 3: 0.6})),
]


def make_requests(seed: int) -> list[Request]:
    """Requests of every kind; every other one takes the way without logits."""
    requests = []
    for index, job in enumerate(random_jobs([None] * 2 * len(OPTIONS), seed)):
        sampling = SamplingParams(
            max_tokens=job.max_tokens,
            temperature=0.8 if index % 4 == 1 else 0.0,
            seed=index,
            logprobs=2 if index % 2 else None,
        )
        requests.append(Request(str(index), job.prompt, sampling, OPTIONS[index % len(OPTIONS)]))
    return requests


def said(request: Request) -> tuple[Any, ...]:
    assert request.error is None
    return request.output_token_ids, request.exit_layers, request.confidences, request.logprobs


@pytest.mark.parametrize("kernels", ["native", "plain"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_is_reported_changes_nothing_that_is_said(dtype: str, kernels: str) -> None:
    if kernels == "native":
        loaded(supported_isa_levels()[0])
    # So many tokens that some are nearly equal.
    model = tiny_model(ExitConfig((1, 2, 3), "norm", classifier=True), vocab_size=4000)
    # Few of so many are sure, and the best is hardly ever one of a few hundred.
    easy = {1: 0.02, 2: 0.02, 3: 0.02}
    entropy = ExitPolicy("entropy", easy, shortlist=SHORTLIST.shortlist, shortlist_only=True)
    options = [
        replace(one, policy=replace(one.policy, thresholds=easy) if one.policy in (MARGIN, SHORTLIST) else one.policy)
        for one in (*OPTIONS, ExitOptions("recompute", replace(SHORTLIST, shortlist_only=True)))
    ]
    options += [ExitOptions("fill", entropy), ExitOptions("verify", entropy, max_pending=3)]
    answers: list[list[tuple[list[int], list[int], list[float | None]]]] = []
    for number in (None, 3):
        # Without others beside them: bits of the other kernels depend on these.
        engine = make_engine(model, max_num_seqs=64 if kernels == "native" else 1, dtype=dtype, kernels=kernels)
        requests = [
            Request(
                str(index),
                job.prompt,
                SamplingParams(max_tokens=job.max_tokens, temperature=0, logprobs=number),
                options[index % len(options)],
            )
            for index, job in enumerate(random_jobs([None] * 3 * len(options)))
        ]
        for request in requests:
            engine.add_request(request)
        drain(engine)
        answers.append([(one.output_token_ids, one.exit_layers, one.confidences) for one in requests])
    assert answers[0] == answers[1]
    assert {layer for _, layers, _ in answers[0] for layer in layers} == {1, 2, 3, 4}
    listed = [one for one in requests if one.exits.policy is not None and one.exits.policy.shortlist_only]
    early = [
        (token, shares)
        for one in listed
        for token, layer, shares in zip(one.output_token_ids, one.exit_layers, one.logprobs, strict=True)
        if layer < 4 and one.exits.kv_policy != "verify"
    ]
    assert all(token in (SHORTLIST.shortlist or ()) and token == shares.token_id for token, shares in early)
    # They are shares of the whole vocabulary, whose best is often another token.
    assert sum(shares.top[0][0] not in (SHORTLIST.shortlist or ()) for _, shares in early) > 10


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("head", ["adapter", "block"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bits_do_not_depend_on_neighbours_chunks_or_preemption(dtype: str, head: HeadKind, quantization: str) -> None:
    loaded(supported_isa_levels()[0])
    model = tiny_model(ExitConfig((1, 2, 3), head, classifier=True))
    config: dict[str, Any] = {"dtype": dtype, "kernels": "native", "quantization": quantization}
    alone = []
    engine = make_engine(model, prefix_caching=False, **config)
    for request in make_requests(seed=1):
        engine.add_request(request)
        drain(engine)
        alone.append(said(request))
    assert {layer for _, layers, _, _ in alone for layer in layers} == {1, 2, 3, 4}
    crowds: list[dict[str, Any]] = [
        {"max_num_seqs": 20, "max_tokens_per_iteration": 400},
        {"max_num_seqs": 5, "max_tokens_per_iteration": 19},
        {"max_num_seqs": 6, "num_blocks": 18},
    ]
    for settings in crowds:
        engine = make_engine(model, **config, **settings)
        requests = make_requests(seed=1)
        for request in reversed(requests):
            engine.add_request(request)
        drain(engine)
        for one, request in zip(alone, requests, strict=True):
            assert said(request) == one, request
