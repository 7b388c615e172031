"""Training checkpoints as whole models, and the exits of several runs joined.

A training checkpoint is either a Lightning file (one process, DDP) or the directory that `deepspeed_pipeline` writes;
both hold the weights under their names in the whole model and the same record of everything else, in plain
containers. Nothing here unpickles: files are read with `weights_only=True`, stages are safetensors.

A run that trained exits alone may have held no layers above them. The directory that it started from has the rest.
"""

from __future__ import annotations

import functools
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offramp.common.checkpoint import EXITS_WEIGHTS, hashed_files, names_above
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy
from offramp.common.families import AnyConfig, make_model, read_config, weight_names
from offramp.common.file_hash import sha256
from offramp.common.hf import read_json, read_tensors, read_weights, stored_names
from offramp.train.lora import merge_lora
from offramp.train.stage_files import STAGES, read_stages
from offramp.train.training_checkpoint import RECORD_FILE, damage
from offramp.train.training_record import RECORD

_MODEL_PREFIX = "model."
"""What stands before the parameters' names in a Lightning file."""
_EXIT_PREFIX = "exits."
_CLASSIFIER = ".classifier."


@dataclass
class TrainedModel:
    """A training checkpoint, made whole.

    Attributes:
        path: of the training checkpoint.
        record: see `make_record`.
        weights: of the whole model, by name.
        source: the directory that training started from.
        start: the weights there, as they are stored; None where weights were drawn.
        config: shape of the model.
    """

    path: Path
    record: dict[str, Any]
    weights: dict[str, Tensor]
    source: Path
    start: dict[str, Tensor] | None
    config: AnyConfig

    @property
    def exits(self) -> ExitConfig:
        """Where and what they are."""
        return ExitConfig.from_json(self.record["exits"])

    @property
    def policy(self) -> ExitPolicy | None:
        """To be exported."""
        return ExitPolicy.from_json(self.record["policy"]) if self.record["policy"] else None

    @property
    def keeps_backbone(self) -> bool:
        """Whether every bit of the backbone is what training started from."""
        return self.start is not None and not any(self._differs(name) for name in self.weights if not _is_exit(name))

    @property
    def backbone_dtype(self) -> torch.dtype:
        """That holds every type in which the backbone is stored where training started; fp32 if weights were drawn."""
        if self.start is None:
            return torch.float32
        stored = (weight.dtype for name, weight in self.start.items() if not _is_exit(name))
        return functools.reduce(torch.promote_types, stored)

    @property
    def changed_exits(self) -> tuple[int, ...]:
        """Exits whose weights are no longer those that training started from."""
        changed = {int(name.split(".")[1]) for name in self.weights if _is_exit(name) and self._differs(name)}
        return tuple(layer for layer in self.exits.layers if layer in changed)

    def _differs(self, name: str) -> bool:
        before = None if self.start is None else self.start.get(name)
        now = self.weights[name]
        return before is None or (before is not now and not torch.equal(before.to(now.dtype), now))

    @classmethod
    def read(cls, path: Path, assets: Path | None = None) -> TrainedModel:
        """Read a training checkpoint, and what it lacks from where training started.

        Args:
            path: Lightning file, or directory of `deepspeed_pipeline`.
            assets: where the directory that training started from has moved to.

        Raises:
            OfframpError: `path` is not such a checkpoint or is incomplete, or the directory is gone or another one.
        """
        record, weights = _read_directory(path) if path.is_dir() else _read_file(path)
        if "lora_scale" in record:
            weights = merge_lora(weights, record["lora_scale"])
        source = assets if assets is not None else Path(record["source"] or "")
        if not (source / "config.json").is_file():
            raise OfframpError(
                f"{source}, where training started from, is gone, and with it the tokenizer; name a directory that has "
                "it with --assets."
            )
        tensors = set(weights) | (stored_names(source) if _has_weights(source) else set())
        config = read_config(record["hf_config"], tensors=tensors)
        with torch.device("meta"):
            model = make_model(config, ExitConfig.from_json(record["exits"]))
        expected, depth = set(model.state_dict()), int(record.get("depth", model.depth))
        model.drop_layers_above(depth)
        lent: set[str] = set()
        if depth < model.config.num_layers:
            # A stage holds neither final norm nor unembedding where no exit reads them.
            above = (*names_above(model), "norm.", "lm_head.")
            lent = {name for name in expected - weights.keys() if name.startswith(above)}
            _check_source(path, source, record.get("source_sha256") or {})
        if wrong := sorted(expected ^ (weights.keys() | lent)):
            raise OfframpError(
                f"{path} does not hold the model it describes: {len(wrong)} tensors differ, {wrong[0]!r} first."
            )
        start = _start(source, model.config, expected)
        if lent:
            assert start is not None
            weights |= {name: start[name] for name in lent}
        return cls(path, record, weights, source, start, config)


def join(parts: Sequence[TrainedModel]) -> TrainedModel:
    """The exits that several runs trained on one backbone, together.

    Each part gives the exits that it changed; one that nobody changed comes from the first that has it.

    Raises:
        OfframpError: a backbone was trained, or they differ; heads are of different kinds; an exit was trained twice;
            or the exit policies differ in more than their shortlists.
    """
    first = parts[0]
    kind = replace(first.exits, layers=())
    owners: dict[int, TrainedModel] = {}
    for part in parts:
        if not part.keeps_backbone:
            raise OfframpError(f"{part.path} has trained its backbone, so its exits fit no other; export it by itself.")
        if replace(part.exits, layers=()) != kind:
            raise OfframpError(
                f"exits of {first.path} are {first.exits.describe()}, those of {part.path} {part.exits.describe()}; a "
                "model has one kind."
            )
        for name, tensor in first.weights.items():
            other = part.weights.get(name)
            if not _is_exit(name) and (other is None or not torch.equal(tensor.float(), other.float())):
                raise OfframpError(
                    f"{first.path} and {part.path} were trained on different backbones ({name!r} differs); their exits "
                    "do not go together."
                )
        for layer in part.changed_exits:
            if layer in owners:
                raise OfframpError(
                    f"{owners[layer].path} and {part.path} have both trained the exit at layer {layer}; leave one out."
                )
            owners[layer] = part
    for part in parts:
        for layer in part.exits.layers:
            owners.setdefault(layer, part)
    weights = {name: tensor for name, tensor in first.weights.items() if not _is_exit(name)}
    for layer, part in owners.items():
        prefix = f"{_EXIT_PREFIX}{layer}."
        weights |= {name: tensor for name, tensor in part.weights.items() if name.startswith(prefix)}
    policy = _joined_policy([part.policy for part in parts])
    record = {
        **first.record,
        "exits": replace(first.exits, layers=tuple(sorted(owners))).to_json(),
        "policy": None if policy is None else policy.to_json(),
        "provenance": {"joined": {str(part.path): part.record["provenance"] for part in parts}},
    }
    return TrainedModel(first.path, record, weights, first.source, first.start, first.config)


def _joined_policy(policies: Sequence[ExitPolicy | None]) -> ExitPolicy | None:
    known = [policy for policy in policies if policy is not None]
    if not known:
        return None
    rest = [replace(policy, shortlist=None, shortlist_only=False) for policy in known]
    if any(other != rest[0] for other in rest):
        raise OfframpError("the runs' exit policies differ in more than their shortlists; export them one by one.")
    lists = [policy.shortlist for policy in known]
    if any(own is None for own in lists):
        return rest[0]
    tokens = {token for own in lists for token in own or ()}
    return replace(known[0], shortlist=tuple(sorted(tokens)), shortlist_only=all(p.shortlist_only for p in known))


def _is_exit(name: str) -> bool:
    return name.startswith(_EXIT_PREFIX)


def _check_source(path: Path, source: Path, hashes: Mapping[str, str]) -> None:
    """What `path` does not hold must come from the very directory that its run started from."""
    files = hashed_files(source)
    if {file.name for file in files} != set(hashes) or any(sha256(file) != hashes[file.name] for file in files):
        raise OfframpError(
            f"{source} does not hold the weights that the run of {path} started from, and the run did not load its "
            "upper layers; name the directory that has them with --assets."
        )


def _has_weights(directory: Path) -> bool:
    return any(directory.glob("model*.safetensors"))


def _start(source: Path, config: AnyConfig, expected: set[str]) -> dict[str, Tensor] | None:
    """The weights that training started from, if the directory has a model of the same tensors.

    Classifiers may be missing there: they are added by training.
    """
    if not _has_weights(source):
        return None
    weights = read_weights(source, config.tie_word_embeddings, weight_names(config))
    if (source / EXITS_WEIGHTS).is_file():
        weights |= read_tensors(source / EXITS_WEIGHTS)
    missing = expected - weights.keys()
    is_same = weights.keys() <= expected and all(_CLASSIFIER in name for name in missing)
    return weights if is_same else None


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
    weights = {name.removeprefix(_MODEL_PREFIX): tensor for name, tensor in content["state_dict"].items()}
    return content[RECORD], weights
