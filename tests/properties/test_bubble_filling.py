"""Partial micro-batches give unbiased gradients of less variance: proved by going through every draw of rows."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.tiny import tiny_model
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.train.data.batch import TokenBatch
from offramp.train.losses import MicroBatch
from offramp.train.pipeline.filling import FillSettings, Weights, arrange, backward_rows, rows_of
from offramp.train.pipeline.schedule import (
    Schedule,
    bubble_capacity,
    cooldown_counts,
    one_f_one_b,
    warmup_counts,
)
from offramp.train.pipeline.stages import Stage, plan_stages


def filled(stages: int, micro_batches: int, early: int, late: int, ratio: float, exit_stages: list[int]) -> Schedule:
    warmup = warmup_counts(stages, early, ratio, exit_stages)
    return one_f_one_b(stages, micro_batches, warmup, cooldown_counts(stages, late, ratio))


def share(schedule: Schedule, weights: Weights, micro: int, stage: int, exit_stage: int) -> float:
    """What the engine's factors make of one micro-batch, for a stage's parameters and an exit's loss.

    Walks down as the gradient does: the loss's factor, then one for each message.
    """
    backs = [{one.micro_batch for one in own if one.kind == "backward"} for own in schedule.operations]
    if any(micro not in backs[index] for index in range(stage, exit_stage + 1)):
        return 0.0
    factor = weights.of_loss(micro, exit_stage)
    for sender in range(exit_stage, stage, -1):
        factor *= weights.of_message(micro, sender)
    return factor


@settings(deadline=None, max_examples=200)
@given(st.data(), st.integers(2, 8), st.integers(1, 6), st.floats(0.5, 4.0))
def test_the_weights_of_all_rows_add_up(data: st.DataObject, stages: int, micro_batches: int, ratio: float) -> None:
    capacity = bubble_capacity(stages, ratio)
    early, late = data.draw(st.integers(0, capacity)), data.draw(st.integers(0, capacity))
    schedule = filled(stages, micro_batches, early, late, ratio, list(range(stages)))
    micros = sorted({one.micro_batch for one in schedule.operations[0] if one.kind == "forward"})
    rows = {micro: data.draw(st.integers(1, 3)) for micro in micros}
    weights, total = Weights.of(schedule, rows), sum(rows.values())
    for exit_stage in range(stages):
        for stage in range(exit_stage + 1):
            added = sum(count * share(schedule, weights, micro, stage, exit_stage) for micro, count in rows.items())
            assert added == pytest.approx(total, rel=1e-12), "each pair counts the whole batch"
    assert backward_rows(schedule, rows)[-1] == total - sum(count for micro, count in rows.items() if micro < 0)


def gradients_of_rows(ids: Tensor, labels: Tensor) -> tuple[dict[tuple[int, int], Tensor], list[int]]:
    """(row, exit) -> gradient of its part of the mean objective, all parameters in one vector; and their stages."""
    exits = ExitConfig((1, 2), head="norm", tied=False)
    model = tiny_model(exits, hidden_size=8, intermediate_size=8, vocab_size=20, num_attention_heads=2).double()
    plan = plan_stages(model.config, exits, 4, exit_placement="same_stage")
    place = [0] * sum(1 for _ in model.parameters())
    names = [name for name, _ in model.named_parameters()]
    for index in range(4):
        for name in Stage(model, plan, index).state_dict():
            place[names.index(name)] = index
    stages = [place[i] for i, p in enumerate(model.parameters()) for _ in range(p.numel())]
    found = {}
    for row in range(len(ids)):
        for layer in (1, 2, 4):
            model.zero_grad()
            logits = model(ids[row : row + 1], exits=[layer]).logits[layer][0]
            weight = {1: 0.3, 2: 0.5, 4: 1.0}[layer]
            loss = F.cross_entropy(logits, labels[row], reduction="sum", ignore_index=-100)
            (weight * loss / int((labels != -100).sum())).backward()
            parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
            found[row, layer] = torch.cat([part.flatten() for part in parts])
    return found, stages


def test_the_expectation_over_all_draws_is_the_whole_batchs_gradient_and_its_variance_is_lower() -> None:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 20, (6, 5), generator=generator)
    labels = torch.randint(0, 20, (6, 5), generator=generator)
    labels[1, :3] = labels[4, :4] = -100  # rows of unequal weight
    exit_stage = {1: 0, 2: 1, 4: 3}
    gradients, stages = gradients_of_rows(ids, labels)
    whole = torch.stack(list(gradients.values())).sum(0)
    place = torch.tensor(stages)
    # Two whole micro-batches of a row each, two rows in the warm-up and two in the cool-down, on four stages.
    schedule = filled(4, 2, 2, 2, 2.0, [0, 1])
    micros = [0, 1, 2, 3, -2, -1]  # where `arrange` puts the rows
    assert sorted({one.micro_batch for one in schedule.operations[0] if one.kind == "forward"}) == sorted(micros)
    weights = Weights.of(schedule, dict.fromkeys(micros, 1))
    plain = 6 / 2  # without filling: two rows stand for six
    sums = {name: [torch.zeros_like(whole), torch.zeros_like(whole)] for name in ("filled", "one divisor", "plain")}
    draws = list(permutations(range(6)))
    for draw in draws:
        estimates = {name: torch.zeros_like(whole) for name in sums}
        for micro, row in zip(micros, draw, strict=True):
            for layer, at in exit_stage.items():
                gradient = gradients[row, layer]
                factors = torch.tensor([share(schedule, weights, micro, s, at) for s in range(4)], dtype=torch.float64)
                estimates["filled"] += factors[place] * gradient
                # EE-LLM: all that is there, over the number of those that come back to the last stage.
                estimates["one divisor"] += (factors[place] > 0) * gradient * 6 / 4
                if micro in (0, 1):
                    estimates["plain"] += plain * gradient
        for name, estimate in estimates.items():
            sums[name][0] += estimate / len(draws)
            sums[name][1] += (estimate - whole) ** 2 / len(draws)
    assert torch.allclose(sums["filled"][0], whole, rtol=1e-10, atol=1e-14)
    assert torch.allclose(sums["plain"][0], whole, rtol=1e-10, atol=1e-14)
    assert not torch.allclose(sums["one divisor"][0], whole, rtol=1e-2), "one divisor for all stages is biased"
    for stage in range(4):
        less, more = (float(sums[name][1][place == stage].sum()) for name in ("filled", "plain"))
        assert less < more, f"stage {stage}: {less} {more}"
    assert float(sums["filled"][1].sum()) < 0.9 * float(sums["plain"][1].sum())


def test_rows_are_drawn_anew_each_step_and_alike_on_all_stages() -> None:
    schedule = filled(4, 3, 2, 2, 2.0, [0, 1])
    tokens = torch.arange(14)[:, None].expand(14, 2)
    batch = MicroBatch(TokenBatch(tokens, tokens, torch.zeros_like(tokens)), tokens.clone())
    queue = arrange(batch, schedule, seed=3, step=7)
    again, other = arrange(batch, schedule, seed=3, step=7), arrange(batch, schedule, seed=3, step=8)
    order = [part.tokens.input_ids[:, 0].tolist() for part in queue]
    assert order == [part.tokens.input_ids[:, 0].tolist() for part in again]
    assert order != [part.tokens.input_ids[:, 0].tolist() for part in other]
    assert sorted(row for part in order for row in part) == list(range(14))
    for part in queue:
        assert part.exit_depths is not None
        assert torch.equal(part.exit_depths, part.tokens.input_ids)
    rows = rows_of(schedule, queue)
    assert list(rows) == [-2, -1, 0, 1, 2, 3, 4]
    assert sum(rows.values()) == 14


@pytest.mark.parametrize("value", [3, "yes", {"warm": 1}, {"warmup": -1}, {"cooldown": 1.5}, {"ratio": 0}])
def test_settings_that_mean_nothing_are_refused(value: object) -> None:
    with pytest.raises(OfframpError, match="fill_bubbles"):
        FillSettings.from_value(value)
    assert FillSettings.from_value(False) is None
    assert FillSettings.from_value(True) == FillSettings()
    assert FillSettings.from_value({"warmup": 2, "ratio": 2.0}) == FillSettings(2, None, 2.0)
