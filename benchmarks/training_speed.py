"""Tokens per second of `offramp fit`, with and without exits and stages, beside a plain loop with transformers.

    python -m benchmarks.training_speed

Everybody trains the model of `benchmarks.from_scratch` on its data in fp32, with all cores: one process with a thread
for each core, or two stages that share them. All take turns in every round, each time beginning with another one. A
run's first steps do not count; what counts is the median of the others, and of rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.from_scratch import EXITS, PLAIN, RECIPE, curves, overrides, prepare, recipe_logger
from demo.steps import SCRIPT, Steps
from rich.console import Console
from rich.table import Table

WARM_UP = 3
"""Steps of a run that do not count."""
ROWS, MICRO_BATCHES, LENGTH = 16, 4, 256
"""Of a step: those of the recipe."""


@dataclass(frozen=True)
class Contestant:
    """One way to train.

    Attributes:
        name: in the table.
        model: of `benchmarks.from_scratch`; None is a loop with transformers, on the model without exits.
        stages: processes.
    """

    name: str
    model: str | None
    stages: int = 1


CONTESTANTS = (
    Contestant("transformers loop, 1 process", None),
    Contestant("offramp, 1 process", PLAIN),
    Contestant("offramp, 1 process, exits", EXITS),
    Contestant("offramp, 2 stages", PLAIN, 2),
    Contestant("offramp, 2 stages, exits", EXITS, 2),
)


def plain_loop(tokenizer: Path, config: Path, steps: int) -> list[float]:
    """Tokens per second of each step of a loop as everybody writes it: forward, backward, clip, step."""
    import torch
    from benchmarks.from_scratch import source
    from transformers import LlamaConfig, LlamaForCausalLM

    from offramp.train.data.datamodule import TextDataModule
    from offramp.train.data.sources import SourceConfig

    torch.manual_seed(0)
    data = TextDataModule(
        str(tokenizer), SourceConfig(**json.loads(source("train"))), sequence_length=LENGTH, batch_size=ROWS
    )
    data.prepare_data()
    data.setup("fit")
    model = LlamaForCausalLM(LlamaConfig.from_json_file(config / "config.json")).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    speeds = []
    for _, batch in zip(range(steps), data.train_dataloader(), strict=False):
        began = time.perf_counter()
        for ids in batch.input_ids.chunk(MICRO_BATCHES):
            (model(input_ids=ids, labels=ids).loss / MICRO_BATCHES).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        speeds.append(ROWS * LENGTH / (time.perf_counter() - began))
    return speeds


def run(one: Contestant, tokenizer: Path, models: dict[str, Path], steps: int, out: Path) -> float:
    """Tokens per second of one run."""
    cores = os.cpu_count() or 1
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(cores // one.stages, 1))}
    out.mkdir(parents=True)
    log = out / "log.txt"
    if one.model is None:
        words = [sys.executable, "-m", "benchmarks.training_speed", "--loop", str(tokenizer), str(models[PLAIN])]
        done = subprocess.run([*words, "--steps", str(steps)], env=environment, stdout=subprocess.PIPE, check=True)
        return statistics.median(json.loads(done.stdout)[WARM_UP:])
    store = f"sqlite:///{out / 'mlflow.db'}"
    given: dict[str, Any] = overrides(one.model, tokenizer, models[one.model], steps) | {
        "trainer.default_root_dir": out,
        "trainer.logger": recipe_logger("speed", store),
        "trainer.log_every_n_steps": 1,
        "trainer.callbacks": "null",
    }
    if one.stages == 1:
        given |= {"trainer.strategy": "auto", "trainer.devices": 1}
    words = [str(SCRIPT), "fit", "-c", str(RECIPE), *(f"--{key}={value}" for key, value in given.items())]
    with log.open("w", encoding="utf-8") as file:
        subprocess.run(words, env=environment, stdout=file, stderr=subprocess.STDOUT, check=True)
    return statistics.median(value for _, value in curves(store, "speed")["train/tokens_per_second"][WARM_UP:])


def show(found: dict[str, Sequence[float]], console: Console) -> None:
    """A table: medians, ranges, and ratios to the loop, round by round."""
    table = Table("", "tokens/s", "range", "beside the loop")
    loop = found[CONTESTANTS[0].name]
    for name, speeds in found.items():
        ratio = statistics.median(speed / base for speed, base in zip(speeds, loop, strict=True))
        spread = f"{min(speeds):,.0f} to {max(speeds):,.0f}"
        table.add_row(name, f"{statistics.median(speeds):,.0f}", spread, f"{ratio:.2f}x")
    console.print(table)


def main() -> None:
    """All contestants, in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=13, help="of a run; the first three do not count (%(default)s)")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--work", type=Path, default=Path("build/training_speed"), help="folder of all results")
    parser.add_argument("--loop", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.loop:
        tokenizer, config = options.loop
        print(json.dumps(plain_loop(tokenizer, config, options.steps)))
        return
    work, console = options.work.resolve(), Console(highlight=False)
    work.mkdir(parents=True, exist_ok=True)
    tokenizer, models = prepare(Steps(work, console), options.vocabulary)
    found: dict[str, list[float]] = {one.name: [] for one in CONTESTANTS}
    for turn in range(options.rounds):
        for one in (*CONTESTANTS[turn % len(CONTESTANTS) :], *CONTESTANTS[: turn % len(CONTESTANTS)]):
            folder = work / "runs" / f"{time.time_ns()}"
            found[one.name].append(run(one, tokenizer, models, options.steps, folder))
            console.print(f"round {turn + 1}: {one.name}: {found[one.name][-1]:,.0f} tokens/s")
    (work / "report.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    show(dict(found), console)


if __name__ == "__main__":
    main()
