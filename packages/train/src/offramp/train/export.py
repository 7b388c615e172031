"""`offramp export`: a training checkpoint -> checkpoint directory.

A training checkpoint is either a Lightning file (one process, DDP) or the directory that `deepspeed_pipeline` writes;
both hold the weights under their names in the whole model and the same record of everything else, in plain
containers. Nothing here unpickles: files are read with `weights_only=True`, stages are safetensors.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offramp.common.checkpoint import DTYPES, Checkpoint, save_checkpoint
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy
from offramp.common.hf import read_json, read_tensors
from offramp.common.model.config import ModelConfig
from offramp.common.model.transformer import MultiExitTransformer
from offramp.train.training_checkpoint import RECORD_FILE, damage

RECORD = "offramp"
"""Key of the record in a Lightning file."""
STAGES = "checkpoint"
"""In a directory of `deepspeed_pipeline`, the folder with the stages."""
MODEL_PREFIX = "model."
"""What stands before the parameters' names in a Lightning file."""


def make_record(
    source: Checkpoint, policy: ExitPolicy | None, provenance: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything but weights that a checkpoint directory needs, as plain containers.

    Args:
        source: the checkpoint that training started from.
        policy: to be exported. Its thresholds are dropped: those found for other weights say nothing about these.
        provenance: of the run: id, step, data.
        settings: hyper-parameters of the run.
    """
    kept = None if policy is None else {**policy.to_json(), "thresholds": {}}
    text = json.dumps(plain(settings), sort_keys=True)
    return {
        "hf_config": plain(source.hf_config),
        "exits": source.exits.to_json(),
        "policy": kept,
        "source": None if source.path is None else str(source.path.resolve()),
        "provenance": plain(
            {
                **provenance,
                "offramp_version": importlib.metadata.version("offramp-train"),
                "settings": settings,
                "settings_sha256": hashlib.sha256(text.encode()).hexdigest(),
                "started_from": source.provenance,
            }
        ),
    }


def plain(value: Any) -> Any:
    """Dictionaries, lists, numbers, strings and None only, so that files load without unpickling classes."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {key if isinstance(key, int | str) else str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [plain(item) for item in value]
    return str(value)


def read_stages(directory: Path) -> dict[str, Tensor]:
    """All parameters of a checkpoint of any number of stages, under their names in the whole model."""
    files = sorted(directory.glob("stage_*.safetensors"))
    if not files:
        raise OfframpError(f"{directory} holds no stage_*.safetensors; it is not a checkpoint of deepspeed_pipeline.")
    return {name: tensor for file in files for name, tensor in read_tensors(file).items()}


def export_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    dtype: str = "fp32",
    assets: str | os.PathLike[str] | None = None,
) -> Path:
    """Write a checkpoint directory from a training checkpoint.

    Args:
        source: Lightning file, or directory of `deepspeed_pipeline`.
        target: directory to create.
        overwrite: replace an existing checkpoint directory.
        dtype: of the weights, a name in `DTYPES`; `fp32` is what was trained.
        assets: directory with tokenizer and generation files; the one that training started from if None.

    Raises:
        OfframpError: `source` is not such a checkpoint, or is incomplete, or the assets are gone.
    """
    path = Path(source)
    record, weights = _read_directory(path) if path.is_dir() else _read_file(path)
    directory = Path(assets) if assets is not None else Path(record["source"] or "")
    if not (directory / "config.json").is_file():
        raise OfframpError(
            f"{directory}, where training started from, is gone, and with it the tokenizer; name a directory that has "
            "it with --assets."
        )
    exits = ExitConfig.from_json(record["exits"])
    with torch.device("meta"):
        model = MultiExitTransformer(ModelConfig.from_hf(record["hf_config"]), exits)
    if wrong := sorted(model.state_dict().keys() ^ weights.keys()):
        raise OfframpError(
            f"{path} does not hold the model it describes: {len(wrong)} tensors differ, {wrong[0]!r} first."
        )
    model.load_state_dict(weights, assign=True)
    checkpoint = Checkpoint(
        model=model.to(dtype=DTYPES[dtype]),
        hf_config=record["hf_config"],
        policy=ExitPolicy.from_json(record["policy"]) if record["policy"] else None,
        provenance=record["provenance"],
    )
    return save_checkpoint(target, checkpoint, assets=directory, overwrite=overwrite)


def main(argv: list[str]) -> int:
    """`offramp export`."""
    parser = argparse.ArgumentParser(
        prog="offramp export",
        description="Turn a training checkpoint (a .ckpt file, or the directory of deepspeed_pipeline) into a "
        "checkpoint directory: an ordinary Hugging Face model with exits beside it.",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="training checkpoint")
    parser.add_argument("out", metavar="OUT", help="directory to create")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is a checkpoint directory")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp32", help="of the weights")
    parser.add_argument("--assets", metavar="DIR", help="where the tokenizer is, if the starting directory has moved")
    arguments = parser.parse_args(argv)
    written = export_checkpoint(
        arguments.checkpoint,
        arguments.out,
        overwrite=arguments.overwrite,
        dtype=arguments.dtype,
        assets=arguments.assets,
    )
    print(f"wrote {written}")
    return 0


def _read_directory(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not (path / RECORD_FILE).is_file():
        raise OfframpError(
            f"{path} has no {RECORD_FILE}; it is not a checkpoint of deepspeed_pipeline, or writing it was cut short."
        )
    if reason := damage(path):
        raise OfframpError(f"{path} is damaged: {reason}; export another checkpoint.")
    return read_json(path / RECORD_FILE), read_stages(path / STAGES)


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if path.is_file() and not zipfile.is_zipfile(path):
        raise OfframpError(f"{path} cannot be read as a Lightning checkpoint; it is something else, or cut short.")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise OfframpError(f"{path} does not exist; give a training checkpoint.") from None
    except Exception as fault:  # torch and zipfile raise many kinds
        first = str(fault).partition("\n")[0]
        raise OfframpError(f"{path} cannot be read as a Lightning checkpoint: {first}") from None
    if not isinstance(content, dict) or RECORD not in content or "state_dict" not in content:
        raise OfframpError(f"{path} was not written by a run of Offramp.")
    weights = {name.removeprefix(MODEL_PREFIX): tensor for name, tensor in content["state_dict"].items()}
    return content[RECORD], weights
