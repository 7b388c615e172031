"""`python -m benchmarks.e2e DEVSET.csv TESTSET.csv`: train exits on E2E NLG and measure what they cost in quality.

Every step is done once: an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path

from benchmarks.e2e.calibrate import calibrate
from benchmarks.e2e.data import prompt_for, read_csv, write_data
from benchmarks.e2e.evaluate import draw_curve, evaluate
from benchmarks.e2e.meaning import known_values, synthetic_mrs
from benchmarks.e2e.settings import Settings
from benchmarks.texts import distil
from benchmarks.texts.outcome import outcome
from benchmarks.texts.progress import reporting
from benchmarks.texts.rows import read_rows, write_table
from demo.model_steps import add_exits, fit, take_plain
from demo.steps import Steps
from rich.console import Console

from offramp.common.checkpoint import load_checkpoint, save_checkpoint
from offramp.common.exits.policy import ExitPolicy
from offramp.serve.engine import Engine
from offramp.serve.request.exit_options import ExitOptions

HERE = Path(__file__).parent
CONFIGS = HERE.parent.parent / "configs" / "e2e"


def main() -> None:
    """Run what has not been run yet."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.e2e", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("devset", type=Path, help="CSV with columns mr and ref, to train on")
    parser.add_argument("testset", type=Path, help="CSV with columns mr and ref, to calibrate and test on")
    parser.add_argument("--work", type=Path, default=Path("build/e2e"), help="folder of all results (%(default)s)")
    parser.add_argument("--source", default=Settings.source, help="model to start from (%(default)s)")
    options = parser.parse_args()
    settings = replace(Settings(), source=options.source)
    console = Console(highlight=False)
    run(settings, options.devset, options.testset, options.work.resolve(), console)
    console.print(f"\nTable and pictures: {options.work / 'test'}; model: {options.work / 'calibrate' / 'model'}")


def run(settings: Settings, devset: Path, testset: Path, work: Path, console: Console) -> Path:
    """All steps; returns the folder with the table."""
    work.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{work / 'mlflow.db'}")
    steps = Steps(work, console)
    data = steps.run(
        "data",
        "Divide the data by meaning representation",
        [devset, testset, HERE / "data.py", str(settings.counts)],
        lambda out: write_data(devset, testset, out, settings.counts),
    )
    plain = take_plain(steps, settings.source, console)

    def train(name: str, title: str, source: Path, texts: Path) -> Path:
        recipe = f"{name.partition('_')[0]}.yaml"
        recipes = [CONFIGS / "common.yaml", CONFIGS / recipe, *([settings.recipe] if settings.recipe else [])]
        return steps.run(
            name, title, recipes, lambda out: fit(out, recipes, source / "model", texts, console, os.cpu_count())
        )

    tuned = train("finetune", "Teach it the task at full depth, from what people wrote", plain, data)
    model = add_exits(steps, tuned, settings.exits, console)
    for turn in range(1, settings.rounds + 1):
        own = steps.run(
            f"own_texts_{turn}",
            f"Round {turn}: what it writes itself about {settings.synthetic:,} synthetic meaning representations",
            [
                Path(distil.__file__),
                HERE / "meaning.py",
                str((settings.synthetic, settings.max_tokens, settings.engine)),
            ],
            lambda out, model=model, turn=turn: write_own_texts(
                settings, model / "model", data, testset, out, turn, console
            ),
        )
        model = train(f"prime_{turn}", "Prime the exits on cached states", model, own)
        model = train(f"shallow_{turn}", "Train the layers below the first exit on these texts", model, own)
        model = train(f"joint_{turn}", "Train everything on them, on the KV cache that serving will see", model, own)
    calibrated = steps.run(
        "calibrate",
        f"Choose thresholds on {settings.counts['calibration']} meaning representations",
        [HERE / "calibrate.py", str((settings.targets, settings.kv_policy, settings.max_tokens, settings.engine))],
        lambda out: choose_thresholds(settings, model / "model", data, out, console),
    )
    return steps.run(
        "test",
        f"Measure quality and depth on {settings.counts['test']} others",
        [HERE / "evaluate.py"],
        lambda out: test(settings, calibrated, tuned / "model", data, out, console),
    )


def write_own_texts(
    settings: Settings, model: Path, data: Path, testset: Path, out: Path, turn: int, console: Console
) -> None:
    """What the full model says about training, validation and synthetic MRs; never about one of the test set."""
    learn, validate = ([row["mr"] for row in read_rows(data / f"{name}_mrs.jsonl")] for name in ("train", "validation"))
    avoid = [*learn, *validate, *read_csv(testset)]
    synthetic = synthetic_mrs(known_values(learn), settings.synthetic, avoid, seed=turn)
    engine = Engine.from_checkpoint(model, settings.engine)
    prompts = {"validation": [prompt_for(mr) for mr in validate], "train": map(prompt_for, [*learn, *synthetic])}
    with reporting(console) as report:
        distil.write_own_texts(
            engine, {name: list(asked) for name, asked in prompts.items()}, settings.max_tokens, out, report
        )


def choose_thresholds(settings: Settings, source: Path, data: Path, out: Path, console: Console) -> None:
    """Write the model again with the policy of the first operating point; keep all of them in `points.json`."""
    checkpoint = load_checkpoint(source)
    engine = Engine.from_checkpoint(source, settings.engine)
    rows = read_rows(data / "calibration.jsonl")
    template = checkpoint.policy or ExitPolicy()
    with reporting(console) as report:
        points, record = calibrate(
            engine, rows, template, settings.targets, settings.kv_policy, settings.max_tokens, report
        )
    checkpoint.policy, checkpoint.calibration = next(iter(points.values())), record
    save_checkpoint(out / "model", checkpoint, overwrite=True)
    (out / "points.json").write_text(json.dumps({name: policy.to_json() for name, policy in points.items()}))
    for name, policy in points.items():
        console.print(f"   {name}: thresholds {dict(policy.thresholds) or 'none; every token runs all layers'}")


def test(settings: Settings, calibrated: Path, tuned: Path, data: Path, out: Path, console: Console) -> None:
    """Write `results.csv` and `quality.png`; the model before it had exits is a line of its own."""
    rows = read_rows(data / "test.jsonl")
    points = {
        name: ExitPolicy.from_json(point)
        for name, point in json.loads((calibrated / "points.json").read_text()).items()
    }
    with reporting(console) as report:
        before = Engine.from_checkpoint(tuned, settings.engine)
        start = outcome("before exits", before, rows, ExitOptions("full"), settings.max_tokens, report)
        engine = Engine.from_checkpoint(calibrated / "model", settings.engine)
        template = replace(next(iter(points.values())), thresholds={})
        outcomes = evaluate(engine, rows, points, template, settings.max_tokens, report)
    table = [one.row(outcomes[0]) for one in (start, *outcomes)]
    write_table(out / "results.csv", table)
    draw_curve(out / "quality.png", table, f"E2E NLG, {len(rows)} test meaning representations")
    for line in table:
        console.print(f"   {line['name']}: ratio {line['ratio']:.3f}, {line['layers']} layers per token")


if __name__ == "__main__":
    main()
