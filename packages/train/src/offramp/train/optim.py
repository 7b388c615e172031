"""AdamW in parameter groups, and its learning rate over time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from offramp.common.errors import OfframpError

Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class OptimizerConfig:
    """How parameters move.

    Attributes:
        lr: peak learning rate.
        exits_lr: of the exit heads; `lr` if None.
        weight_decay: on matrices; norms and biases are never decayed.
        betas: of AdamW.
        warmup_steps: optimizer steps over which the rate rises to its peak.
        schedule: what follows until the last step: `constant`, or down to `final_share` of the peak on a line or a
            cosine.
        final_share: of the peak, at the last step.
    """

    lr: float = 1e-4
    exits_lr: float | None = None
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    warmup_steps: int = 0
    schedule: Schedule = "cosine"
    final_share: float = 0.1

    def __post_init__(self) -> None:
        for name, value in (("lr", self.lr), ("exits_lr", self.exits_lr), ("weight_decay", self.weight_decay)):
            if value is not None and value < 0:
                raise OfframpError(f"optimizer.{name} is {value}; it must not be negative.")
        if self.warmup_steps < 0:
            raise OfframpError(f"optimizer.warmup_steps is {self.warmup_steps}; it must not be negative.")

    def factor(self, step: int, total_steps: int) -> float:
        """Share of the peak rate at an optimizer step, counted from 0.

        Args:
            step: number of steps done.
            total_steps: of the whole run, warm-up included.
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return 1.0
        progress = min((step - self.warmup_steps) / max(total_steps - 1 - self.warmup_steps, 1), 1.0)
        left = 1.0 - progress if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.final_share + (1.0 - self.final_share) * left


def make_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig, total_steps: int
) -> tuple[torch.optim.AdamW, LambdaLR]:
    """AdamW over named parameters, and the schedule of its rates.

    Args:
        parameters: (name in the whole model, parameter), trained ones only. A pipeline stage has some of the model's;
            every stage gets the same rates.
        config: settings.
        total_steps: optimizer steps of the run.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in parameters:
        lr = config.exits_lr if name.startswith("exits.") and config.exits_lr is not None else config.lr
        decay = config.weight_decay if parameter.dim() > 1 else 0.0
        groups.setdefault((lr, decay), []).append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": params, "lr": lr, "weight_decay": decay} for (lr, decay), params in groups.items()],
        lr=config.lr,
        betas=config.betas,
        fused=True,
    )
    # Lightning refuses to clip what may have to be unscaled first; there is no loss scaling in bf16 or fp32.
    optimizer._step_supports_amp_scaling = False
    return optimizer, LambdaLR(optimizer, lambda step: config.factor(step, total_steps))
