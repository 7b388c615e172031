"""What happens when the loss or the gradient of a step is no finite number: the step is left out, or the run ended.

All ranks know the same numbers (sums of losses over ranks, and the norm of the gradient that they share), so they
decide alike without asking each other. Whatever is decided, weights and optimizer stay those of the step before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from lightning.pytorch.utilities import rank_zero_warn

from offramp.common.errors import OfframpError

OnNonfinite = Literal["stop", "skip"]

MOST_IN_A_ROW = 20
"""Steps in a row that are skipped; more of them say that weights, and not samples, are at fault."""
LOWEST_SCALE = 1.0
"""Of losses under fp16; gradients that overflow without any scale will overflow with a smaller one."""
_LOSS = "loss_exit_"


def scale_fault(scale: float) -> OfframpError:
    """What ends a run whose loss scale cannot fall any further."""
    return OfframpError(
        f"gradients are not finite at a loss scale of {scale:g}, the lowest; lower the learning rate, or train with "
        "precision bf16-mixed."
    )


class NonfiniteGuard:
    """Watches the steps of a run.

    Args:
        reaction: `stop` ends the run at the first such step, `skip` leaves it out and goes on.
    """

    def __init__(self, reaction: OnNonfinite) -> None:
        if reaction not in ("stop", "skip"):
            raise OfframpError(f"model.on_nonfinite is {reaction!r}; choose stop or skip.")
        self.reaction = reaction
        self.skipped = 0
        self._in_a_row = 0

    def state_dict(self) -> dict[str, int]:
        """For a checkpoint."""
        return {"skipped": self.skipped, "in_a_row": self._in_a_row}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """From a checkpoint."""
        self.skipped, self._in_a_row = state["skipped"], state["in_a_row"]

    def watch(
        self, step: int, losses: Mapping[str, float], grad_norm: float, samples: Callable[[], Sequence[int] | None]
    ) -> bool:
        """Whether a step counts; one that does not was, or must be, left out by the optimizer.

        Args:
            step: number of optimizer steps before it.
            losses: as `ExitSums.report` names them, over all ranks.
            grad_norm: before clipping, over all ranks.
            samples: gives the numbers of the examples that it was made of, or None if they are not known.

        Raises:
            OfframpError: the run is to stop, or has skipped too many steps in a row.
        """
        bad = [name.removeprefix(_LOSS) for name, value in losses.items() if not math.isfinite(value)]
        exits = [name for name in bad if name != "loss"]
        if not bad and math.isfinite(grad_norm):
            self._in_a_row = 0
            return True
        self.skipped += 1
        self._in_a_row += 1
        what = f"the gradient norm is {grad_norm}"
        if bad:
            value = next(value for value in losses.values() if not math.isfinite(value))
            of = f" of exit {', '.join(exits)}" if exits else ""
            what = f"the loss{of} is {value}, the gradient norm {grad_norm},"
        known = samples()
        where = "samples that are not known" if known is None else f"samples {', '.join(map(str, known))}"
        sentence = f"step {step}: {what} on {where}"
        if self.reaction == "stop":
            raise OfframpError(
                f"{sentence}; weights are those of the step before. Lower optimizer.lr, look at the samples, or set "
                "model.on_nonfinite to skip."
            )
        if self._in_a_row > MOST_IN_A_ROW:
            raise OfframpError(
                f"{sentence}, and so were the {MOST_IN_A_ROW} steps before it; the weights are at fault, resume from "
                "an earlier checkpoint with a lower optimizer.lr."
            )
        rank_zero_warn(f"{sentence}; the step is left out ({self.skipped} so far)")
        return False
