"""A callback that draws from the global generators after every step and writes down what it got."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch


class Draws(pl.Callback):
    """Appends `STEP NUMBERS` to `draws-RANK` in the run directory; ranks draw different ones."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for _ in range(trainer.global_rank):
            torch.rand(())
            np.random.rand()
            random.random()

    def on_train_batch_end(  # pyright: ignore[reportIncompatibleMethodOverride] - only the first is read
        self, trainer: pl.Trainer, *args: Any
    ) -> None:
        drawn = [float(torch.rand(())), np.random.rand(), random.random()]
        with (Path(trainer.default_root_dir) / f"draws-{trainer.global_rank}").open("a") as file:
            file.write(f"{trainer.global_step - 1} {drawn}\n")


def read_draws(directory: Path) -> dict[tuple[str, str], str]:
    """(rank's file, step) -> the last numbers drawn there."""
    drawn = {}
    for file in directory.glob("draws-*"):
        for line in file.read_text().splitlines():
            step, _, numbers = line.partition(" ")
            if numbers.endswith("]"):  # and not cut off
                drawn[file.name, step] = numbers
    return drawn
