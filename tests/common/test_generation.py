"""Naive generation and the frozen states it is built on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from helpers.tiny import tiny_model
from offramp.common.exits.confidence import confidence
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy, Measure
from offramp.common.generation import generate
from offramp.common.model.transformer import MultiExitTransformer

PROMPT = [10, 42, 7, 99, 23]
EXITS = ExitConfig((1, 2, 3), "norm")


@torch.no_grad()
def test_a_frozen_token_keeps_its_state_and_lends_keys_and_values_from_it() -> None:
    model = tiny_model()
    ids = torch.tensor([PROMPT])
    free, frozen = model.layout(ids), model.layout(ids, exit_depths=torch.tensor([[4, 1, 4, 2, 4]]))
    # By hand: blocks run on all tokens, and those that have left are put back.
    h1 = model.run_layers(model.embed(ids), 0, 1, free)
    h2 = torch.where(torch.tensor([False, True, False, False, False])[:, None], h1, model.run_layers(h1, 1, 2, free))
    h3 = torch.where(torch.tensor([False, True, False, True, False])[:, None], h2, model.run_layers(h2, 2, 3, free))
    assert torch.equal(model.run_layers(model.embed(ids), 0, 1, frozen), h1)
    assert torch.equal(model.run_layers(model.embed(ids), 0, 2, frozen), h2)
    assert torch.equal(model.run_layers(model.embed(ids), 0, 3, frozen), h3)
    assert torch.equal(h3[:, 1], h1[:, 1])
    assert torch.equal(h3[:, 3], h2[:, 3])
    # Layer 3 is the first to make keys and values from another state of token 1 than the whole model's.
    whole2 = model.run_layers(model.embed(ids), 0, 2, free)
    whole3 = model.run_layers(model.embed(ids), 0, 3, free)
    assert torch.equal(h2[:, [0, 2, 3, 4]], whole2[:, [0, 2, 3, 4]])
    assert torch.equal(h3[:, 0], whole3[:, 0])  # sees no frozen token
    assert not torch.allclose(h3[:, 2], whole3[:, 2])


@pytest.mark.parametrize("measure", ["max_probability", "margin", "entropy", "cosine"])
@pytest.mark.parametrize("decay", [None, 3.0])
def test_thresholds_of_one_and_more_mean_full_depth(measure: Measure, decay: float | None) -> None:
    model = tiny_model(EXITS)
    full = generate(model, PROMPT, 12)
    assert full.exit_layers == [4] * 12
    for threshold in (1.0, 1.5, math.inf):
        policy = ExitPolicy(measure, dict.fromkeys((1, 2, 3), threshold), decay=decay)
        assert generate(model, PROMPT, 12, policy=policy) == full
    assert generate(model, PROMPT, 12, policy=ExitPolicy(measure)) == full  # exits without thresholds are not used


def test_low_thresholds_leave_at_the_lowest_exit_after_the_prompt() -> None:
    model = tiny_model(EXITS)
    everywhere = ExitPolicy("margin", dict.fromkeys((1, 2, 3), -1.0))
    result = generate(model, PROMPT, 8, policy=everywhere)
    assert result.exit_layers == [4] + [1] * 7
    assert result.token_ids[0] == generate(model, PROMPT, 1).token_ids[0]
    assert generate(model, PROMPT, 8, policy=ExitPolicy("margin", {1: -1.0, 3: -1.0}, min_layer=2)).exit_layers == [
        4,
        *[3] * 7,
    ]


def test_a_prompt_of_one_token_does_not_exit() -> None:
    """Position 0 is no sign of a prompt, and a length of one is no sign of decoding."""
    result = generate(tiny_model(EXITS), [10], 3, policy=ExitPolicy("margin", {1: -1.0}))
    assert result.exit_layers == [4, 1, 1]


@pytest.mark.parametrize("head", ["norm", "block", "adapter"])
@pytest.mark.parametrize("measure", ["margin", "cosine"])
def test_every_token_is_what_its_exit_said(head: Any, measure: Measure) -> None:
    """Replayed in one pass with the recorded depths: exits taken were sure, exits passed by were not."""
    model = tiny_model(ExitConfig((1, 2, 3), head))
    thresholds = {1: 0.5, 2: 0.35, 3: 0.2} if measure == "margin" else {1: 0.9, 2: 0.75, 3: 0.6}
    policy = ExitPolicy(measure, thresholds)
    result = generate(model, PROMPT, 24, policy=policy)
    assert len(set(result.exit_layers)) > 2, "the test says little when all tokens leave at one layer"
    _replay(model, policy, result.token_ids, result.exit_layers)


@torch.no_grad()
def _replay(model: MultiExitTransformer, policy: ExitPolicy, tokens: list[int], taken: list[int]) -> None:
    ids = torch.tensor([PROMPT + tokens[:-1]])
    # How deep each token that is read went to say the next one; the prompt always went all the way.
    depths = torch.tensor([[4] * len(PROMPT) + taken[1:]])
    layout = model.layout(ids, exit_depths=depths)
    h, states = model.embed(ids), []
    for layer in range(1, 5):
        states.append(h)
        h = model.run_layers(h, layer - 1, layer, layout)
        logits = model.exit_logits(h, layer, layout)[0]
        for step, (token, depth) in enumerate(zip(tokens, taken, strict=True)):
            at = len(PROMPT) - 1 + step
            if layer == depth:
                assert token == int(logits[at].argmax())
            if step > 0 and layer in policy.thresholds and layer <= depth:
                sure = confidence(policy.measure, logits[at : at + 1], h[0, at : at + 1], states[-1][0, at : at + 1])
                assert (float(sure) > policy.threshold(layer, step, len(tokens))) == (layer == depth)


def test_a_shortlist_judges_a_few_tokens_and_says_any() -> None:
    model = tiny_model(EXITS)
    free = generate(model, PROMPT, 20, policy=ExitPolicy("max_probability", {1: 0.4}))
    listed = generate(model, PROMPT, 20, policy=ExitPolicy("max_probability", {1: 0.4}, shortlist=(20, 21)))
    assert listed.exit_layers == [4] + [1] * 19  # the better of two has at least half of their probability
    assert free.exit_layers != listed.exit_layers
    assert set(listed.token_ids) - {20, 21}


def test_generation_ends_with_an_eos() -> None:
    model = tiny_model(EXITS)
    text = generate(model, PROMPT, 12).token_ids
    eos = text[4]
    end = text.index(eos) + 1
    assert generate(model, PROMPT, 12, eos_ids=(299, eos)).token_ids == text[:end]
    assert generate(model, PROMPT, 12, eos_ids=(text[0],)).token_ids == text[:1]  # also as the first token
