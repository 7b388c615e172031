"""The models of the experiment: a tokenizer, the multi-exit T5 with its classifiers, and a statically shallower one.

Models are trained by `offramp fit`, from recipes that the output folder keeps, and exported by `offramp export`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import yaml

from offramp.common.checkpoint import load_any_checkpoint, save_checkpoint
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.families import make_model, read_config
from offramp.common.importing import NewExits, import_model
from offramp.evaluate.reproduce.sizes import Size
from offramp.evaluate.reproduce.tasks import Task
from offramp.train.cli import run
from offramp.train.export import export_checkpoint

RECIPES = files("offramp.evaluate.reproduce") / "recipes"


def train_tokenizer(texts: Iterable[str], vocabulary: int, directory: Path) -> int:
    """A byte-level BPE tokenizer of some texts, whose sources end in an end-of-sequence token; its number of tokens.

    Args:
        texts: of the training part alone.
        vocabulary: most tokens.
        directory: to save it in.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe: Any = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<pad>", "</s>", "<unk>"]  # in T5's order
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    names = dict(zip(("pad_token", "eos_token", "unk_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=bpe, **names).save_pretrained(str(directory))
    return int(bpe.get_vocab_size())


def start_model(task: Task, size: Size, texts: Iterable[str], directory: Path) -> None:
    """What training of the multi-exit model starts from: an imported model, or a shape and a new tokenizer.

    An exit lies after every decoder layer, and shares the model's norm and unembedding, as in CALM.
    """
    exits = ExitConfig(tuple(range(1, size.decoder_layers)), "final")
    if (name := task.pretrained.get(size.name)) is not None:
        import_model(name, directory, exits=NewExits(exits), dtype=torch.float32)
        return
    directory.mkdir(parents=True)
    vocabulary = train_tokenizer(texts, size.vocabulary, directory)
    _write_shape(directory, {**size.model_config(size.decoder_layers), "vocab_size": vocabulary}, exits)


def shallow_start(full: Path, layers: int, directory: Path, *, pretrained: bool) -> None:
    """What training of the shallower model starts from: the same with only the lower decoder layers, without exits."""
    hf_config = json.loads((full / "config.json").read_text(encoding="utf-8"))
    hf_config |= {"num_decoder_layers": layers}
    if not pretrained:
        directory.mkdir(parents=True)
        for file in full.iterdir():
            if file.name not in ("exits.json", "config.json"):
                shutil.copy(file, directory)
        _write_shape(directory, hf_config, ExitConfig())
        return
    deep = load_any_checkpoint(full)
    model: Any = make_model(read_config(hf_config), ExitConfig())
    kept = model.state_dict().keys()
    model.load_state_dict({name: tensor for name, tensor in deep.model.state_dict().items() if name in kept})
    save_checkpoint(directory, dataclasses.replace(deep, model=model, hf_config=hf_config, policy=None), assets=full)


def write_recipe(name: str, path: Path, values: Mapping[str, Any]) -> Path:
    """A whole recipe: one of `recipes/`, with its variables filled in.

    Raises:
        OfframpError: a value has no place in it, or a place no value.
    """
    recipe = yaml.safe_load((RECIPES / f"{name}.yaml").read_text(encoding="utf-8"))
    variables = recipe["vars"] | values
    if wrong := sorted((variables.keys() - recipe["vars"].keys()) | {k for k, v in variables.items() if v == "???"}):
        raise OfframpError(f"recipe {name} and the experiment differ in {', '.join(wrong)}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(recipe | {"vars": variables}, sort_keys=False), encoding="utf-8")
    return path


def fit(recipe: Path, log: Path) -> None:
    """`offramp fit` with what it prints in a file.

    Raises:
        OfframpError: the recipe is at fault, or training failed.
    """
    with log.open("w", encoding="utf-8") as sink, contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
        code = run("fit", ["-c", str(recipe)])
    if code:
        raise OfframpError(f"offramp fit -c {recipe} ended with code {code}; see {log}.")


def train_model(start: Path, data: Path, folder: Path, task: Task, size: Size, device: str) -> dict[str, Any]:
    """Train a model and export the checkpoint whose final exit has the smallest validation loss.

    Args:
        start: directory to start from.
        data: with `train.jsonl` and `validation.jsonl`.
        folder: gets the recipe, the run and `model`, the checkpoint directory.
        task: lengths.
        size: steps, rows and rate.
        device: `cpu` or `cuda`.

    Returns:
        What was trained, for the report.
    """
    config = json.loads((start / "config.json").read_text(encoding="utf-8"))
    pretrained = size.name in task.pretrained
    run_folder = folder / "run"
    row_tokens = max(256, task.source_tokens, task.target_tokens)
    values = {
        "model": str(start),
        "data": str(data),
        "out": str(run_folder),
        "from_scratch": not pretrained,
        "layers": f"{config['num_decoder_layers']:02d}",
        "source_tokens": task.source_tokens,
        "max_source_tokens": task.max_source_tokens,
        "target_tokens": task.target_tokens,
        "row_tokens": row_tokens,
        "rows": size.rows,
        "steps": size.steps,
        "warmup_steps": max(1, size.steps // 20),
        "validate_every": size.validate_every,
        "learning_rate": size.learning_rate,
        "accelerator": "gpu" if device.startswith("cuda") else "cpu",
        "precision": "bf16-mixed" if device.startswith("cuda") else "32-true",
    }
    fit(write_recipe("train", folder / "recipe.yaml", values), folder / "fit.log")
    best = run_folder / "checkpoints" / "best.ckpt"
    export_checkpoint(best, folder / "model")
    state: Any = torch.load(best, map_location="cpu", weights_only=True)
    parameters = sum(p.numel() for p in load_any_checkpoint(folder / "model").model.parameters())
    tracked = next(value for key, value in state["callbacks"].items() if key.startswith("ModelCheckpoint"))
    return {
        "parameters": parameters,
        "encoder_layers": config["num_layers"],
        "decoder_layers": config["num_decoder_layers"],
        "steps": size.steps,
        "best_step": int(state["global_step"]),
        "validation_loss": float(tracked["best_model_score"]),
        "tokens_per_step": 2 * size.rows * row_tokens,
    }


def train_classifiers(model: Path, data: Path, folder: Path, task: Task, size: Size, device: str) -> dict[str, Any]:
    """Train the exits' classifiers of a model and export it with them; see `train_model` for the arguments."""
    values = {
        "model": str(model),
        "data": str(data),
        "out": str(folder / "run"),
        "row_tokens": max(256, task.source_tokens, task.target_tokens),
        "rows": size.rows,
        "states": size.classifier_states,
        "steps": size.classifier_steps,
        "accelerator": "gpu" if device.startswith("cuda") else "cpu",
    }
    fit(write_recipe("classifiers", folder / "recipe.yaml", values), folder / "fit.log")
    export_checkpoint(folder / "run" / "checkpoints" / "last.ckpt", folder / "model")
    return {"states": size.classifier_states, "steps": size.classifier_steps}


def _write_shape(directory: Path, hf_config: Mapping[str, Any], exits: ExitConfig) -> None:
    (directory / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n", encoding="utf-8")
    record = {"schema_version": 1, "exits": exits.to_json()}
    (directory / "exits.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
