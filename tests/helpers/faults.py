"""A callback that meets a user's fault on some ranks."""

from __future__ import annotations

import lightning.pytorch as pl

from offramp.common.errors import OfframpError


class Fault(pl.Callback):
    """Raises at the start of training, on one rank, or on all of them if `rank` is negative."""

    def __init__(self, rank: int = -1) -> None:
        self.rank = rank

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.rank in (-1, trainer.global_rank):
            raise OfframpError("the moon is full; wait.")
