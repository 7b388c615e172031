"""Training from scratch with and without early exits: same weights at first, same data, same steps, two stages.

    python -m benchmarks.from_scratch                  600 steps each; goes on where it stopped

The text is the documentation of the installed Python packages, validation that of packages which training never sees.
The recipe is `configs/train/tiny.yaml` with a smaller vocabulary: a byte-level BPE made from the training text.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from demo.steps import Steps, offramp
from rich.console import Console

from offramp.common.exits.config import ExitConfig
from offramp.train.data.docstrings import DocstringOptions, load_docstrings

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "configs" / "train" / "tiny.yaml"
SHAPE = ROOT / "configs" / "train" / "models" / "tiny"
EXPERIMENT = "offramp-from-scratch"
PLAIN, EXITS = "without_exits", "with_exits"
END, BEGIN = "</s>", "<s>"
VALIDATIONS = 8
"""Of a run."""

VALIDATION_SHARE = 0.15
"""Of the packages; they are some of the smaller ones, with 3% of the text."""

Curve = list[tuple[int, float]]
"""Steps, and what was logged there."""


def corpus() -> list[str]:
    """The training text, as the recipe reads it."""
    cache = Path("~/.cache/offramp").expanduser()
    return [row["details"] for row in load_docstrings(DocstringOptions(validation_share=VALIDATION_SHARE), cache)]


def write_tokenizer(out: Path, texts: Sequence[str], vocabulary: int) -> None:
    """A byte-level BPE of these texts, in the files of Hugging Face."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    # The configuration of the model names the first two after padding.
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<pad>", BEGIN, END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BEGIN, eos_token=END, pad_token="<pad>"
    ).save_pretrained(out)


def write_model(out: Path, vocabulary: int, exits: Sequence[int]) -> None:
    """The directory that a run from scratch starts from: a shape without weights."""
    out.mkdir(parents=True, exist_ok=True)
    config = json.loads((SHAPE / "config.json").read_text(encoding="utf-8")) | {"vocab_size": vocabulary}
    head = json.loads((SHAPE / "exits.json").read_text(encoding="utf-8"))
    head["exits"] |= {"layers": list(exits)}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (out / "exits.json").write_text(json.dumps(head, indent=2) + "\n", encoding="utf-8")


def prepare(steps: Steps, vocabulary: int) -> tuple[Path, dict[str, Path]]:
    """The folders of the tokenizer, and of the models with and without exits."""
    tokenizer = steps.run(
        "tokenizer",
        f"Make a vocabulary of {vocabulary:,} from the documentation of the installed packages",
        [str(vocabulary)],
        lambda out: write_tokenizer(out, corpus(), vocabulary),
    )
    exits = ExitConfig.from_json(json.loads((SHAPE / "exits.json").read_text(encoding="utf-8"))["exits"]).layers
    models = {PLAIN: steps.work / "models" / PLAIN, EXITS: steps.work / "models" / EXITS}
    for name, folder in models.items():
        write_model(folder, vocabulary, exits if name == EXITS else ())
    return tokenizer, models


def source(split: str) -> str:
    """The documentation, for `offramp fit`."""
    options = {"split": split, "validation_share": VALIDATION_SHARE}
    return json.dumps({"kind": "docstrings", "text": "{details}", "options": options})


def recipe_logger(name: str, store: str) -> str:
    """Metrics of a run of this name go to this store."""
    given = {"experiment_name": EXPERIMENT, "run_name": name, "tracking_uri": store, "system_metrics": False}
    return json.dumps({"class_path": "offramp.train.tracking.logger.OfframpMLFlowLogger", "init_args": given})


def overrides(name: str, tokenizer: Path, model: Path, steps: int) -> dict[str, Any]:
    """What changes in the recipe."""
    return {
        "vars.tokenizer": tokenizer,
        "data.train": source("train"),
        "model.checkpoint": model,
        **({"model.exit_weights": "[]"} if name == PLAIN else {}),
        "model.optimizer.warmup_steps": max(steps // 20, 1),
        "trainer.max_steps": steps,
    }


def train(out: Path, name: str, tokenizer: Path, model: Path, steps: int, store: str, console: Console) -> None:
    """Run the recipe; an interrupted run goes on from its newest checkpoint."""
    given = overrides(name, tokenizer, model, steps) | {
        "data.validation": source("validation"),
        "trainer.default_root_dir": out,
        "trainer.logger": recipe_logger(name, store),
        "trainer.check_val_every_n_epoch": "null",
        "trainer.val_check_interval": max(steps // VALIDATIONS, 1),
        "trainer.num_sanity_val_steps": 0,
        "trainer.log_every_n_steps": 5,
    }
    words = [f"--{key}={value}" for key, value in given.items()]
    offramp("fit", "-c", RECIPE, *words, "--ckpt_path=last", console=console, threads=1)


def curves(store: str, name: str) -> dict[str, Curve]:
    """Losses and tokens per second of the newest run of this name, by metric."""
    from mlflow import MlflowClient

    client = MlflowClient(store)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id], f"tags.mlflow.runName = '{name}'", max_results=1)
    keys = sorted(key for key in run.data.metrics if key.startswith(("train/loss_exit", "val/loss_exit")))
    keys.append("train/tokens_per_second")
    return {
        key: sorted((metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, key))
        for key in keys
    }


def compare(found: dict[str, dict[str, Curve]]) -> dict[str, Any]:
    """First and last losses of all exits, and what the final exit has lost by the others."""
    report: dict[str, Any] = {}
    for name, metrics in found.items():
        report[name] = {
            key: {"first": values[0][1], "last": values[-1][1]}
            for key, values in metrics.items()
            if key.startswith("val/")
        }
        speeds = sorted(value for _, value in metrics["train/tokens_per_second"])
        report[name]["tokens_per_second"] = speeds[len(speeds) // 2]
    final = next(iter(_validation(found[PLAIN])))
    report["final_exit_minus_plain"] = found[EXITS][final][-1][1] - found[PLAIN][final][-1][1]
    return report


def _validation(metrics: dict[str, Curve]) -> Iterator[str]:
    return (key for key in metrics if key.startswith("val/"))


def draw(path: Path, found: dict[str, dict[str, Curve]]) -> None:
    """A PNG: validation losses of all exits, and of the final exit of the run without."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.8), layout="constrained")
    for name, metrics in found.items():
        for key in _validation(metrics):
            steps, losses = zip(*metrics[key], strict=True)
            label = f"exit {int(key.rpartition('_')[2])}, {name.replace('_', ' ')}"
            axes.plot(steps, losses, "o-" if name == EXITS else "s--", markersize=3, label=label)
    axes.set(xlabel="step", ylabel="cross-entropy on packages that training never saw")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Train both, then compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="of 16 x 256 tokens (%(default)s)")
    parser.add_argument("--vocabulary", type=int, default=4096, help="tokens (%(default)s)")
    parser.add_argument("--work", type=Path, default=Path("build/from_scratch"), help="folder of all results")
    options = parser.parse_args()
    work, console = options.work.resolve(), Console(highlight=False)
    work.mkdir(parents=True, exist_ok=True)
    store, steps = f"sqlite:///{work / 'mlflow.db'}", Steps(work, console)
    tokenizer, models = prepare(steps, options.vocabulary)
    for name in (EXITS, PLAIN):
        steps.run(
            name,
            f"Train {options.steps:,} steps {name.replace('_', ' ')}",
            [RECIPE, str(options.steps)],
            lambda out, name=name: train(out, name, tokenizer, models[name], options.steps, store, console),
        )
    found = {name: curves(store, name) for name in (EXITS, PLAIN)}
    report = compare(found)
    (work / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    draw(work / "losses.png", found)
    console.print_json(data=report)


if __name__ == "__main__":
    main()
