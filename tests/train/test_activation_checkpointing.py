"""A stage that checkpoints activations computes the same gradients to the bit, and keeps what the plan says."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from benchmarks.live_bytes import LiveBytes
from torch import Tensor

from helpers.gradients import LAYERS, Case
from helpers.tiny import tiny_model
from offramp.common.exits.config import ExitConfig
from offramp.train.losses import ExitLosses, ExitSums, Objective
from offramp.train.pipeline.back_propagation import back_propagate
from offramp.train.pipeline.costs import MicroBatchShape
from offramp.train.pipeline.estimate import Estimator
from offramp.train.pipeline.stages import Stage, plan_stages
from offramp.train.pipeline.times import estimated

CASES = {
    "packed": Case(exits=(1, 2, 3)),
    "fill-aware": Case(exits=(1, 2, 3), fill_aware={1: 0.3, 2: 0.3}),
    "exit blocks": Case(head="block", fill_aware={2: 0.4}),
    "exit MLPs, untied": Case(head="mlp", tied_exits=False),
    "frozen layers": Case(frozen=("embed_tokens", "layers.0", "layers.2")),
}


def gradients(case: Case, checkpointed: bool, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Three stages in a row in one process, as the engine runs them on each of two micro-batches."""
    model, micro_batches = case.model(), case.batch(0).split(2)
    plan = plan_stages(model.config, model.exit_config, 3, exit_placement="same_stage")
    objective = Objective(case.weights)
    stages = [Stage(model, plan, index, checkpointed) for index in range(3)]
    counts = torch.tensor([50.0] * len(objective.layers))
    autocast = contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)
    for micro in micro_batches:
        with autocast:
            layout = model.layout(micro.tokens.input_ids, micro.tokens.segment_ids, micro.exit_depths)
            x, done = micro.tokens.input_ids, []
            for index, stage in enumerate(stages):
                received = x if index == 0 else x.detach().requires_grad_()
                x, cuts, _ = stage(received, layout)
                done.append((received, x, cuts))
            gradient = None
            for stage, (received, output, cuts) in zip(reversed(stages), reversed(done), strict=True):
                states = {layer: cut.above for layer, cut in cuts.items()}
                readers = {layer: stage.reader(layer) for layer in cuts}
                sums = ExitSums(objective.layers, output.device)
                losses = ExitLosses(objective, readers, states, micro, layout, counts, sums)
                back_propagate(output, gradient, cuts, losses.of)
                gradient = received.grad if received.is_floating_point() else None
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_same_to_the_bit(name: str, dtype: torch.dtype | None) -> None:
    kept, again = (gradients(CASES[name], checkpointed, dtype) for checkpointed in (False, True))
    assert kept.keys() == again.keys()
    assert len(kept) > 20
    for parameter, gradient in kept.items():
        assert torch.equal(gradient, again[parameter]), parameter


def test_nothing_is_recomputed_in_evaluation() -> None:
    case = CASES["packed"]
    model = case.model()
    stage = Stage(model, plan_stages(model.config, model.exit_config, 1), 0, checkpoint_activations=True)
    micro = case.batch(0)
    with torch.no_grad():
        output, *_ = stage(micro.tokens.input_ids, model.layout(micro.tokens.input_ids))
    assert not output.requires_grad


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("head", ["norm", "block"])
def test_a_stage_keeps_what_the_plan_says(head: Any, checkpointed: bool) -> None:
    rows, time, size = 2, 64, 64
    exits = ExitConfig((2,), head=head)
    model = tiny_model(exits, hidden_size=size, intermediate_size=160, vocab_size=500).train()
    plan = plan_stages(model.config, exits, 2, [1])
    stage = Stage(model, plan, 1, checkpointed)
    assert (LAYERS, stage.exit_layers) == (4, (2, 4))
    shape = MicroBatchShape(rows, time)
    times = estimated(model.config, exits, shape, 1e12, "")
    estimator = Estimator(plan, model, shape, times, micro_batches=4, checkpointing=checkpointed)
    ids = torch.arange(rows * time).view(rows, time)
    layout = model.layout(ids, torch.zeros_like(ids))
    kept = []
    with LiveBytes() as live:
        for _ in range(3):
            received = torch.randn(rows, time, size).requires_grad_()
            kept.append(stage(received, layout))
            del received
    # The layout is here made once for all of them, and what the first stage sent is a part of what is kept.
    tables = shape.tokens * 2 * model.config.head_dim * 4 + rows * time**2
    planned = estimator.works()[1].held - tables
    assert live.now / 3 == pytest.approx(planned, rel=0.02)
