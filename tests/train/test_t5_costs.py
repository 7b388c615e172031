"""Costs of a T5 from shapes equal what autograd keeps, what a flop counter counts and what stages have alive."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from benchmarks.live_bytes import LiveBytes
from torch.utils.flop_counter import FlopCounterMode

from helpers.kept_bytes import kept_bytes
from offramp.common.exits.config import ExitConfig
from offramp.common.t5.config import T5Config
from offramp.common.t5.layout import Encoded, TargetLayout, source_mask
from offramp.common.t5.model import MultiExitT5
from offramp.train.data.batch import PairBatch
from offramp.train.losses import ExitLosses, ExitSums, MicroBatch, Objective
from offramp.train.pipeline.back_propagation import back_propagate
from offramp.train.pipeline.costs import MicroBatchShape
from offramp.train.pipeline.estimate import Estimator
from offramp.train.pipeline.stages import plan_stages
from offramp.train.pipeline.t5_costs import decoder_layer_cost, encoder_layer_cost
from offramp.train.pipeline.t5_stages import make_stage
from offramp.train.pipeline.times import estimated

ROWS, TIME, SOURCE = 2, 96, 160
SHAPE = MicroBatchShape(ROWS, TIME, source_time=SOURCE)


def t5(feed_forward: str, layers: int = 1, exits: ExitConfig | None = None) -> MultiExitT5:
    """Heads that do not fill D; encoder and decoder with as many layers."""
    shape = {"d_model": 32, "d_kv": 12, "num_heads": 4, "d_ff": 80, "num_layers": layers, "vocab_size": 300}
    config = T5Config.from_hf({"model_type": "t5", "feed_forward_proj": feed_forward, **shape})
    model = MultiExitT5(config, exits)
    model.reset_parameters(seed=0)
    return model.train()


def segments(length: int) -> torch.Tensor:
    """Two pairs in every row."""
    return (1 + (torch.arange(length) >= length // 2).long()).expand(ROWS, length)


@pytest.mark.parametrize("trained", [True, False], ids=["bias trained", "bias frozen"])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("feed_forward", ["relu", "gated-gelu"])
def test_bytes_and_operations_of_layers(feed_forward: str, mixed: bool, trained: bool) -> None:
    model, shape = t5(feed_forward), replace(SHAPE, mixed=mixed)
    for bias in (model.relative_attention_bias, model.encoder.relative_attention_bias):
        bias.requires_grad_(trained)
    source = torch.randn(ROWS, SOURCE, 32, requires_grad=True)
    mask = source_mask(model.encoder.relative_attention_bias, SOURCE, segments(SOURCE))
    encoder, decoder = model.encoder.layers[0], model.layers[0]
    cost = encoder_layer_cost(model.config, shape, trained)
    shared = {mask.untyped_storage().data_ptr()}
    assert kept_bytes(model, shape, lambda: encoder(source, mask), shared) == pytest.approx(cost.held, rel=0.01)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        encoder(source, mask.detach())
    # The counter does not know these attention kernels: two products over all pairs of tokens.
    width = model.config.num_heads * model.config.head_dim
    assert cost.flops == counter.get_total_flops() + 4 * ROWS * SOURCE**2 * width

    h, encoded = torch.randn(ROWS, TIME, 32, requires_grad=True), Encoded(source, segments(SOURCE))
    layout = TargetLayout.build(model.relative_attention_bias, encoded, TIME, segments(TIME))
    assert layout.cross_mask is not None
    shared = {one.untyped_storage().data_ptr() for one in (layout.self_mask, layout.cross_mask)}
    cost = decoder_layer_cost(model.config, shape, trained)
    # The sources as products read them: once for all layers of a stage.
    sources = ROWS * SOURCE * 32 * shape.compute_bytes
    kept = kept_bytes(model, shape, lambda: decoder(h, layout), shared) - sources
    assert kept == pytest.approx(cost.held, rel=0.01)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        decoder(h, replace(layout, self_mask=layout.self_mask.detach()))
    attention = 4 * ROWS * (TIME**2 / 2 + TIME * SOURCE) * width
    assert cost.flops == counter.get_total_flops() + attention


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("bounds", [[3], [2], [5], []], ids=str)
def test_stages_have_alive_what_the_plan_says(bounds: list[int], checkpointed: bool) -> None:
    exits = ExitConfig((1, 2), head="norm")
    model = t5("gated-gelu", 3, exits)
    plan = plan_stages(model.config, exits, len(bounds) + 1, bounds)
    times = estimated(model.config, exits, SHAPE, 1e12, "")
    estimator = Estimator(plan, model, SHAPE, times, 1, checkpointing=checkpointed)
    ids = torch.arange(ROWS * SOURCE).view(ROWS, SOURCE) % 300
    pairs = PairBatch(ids, segments(SOURCE), ids[:, :TIME], ids[:, :TIME], segments(TIME))
    batch, objective = MicroBatch(pairs), Objective({1: 0.3, 2: 0.3, 3: 1.0})
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for index, work in enumerate(estimator.works()):
        stage = make_stage(model, plan, index, checkpointed)
        with LiveBytes() as live:
            received = torch.randn(ROWS, SOURCE + TIME, 32).requires_grad_() if index else ids
            made = stage(received, stage.layout(batch))
            held = live.now
            live.reset()
            readers = {layer: stage.reader(layer) for layer in made.cuts}
            states = {layer: cut.above for layer, cut in made.cuts.items()}
            sums, counts = ExitSums(objective.layers, torch.device("cpu")), objective.counts(batch)
            losses = ExitLosses(objective, readers, states, batch, stage.layout(batch), counts, sums)
            last = index == plan.num_stages - 1
            gradient = None if last else torch.zeros_like(made.states)
            back_propagate(made.states, gradient, made.cuts, losses.of, made.carried)
        assert held == pytest.approx(work.held, rel=1e-3)
        assert live.peak == pytest.approx(
            estimator.run(estimator.works()).peaks[index].bytes, rel=0.16 if checkpointed else 0.01
        )
