"""Exit configuration, policy, confidence and heads."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers.tiny import tiny_model
from offramp.common.errors import OfframpError
from offramp.common.exits.confidence import confidence
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy, Measure
from offramp.common.model.exit_head import ExitClassifier, ExitHead
from offramp.common.model.norm import RMSNorm
from offramp.common.model.transformer import MultiExitTransformer

MEASURES: tuple[Measure, ...] = ("max_probability", "margin", "entropy", "cosine", "classifier")
HEADS = [
    ExitConfig((1, 3), "bare"),
    ExitConfig((1, 3), "final"),
    ExitConfig((1, 3), "norm"),
    ExitConfig((1, 3), "adapter"),
    ExitConfig((1, 3), "adapter", adapter_dim=5),
    ExitConfig((1, 3), "mlp"),
    ExitConfig((1, 3), "block"),
    ExitConfig((1, 3), "bare", tied=False),
    ExitConfig((1, 3), "adapter", tied=False),
    ExitConfig((1, 3), "block", tied=False),
    ExitConfig((1, 3), "final", classifier=True),
]


def line(size: int) -> ExitClassifier:
    """A classifier that is sure of states whose first number is large."""
    made = ExitClassifier(size).requires_grad_(False)
    made.weight[0, 0], made.bias[0] = 2.0, -1.0
    return made


def ids(rows: int = 2, length: int = 9) -> Tensor:
    return torch.randint(5, 300, (rows, length), generator=torch.Generator().manual_seed(1))


def head_of(model: MultiExitTransformer, layer: int) -> ExitHead:
    head = model.exits[str(layer)]
    assert isinstance(head, ExitHead)
    return head


# Configuration


@pytest.mark.parametrize("config", HEADS)
def test_config_survives_json(config: ExitConfig) -> None:
    assert ExitConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_a_config_from_before_there_were_classifiers() -> None:
    known = {name: value for name, value in ExitConfig((1, 3)).to_json().items() if name != "classifier"}
    assert ExitConfig.from_json(known) == ExitConfig((1, 3), classifier=False)


@pytest.mark.parametrize("layers", [["six"], None, 6])
def test_json_that_is_no_config_is_one_sentence(layers: object) -> None:
    with pytest.raises(OfframpError, match="section 'exits' is not understood"):
        ExitConfig.from_json({"layers": layers})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": (2, 1)}, "ascending"),
        ({"layers": (1, 1)}, "without duplicates"),
        ({"head": "linear"}, "exit head 'linear' is unknown; choose one of bare, final"),
        ({"head": "final", "tied": False}, "cannot be untied"),
        ({"head": "norm", "adapter_dim": 8}, "needs exit head 'adapter'"),
        ({"head": "adapter", "adapter_dim": 0}, "at least 1"),
        ({"classifier": "yes"}, "classifier 'yes' must be true or false"),
    ],
)
def test_a_wrong_config_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(OfframpError, match=message):
        ExitConfig(**fields)


@pytest.mark.parametrize("layer", [-1, 0, 4, 5])
def test_exits_lie_inside_the_model(layer: int) -> None:
    with pytest.raises(OfframpError, match=rf"exit layers \[{layer}\] are outside 1..3: layers are counted from 1"):
        tiny_model(ExitConfig((layer,)))


@pytest.mark.parametrize("exits", [[2], [5], [1, 99]])
def test_an_exit_that_does_not_exist_is_refused_with_those_that_do(exits: list[int]) -> None:
    model = tiny_model(ExitConfig((1, 3)))
    with pytest.raises(OfframpError, match=r"no exit at layer .*exits at \[1, 3, 4\]"):
        model(ids(), exits=exits)


# Policy


@given(
    measure=st.sampled_from(MEASURES),
    thresholds=st.dictionaries(st.integers(1, 60), st.floats(-2, 2), max_size=5),
    min_layer=st.integers(0, 60),
    decay=st.none() | st.floats(0, 50),
    shortlist=st.none() | st.lists(st.integers(0, 1000), min_size=2, max_size=5, unique=True).map(tuple),
)
def test_policy_survives_json(**fields: Any) -> None:
    policy = ExitPolicy(**fields)
    assert ExitPolicy.from_json(json.loads(json.dumps(policy.to_json()))) == policy


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"measure": "luck"}, "measure 'luck' is unknown; choose one of max_probability, margin, entropy, cosine"),
        ({"thresholds": {1: math.nan}}, "NaN"),
        ({"decay": -1.0}, "decay -1.0 must be 0 or more"),
        ({"decay": math.nan}, "decay nan must be 0 or more"),
        ({"decay": "x"}, "decay 'x' must be 0 or more"),
        ({"min_layer": "x"}, "min_layer 'x' must be a whole number"),
        ({"min_layer": 1.5}, "min_layer 1.5 must be a whole number"),
        ({"shortlist": (7,)}, "at least 2"),
        ({"shortlist": (7, 8, 7)}, "names a token twice"),
        ({"shortlist_only": True}, "needs a shortlist"),
        ({"shortlist": (7, 8), "shortlist_only": 1}, "must be true or false"),
    ],
)
def test_a_wrong_policy_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(OfframpError, match=message):
        ExitPolicy(**fields)


def test_threshold_of_an_unused_exit_is_never_passed() -> None:
    policy = ExitPolicy("margin", {1: 0.1, 3: 0.2}, min_layer=2)
    assert policy.threshold(1, 5, 10) == math.inf  # below the lowest layer
    assert policy.threshold(2, 5, 10) == math.inf  # without a threshold
    assert policy.threshold(3, 5, 10) == 0.2
    assert ExitPolicy().threshold(1, 0, 1) == math.inf  # by default no exit is used


@pytest.mark.parametrize(
    ("threshold", "step", "expected"),
    [
        (0.5, 0, 0.45 + 0.1),
        (0.5, 5, 0.45 + 0.1 * 0.1353352832),  # exp(-4 * 5 / 10)
        (0.5, 10, 0.45 + 0.1 * 0.0183156389),  # exp(-4)
        (0.99, 0, 0.991),
        (-3.0, 5, 0.0),  # clipped
    ],
)
def test_decay_follows_the_papers_formula(threshold: float, step: int, expected: float) -> None:
    assert ExitPolicy("margin", {1: threshold}, decay=4.0).threshold(1, step, 10) == pytest.approx(expected, abs=1e-9)


@given(st.floats(1.0, 5.0), st.floats(0, 50), st.integers(0, 100))
def test_decay_never_turns_never_into_sometimes(threshold: float, decay: float, step: int) -> None:
    assert ExitPolicy("margin", {1: threshold}, decay=decay).threshold(1, step, 100) >= 1.0


def test_one_threshold_everywhere() -> None:
    policy = ExitPolicy("entropy", {1: 0.1}, min_layer=1, decay=1.0).with_threshold(0.7, (1, 3))
    assert policy == ExitPolicy("entropy", {1: 0.7, 3: 0.7}, min_layer=1, decay=1.0)


# Confidence


def test_measures_against_hand_numbers() -> None:
    logits = torch.tensor([[0.7, 0.2, 0.1], [1 / 3, 1 / 3, 1 / 3], [1.0, 0.0, 0.0]]).log()
    states = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 2.0]])
    previous = torch.tensor([[4.0, 3.0], [0.0, 5.0], [0.0, 1.0]])
    entropy = 1 + (0.7 * math.log(0.7) + 0.2 * math.log(0.2) + 0.1 * math.log(0.1)) / math.log(3)
    for measure, expected in {
        "max_probability": [0.7, 1 / 3, 1.0],
        "margin": [0.5, 0.0, 1.0],
        "entropy": [entropy, 0.0, 1.0],
        "cosine": [24 / 25, 0.0, 1.0],
        "classifier": [1 / (1 + math.exp(-5)), 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))],
    }.items():
        got = confidence(measure, logits, states, previous, line(2))  # pyright: ignore[reportArgumentType]
        torch.testing.assert_close(got, torch.tensor(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("measure", MEASURES)
def test_a_row_is_judged_alone(measure: Measure) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, state, previous = (torch.randn(5, size, generator=generator) for size in (40, 16, 16))
    together = confidence(measure, logits, state, previous, line(16))
    assert together.shape == (5,)
    alone = [
        confidence(measure, logits[row : row + 1], state[row : row + 1], previous[row : row + 1], line(16))
        for row in range(5)
    ]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("measure", MEASURES)
def test_nan_never_lets_a_token_leave_nor_touches_its_neighbours(measure: Measure) -> None:
    logits, state, previous = torch.ones(2, 8), torch.ones(2, 4), torch.ones(2, 4)
    logits[0, 3] = state[0, 1] = math.nan
    got = confidence(measure, logits, state, previous, line(4))
    assert not got[0] > -math.inf
    assert not got[1].isnan()


@pytest.mark.parametrize("measure", MEASURES)
@given(
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([1e-3, 1.0, 30.0, 1e4]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_confidence_never_passes_one(measure: Measure, seed: int, scale: float, dtype: str) -> None:
    """A threshold of 1 means never; rounding must not disagree."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(4, 300, generator=generator) * scale).to(getattr(torch, dtype))
    state = (torch.randn(4, 32, generator=generator) * scale).to(getattr(torch, dtype))
    assert (confidence(measure, logits, state, state, line(32)) <= 1.0).all()


def test_masked_tokens_count_as_impossible() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf, -math.inf]])
    assert confidence("entropy", logits, logits, logits).item() == pytest.approx(0.5)  # 1 - log 2 / log 4
    assert confidence("margin", logits, logits, logits).item() == 0.0


def test_logit_measures_need_logits() -> None:
    with pytest.raises(ValueError, match="computed on logits"):
        confidence("margin", None, torch.ones(1, 2), torch.ones(1, 2))


def test_the_classifier_measure_needs_a_classifier() -> None:
    with pytest.raises(ValueError, match="what a classifier of the exit says"):
        confidence("classifier", None, torch.ones(1, 2), torch.ones(1, 2))
    with pytest.raises(OfframpError, match="measure 'classifier' asks the exits' classifiers, and this model has none"):
        ExitPolicy("classifier").check_measure(has_classifiers=False)
    ExitPolicy("classifier").check_measure(has_classifiers=True)
    ExitPolicy("margin").check_measure(has_classifiers=False)


@pytest.mark.parametrize("row", range(0, 37, 4))
def test_a_classifier_is_not_disturbed_by_many_neighbours(row: int) -> None:
    """Bit by bit, in any number of rows: a matrix product would not promise that."""
    generator = torch.Generator().manual_seed(4)
    made = ExitClassifier(576).requires_grad_(False)
    made.weight.normal_(generator=generator)
    states = torch.randn(37, 576, generator=generator)
    assert torch.equal(made(states)[row : row + 3], made(states[row : row + 3]))


# Heads


@torch.no_grad()
def test_classifiers_are_added_and_know_nothing() -> None:
    model = tiny_model(ExitConfig((1, 3)))
    before = model.state_dict()
    assert model.exit_classifier(1) is None
    model.add_classifiers()
    assert model.exit_config == ExitConfig((1, 3), classifier=True)
    made = model.exit_classifier(3)
    assert made is not None
    assert made(torch.randn(5, 32)).tolist() == [0.5] * 5
    added = set(model.state_dict()) - set(before)
    assert added == {f"exits.{layer}.classifier.{part}" for layer in (1, 3) for part in ("weight", "bias")}
    made.bias.fill_(1.0)
    model.initialise_exits("random")
    assert float(made.bias) == float(made.weight.abs().sum()) == 0.0


@pytest.mark.parametrize("config", HEADS, ids=str)
@torch.no_grad()
def test_every_head_reads_its_layer(config: ExitConfig) -> None:
    model = tiny_model(config)
    out = model(ids())
    assert set(out.logits) == {1, 3, 4}
    layout = model.layout(ids())
    for layer in (1, 3, 4):
        assert out.logits[layer].shape == (2, 9, 300)
        state = model.run_layers(model.embed(ids()), 0, layer, layout)
        assert torch.equal(out.hidden_states[layer], state)
        assert torch.equal(out.logits[layer], model.exit_logits(state, layer, layout))
    assert torch.equal(model(ids(), exits=[4]).logits[4], out.logits[4])
    assert (model.unembedding(1) is model.unembedding()) == config.tied
    assert torch.equal(out.logits[4], tiny_model(None)(ids()).logits[4])  # exits change nothing of the model


@torch.no_grad()
def test_a_block_head_needs_the_sequence() -> None:
    model = tiny_model(ExitConfig((1,), "block"))
    with pytest.raises(ValueError, match="layout"):
        model.exit_logits(model.embed(ids()), 1)


@pytest.mark.parametrize("width", [None, 5])
@torch.no_grad()
def test_an_adapter_starts_as_the_identity(width: int | None) -> None:
    model = tiny_model(ExitConfig((2,), "adapter", adapter_dim=width))
    plain = tiny_model(ExitConfig((2,), "final"))
    state = plain(ids()).hidden_states[2]
    assert not torch.allclose(model.exit_logits(state, 2), plain.exit_logits(state, 2))
    model.initialise_exits("copy")
    torch.testing.assert_close(model.exit_logits(state, 2), plain.exit_logits(state, 2))


@torch.no_grad()
def test_an_adapters_correction_scales_with_the_state() -> None:
    """States grow with depth; the adapter's share of them must not depend on it."""
    model = tiny_model(ExitConfig((2,), "adapter"))
    adapter = head_of(model, 2).adapter
    assert adapter is not None
    state = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(adapter(100 * state), 100 * adapter(state), rtol=1e-4, atol=1e-3)


@torch.no_grad()
def test_copying_starts_from_the_models_own_weights() -> None:
    for kind in ("norm", "mlp", "block"):
        model = tiny_model(ExitConfig((1, 3), kind, tied=False))
        model.initialise_exits("copy", norm_scale=0.25)
        for layer in (1, 3):
            head = head_of(model, layer)
            assert isinstance(head.norm, RMSNorm)
            assert torch.equal(head.norm.weight, model.norm.weight * 0.25)
            assert head.unembed is not None
            assert torch.equal(head.unembed.weight, model.unembedding())
            assert head.unembed.weight is not model.unembedding()
            own = model.layers[layer - 1].state_dict()
            if head.mlp is not None and head.mlp_norm is not None:
                assert all(torch.equal(tensor, own[f"mlp.{name}"]) for name, tensor in head.mlp.state_dict().items())
                assert torch.equal(head.mlp_norm.weight, own["post_attention_layernorm.weight"])
            if head.block is not None:
                last = model.layers[-1].state_dict()
                assert all(torch.equal(tensor, last[name]) for name, tensor in head.block.state_dict().items())


@torch.no_grad()
def test_a_copied_block_continues_the_model() -> None:
    """After layer L - 1 the copy of the last block, with the copied norm, is the final exit."""
    model = tiny_model(ExitConfig((3,), "block"))
    model.initialise_exits("copy")
    out = model(ids())
    torch.testing.assert_close(out.logits[3], out.logits[4])


def test_random_heads_follow_their_seed() -> None:
    def weights(seed: int) -> Tensor:
        model = tiny_model(ExitConfig((1,), "mlp"))
        model.initialise_exits("random", seed=seed)
        mlp = head_of(model, 1).mlp
        assert mlp is not None
        return mlp.down_proj.weight

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))
    assert weights(1).std().item() == pytest.approx(0.02, rel=0.1)  # initializer_range
