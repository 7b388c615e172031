"""Loss scaling for fp16 on pipeline stages (Micikevicius et al., 2018).

Gradients of one token among thousands are smaller than what fp16 can hold, so losses are multiplied by a large power of
two. Every loss of every exit on every stage is, once; what a stage receives is a gradient of scaled losses already.
Before gradients are added up over ranks, measured and clipped, they are divided by the same power, which is exact.

If one of them is not finite on any rank, no rank makes the step, and the scale is halved on all of them. A loss that is
not finite is no matter of the scale, which then stays.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offramp.train.nonfinite import LOWEST_SCALE, scale_fault
from offramp.train.pipeline import quiet_deepspeed  # noqa: F401 - before deepspeed

# isort: split
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

INITIAL, PATIENCE = 2.0**16, 1000
"""The scale at first, and steps without overflow after which it is doubled."""


class LossScale:
    """One scale for all processes.

    Args:
        initial: a power of two.
        patience: see `PATIENCE`.

    Attributes:
        overflows: steps that were left out, those before a resume included.
    """

    def __init__(self, initial: float = INITIAL, patience: int = PATIENCE) -> None:
        self.overflows = 0
        self._scaler = DynamicLossScaler(
            init_scale=initial,
            scale_window=patience,
            min_scale=LOWEST_SCALE,
            delayed_shift=1,
            consecutive_hysteresis=False,
            raise_error_at_min_scale=False,
        )

    @property
    def value(self) -> float:
        """What losses are multiplied by."""
        return float(self._scaler.cur_scale)

    def unscale(self, gradients: Iterable[Tensor], losses: Tensor, device: torch.device) -> bool:
        """Divide gradients by the scale, in place, and set the next scale. All processes take part.

        Args:
            gradients: of this process.
            losses: of this process, unscaled, in any shape.
            device: of both.

        Returns:
            Whether the gradients and losses of all processes are finite; if not, nobody may make the step.

        Raises:
            OfframpError: gradients of finite losses are not, and the scale cannot be lower.
        """
        found = torch.zeros((), device=device)
        own = list(gradients)
        if own:
            inverse = torch.full((), 1.0 / self.value, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(own, found, inverse)
        found = torch.stack((found, (~losses.isfinite().all()).to(found)))
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        overflow, bad_loss = found.bool().tolist()
        if bad_loss:
            return False
        finite = not overflow
        if not finite and self.value <= LOWEST_SCALE:
            raise scale_fault(self.value)
        self.overflows += not finite
        self._scaler.update_scale(not finite)
        return finite

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        scaler = self._scaler
        return {
            "scale": scaler.cur_scale,
            "step": scaler.cur_iter,
            "last_overflow": scaler.last_overflow_iter,
            "overflows": self.overflows,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""
        scaler = self._scaler
        scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter = (
            state[key] for key in ("scale", "step", "last_overflow")
        )
        self.overflows = state.get("overflows", 0)
