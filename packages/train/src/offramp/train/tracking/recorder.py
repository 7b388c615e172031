"""Callbacks that every command adds: what was run is written down, and SIGTERM ends it orderly."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from offramp.train.recipe import plain_yaml
from offramp.train.tracking.artifacts import record_text
from offramp.train.tracking.environment import describe_environment
from offramp.train.tracking.logger import OfframpMLFlowLogger
from offramp.train.tracking.secrets import mask

CONFIG_FILE, ENVIRONMENT_FILE, STAGE_PLAN = "config.yaml", "environment.json", "stage_plan"


class RunRecorder(pl.Callback):
    """Writes what is run beside the checkpoints and into the MLflow run: configuration, environment, stage plan.

    Args:
        config: plain containers. Secrets are masked in what is written.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = mask(config)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Writes before anything runs, so that a run that fails early is described too."""
        text = plain_yaml(self.config)
        loggers = [logger for logger in trainer.loggers if isinstance(logger, OfframpMLFlowLogger)]
        if trainer.is_global_zero:
            directory = Path(trainer.default_root_dir)
            directory.mkdir(parents=True, exist_ok=True)
            word = str(getattr(stage, "value", stage))  # Lightning hands an enumeration
            name = CONFIG_FILE if word == "fit" else f"{word}-{CONFIG_FILE}"
            (directory / name).write_text(text, encoding="utf-8")
            for logger in loggers:
                logger.log_hyperparams(self.config)
                logger.log_text(text, name)
            if word == "fit":
                record_text(trainer, ENVIRONMENT_FILE, json.dumps(describe_environment(), indent=2) + "\n")

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes the stage plan of a pipeline, which is known by now."""
        report = getattr(trainer.strategy, "stage_report", None)
        if trainer.is_global_zero and report is not None:
            record_text(trainer, f"{STAGE_PLAN}.txt", report.text + "\n")
            record_text(trainer, f"{STAGE_PLAN}.json", json.dumps(report.stages, indent=2) + "\n")


class Termination(pl.Callback):
    """Turns SIGTERM into an exception at once, wherever the program is.

    Lightning waits for the end of the step and, with several ranks, starts a collective within the signal handler,
    which deadlocks with the collectives of a pipeline. This handler is in force from before the trainer is built, and
    takes over again after Lightning has put in its own.
    """

    def __init__(self) -> None:
        self._trainer: pl.Trainer | None = None
        self._previous: Any = None

    def __enter__(self) -> Termination:
        self._previous = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, traceback: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGTERM, self._previous)

    @override
    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Takes over from Lightning's handler."""
        self._take_over(trainer)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Takes over from Lightning's handler."""
        self._take_over(trainer)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Takes over from Lightning's handler."""
        self._take_over(trainer)

    @override
    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Takes over from Lightning's handler."""
        self._take_over(trainer)

    def _take_over(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Once is enough: what follows is the orderly end, and must not be interrupted.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self._trainer is not None and self._trainer.strategy.launcher is not None:
            self._trainer.strategy.launcher.kill(signal.SIGTERM)
        sys.exit(128 + number)
