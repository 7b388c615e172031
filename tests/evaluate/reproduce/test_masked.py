"""Masked keys and values, against what they are equal to where everybody leaves at one layer, or nobody does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.tiny_t5 import EOS_ID, hugging_face_t5, load_t5
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy
from offramp.common.generation import generate
from offramp.common.importing import NewExits, import_model
from offramp.common.t5.model import MultiExitT5
from offramp.evaluate.reproduce.masked import generate_masked

SOURCES = ([5, 9, 11, 1], [40, 3, 17, 22, 8, 1], [7, 7, 90, 1])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> MultiExitT5:
    folder = tmp_path_factory.mktemp("t5")
    hugging_face_t5(folder / "hf", feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    import_model(str(folder / "hf"), folder / "start", exits=NewExits(ExitConfig((1, 2, 3), "final")))
    return load_t5(folder / "start").model.eval()


def said(model: MultiExitT5, policy: ExitPolicy) -> list[list[int]]:
    return [generate_masked(model, source, 12, policy, (EOS_ID,)).token_ids for source in SOURCES]


def test_where_nobody_leaves_nothing_is_masked(model: MultiExitT5) -> None:
    full = [generate(model, source, 12, kv_policy="full", eos_ids=(EOS_ID,)).token_ids for source in SOURCES]
    assert said(model, ExitPolicy("margin", {2: 1.0})) == full


def test_where_all_leave_at_one_layer_nobody_looks_above(model: MultiExitT5) -> None:
    static = [
        generate(model, source, 12, kv_policy="static", static_layer=2, eos_ids=(EOS_ID,)).token_ids
        for source in SOURCES
    ]
    assert said(model, ExitPolicy("cosine", {2: -2.0})) == static


def test_who_goes_on_does_not_see_who_left(model: MultiExitT5) -> None:
    # The threshold falls over the answer: early tokens run deep, so later ones that leave have seen all of them.
    policy = ExitPolicy("margin", {1: 0.3, 3: 0.2}, decay=4.0)
    hidden = 0
    for source in SOURCES:
        answer = generate_masked(model, source, 12, policy, (EOS_ID,))
        depths = [4, *answer.exit_layers[1:]]  # of what the decoder reads, the start token first
        for step, (token, layer) in enumerate(zip(answer.token_ids, answer.exit_layers, strict=True)):
            logits, unseen = said_at(model, source, [0, *answer.token_ids[:step]], [*depths[:step], 4], layer)
            assert token == int(logits.argmax())
            hidden += unseen
    assert hidden > 0, "some look where others have left"
    exact = [generate(model, s, 12, kv_policy="recompute", policy=policy, max_pending=99).token_ids for s in SOURCES]
    assert said(model, policy) != exact


@torch.no_grad()
def said_at(
    model: MultiExitT5, source: list[int], ids: list[int], depths: list[int], layer: int
) -> tuple[torch.Tensor, int]:
    """Logits of the last token at its layer, by masks made here; and how often it did not see an earlier one."""
    targets = torch.tensor([ids])
    whole = model.layout(model.encode(torch.tensor([source])), targets)
    state, hidden = model.embed(targets), 0
    for number in range(1, layer + 1):
        mask = whole.self_mask.clone()
        for place, depth in enumerate(depths):
            if depth < number:
                mask[..., place + 1 :, place] = -torch.inf
                hidden += 1
        state = model.run_layers(state, number - 1, number, replace(whole, self_mask=mask))
    return model.exit_logits(state, layer, whole)[0, -1], hidden
