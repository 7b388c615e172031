"""Naive generation and the frozen states it is built on."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch

from helpers.tiny import tiny_model
from offramp.common.errors import OfframpError
from offramp.common.exits.confidence import confidence
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy, Measure
from offramp.common.generation import generate
from offramp.common.model.transformer import MultiExitTransformer

PROMPT = [10, 42, 7, 99, 23]
EXITS = ExitConfig((1, 2, 3), "norm")
CLASSIFIED = dataclasses.replace(EXITS, classifier=True)


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


@pytest.mark.parametrize("measure", ["max_probability", "margin", "entropy", "cosine", "classifier"])
@pytest.mark.parametrize("decay", [None, 3.0])
def test_thresholds_of_one_and_more_mean_full_depth(measure: Measure, decay: float | None) -> None:
    model = tiny_model(CLASSIFIED)
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
@pytest.mark.parametrize("measure", ["margin", "cosine", "classifier"])
def test_every_token_is_what_its_exit_said(head: Any, measure: Measure) -> None:
    """Replayed in one pass with the recorded depths: exits taken were sure, exits passed by were not."""
    model = tiny_model(ExitConfig((1, 2, 3), head, classifier=measure == "classifier"))
    thresholds = {1: 0.5, 2: 0.35, 3: 0.2} if measure == "margin" else {1: 0.9, 2: 0.75, 3: 0.6}
    policy = ExitPolicy(measure, thresholds)
    result = generate(model, PROMPT, 24, policy=policy)
    assert len(set(result.exit_layers)) > 2, "the test says little when all tokens leave at one layer"
    _replay(model, policy, result.token_ids, result.exit_layers)


def _classify(model: MultiExitTransformer, layer: int, state: torch.Tensor) -> torch.Tensor:
    """The classifier of an exit, from its weights by name."""
    weights = model.state_dict()
    weight, bias = (weights[f"exits.{layer}.classifier.{part}"] for part in ("weight", "bias"))
    return torch.sigmoid(state @ weight[0] + bias)


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
                now = slice(at, at + 1)
                by_hand = functools.partial(_classify, model, layer) if policy.measure == "classifier" else None
                sure = confidence(policy.measure, logits[now], h[0, now], states[-1][0, now], by_hand)
                assert (float(sure) > policy.threshold(layer, step, len(tokens))) == (layer == depth)


@torch.no_grad()
def test_a_token_outside_the_shortlist_cannot_exit() -> None:
    model = tiny_model(EXITS)
    shortlist = tuple(range(20, 200, 3))
    sure = ExitPolicy("max_probability", dict.fromkeys((1, 2, 3), 0.0))  # every test passes
    listed = dataclasses.replace(sure, shortlist=shortlist)
    result = generate(model, PROMPT, 40, policy=listed)
    early = [token for token, layer in zip(result.token_ids, result.exit_layers, strict=True) if layer < 4]
    assert early
    assert set(early) <= set(shortlist)
    assert len(set(result.exit_layers)) > 2
    # Step by step: the first exit whose best token of all is on the list says it.
    for step in range(1, 12):
        ids = torch.tensor([PROMPT + result.token_ids[:step]])
        depths = torch.tensor([[4] * len(PROMPT) + result.exit_layers[1:step] + [4]])
        out = model(ids, model.layout(ids, exit_depths=depths))
        best = {layer: int(logits[0, -1].argmax()) for layer, logits in out.logits.items()}
        leaves_at = next((layer for layer in (1, 2, 3) if best[layer] in shortlist), 4)
        assert (result.token_ids[step], result.exit_layers[step]) == (best[leaves_at], leaves_at)


@torch.no_grad()
@pytest.mark.parametrize("measure", ["margin", "cosine"])
def test_a_shortlist_alone_says_what_leaves(measure: Measure) -> None:
    model = tiny_model(EXITS)
    shortlist = tuple(range(20, 200, 3))
    policy = ExitPolicy(measure, dict.fromkeys((1, 2), -1.0), shortlist=shortlist, shortlist_only=True)
    result = generate(model, PROMPT, 20, policy=policy)
    assert result.exit_layers == [4] + [1] * 19
    others = 0
    for step in range(1, 20):
        ids = torch.tensor([PROMPT + result.token_ids[:step]])
        depths = torch.tensor([[4] * len(PROMPT) + result.exit_layers[1:step] + [4]])
        logits = model(ids, model.layout(ids, exit_depths=depths)).logits[1][0, -1]
        assert result.token_ids[step] == shortlist[int(logits[list(shortlist)].argmax())]
        others += int(logits.argmax()) not in shortlist
    assert others > 3


@pytest.mark.parametrize("measure", ["cosine", "classifier"])
def test_a_shortlist_is_nothing_to_a_measure_of_states(measure: Measure) -> None:
    model = tiny_model(CLASSIFIED)
    policy = ExitPolicy(measure, {1: 0.8, 3: 0.5})
    free = generate(model, PROMPT, 20, policy=policy)
    assert {3, 4} <= set(free.exit_layers)
    assert generate(model, PROMPT, 20, policy=dataclasses.replace(policy, shortlist=(20, 21))) == free


def test_without_classifiers_there_is_nothing_to_ask() -> None:
    with pytest.raises(OfframpError, match="measure 'classifier' asks the exits' classifiers"):
        generate(tiny_model(EXITS), PROMPT, 3, policy=ExitPolicy("classifier", {1: 0.5}))


def test_a_shortlist_changes_what_confidence_is_a_share_of() -> None:
    model = tiny_model(EXITS)
    policy = ExitPolicy("max_probability", {1: 0.4})
    free = generate(model, PROMPT, 20, policy=policy)
    listed = generate(model, PROMPT, 20, policy=dataclasses.replace(policy, shortlist=tuple(range(0, 300, 2))))
    assert sum(layer == 1 for layer in listed.exit_layers) > 0
    assert listed.exit_layers != free.exit_layers


WITH_EXITS = [
    ExitPolicy("margin", {1: 0.5, 2: 0.35, 3: 0.2}),
    ExitPolicy("cosine", {1: 0.8, 3: 0.5}),
    ExitPolicy("max_probability", {2: 0.1}, decay=2.0),
]


@torch.no_grad()
@pytest.mark.parametrize("policy", WITH_EXITS, ids=lambda policy: policy.measure)
@pytest.mark.parametrize("head", ["norm", "block"])
@pytest.mark.parametrize("max_pending", [1, 3, 8])
def test_recompute_reads_the_full_models_keys_and_values(head: Any, policy: ExitPolicy, max_pending: int) -> None:
    """In one full pass over the answer, each exit layer recorded says the token it said, and no exit before it would
    have."""
    model = tiny_model(ExitConfig((1, 2, 3), head))
    result = generate(model, PROMPT, 24, kv_policy="recompute", policy=policy, max_pending=max_pending)
    assert len(set(result.exit_layers)) > 1
    ids = torch.tensor([PROMPT + result.token_ids[:-1]])
    out = model(ids)
    states, h, layout = [model.embed(ids)], model.embed(ids), model.layout(ids)
    for layer in range(4):
        h = model.run_layers(h, layer, layer + 1, layout)
        states.append(h)
    pending = 0
    for step, (token, taken) in enumerate(zip(result.token_ids, result.exit_layers, strict=True)):
        at = len(PROMPT) - 1 + step
        assert token == int(out.logits[taken][0, at].argmax())
        leaves_at = 4
        if step > 0 and pending < max_pending:
            sure = {
                layer: confidence(
                    policy.measure, out.logits[layer][0, [at]], states[layer][0, [at]], states[layer - 1][0, [at]]
                )
                for layer in policy.thresholds
            }
            leaves_at = next((e for e in sorted(sure) if float(sure[e]) > policy.threshold(e, step, 24)), 4)
        assert taken == leaves_at
        pending = 0 if taken == 4 else pending + 1


def test_recompute_runs_through_once_max_pending_tokens_wait() -> None:
    model = tiny_model(EXITS)
    everywhere = ExitPolicy("margin", {2: -1.0})

    def layers(max_pending: int) -> list[int]:
        return generate(model, PROMPT, 8, kv_policy="recompute", policy=everywhere, max_pending=max_pending).exit_layers

    assert layers(1) == [4, 2, 4, 2, 4, 2, 4, 2]
    assert layers(3) == [4, 2, 2, 2, 4, 2, 2, 2]
    assert layers(7) == [4] + [2] * 7


@pytest.mark.parametrize("policy", WITH_EXITS, ids=lambda policy: policy.measure)
@pytest.mark.parametrize("max_pending", [1, 2, 8])
def test_verify_says_what_the_full_model_says(policy: ExitPolicy, max_pending: int) -> None:
    for seed in range(4):
        model = tiny_model(ExitConfig((1, 2, 3), "final"), seed)
        full = generate(model, PROMPT, 20, kv_policy="full")
        result = generate(model, PROMPT, 20, kv_policy="verify", policy=policy, max_pending=max_pending)
        assert result.token_ids == full.token_ids
        eos = full.token_ids[9]
        end = full.token_ids.index(eos) + 1
        ended = generate(model, PROMPT, 20, kv_policy="verify", policy=policy, max_pending=max_pending, eos_ids=(eos,))
        assert ended.token_ids == full.token_ids[:end]


@torch.no_grad()
def test_verify_counts_kept_drafts_as_said_where_they_were_drafted() -> None:
    """A head that is the model's own and sits under a layer that changes nothing drafts what the model says."""
    model = tiny_model(ExitConfig((3,), "final"))
    last = model.get_submodule("layers.3")
    last.get_parameter("self_attn.o_proj.weight").zero_()
    last.get_parameter("mlp.down_proj.weight").zero_()
    policy = ExitPolicy("margin", {3: -1.0})

    def layers(count: int, max_pending: int) -> list[int]:
        return generate(model, PROMPT, count, kv_policy="verify", policy=policy, max_pending=max_pending).exit_layers

    assert layers(9, 3) == [4, 3, 3, 3, 4, 3, 3, 3, 4]
    assert layers(7, 3) == [4, 3, 3, 3, 4, 3, 3], "drafts that end the text are judged as well"
    assert layers(5, 1) == [4, 3, 4, 3, 4]


def test_verify_forgets_drafts_that_are_wrong() -> None:
    """Also those that would have ended the text."""
    model = tiny_model(ExitConfig((1,), "norm", tied=False))
    policy = ExitPolicy("margin", {1: -1.0})
    full = generate(model, PROMPT, 8)
    assert generate(model, PROMPT, 8, kv_policy="verify", policy=policy, max_pending=3) == full
    draft = generate(model, PROMPT, 2, kv_policy="recompute", policy=policy).token_ids[1]
    assert draft not in full.token_ids
    assert generate(model, PROMPT, 8, kv_policy="verify", policy=policy, eos_ids=(draft,)) == full


@torch.no_grad()
def test_static_is_the_model_cut_off_after_its_first_token() -> None:
    model = tiny_model(EXITS)
    result = generate(model, PROMPT, 12, kv_policy="static", static_layer=2)
    assert result.exit_layers == [4] + [2] * 11
    out = model(torch.tensor([PROMPT + result.token_ids[:-1]]))
    said = {layer: logits[0].argmax(dim=-1).tolist() for layer, logits in out.logits.items()}
    assert result.token_ids == said[4][len(PROMPT) - 1 : len(PROMPT)] + said[2][len(PROMPT) :]


def test_full_takes_no_exit() -> None:
    model = tiny_model(EXITS)
    everywhere = ExitPolicy("margin", {1: -1.0})
    assert generate(model, PROMPT, 8, kv_policy="full", policy=everywhere) == generate(model, PROMPT, 8)


def test_generation_ends_with_an_eos() -> None:
    model = tiny_model(EXITS)
    text = generate(model, PROMPT, 12).token_ids
    eos = text[4]
    end = text.index(eos) + 1
    assert generate(model, PROMPT, 12, eos_ids=(299, eos)).token_ids == text[:end]
    assert generate(model, PROMPT, 12, eos_ids=(text[0],)).token_ids == text[:1]  # also as the first token
