"""The penalty on unequal exit depths: its formula, its gradient, and that training with it narrows real exit depths."""

from __future__ import annotations

import math

import pytest
import torch

from helpers.tiny import tiny_model
from offramp.common.exits.config import ExitConfig
from offramp.train.data.batch import IGNORED_LABEL, TokenBatch
from offramp.train.depth_spread import DepthSpread
from offramp.train.losses import ExitLosses, ExitSums, MicroBatch, Objective, exit_reader

EXITS, LAYERS = (1, 2, 3), 4


def draw(tokens: int) -> torch.Tensor:
    return torch.rand(len(EXITS), tokens, generator=torch.Generator().manual_seed(tokens), dtype=torch.float64)


def test_the_formula_token_by_token() -> None:
    penalty = DepthSpread(1.0, threshold=0.6, softness=0.2, sharpness=7.0)
    sure, positions = draw(9), torch.tensor([0, 0, 0, 5, 5, 5, 5, 2, 0])
    depths = []
    for token in sure.T.tolist():
        taken = [1 / (1 + math.exp(-(p - 0.6) / 0.2)) for p in token]
        chances = [taken[e] * math.prod(1 - c for c in taken[:e]) for e in range(3)]
        depths.append(sum(p * e / 4 for p, e in zip(chances, EXITS, strict=True)) + math.prod(1 - c for c in taken))
    expected = 0.0
    for position in set(positions.tolist()):
        group = [depth for depth, other in zip(depths, positions.tolist(), strict=True) if other == position]
        soft_maximum = math.log(sum(math.exp(7.0 * depth) for depth in group) / len(group)) / 7.0
        expected += len(group) * (soft_maximum - sum(group) / len(group))
    assert float(penalty(sure, EXITS, LAYERS, positions)) == pytest.approx(expected, rel=1e-12)
    assert float(penalty(sure[:, :0], EXITS, LAYERS, positions[:0])) == 0.0


def test_the_gradient_by_differences() -> None:
    penalty, positions = DepthSpread(1.0, threshold=0.6), torch.tensor([0, 0, 1, 1, 1, 2])
    sure = draw(6).requires_grad_()
    assert torch.autograd.gradcheck(lambda p: penalty(p, EXITS, LAYERS, positions), sure)


def test_limits() -> None:
    """Half of sharpness times the variance when it is small, maximum minus mean when it is large, never below 0."""
    sure, together = draw(50), torch.zeros(50, dtype=torch.long)
    depths = DepthSpread(1.0).expected_depths(sure, EXITS, LAYERS)
    blunt = DepthSpread(1.0, sharpness=1e-3)(sure, EXITS, LAYERS, together) / 50
    assert float(blunt) == pytest.approx(0.5e-3 * float(depths.var(correction=0)), rel=1e-3)
    sharp = DepthSpread(1.0, sharpness=400.0)(sure, EXITS, LAYERS, together) / 50
    assert float(sharp) == pytest.approx(float(depths.max() - depths.mean()), abs=math.log(50) / 400)
    alike = sure[:, :1].expand(-1, 50)
    assert float(DepthSpread(1.0)(alike, EXITS, LAYERS, together)) == pytest.approx(0.0, abs=1e-12)
    apart = torch.arange(50)
    assert float(DepthSpread(1.0)(sure, EXITS, LAYERS, apart)) == pytest.approx(0.0, abs=1e-12)


def test_positions_count_generated_tokens_of_each_segment() -> None:
    i = IGNORED_LABEL
    labels = torch.tensor([[i, i, 5, 6, 7, i, 8, 9, 5], [5, 6, 7, i, i, i, 6, 7, i]])
    segments = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 0, 0]])
    positions = TokenBatch(torch.zeros_like(labels), labels, segments).generated_positions()
    assert positions.tolist() == [[-1, -1, -1, 0, 1, -1, -1, 0, 1], [-1, 0, 1, -1, -1, -1, -1, 2, -1]]


def rows(seed: int, count: int = 16, time: int = 10) -> MicroBatch:
    """Half of the rows count up; the other half does, too, but now and then makes a larger step."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(0, 10, (count, 1), generator=generator)
    steps = 1 + 2 * (torch.rand(count, time + 1, generator=generator) < 0.15).long()
    steps[: count // 2] = 1
    tokens = (first + steps.cumsum(1)) % 10 + 10
    tokens[count // 2 :] += 20
    return MicroBatch(TokenBatch(tokens[:, :-1], tokens[:, 1:], torch.zeros(count, time, dtype=torch.long)))


def trained(penalty: DepthSpread | None, steps: int = 60) -> tuple[float, float]:
    """Trains a tiny model: standard deviation of exit layers over rows, and the final accuracy."""
    model = tiny_model(ExitConfig(EXITS), vocab_size=64).train()
    objective = Objective({1: 0.5, 2: 0.5, 3: 0.5, 4: 1.0}, depth_spread=penalty)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    readers = {layer: exit_reader(model, layer) for layer in objective.layers}
    for step in range(steps):
        batch = rows(step)
        layout = batch.layout(model.config)
        h, depth, states = model.embed(batch.tokens.input_ids), 0, {}
        for layer in objective.layers:
            h, depth = model.run_layers(h, depth, layer, layout), layer
            states[layer] = h
        sums = ExitSums(objective.layers, h.device)
        losses = ExitLosses(objective, readers, states, batch, layout, objective.counts(batch), sums)
        optimizer.zero_grad()
        torch.stack(list(losses)).sum().backward()
        optimizer.step()
    batch = rows(1000, count=128)
    with torch.no_grad():
        logits = model(batch.tokens.input_ids).logits
    depths = torch.full(batch.tokens.labels.shape, float(LAYERS))
    for layer in reversed(EXITS):  # as serving decides: the first exit that is sure enough
        depths[logits[layer].softmax(-1).amax(-1) > 0.8] = layer
    deviation = depths[:, 1:].std(dim=0).mean()  # of the tokens that are generated at one position
    return float(deviation), float((logits[LAYERS].argmax(-1) == batch.tokens.labels).float().mean())


def test_training_with_it_narrows_the_depths_that_serving_would_see() -> None:
    plain, plain_accuracy = trained(None)
    narrowed, accuracy = trained(DepthSpread(2.0, threshold=0.8))
    assert plain > 0.5, "without the penalty there must be something to narrow"
    assert narrowed < 0.75 * plain
    assert accuracy > plain_accuracy - 0.02
