"""`verify` is lossless: whatever exits draft, the answer is the full model's, over random models, exits and batches."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.engines import MAX_MODEL_LEN, drain, layer_runs, make_engine
from helpers.tiny import tiny_model
from offramp.common.exits.config import ExitConfig, HeadKind
from offramp.common.exits.policy import ExitPolicy, Measure
from offramp.common.generation import generate
from offramp.common.model.transformer import MultiExitTransformer
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.request import Request
from offramp.serve.request.sampling_params import SamplingParams

NUM_LAYERS = 4
VARIANTS: list[dict[str, Any]] = [
    {},
    {"model_type": "mistral", "sliding_window": 5},
    {"model_type": "qwen3", "head_dim": 16},
    {"attention_bias": True, "num_key_value_heads": 1},
]


@torch.no_grad()
def draw_model(exits: ExitConfig, seed: int, quiet: float, variant: dict[str, Any]) -> MultiExitTransformer:
    """A random model whose layers after the first exit add `quiet` times what they would: so drafts are often right."""
    model = tiny_model(exits, seed, **variant)
    for layer in range(exits.layers[0], NUM_LAYERS):
        block = model.get_submodule(f"layers.{layer}")
        block.get_parameter("self_attn.o_proj.weight").mul_(quiet)
        block.get_parameter("mlp.down_proj.weight").mul_(quiet)
    if exits.head == "norm":
        for layer in exits.layers:
            model.get_submodule(f"exits.{layer}.norm").get_parameter("weight").copy_(model.norm.weight)
    return model


exit_layers = st.sets(st.integers(1, NUM_LAYERS - 1), min_size=1).map(lambda layers: tuple(sorted(layers)))
thresholds = st.sampled_from([-1.0, 0.1, 0.3, 0.6])


@st.composite
def options(draw: st.DrawFn, layers: tuple[int, ...]) -> ExitOptions:
    policy = ExitPolicy(
        draw(st.sampled_from([one for one in get_args(Measure) if one != "classifier"])),  # these exits have none
        {layer: draw(thresholds) for layer in layers},
        decay=draw(st.none() | st.just(2.0)),
        shortlist=draw(st.none() | st.just(tuple(range(0, 300, 2)))),
    )
    return ExitOptions("verify", policy, max_pending=draw(st.integers(1, 9)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[MultiExitTransformer, list[tuple[list[int], int, ExitOptions]], dict[str, Any]]:
    layers = draw(exit_layers)
    head: HeadKind = draw(st.sampled_from(["norm", "final", "bare", "block"]))
    model = draw_model(
        ExitConfig(layers, head),
        draw(st.integers(0, 1000)),
        draw(st.sampled_from([0.0, 0.05, 0.3, 1.0])),
        draw(st.sampled_from(VARIANTS)),
    )
    requests = [
        (
            draw(st.lists(st.integers(5, 299), min_size=1, max_size=12)),
            draw(st.integers(1, 10)),
            draw(options(layers)),
        )
        for _ in range(draw(st.integers(1, 3)))
    ]
    engine = {
        "max_num_seqs": draw(st.integers(1, 3)),
        "max_tokens_per_iteration": draw(st.integers(11, 24)),  # at least max_pending + 2
        "block_size": draw(st.sampled_from([1, 4, 16])),
    }
    return model, requests, engine


@settings(max_examples=10, deadline=None)
@given(cases())
def test_the_answer_is_the_full_models(
    case: tuple[MultiExitTransformer, list[tuple[list[int], int, ExitOptions]], dict[str, Any]],
) -> None:
    model, asked, config = case
    requests = [
        Request(str(index), tuple(prompt), SamplingParams(max_tokens=count, temperature=0), options)
        for index, (prompt, count, options) in enumerate(asked)
    ]
    engine = make_engine(model, **config)
    for request in requests:
        engine.add_request(request)
        engine.step()
    drain(engine)
    for request, (prompt, count, options) in zip(requests, asked, strict=True):
        assert request.error is None
        full = generate(model, prompt, count, kv_policy="full", rope_length=MAX_MODEL_LEN)
        assert request.output_token_ids == full.token_ids
        drafted = generate(
            model,
            prompt,
            count,
            kv_policy="verify",
            policy=options.policy,
            max_pending=options.max_pending,
            rope_length=MAX_MODEL_LEN,
        )
        assert request.exit_layers == drafted.exit_layers
    assert engine.num_free_blocks == 256
    assert engine.num_kept_tokens == 0


@pytest.mark.parametrize("max_pending", [1, 3, 8])
def test_drafts_that_are_right_save_full_passes(max_pending: int) -> None:
    """Where layers above the exit add nothing every draft is right: one full pass in `max_pending` + 1."""
    model = draw_model(ExitConfig((2,), "final"), seed=0, quiet=0.0, variant={})
    exits = ExitOptions("verify", ExitPolicy("margin", {2: -1.0}), max_pending)
    engine = make_engine(model)
    request = Request("a", (9, 8, 7), SamplingParams(max_tokens=19, temperature=0), exits)
    engine.add_request(request)
    drain(engine)
    expected = [NUM_LAYERS if index % (max_pending + 1) == 0 else 2 for index in range(19)]
    assert request.exit_layers == expected
    # One pass for each token after the prompt's, and one more if the last ones are drafts that wait for a verdict.
    unjudged = expected[-1] != NUM_LAYERS
    calls, _ = layer_runs(engine)
    assert calls[0] == 19 + unjudged
    assert calls[-1] == expected.count(NUM_LAYERS) + unjudged


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_text_ends_where_the_full_models_does(temperature: float) -> None:
    """At a stop token, drafted or not; nothing drafted after it gets out."""
    model = draw_model(ExitConfig((2,), "final"), seed=3, quiet=0.05, variant={})
    exits = ExitOptions("verify", ExitPolicy("margin", {2: 0.1}), 8)
    sampling = SamplingParams(max_tokens=24, temperature=temperature, seed=1)

    def run(options: ExitOptions, params: SamplingParams) -> Request:
        engine = make_engine(model)
        request = Request("a", (9, 8, 7), params, options)
        engine.add_request(request)
        said = [token for output in drain(engine) for token in output.new_token_ids]
        assert said == request.output_token_ids
        assert request.drafts == []
        return request

    free = run(exits, sampling).output_token_ids
    assert len(free) == 24
    for stop in sorted(set(free)):
        ended = run(exits, SamplingParams(**{**vars(sampling), "stop_token_ids": (stop,)}))
        assert ended.output_token_ids == free[: free.index(stop) + 1]
        assert ended.finish_reason == "stop"


def test_drawn_texts_do_not_depend_on_batch_mates() -> None:
    model = draw_model(ExitConfig((1, 3), "final"), seed=4, quiet=0.3, variant={})
    exits = ExitOptions("verify", ExitPolicy("margin", {1: 0.2, 3: 0.1}), 4)

    def request(seed: int) -> Request:
        return Request(str(seed), (9, 8, 7, seed), SamplingParams(max_tokens=20, seed=seed, logprobs=2), exits)

    alone = []
    for seed in range(5, 11):
        engine = make_engine(model)
        engine.add_request(one := request(seed))
        drain(engine)
        alone.append(one)
    engine = make_engine(model, max_num_seqs=3, max_tokens_per_iteration=6)
    together = [request(seed) for seed in range(5, 11)]
    for one in together:
        engine.add_request(one)
        engine.step()
    drain(engine)
    assert [one.output_token_ids for one in together] == [one.output_token_ids for one in alone]
    assert [one.exit_layers for one in together] == [one.exit_layers for one in alone]
    assert len({layer for one in alone for layer in one.exit_layers}) > 1


@torch.no_grad()
def test_log_probabilities_are_the_full_models() -> None:
    model = draw_model(ExitConfig((2,), "final"), seed=5, quiet=0.1, variant={})
    exits = ExitOptions("verify", ExitPolicy("margin", {2: 0.1}), 8)
    engine = make_engine(model)
    request = Request("a", (9, 8, 7), SamplingParams(max_tokens=20, seed=3, logprobs=1), exits)
    engine.add_request(request)
    drain(engine)
    assert set(request.exit_layers) == {2, NUM_LAYERS}
    log_p = model(torch.tensor([[9, 8, 7, *request.output_token_ids]])).logits[NUM_LAYERS][0].log_softmax(dim=-1)
    expected = [float(log_p[2 + index, token]) for index, token in enumerate(request.output_token_ids)]
    assert [one.logprob for one in request.logprobs] == pytest.approx(expected, abs=1e-4)
