from __future__ import annotations

import math

import pytest
import torch

from helpers.tiny import tiny_model
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.train.data.batch import TokenBatch
from offramp.train.layer_dropout import LayerDropout
from offramp.train.losses import MicroBatch

LAYERS = 8


def rows(count: int) -> TokenBatch:
    ids = torch.randint(0, 300, (count, 12), generator=torch.Generator().manual_seed(1))
    return TokenBatch(ids, ids.roll(-1, 1), torch.zeros_like(ids))


def test_rates_grow_with_depth_and_time() -> None:
    constant = LayerDropout(0.2)
    assert constant.rates(LAYERS, 0) == constant.rates(LAYERS, 99)
    for layer, rate in enumerate(constant.rates(LAYERS, 0)):
        assert rate == pytest.approx(0.2 * (math.exp(layer * math.log(2) / 7) - 1))
    assert constant.rates(LAYERS, 0)[0] == 0.0
    assert constant.rates(LAYERS, 0)[-1] == pytest.approx(0.2)
    ramped = LayerDropout(0.2, "exponential", 11)
    assert ramped.rates(LAYERS, 0) == [0.0] * LAYERS
    assert ramped.rates(LAYERS, 5)[-1] == pytest.approx(0.2 * (math.exp(0.5 * math.log(2)) - 1))
    assert ramped.rates(LAYERS, 10) == pytest.approx(constant.rates(LAYERS, 0))
    assert ramped.rates(LAYERS, 500) == pytest.approx(constant.rates(LAYERS, 0))
    assert LayerDropout(0.5).rates(1, 0) == [0.0]


def test_shares_are_the_rates() -> None:
    dropout = LayerDropout(0.5)
    shares = dropout.draw(rows(4000), LAYERS, seed=7, step=3).float().mean(0)
    torch.testing.assert_close(shares, torch.tensor(dropout.rates(LAYERS, 3)), rtol=0, atol=0.03)


def test_a_draw_depends_on_the_row_and_the_step_alone() -> None:
    batch, dropout = rows(6), LayerDropout(0.7)
    whole = dropout.draw(batch, LAYERS, 7, 3)
    parts = [dropout.draw(batch.rows(start, start + 2), LAYERS, 7, 3) for start in (0, 2, 4)]
    assert torch.equal(whole, torch.cat(parts))
    assert not torch.equal(whole, dropout.draw(batch, LAYERS, 7, 4))
    assert not torch.equal(whole, dropout.draw(batch, LAYERS, 8, 3))
    pieces = MicroBatch(batch, None, whole).split(4)
    assert torch.equal(torch.cat([piece.skipped_layers for piece in pieces if piece.skipped_layers is not None]), whole)


def test_a_row_that_skips_layers_is_one_of_a_model_without_them() -> None:
    model = tiny_model(ExitConfig((2,)))
    batch = rows(2)
    skipped = torch.tensor([[False, True, False, True], [False] * 4])
    states = model(batch.input_ids, MicroBatch(batch, None, skipped).layout(model.config)).hidden_states
    plain = model(batch.input_ids[:1]).hidden_states
    layout = model.layout(batch.input_ids[:1])
    h = model.run_layers(model.embed(batch.input_ids[:1]), 0, 1, layout)
    torch.testing.assert_close(states[2][:1], h)
    torch.testing.assert_close(states[4][:1], model.run_layers(h, 2, 3, layout))
    assert not torch.allclose(states[2][:1], plain[2])
    torch.testing.assert_close(states[4][1:], model(batch.input_ids[1:]).hidden_states[4])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((1.0,), r"rate is 1\.0"),
        ((-0.1,), r"rate is -0\.1"),
        ((0.1, "steep"), "'steep'; choose one of constant, exponential"),
        ((0.1, "exponential"), "ramp_steps is None"),
        ((0.1, "constant", 5), "means nothing to a constant ramp"),
    ],
)
def test_bad_settings_are_refused(settings: tuple[object, ...], message: str) -> None:
    with pytest.raises(OfframpError, match=message):
        LayerDropout(*settings)  # pyright: ignore[reportArgumentType]
