"""Short runs of the trainer on tiny models, in this process or in several."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger

from offramp.common.errors import OfframpError
from offramp.train.confidence_training import ConfidenceTrainingModule
from offramp.train.data.batch import IGNORED_LABEL, AnyBatch, PairBatch, TokenBatch
from offramp.train.module import MultiExitModule
from offramp.train.optim import OptimizerConfig
from offramp.train.priming import ExitPrimingModule, PrimingDataModule
from offramp.train.tracking.exit_samples import continuations

ROWS = 24
HALF_WAY = "{}-{{step}}"
"""Name of the checkpoints that `fit` writes beside `out` after every third step."""
OF_THE_MACHINE = (
    "epoch", "train/tokens_per_second", "train/step_seconds", "train/model_tflops", "train/mfu", "train/memory",
)  # fmt: skip
"""How the names of metrics begin that no two runs share."""


class Steps:
    """A resumable, rank-aware loader: step s takes the next rows of `rows`, rank r its part of them."""

    make: Callable[[list[tuple[int, int]], int], AnyBatch]

    def __init__(self, rows: list[tuple[int, int]], batch_size: int, replicas: int, rank: int, time: int) -> None:
        self.make = make_batch
        self.rows, self.batch_size, self.replicas, self.rank, self.time = rows, batch_size, replicas, rank, time
        self.done = self.start = 0

    def __len__(self) -> int:
        return -(-len(self.rows) // (self.batch_size * self.replicas))

    def __iter__(self) -> Iterator[AnyBatch]:
        start, self.start = self.start, 0
        self.done = start
        size = self.batch_size * self.replicas
        for step in range(start, len(self)):
            rows = self.rows[step * size : (step + 1) * size]
            rows += [(-1, 0)] * (size - len(rows))
            self.done += 1
            yield self.make(rows[self.rank * self.batch_size : (self.rank + 1) * self.batch_size], self.time)

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["done"] % len(self)


def make_batch(rows: list[tuple[int, int]], time: int) -> TokenBatch:
    """Rows of counting numbers (first token, prompt length); first token -1 is an empty row."""
    first = torch.tensor([[token] for token, _ in rows])
    tokens = (first + torch.arange(time + 1)) % 50 + 10
    labels = tokens[:, 1:].clone()
    labels[torch.arange(time) < torch.tensor([[prompt] for _, prompt in rows])] = IGNORED_LABEL
    labels[first[:, 0] < 0] = IGNORED_LABEL
    return TokenBatch(tokens[:, :-1].contiguous(), labels, torch.zeros(len(rows), time, dtype=torch.long))


def make_pairs(rows: list[tuple[int, int]], time: int) -> PairBatch:
    """The same rows as targets, without their prompts, and their reversals as sources; 1 ends both."""
    tokens = make_batch(rows, time)
    sources = torch.zeros(len(rows), time + 1, dtype=torch.long)
    inputs, labels = torch.zeros_like(tokens.labels), torch.full_like(tokens.labels, IGNORED_LABEL)
    for row, own in enumerate(tokens.labels):
        target = [*own[own != IGNORED_LABEL].tolist()[:-1], 1] if (own != IGNORED_LABEL).any() else []
        inputs[row, 1 : len(target)] = torch.tensor(target[:-1])
        labels[row, : len(target)] = torch.tensor(target)
        sources[row, : len(target)] = torch.tensor([*target[-2::-1], 1] if target else [])
    return PairBatch(sources, (sources != 0).long(), inputs, labels, (labels != IGNORED_LABEL).long())


class Numbers(pl.LightningDataModule):
    """24 rows to train on, 7 of another length to validate on."""

    def __init__(self, global_batch: int = 4) -> None:
        super().__init__()
        self.global_batch = global_batch

    def _steps(self, rows: list[tuple[int, int]], time: int) -> Steps:
        assert self.trainer is not None
        kwargs = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        return Steps(rows, self.global_batch // kwargs["num_replicas"], kwargs["num_replicas"], kwargs["rank"], time)

    def describe(self) -> dict[str, Any]:
        return {"examples": ROWS}

    def train_dataloader(self) -> Any:
        return self._steps([(7 * row, row % 5) for row in range(ROWS)], 9)

    def val_dataloader(self) -> Any:
        return self._steps([(3 * row + 1, row % 3) for row in range(7)], 6)


class Pairs(Numbers):
    """The same for an encoder-decoder model."""

    def _steps(self, rows: list[tuple[int, int]], time: int) -> Steps:
        steps = super()._steps(rows, time)
        steps.make = make_pairs
        return steps


class Said(pl.Callback):
    """What each exit writes after some prompts at the last validation."""

    def __init__(self, prompts: list[list[int]], tokens: int) -> None:
        self.prompts, self.tokens = prompts, tokens
        self.texts: dict[int, list[list[int]]] = {}

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, MultiExitModule)
        self.texts = continuations(pl_module, self.prompts, self.tokens, ends=[])


class Memory(Logger):
    """Keeps every logged metric: (step, name) -> value."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: dict[tuple[int, str], float] = {}

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.metrics.update({(step or 0, name): float(value) for name, value in metrics.items()})


def fit(
    checkpoint: str,
    out: str,
    strategy: Any = "auto",
    *,
    devices: int = 1,
    max_steps: int = 6,
    resume: str | None = None,
    module: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    priming: bool = False,
    classifiers: bool = False,
    data: type[Numbers] = Numbers,
    prompts: list[list[int]] | None = None,
) -> dict[str, Any]:
    """Fit, save to `out`, validate, and say what was logged by this process.

    Args:
        checkpoint: directory to start from.
        out: training checkpoint to write.
        strategy: of the trainer; a dictionary makes a `DeepSpeedPipelineStrategy`.
        devices: processes.
        max_steps: to run to; schedules are made for it.
        resume: training checkpoint to resume.
        module: arguments of `MultiExitModule`.
        trainer: arguments of the trainer.
        priming: prime exits, instead of training all.
        classifiers: train classifiers, instead of all.
        data: what to train on.
        prompts: to be continued by every exit with five tokens; `said` in the answer.
    """
    warnings.filterwarnings("ignore")
    if isinstance(strategy, dict):
        from offramp.train.pipeline.strategy import DeepSpeedPipelineStrategy

        strategy = DeepSpeedPipelineStrategy(**strategy)
    memory, said = Memory(), Said(prompts or [], 5)
    runner = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_steps=max_steps,
        logger=memory,
        log_every_n_steps=1,
        num_sanity_val_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(Path(out).parent),
        callbacks=[
            ModelCheckpoint(Path(out).parent, HALF_WAY.format(Path(out).stem), every_n_train_steps=3, save_top_k=-1),
            *([] if prompts is None else [said]),
        ],
        **{"gradient_clip_val": 1.0, "val_check_interval": 3, **(trainer or {})},
    )
    settings = {"optimizer": OptimizerConfig(lr=1e-2, warmup_steps=2, weight_decay=0.1), **(module or {})}
    if priming:
        model = ExitPrimingModule(checkpoint)
    elif classifiers:
        model = ConfidenceTrainingModule(checkpoint)
    else:
        model = MultiExitModule(checkpoint, **settings)
    on_states = PrimingDataModule(data(), batch_size=16) if priming or classifiers else None
    runner.fit(model, datamodule=on_states or data(), ckpt_path=resume)
    runner.save_checkpoint(out)
    logged = {name: float(value) for name, value in runner.callback_metrics.items()}
    (again,) = runner.validate(model, datamodule=data(), verbose=False)
    return {
        "metrics": dict(memory.metrics),
        "logged": logged,
        "validated": again,
        "steps": runner.global_step,
        "said": said.texts,
    }


def fit_all(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Several fits one after the other in this process, so that it starts up once; {"fault": ...} of those refused."""
    answers = []
    for run in runs:
        try:
            answers.append(fit(**run))
        except OfframpError as fault:
            answers.append({"fault": str(fault)})
    return answers


def comparable(run: dict[str, Any], steps: range = range(6)) -> dict[tuple[int, str], float]:
    """The metrics of a run that another one must have too: (step, name) -> value."""
    return {
        key: value for key, value in run["metrics"].items() if key[0] in steps and not key[1].startswith(OF_THE_MACHINE)
    }


def validate(checkpoint: str, trained: str, strategy: dict[str, Any] | None, devices: int = 1) -> dict[str, float]:
    """Validate a training checkpoint in a new trainer."""
    warnings.filterwarnings("ignore")
    from offramp.train.pipeline.strategy import DeepSpeedPipelineStrategy

    runner = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="auto" if strategy is None else DeepSpeedPipelineStrategy(**strategy),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    (metrics,) = runner.validate(MultiExitModule(checkpoint), datamodule=Numbers(), ckpt_path=trained, verbose=False)
    return dict(metrics)
