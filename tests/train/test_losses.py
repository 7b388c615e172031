from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from helpers.tiny import tiny_model
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.train.data.batch import IGNORED_LABEL, TokenBatch
from offramp.train.depth_spread import DepthSpread
from offramp.train.linear_cross_entropy import TokenSums
from offramp.train.losses import ExitLosses, ExitSums, MicroBatch, Objective, exit_reader

CPU = torch.device("cpu")


def batch_of(labels: list[list[int]], depths: list[list[int]] | None = None) -> MicroBatch:
    target = torch.tensor(labels)
    tokens = TokenBatch(torch.ones_like(target), target, torch.zeros_like(target))
    return MicroBatch(tokens, None if depths is None else torch.tensor(depths))


def test_objective_by_hand() -> None:
    objective = Objective({1: 0.5, 2: 2.0}, distill=0.25)
    sums = ExitSums(objective.layers, CPU)
    # Exit 1: losses of 6, cross-entropy 7 over 3 tokens, divergence 1 over the 2 tokens of the final exit; final: 5.
    sums.add(1, term_of(6.0, 7.0, 1.0, 1), torch.tensor(3))
    sums.add(2, term_of(5.0, 5.0, 0.0, 2), torch.tensor(2))
    report = sums.report(objective)
    assert report["loss"] == pytest.approx(0.5 * (0.75 * 2.0 + 0.25 * 0.5) + 2.0 * 2.5)
    assert report["loss_exit_01"] == pytest.approx(7 / 3)
    assert report["accuracy_exit_01"] == pytest.approx(1 / 3)
    assert report["accuracy_exit_02"] == pytest.approx(1.0)
    assert "depth_spread" not in report
    sums.add_spread(torch.tensor(0.6))
    report = sums.report(replace(objective, depth_spread=DepthSpread(weight=10.0)))
    assert report["depth_spread"] == pytest.approx(0.3)
    assert report["loss"] == pytest.approx(0.5 * (0.75 * 2.0 + 0.25 * 0.5) + 2.0 * 2.5 + 10.0 * 0.3)


def term_of(target: float, cross_entropy: float, divergence: float, correct: int) -> TokenSums:
    loss, *sums = (torch.tensor(value) for value in (0.0, target, cross_entropy, divergence, correct))
    return TokenSums(loss, sums[0], sums[1], sums[2], sums[3], torch.empty(0))


def test_frozen_tokens_train_only_the_exits_they_reach() -> None:
    ignored = IGNORED_LABEL
    batch = batch_of([[ignored, 5, 6, 7]], [[4, 1, 2, 4]])
    assert batch.trained(1).tolist() == [[False, True, True, True]]
    assert batch.trained(2).tolist() == [[False, False, True, True]]
    assert batch.trained(4).tolist() == [[False, False, False, True]]
    assert Objective({1: 1.0, 2: 1.0, 4: 1.0}).counts(batch).tolist() == [3, 2, 1]


@pytest.mark.parametrize("head", ["norm", "final", "block", "mlp"])
def test_logits_of_selected_tokens_are_those_of_the_model(head: str) -> None:
    model = tiny_model(ExitConfig((1, 3), head=head))  # pyright: ignore[reportArgumentType]
    ids = torch.arange(20).view(2, 10)
    layout = model.layout(ids)
    out = model(ids, layout)
    mask = torch.rand(2, 10, generator=torch.Generator().manual_seed(0)) > 0.5
    for layer, h in out.hidden_states.items():
        torch.testing.assert_close(exit_reader(model, layer)(h, mask, layout), out.logits[layer][mask])


def test_a_batch_without_targets_has_a_finite_loss_and_zero_gradients() -> None:
    model = tiny_model(ExitConfig((2,)))
    batch = batch_of([[IGNORED_LABEL] * 4])
    objective = Objective({2: 1.0, 4: 1.0})
    layout = model.layout(batch.tokens.input_ids)
    states = model(batch.tokens.input_ids, layout).hidden_states
    readers = {layer: exit_reader(model, layer) for layer in states}
    sums = ExitSums(objective.layers, CPU)
    total = sum(ExitLosses(objective, readers, states, batch, layout, objective.counts(batch), sums))
    assert isinstance(total, torch.Tensor)
    total.backward()
    assert float(total.detach()) == 0.0
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)
    assert all(math.isfinite(value) for value in sums.report(objective).values())


@pytest.mark.parametrize(("rows", "parts", "sizes"), [(7, 3, [2, 2, 3]), (4, 4, [1] * 4), (2, 4, [1, 1]), (8, 1, [8])])
def test_split_keeps_every_row_once(rows: int, parts: int, sizes: list[int]) -> None:
    labels = [[row] * 3 for row in range(rows)]
    pieces = batch_of(labels, labels).split(parts)
    assert [piece.tokens.num_rows for piece in pieces] == sizes
    assert torch.cat([piece.tokens.labels for piece in pieces]).tolist() == labels
    assert torch.cat([piece.exit_depths for piece in pieces if piece.exit_depths is not None]).tolist() == labels


def test_impossible_weights_are_refused() -> None:
    with pytest.raises(OfframpError, match="must not be negative"):
        Objective({2: -1.0, 4: 1.0})


def test_layers_above_the_deepest_exit_with_a_weight_are_not_read_and_have_no_metrics() -> None:
    objective = Objective({1: 1.0, 2: 0.0, 4: 0.0})
    assert objective.trained_layers == (1,)
    assert Objective({1: 0.0, 2: 0.5, 4: 0.0}).trained_layers == (1, 2)
    assert replace(objective, distill=0.5).trained_layers == (1, 2, 4)
    assert replace(objective, depth_spread=DepthSpread(1.0)).trained_layers == (1, 2)
    sums = ExitSums(objective.layers, CPU)
    sums.add(1, term_of(6.0, 6.0, 0.0, 1), torch.tensor(3))
    assert set(sums.report(objective)) == {"loss", "loss_exit_01", "accuracy_exit_01"}
    sums.add(4, term_of(6.0, 6.0, 0.0, 1), torch.tensor(3))  # as in validation, where all of them run
    assert "loss_exit_04" in sums.report(objective)


def test_an_exit_without_a_weight_is_left_out_while_training_and_measured_otherwise() -> None:
    model = tiny_model(ExitConfig((1, 2), head="mlp"))
    batch = batch_of([[5, 6, 7, 8]])
    objective = Objective({1: 0.0, 2: 1.0, 4: 1.0})

    def run() -> ExitSums:
        sums = ExitSums(objective.layers, CPU)
        layout = batch.layout(model.config)
        states = model(batch.tokens.input_ids, layout).hidden_states
        readers = {layer: exit_reader(model, layer) for layer in states}
        losses = ExitLosses(objective, readers, states, batch, layout, objective.counts(batch), sums)
        total = sum(losses)
        if torch.is_grad_enabled():
            assert isinstance(total, torch.Tensor)
            total.backward()
        return sums

    assert run().values[4].tolist() == [0, 4, 4]
    grads = {name: parameter.grad for name, parameter in model.exits.named_parameters()}
    assert all(grad is not None and bool(grad.any()) == (name[0] == "2") for name, grad in grads.items())
    with torch.no_grad():
        assert run().values[4].tolist() == [4, 4, 4]


def test_a_final_exit_without_a_weight_still_teaches() -> None:
    model = tiny_model(ExitConfig((2,)))
    batch = batch_of([[5, 6, 7, 8]])
    objective = Objective({2: 1.0, 4: 0.0}, distill=1.0)
    layout = batch.layout(model.config)
    out = model(batch.tokens.input_ids, layout)
    readers = {layer: exit_reader(model, layer) for layer in objective.layers}
    sums = ExitSums(objective.layers, CPU)
    losses = ExitLosses(objective, readers, out.hidden_states, batch, layout, objective.counts(batch), sums)
    (loss,) = losses
    taught, log_p = out.logits[4].detach().softmax(-1), out.logits[2].log_softmax(-1)
    expected = torch.nn.functional.kl_div(log_p, taught, reduction="sum") / 4
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert all(parameter.grad is None for parameter in model.layers[2:].parameters())
