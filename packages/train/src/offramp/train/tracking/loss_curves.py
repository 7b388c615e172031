"""`LossCurves`: the loss of every exit over time, as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from offramp.train.module import MultiExitModule
from offramp.train.tracking.artifacts import record_file

FILE = "loss_per_exit.png"
MOST_POINTS = 1000
"""Of a curve, so that drawing takes as long after a million steps as after a thousand."""

CROSS_ENTROPY = MultiExitModule.kind_of_losses
_LOSS = "loss_exit_"


class Curve:
    """A number over steps; neighbouring points become their mean when there are too many.

    Attributes:
        points: (step, value), each the mean of `width` numbers.
        width: a power of two.
    """

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []
        self.width = 1
        self._waiting: list[tuple[float, float]] = []

    def add(self, step: float, value: float) -> None:
        """Add a number; what is not finite has no place in a picture."""
        if not math.isfinite(value):
            return
        self._waiting.append((step, value))
        if len(self._waiting) < self.width:
            return
        self.points.append(_mean(self._waiting))
        self._waiting = []
        if len(self.points) > MOST_POINTS:
            pairs = len(self.points) // 2
            left = self.points[2 * pairs :]
            self.points = [_mean(self.points[2 * pair : 2 * pair + 2]) for pair in range(pairs)]
            self._waiting = left * self.width
            self.width *= 2

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, in plain containers."""
        return {"points": list(self.points), "width": self.width, "waiting": list(self._waiting)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Curve:
        """From a checkpoint."""
        curve = cls()
        curve.width = state["width"]
        curve.points, curve._waiting = ([(step, value) for step, value in state[key]] for key in ("points", "waiting"))
        return curve


class LossCurves(pl.Callback):
    """Draws `loss_per_exit.png` at every validation and at the end, in the run directory and for MLflow.

    Points are in checkpoints, so the picture of a resumed run goes on.
    """

    def __init__(self) -> None:
        self.train: dict[str, Curve] = {}
        self.validation: dict[str, Curve] = {}
        self._is_drawn = True

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep what is logged."""
        every = int(getattr(trainer, "log_every_n_steps"))  # noqa: B009 - made known at run time
        if isinstance(pl_module, MultiExitModule) and every and trainer.global_step % every == 0:
            self._keep(self.train, trainer.global_step - 1, pl_module.losses_of_step)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep what was measured, and draw."""
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        found = {name.removeprefix("val/"): float(value) for name, value in trainer.callback_metrics.items()
                 if name.startswith(f"val/{_LOSS}")}  # fmt: skip
        self._keep(self.validation, trainer.global_step - 1, found)
        self._draw(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draw what has come since."""
        if not self._is_drawn:
            self._draw(trainer)

    @override
    def state_dict(self) -> dict[str, Any]:
        """All points."""
        curves = {"train": self.train, "validation": self.validation}
        return {kind: {name: curve.state_dict() for name, curve in own.items()} for kind, own in curves.items()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """All points."""
        self.train, self.validation = (
            {name: Curve.from_state(curve) for name, curve in state_dict[kind].items()}
            for kind in ("train", "validation")
        )

    def _keep(self, curves: dict[str, Curve], step: int, losses: Mapping[str, float]) -> None:
        for name, value in losses.items():
            if name.startswith(_LOSS):
                curves.setdefault(name.removeprefix(_LOSS), Curve()).add(step, value)
                self._is_drawn = False

    def _draw(self, trainer: pl.Trainer) -> None:
        self._is_drawn = True
        kind = getattr(trainer.lightning_module, "kind_of_losses", CROSS_ENTROPY)
        if trainer.is_global_zero and (self.train or self.validation):
            record_file(trainer, FILE, lambda path: draw(path, self.train, self.validation, kind))


def draw(path: Path, train: Mapping[str, Curve], validation: Mapping[str, Curve], kind: str = CROSS_ENTROPY) -> None:
    """Write a PNG: one colour for each exit, a thin line for training and a thick one with marks for validation.

    Args:
        path: of the file.
        train: exit -> losses of training steps.
        validation: exit -> losses on validation data, which are cross-entropies.
        kind: of losses of training steps.
    """
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    exits = sorted({*train, *validation})
    of_kind = "" if kind == CROSS_ENTROPY else f" ({kind})"
    for number, name in enumerate(exits):
        colour = colormaps["viridis"](0.92 * (1.0 - number / max(len(exits) - 1, 1)))
        if name in train:
            steps, losses = zip(*train[name].points, strict=True) if train[name].points else ((), ())
            axis.plot(steps, losses, color=colour, linewidth=0.8, alpha=0.6, label=f"exit {name}, training{of_kind}")
        if name in validation:
            steps, losses = zip(*validation[name].points, strict=True) if validation[name].points else ((), ())
            mark = "o" if len(steps) <= 50 else ""
            axis.plot(steps, losses, color=colour, linewidth=1.8, marker=mark, label=f"exit {name}, validation")
    axis.set_xlabel("optimizer step")
    axis.set_ylabel("nats per token" if of_kind else f"{CROSS_ENTROPY} (nats per token)")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=110, format="png")


def _mean(points: list[tuple[float, float]]) -> tuple[float, float]:
    return sum(step for step, _ in points) / len(points), sum(value for _, value in points) / len(points)
