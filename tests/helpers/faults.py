"""Callbacks that make trouble on some ranks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from offramp.common.errors import OfframpError
from offramp.train import shared_directory
from offramp.train.pipeline.strategy import DeepSpeedPipelineStrategy


class Fault(pl.Callback):
    """Raises a user's fault at the start of training, on one rank, or on all of them if `rank` is negative."""

    def __init__(self, rank: int = -1) -> None:
        self.rank = rank

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.rank in (-1, trainer.global_rank):
            raise OfframpError("the moon is full; wait.")


class Haste(pl.Callback):
    """Lets this process give up soon on a directory that is not shared."""

    def __init__(self) -> None:
        shared_directory.PATIENCE_S = 2.0


class Impatience(pl.Callback):
    """After a step, processes wait for each other a hundredth of what the recipe says; before, they start up."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.step:
            assert isinstance(trainer.strategy, DeepSpeedPipelineStrategy)
            links = trainer.strategy.engine.links
            links.limit_to(links.limit / 100)
            # Checkpoints are agreed on by all processes, whose group got its limit when they met.
            _set_pg_timeout(links.limit, dist.group.WORLD)


class Death(pl.Callback):
    """Kills its process before a step, on one rank, and notes the time."""

    def __init__(self, rank: int, step: int, note: str) -> None:
        self.rank, self.step, self.note = rank, step, note

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if (trainer.global_rank, trainer.global_step) == (self.rank, self.step):
            Path(self.note).write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
