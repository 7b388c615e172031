"""The probe reads off the packed model what the naive model says at every exit, and the engine does not notice."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from helpers.engines import MAX_MODEL_LEN, Job, drain, make_engine
from helpers.tiny import tiny_model
from offramp.common.errors import OfframpError
from offramp.common.exits.confidence import confidence
from offramp.common.exits.config import ExitConfig, HeadKind
from offramp.common.exits.policy import ExitPolicy, Measure
from offramp.common.model.attention import Layout
from offramp.common.model.transformer import MultiExitTransformer
from offramp.serve.probe import SLICE, PositionReading

EXITS = ExitConfig((1, 3), "norm")
TEXT = [(7 * n * n + 3 * n) % 300 for n in range(100)]  # in two slices


@torch.no_grad()
def check(model: MultiExitTransformer, readings: list[PositionReading], policy: ExitPolicy | None) -> None:
    ids = torch.tensor([TEXT])
    layout = Layout.build(model.config, ids, rope_length=MAX_MODEL_LEN)
    h, states = model.embed(ids), []
    for layer in range(4):
        states.append(h[0])
        h = model.run_layers(h, layer, layer + 1, layout)
    states.append(h[0])
    assert [one.position for one in readings] == list(range(len(TEXT)))
    assert [one.token_id for one in readings] == TEXT
    for layer in (1, 3, 4):
        logits = model.exit_logits(states[layer][None], layer, layout)[0]
        p = logits.softmax(dim=-1)
        at = [one.exits[layer] for one in readings]
        assert [reading.top[0][0] for reading in at] == logits.argmax(dim=-1).tolist()
        for row, reading in enumerate(at):
            assert [share for _, share in reading.top] == pytest.approx(p[row].topk(3).values.tolist(), abs=1e-4)
            assert [float(p[row, token]) for token, _ in reading.top] == pytest.approx(
                [share for _, share in reading.top], abs=1e-4
            )
        for measure in set(get_args(Measure)) - {"classifier"}:  # these exits have none
            expected = confidence(measure, logits, states[layer], states[layer - 1])
            assert [reading.confidence[measure] for reading in at] == pytest.approx(expected.tolist(), abs=1e-4)
        if policy is None or layer == 4:
            assert all(reading.tested is None for reading in at)
        else:
            shortlisted = logits if policy.shortlist is None else logits[:, list(policy.shortlist)]
            expected = confidence(policy.measure, shortlisted, states[layer], states[layer - 1])
            assert [reading.tested for reading in at] == pytest.approx(expected.tolist(), abs=1e-4)


VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "dynamic-rope": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 64},
    "mistral-window": {"model_type": "mistral", "sliding_window": 7},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_architecture(variant: str) -> None:
    model = tiny_model(EXITS, **{**VARIANTS[variant], "max_position_embeddings": 256})
    policy = ExitPolicy("margin", {1: 0.5}, shortlist=tuple(range(10, 200)))
    assert len(TEXT) > SLICE
    check(model, make_engine(model, policy).probe(TEXT, 3), policy)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", ["bare", "adapter", "mlp", "block"])
def test_every_head(head: HeadKind, tied: bool) -> None:
    model = tiny_model(ExitConfig((1, 3), head, tied))
    check(model, make_engine(model).probe(TEXT, 3), None)


def test_the_engine_does_not_notice() -> None:
    model = tiny_model(EXITS)
    policy = ExitPolicy("margin", {1: 0.3, 3: 0.3})
    job = Job((9, 8, 7), 16, policy)
    alone = make_engine(model)
    alone.add_request(job.request("a"))
    expected = [output.new_token_ids for output in drain(alone)]
    engine = make_engine(model)
    engine.add_request(job.request("a"))
    said = []
    while engine.has_unfinished:
        said += [output.new_token_ids for output in engine.step()]
        before = engine.num_free_blocks, engine.metrics.totals.row_layers
        engine.probe(TEXT, 1)
        assert before == (engine.num_free_blocks, engine.metrics.totals.row_layers)
    assert said == expected


@pytest.mark.parametrize(
    ("tokens", "top", "words"),
    [
        ([], 1, "no token to probe"),
        ([300], 1, "token 300, outside the vocabulary of 300"),
        ([5] * (MAX_MODEL_LEN + 1), 1, f"more than the {MAX_MODEL_LEN}"),
        ([5], 0, "at least 1"),
    ],
)
def test_what_cannot_be_probed_is_refused(tokens: list[int], top: int, words: str) -> None:
    with pytest.raises(OfframpError, match=words):
        make_engine(tiny_model(EXITS)).probe(tokens, top)


def test_as_many_tokens_as_there_are() -> None:
    (reading,) = make_engine(tiny_model(EXITS)).probe([5], 1000)
    assert len(reading.exits[4].top) == 300
    assert sum(share for _, share in reading.exits[4].top) == pytest.approx(1.0)
