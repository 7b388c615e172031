"""`SampleLog`: which examples every step was trained on, as a table beside the checkpoints.

With it a loss that jumps can be traced to its texts, and two runs can be compared step by step:

    trainer:
      callbacks:
        - class_path: offramp.train.sample_log.SampleLog
"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from offramp.common.errors import OfframpError
from offramp.train.data.loader import BatchLoader

FILE = "samples.csv"
COLUMNS = ("step", "epoch", "batch", "loss", "samples")


class SampleLog(pl.Callback):
    """Writes `samples.csv` in the run directory: step, epoch, batch within it, loss, and the samples of all replicas.

    Samples are the numbers of examples in the tokenised data, or of rows since the epoch began where data are streamed.
    A run that is resumed goes on where its checkpoint was made: later lines of the run that broke off are dropped.
    """

    def __init__(self) -> None:
        self._path = Path(FILE)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin the table, or drop the lines that come anew."""
        if not isinstance(trainer.train_dataloader, BatchLoader):
            raise OfframpError(
                "SampleLog knows the samples of a TextDataModule, not those that a "
                f"{type(trainer.train_dataloader).__name__} gives."
            )
        if not trainer.is_global_zero:
            return
        self._path = Path(trainer.default_root_dir) / FILE
        kept = read_samples(self._path) if trainer.global_step and self._path.is_file() else []
        scratch = self._path.with_suffix(".part")
        scratch.parent.mkdir(parents=True, exist_ok=True)
        lines = [list(row.values()) for row in kept if int(row["step"]) < trainer.global_step]
        scratch.write_text("".join(map(_line, [COLUMNS, *lines])), encoding="utf-8")
        scratch.replace(self._path)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add a line."""
        loader = trainer.train_dataloader
        if trainer.is_global_zero and isinstance(loader, BatchLoader):
            taken = loader.last_taken()
            loss = float(trainer.callback_metrics["train/loss"])
            samples = " ".join(map(str, taken.samples))
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_line([trainer.global_step - 1, taken.epoch, taken.batch, repr(loss), samples]))


def read_samples(path: Path) -> list[dict[str, str]]:
    """The lines of a table, by column; one that was cut off is left out."""
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    return list(csv.DictReader(io.StringIO(whole)))


def _line(values: Any) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()
