"""`python -m benchmarks.recipes e2e DEV.csv TEST.csv` or `... docstrings`: four ways of training exits, compared.

Every step is done once: an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.recipes import curve as curves
from benchmarks.recipes import speed, tasks
from benchmarks.recipes.picture import draw
from benchmarks.recipes.settings import DOCSTRINGS, E2E, Settings
from benchmarks.texts import distil, outcome
from benchmarks.texts.progress import reporting
from benchmarks.texts.rows import read_rows, write_table
from demo.model_steps import add_exits, fit, take_plain
from demo.steps import Steps
from rich.console import Console

from offramp.serve.engine import Engine
from offramp.serve.request.exit_options import ExitOptions

HERE = Path(__file__).parent
CONFIGS = HERE.parent.parent / "configs"

WriteData = Callable[[Path], None]


def main() -> None:
    """Run what has not been run yet."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recipes", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--work", type=Path, help="folder of all results (build/recipes/TASK)")
    parser.add_argument("--source", default=Settings.source, help="model to start from (%(default)s)")
    tasks_ = parser.add_subparsers(dest="task", required=True)
    e2e = tasks_.add_parser("e2e", help="E2E NLG: facts about a restaurant to a sentence")
    e2e.add_argument("devset", type=Path, help="CSV with columns mr and ref, to train on")
    e2e.add_argument("testset", type=Path, help="CSV with columns mr and ref, to test on")
    tasks_.add_parser("docstrings", help="docstrings of the installed packages: details to the summary line")
    options = parser.parse_args()
    work = (options.work or Path("build/recipes") / options.task).resolve()
    settings = replace(E2E if options.task == "e2e" else DOCSTRINGS, source=options.source)
    sizes = {"prompts": settings.prompts, "test_rows": settings.test_rows}
    inputs: list[Path] = []
    if options.task == "e2e":
        inputs = [options.devset, options.testset]

        def write(out: Path) -> None:
            tasks.write_e2e(options.devset, options.testset, out, **sizes)
    else:

        def write(out: Path) -> None:
            tasks.write_docstrings(out, work / "collected", **sizes)

    console = Console(highlight=False)
    found = run(settings, options.task, inputs, write, work, console)
    console.print(f"\nTables and picture: {found}")


def run(
    settings: Settings,
    task: str,
    inputs: Sequence[Path],
    write_data: WriteData,
    work: Path,
    console: Console,
) -> Path:
    """All steps; returns the folder with tables and picture.

    Args:
        settings: sizes and choices.
        task: names the configuration file with the lengths of training.
        inputs: files the data are made of.
        write_data: makes them, in a folder.
        work: folder of all results.
        console: says what is done.
    """
    work.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{work / 'mlflow.db'}")
    steps = Steps(work, console)
    data = steps.run(
        "data",
        f"Prompts and texts of {task}",
        [*inputs, HERE / "tasks.py", str((settings.prompts, settings.test_rows))],
        write_data,
    )
    plain = take_plain(steps, settings.source, console)

    def train(name: str, title: str, kind: str, source: Path, texts: Path, *more: str) -> Path:
        recipes = recipe_files(task, kind, *more)
        return steps.run(name, title, recipes, lambda out: fit(out, recipes, source / "model", texts, console))

    tuned = train("finetune", "Teach it the task at full depth", "finetune", plain, data)
    own = steps.run(
        "own_texts",
        f"What it writes itself about {settings.prompts:,} prompts",
        [Path(distil.__file__), str((settings.max_tokens, settings.engine))],
        lambda out: write_own_texts(settings, tuned / "model", data, out, console),
    )
    bare = add_exits(steps, tuned, settings.exits, console, "norm", "exits_norm")
    norm = train("norm", "norm: a norm at each exit, on cached states of the frozen model", "prime", bare, own)
    adapted = add_exits(steps, tuned, settings.exits, console)
    adapter = train("adapter", "adapter: a linear map at each exit, likewise", "prime", adapted, own)
    joint = train("joint", "joint: from these adapters, everything trained", "joint", adapter, own, "exact_kv")
    filled = train("joint_fill", "joint_fill: the same on the KV cache that *fill* leaves", "joint", adapter, own)
    variants = {"norm": norm, "adapter": adapter, "joint": joint, "joint_fill": filled}
    code = [Path(curves.__file__), Path(speed.__file__), Path(outcome.__file__)]
    choices = str((settings.max_tokens, settings.thresholds, settings.engine, settings.timings))
    before = steps.run(
        "before",
        f"What the model before exits writes about {settings.test_rows} test prompts",
        [*code, choices],
        lambda out: write_start(settings, tuned / "model", data, out, console),
    )
    measured = {
        name: steps.run(
            f"measure_{name}",
            f"The curve of {name}",
            [name],
            lambda out, model=model: measure(settings, model / "model", data, before, out, console),
        )
        for name, model in variants.items()
    }
    return steps.run(
        "result",
        "Tables and picture",
        [HERE / "picture.py"],
        lambda out: show(task, {name: found / "points.json" for name, found in measured.items()}, out, console),
    )


def recipe_files(task: str, kind: str, *more: str) -> list[Path]:
    """Configuration files of a training run: those of `benchmarks.e2e`, the task's lengths, and what differs here.

    Args:
        task: its name.
        kind: `finetune`, `prime` or `joint`.
        more: further files of `configs/recipes`.
    """
    theirs, own = CONFIGS / "e2e", CONFIGS / "recipes"
    names = [task, *([] if kind == "prime" else [kind]), *more]
    return [theirs / "common.yaml", theirs / f"{kind}.yaml", *(own / f"{name}.yaml" for name in names)]


def write_own_texts(settings: Settings, model: Path, data: Path, out: Path, console: Console) -> None:
    """What the full model says about training and validation prompts."""
    engine = Engine.from_checkpoint(model, settings.engine)
    prompts = {
        name: [row["prompt"] for row in read_rows(data / f"ask_{name}.jsonl")] for name in ("validation", "train")
    }
    with reporting(console) as report:
        distil.write_own_texts(engine, prompts, settings.max_tokens, out, report)


def write_start(settings: Settings, model: Path, data: Path, out: Path, console: Console) -> None:
    """ROUGE-L of the model before it had exits, text by text."""
    engine = Engine.from_checkpoint(model, settings.engine)
    with reporting(console) as report:
        found = outcome.outcome(
            "before exits", engine, read_rows(data / "test.jsonl"), ExitOptions("full"), settings.max_tokens, report
        )
    (out / "scores.json").write_text(json.dumps(found.scores))


def measure(settings: Settings, model: Path, data: Path, before: Path, out: Path, console: Console) -> None:
    """The points of one variant."""
    start: list[float] = json.loads((before / "scores.json").read_text())
    with reporting(console) as report:
        points = curves.measure(settings, model, read_rows(data / "test.jsonl"), start, report)
    curves.write_points(out / "points.json", points)


def show(task: str, files: dict[str, Path], out: Path, console: Console) -> None:
    """Write `results.csv`, `summary.csv` and `quality.png`."""
    rows = curves.table({name: curves.read_points(path) for name, path in files.items()})
    write_table(out / "results.csv", rows)
    found: list[dict[str, Any]] = curves.summary(rows)
    write_table(out / "summary.csv", found)
    draw(out / "quality.png", rows, f"{task}: four ways of training exits")
    for line in found:
        speeds = ", ".join(f"{line[name]}x {name.removesuffix('_speedup')}" for name in line if _is_speed(name))
        console.print(
            f"   {line['variant']}, {line['kv']}: at {curves.TARGET} of ROUGE-L {line['layers']} layers, {speeds}"
        )


def _is_speed(column: str) -> bool:
    return column.endswith("_speedup") and not column.startswith("ratio")


if __name__ == "__main__":
    main()
