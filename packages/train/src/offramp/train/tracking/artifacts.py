"""Files beside a run that MLflow gets too, whichever logger a trainer has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl

from offramp.train.tracking.logger import OfframpMLFlowLogger


def record_text(trainer: pl.Trainer, name: str, text: str) -> None:
    """Write a text into the run directory and into the MLflow run; for the process that logs."""
    path = Path(trainer.default_root_dir) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    for logger in trainer.loggers:
        if isinstance(logger, OfframpMLFlowLogger):
            logger.log_text(text, name)


def record_file(trainer: pl.Trainer, name: str, write: Callable[[Path], None]) -> None:
    """Write a file into the run directory and into the MLflow run; for the process that logs.

    Args:
        trainer: of the run.
        name: of the file, in the run directory.
        write: is given a path with the same suffix. What it writes takes the file's place when it is whole: an earlier
            one may be on its way to the store.
    """
    path = Path(trainer.default_root_dir) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}")
    write(scratch)
    scratch.replace(path)
    for logger in trainer.loggers:
        if isinstance(logger, OfframpMLFlowLogger):
            logger.log_file(path)
