"""An engine with weights of int8 is one whose model has the matrices that they stand for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from helpers.engines import Job, drain, make_engine, random_jobs, run_jobs
from helpers.native import loaded
from helpers.tiny import tiny_model
from offramp.common.exits.config import ExitConfig, HeadKind
from offramp.common.exits.policy import ExitPolicy
from offramp.common.model.transformer import MultiExitTransformer
from offramp.serve.model.native import supported_isa_levels
from offramp.serve.model.quantization import quantize
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.request import Request
from offramp.serve.request.sampling_params import SamplingParams

MARGIN = ExitPolicy("margin", {1: 0.3, 2: 0.3, 3: 0.3})


@torch.no_grad()
def both_models(head: HeadKind, dtype: torch.dtype) -> tuple[MultiExitTransformer, MultiExitTransformer]:
    """A model, and one with the matrices that its int8 stand for in `dtype`.

    Input norms are of ones: filled keys and values come from weights that have the norm folded in before they are
    rounded, which else is another rounding than that of the layer.
    """
    model = tiny_model(ExitConfig((1, 2, 3), head))
    for name, parameter in model.named_parameters():
        if name.endswith("input_layernorm.weight"):
            parameter.fill_(1)
    made = copy.deepcopy(model)
    for module in made.modules():
        if isinstance(module, nn.Linear):
            module.weight.copy_(quantize(module.weight).dequantized(dtype))
    return model, made


@pytest.mark.parametrize("kernels", ["native", "plain"])
@pytest.mark.parametrize("head", ["adapter", "mlp", "block"])
def test_in_fp32_it_says_what_naive_generation_says(head: HeadKind, kernels: str) -> None:
    loaded(supported_isa_levels()[0])
    model, made = both_models(head, torch.float32)
    jobs = [
        Job(job.prompt, job.max_tokens, job.policy, kv_policy)
        for kv_policy in ("fill", "recompute", "verify")
        for job in random_jobs([MARGIN, MARGIN, None], seed=3)
    ]
    engine = make_engine(model, quantization="int8", kernels=kernels, max_num_seqs=4, max_tokens_per_iteration=16)
    expected = [job.naive(made) for job in jobs]
    assert run_jobs(engine, jobs) == expected
    assert len({layer for _, layers in expected for layer in layers}) > 2


@pytest.mark.parametrize("head", ["adapter", "block"])
def test_in_bf16_every_bit_is_that_of_the_dequantized_model(head: HeadKind) -> None:
    if loaded(supported_isa_levels()[0]).isa not in ("amx", "avx512_bf16"):
        pytest.skip("without a dot product of bf16, weights of int8 are not rounded to bf16")
    model, made = both_models(head, torch.bfloat16)
    settings: dict[str, Any] = {"dtype": "bf16", "kernels": "native"}
    answers: list[list[Any]] = []
    for engine in (make_engine(model, quantization="int8", **settings), make_engine(made, **settings)):
        requests = [
            Request(
                str(index), job.prompt, SamplingParams(max_tokens=job.max_tokens, temperature=0, logprobs=2), options
            )
            for index, (job, options) in enumerate(
                zip(
                    random_jobs([None] * 4),
                    (
                        ExitOptions("full"),
                        ExitOptions("fill", MARGIN),
                        ExitOptions("verify", MARGIN),
                        ExitOptions("fill", ExitPolicy("margin", {1: 0.2, 3: 0.2}, shortlist=tuple(range(3, 200)))),
                    ),
                    strict=True,
                )
            )
        ]
        for request in requests:
            engine.add_request(request)
        drain(engine)
        assert not any(request.error for request in requests)
        answers.append([(one.output_token_ids, one.exit_layers, one.confidences, one.logprobs) for one in requests])
    assert answers[0] == answers[1]


def test_verified_answers_are_those_of_full_depth() -> None:
    model, _ = both_models("adapter", torch.float32)
    engine = make_engine(model, quantization="int8")
    jobs = random_jobs([MARGIN] * 3)
    verified = run_jobs(engine, [Job(job.prompt, job.max_tokens, MARGIN, "verify") for job in jobs])
    whole = run_jobs(engine, [Job(job.prompt, job.max_tokens) for job in jobs])
    assert [tokens for tokens, _ in verified] == [tokens for tokens, _ in whole]


def test_int8_is_another_model_than_the_weights_are() -> None:
    model, _ = both_models("norm", torch.float32)
    request = [
        Request("0", (5, 6, 7), SamplingParams(max_tokens=3, temperature=0, logprobs=1), ExitOptions("full"))
        for _ in range(2)
    ]
    for one, quantization in zip(request, ("none", "int8"), strict=True):
        engine = make_engine(model, quantization=quantization)
        engine.add_request(one)
        drain(engine)
    assert request[0].logprobs != request[1].logprobs
