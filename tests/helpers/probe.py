"""A LightningModule with one weight, for tests of what surrounds training."""

from __future__ import annotations

import os
import signal
import time

import lightning.pytorch as pl
import torch
from torch import nn

from offramp.train.data.batch import TokenBatch


class Probe(pl.LightningModule):
    """Counts steps; fails, is killed or is interrupted at `trouble_at` when asked to."""

    def __init__(self, lr: float = 0.1, note: str = "", trouble: str = "none", trouble_at: int = 1) -> None:
        super().__init__()
        self.lr, self.note, self.trouble, self.trouble_at = lr, note, trouble, trouble_at
        self.weight = nn.Parameter(torch.zeros(()))
        self.steps: list[int] = []

    def training_step(self, batch: TokenBatch, batch_idx: int) -> torch.Tensor:
        self.steps.append(self.global_step)
        loss = self.weight * 0 + batch.input_ids.float().mean()
        self.log("train/loss", loss)
        if self.trouble != "none" and self.global_step == self.trouble_at:
            self._make_trouble()
        return loss

    def validation_step(self, batch: TokenBatch) -> None:
        self.log("val/rows", float(batch.num_rows), batch_size=1)

    def test_step(self, batch: TokenBatch) -> None:
        self.log("test/rows", float(batch.num_rows), batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def _make_trouble(self) -> None:
        if self.trouble == "raise":
            raise RuntimeError("out of luck")
        if self.trouble == "interrupt":
            raise KeyboardInterrupt
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
