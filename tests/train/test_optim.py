from __future__ import annotations

import pytest
import torch
from torch import nn

from offramp.common.errors import OfframpError
from offramp.train.optim import OptimizerConfig, make_optimizer


def test_rates_by_hand() -> None:
    config = OptimizerConfig(warmup_steps=2, schedule="linear", final_share=0.0)
    assert [config.factor(step, 7) for step in range(7)] == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0])
    cosine = OptimizerConfig(schedule="cosine", final_share=0.2)
    assert [cosine.factor(step, 3) for step in range(5)] == pytest.approx([1.0, 0.6, 0.2, 0.2, 0.2])
    assert OptimizerConfig(schedule="constant").factor(99, 10) == 1.0


def test_groups() -> None:
    matrix, norm, exit_matrix = (nn.Parameter(torch.ones(shape)) for shape in ((2, 2), (2,), (2, 2)))
    named = [("layers.0.w", matrix), ("norm.weight", norm), ("exits.1.w", exit_matrix)]
    optimizer, scheduler = make_optimizer(named, OptimizerConfig(lr=1.0, exits_lr=2.0, weight_decay=0.1), 10)
    found = {(g["initial_lr"], g["weight_decay"]): g["params"] for g in optimizer.param_groups}
    assert {key: [id(p) for p in params] for key, params in found.items()} == {
        (1.0, 0.1): [id(matrix)],
        (1.0, 0.0): [id(norm)],
        (2.0, 0.1): [id(exit_matrix)],
    }
    assert scheduler.get_last_lr() == [1.0, 1.0, 2.0]


def test_negative_rates_are_refused() -> None:
    with pytest.raises(OfframpError, match="lr is -1"):
        OptimizerConfig(lr=-1.0)
