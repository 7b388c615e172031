"""Costs from shapes equal what autograd keeps and what a flop counter counts."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from benchmarks.live_bytes import LiveBytes
from torch.utils.flop_counter import FlopCounterMode

from helpers.kept_bytes import kept_bytes
from helpers.tiny import tiny_model
from offramp.common.exits.config import ExitConfig
from offramp.train.linear_cross_entropy import linear_cross_entropy
from offramp.train.losses import exit_reader
from offramp.train.pipeline.costs import MicroBatchShape, head_cost, layer_cost

ROWS, TIME = 2, 96


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_bytes_and_operations_of_a_layer(family: str, mixed: bool) -> None:
    model = tiny_model(model_type=family, num_hidden_layers=1, intermediate_size=80).train()
    shape = MicroBatchShape(ROWS, TIME, mixed=mixed)
    segments = (torch.arange(TIME) >= 50).long().expand(ROWS, TIME)
    layout = model.layout(torch.zeros(ROWS, TIME, dtype=torch.long), segments)
    h = torch.randn(ROWS, TIME, 32, requires_grad=True)
    tables = {layout.cos.untyped_storage().data_ptr(), layout.sin.untyped_storage().data_ptr()}
    cost = layer_cost(model.config, shape)
    assert kept_bytes(model, shape, lambda: model.layers[0](h, layout), tables) == pytest.approx(cost.held, rel=0.02)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.layers[0](h, layout)
    # The counter does not know this attention kernel: two products over the causal half of T x T.
    attention = 2 * 2 * ROWS * TIME**2 / 2 * model.config.num_heads * model.config.head_dim
    assert cost.flops == counter.get_total_flops() + attention


def whole_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(logits.float().log_softmax(dim=-1), labels, reduction="sum")


HEADS = pytest.mark.parametrize(
    "exits",
    [
        ExitConfig((2,), head="bare"),
        ExitConfig((2,), head="final"),
        ExitConfig((2,), head="norm"),
        ExitConfig((2,), head="adapter"),
        ExitConfig((2,), head="adapter", adapter_dim=8),
        ExitConfig((2,), head="mlp", tied=False),
        ExitConfig((2,), head="block"),
    ],
    ids=lambda exits: f"{exits.head}{exits.adapter_dim or ''}",
)


@pytest.mark.parametrize("mixed", [False, True])
@HEADS
def test_bytes_and_operations_of_a_head(exits: ExitConfig, mixed: bool) -> None:
    model = tiny_model(exits, vocab_size=500, intermediate_size=80).train()
    shape = MicroBatchShape(ROWS, TIME, labelled_share=0.5, mixed=mixed)
    ids = torch.zeros(ROWS, TIME, dtype=torch.long)
    layout = model.layout(ids, (torch.arange(TIME) >= 50).long().expand(ROWS, TIME))
    mask = (torch.arange(TIME) % 2 == 0).expand(ROWS, TIME)
    labels = ids[mask]
    h = torch.randn(ROWS, TIME, 32, requires_grad=True)
    reader = exit_reader(model, 2)
    cost = head_cost(model.config, exits, 2, shape, whole_logits=True)
    kept = kept_bytes(model, shape, lambda: whole_loss(reader(h, mask, layout), labels), set())
    assert kept == pytest.approx(cost.held, rel=0.05)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        reader(h, mask, layout)
    attention = 2 * ROWS * TIME**2 * 32 if exits.head == "block" else 0
    assert cost.flops == counter.get_total_flops() + attention


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
@HEADS
def test_bytes_of_a_head_a_few_rows_at_a_time(exits: ExitConfig, mixed: bool, frozen: bool) -> None:
    # Sizes at which what is counted is far larger than running tensors of single operations.
    time = 256
    model = tiny_model(exits, vocab_size=3000, hidden_size=64, intermediate_size=160).train()
    shape = MicroBatchShape(ROWS, time, labelled_share=0.5, mixed=mixed)
    ids = torch.zeros(ROWS, time, dtype=torch.long)
    layout = model.layout(ids, (torch.arange(time) >= 50).long().expand(ROWS, time))
    mask = (torch.arange(time) % 2 == 0).expand(ROWS, time)
    h, reader, labels = torch.randn(ROWS, time, 64, requires_grad=True), exit_reader(model, 2), ids[mask]
    model.unembedding(2).requires_grad_(not frozen)
    for parameter in (*model.parameters(), h):
        parameter.grad = torch.zeros_like(parameter)
    autocast = torch.autocast("cpu", torch.bfloat16) if mixed else contextlib.nullcontext()
    with autocast:
        reader.state(h, mask, layout)  # autocast converts weights once for a whole step
        with LiveBytes() as live:
            state = reader.state(h, mask, layout)
            loss = linear_cross_entropy(state, reader.unembedding, labels).loss
            del state
            with torch.autocast("cpu", enabled=False):
                loss.backward()
    cost = head_cost(model.config, exits, 2, shape, trained=not frozen)
    assert live.peak == pytest.approx(cost.working, rel=0.05)
