"""The checkpoint directory: what train writes is what serve reads, and it stays an ordinary Hugging Face directory.

    config.json generation_config.json tokenizer files model.safetensors     plain Hugging Face; final exit only
    exits.safetensors    weights of the exit heads; absent tensors are tied
    exits.json           schema version, exits, policy, operating points, calibration record, provenance, hashes

Loading is strict: a missing, extra or misshapen tensor, a hash that differs or an unknown schema version is an error
that names the path and the remedy. Nothing is ever served with random weights.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.operating_point import OperatingPoints
from offramp.common.exits.policy import ExitPolicy
from offramp.common.families import check_dtype, make_model, read_config, weight_names
from offramp.common.file_hash import sha256
from offramp.common.hf import INDEX, SINGLE, read_json, stored_weights, weight_files, write_weights
from offramp.common.model.config import refuse_encoder_decoder
from offramp.common.model.multi_exit import ConfigT, MultiExitDecoder
from offramp.common.model.transformer import MultiExitTransformer
from offramp.common.stored_tensor import StoredTensor, read_stored, stored_tensors
from offramp.common.t5.model import MultiExitT5

SCHEMA_VERSION = 1
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
EXITS_JSON, EXITS_WEIGHTS = "exits.json", "exits.safetensors"
_EXIT_PREFIX = "exits."
# What else makes a directory complete for transformers: tokenizer, chat template, generation defaults.
_ASSETS = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "chat_template*",
    "LICENSE*",
)


# Covariant, so that the type of the configuration follows from that of the model.
ModelT_co = TypeVar("ModelT_co", bound="MultiExitDecoder[Any, Any]", covariant=True)


@dataclass
class CheckpointOf(Generic[ModelT_co]):
    """A model and all that is known about it.

    Attributes:
        model: with weights, in evaluation mode.
        hf_config: `config.json`, verbatim.
        policy: thresholds to exit by; None when none were ever set, which means full depth.
        calibration: how the policy and the points were found.
        provenance: where the weights come from (run id, config hash, data, ...).
        path: the directory, absent for a model made in memory.
        sha256: of the files with weights, by name, where `exits.json` lists them.
        points: calibrated ways of answering, by name.
    """

    model: ModelT_co
    hf_config: dict[str, Any]
    policy: ExitPolicy | None = None
    calibration: dict[str, Any] | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None
    sha256: Mapping[str, str] = field(default_factory=dict)
    points: OperatingPoints = field(default_factory=OperatingPoints)

    @property
    def config(self: CheckpointOf[MultiExitDecoder[ConfigT, Any]]) -> ConfigT:
        """Shape of the model."""
        return self.model.config

    @property
    def exits(self) -> ExitConfig:
        """Its early exits."""
        return self.model.exit_config

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every token id that ends a text: the union of what the generation config and the model config list."""
        found: list[int] = []
        generation = self.path / "generation_config.json" if self.path else None
        for source in (read_json(generation) if generation and generation.is_file() else {}, self.hf_config):
            ids = source.get("eos_token_id")
            found += ids if isinstance(ids, list) else [] if ids is None else [ids]
        if not found and isinstance(self.model, MultiExitT5) and "eos_token_id" not in self.hf_config:
            found.append(1)  # what transformers assumes
        return tuple(dict.fromkeys(int(token) for token in found))


Checkpoint = CheckpointOf[MultiExitTransformer]
"""Of a decoder-only model."""

AnyCheckpoint = CheckpointOf[MultiExitTransformer | MultiExitT5]
"""Of a model of either family."""


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    exits: ExitConfig | None = None,
    depth: int | None = None,
    verify: bool = True,
) -> Checkpoint:
    """`load_any_checkpoint` for what works with decoder-only models alone.

    Raises:
        OfframpError: see there; or the directory holds an encoder-decoder model.
    """
    _check_decoder_only(path)  # before weights are read for nothing
    return cast(Checkpoint, load_any_checkpoint(path, dtype=dtype, exits=exits, depth=depth, verify=verify))


def load_any_checkpoint(
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    exits: ExitConfig | None = None,
    depth: int | None = None,
    verify: bool = True,
) -> AnyCheckpoint:
    """Load a checkpoint directory of either family, or a plain Hugging Face one (a model without early exits).

    Args:
        path: the directory.
        dtype: convert weights; as stored if None (the narrowest type that loses nothing if files hold several).
        exits: declare exits that need no weights of their own (head `final` or `bare`, tied) on a plain directory, as
            for LayerSkip models, whose exits share the final norm and head.
        depth: read layers 1 .. `depth` and the exits they reach only; see `MultiExitDecoder.drop_layers_above`.
        verify: compare the hashes in `exits.json`.

    Raises:
        OfframpError: anything is missing, superfluous, of another shape, or not what the hashes say.
    """
    checkpoint, stored = open_any_checkpoint(path, exits=exits, depth=depth, verify=verify)
    weights = read_stored(stored)
    # One type throughout, even where files hold several: the narrowest that loses nothing.
    dtype = dtype or functools.reduce(torch.promote_types, {w.dtype for w in weights.values()})
    check_dtype(checkpoint.model.config, dtype)
    checkpoint.model.load_state_dict(weights, assign=True)
    checkpoint.model.to(dtype).eval()
    return checkpoint


def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    exits: ExitConfig | None = None,
    depth: int | None = None,
    verify: bool = True,
) -> tuple[Checkpoint, dict[str, StoredTensor]]:
    """`open_any_checkpoint` for what works with decoder-only models alone."""
    _check_decoder_only(path)
    checkpoint, stored = open_any_checkpoint(path, exits=exits, depth=depth, verify=verify)
    return cast(Checkpoint, checkpoint), stored


def _check_decoder_only(path: str | os.PathLike[str]) -> None:
    config = Path(path) / "config.json"
    if config.is_file():
        refuse_encoder_decoder(read_json(config))


def open_any_checkpoint(
    path: str | os.PathLike[str],
    *,
    exits: ExitConfig | None = None,
    depth: int | None = None,
    verify: bool = True,
) -> tuple[AnyCheckpoint, dict[str, StoredTensor]]:
    """As `load_any_checkpoint`, but nothing is read: the model is on the meta device, and its tensors are named."""
    directory = Path(path)
    if not directory.is_dir():
        raise OfframpError(f"{directory} is not a directory; give a checkpoint directory.")
    hf_config = read_json(directory / "config.json")
    config = read_config(hf_config, directory)
    if exits is not None and not (exits.head in ("bare", "final") and exits.tied):
        raise OfframpError(f"exits with head {exits.head!r} need weights; add them with `offramp import --exits`.")
    record = _read_record(directory, verify) if (directory / EXITS_JSON).is_file() else {}
    own = ExitConfig.from_json(record["exits"]) if record else ExitConfig()
    if exits is not None and own.layers:
        raise OfframpError(
            f"{directory} already has exits at {list(own.layers)} ({EXITS_JSON}); leave out the ones declared."
        )
    exits = exits if exits is not None else own  # a record without exits only says where the weights come from
    with torch.device("meta"):
        model = make_model(config, exits)
    above: tuple[str, ...] = ()
    if depth is not None:
        model.drop_layers_above(depth)
        above = names_above(model)
    stored = stored_weights(
        directory, config.tie_word_embeddings, lambda name: not name.startswith(above), weight_names(config)
    )
    if (directory / EXITS_WEIGHTS).is_file():
        heads = _stored_exit_weights(directory / EXITS_WEIGHTS)
        stored |= {name: tensor for name, tensor in heads.items() if not name.startswith(above)}
    _check_tensors(directory, model, stored)
    policy = ExitPolicy.from_json(record["policy"]) if record.get("policy") else None
    if policy is not None:
        policy.check(exits.layers, config.vocab_size)
        policy.check_measure(has_classifiers=exits.classifier)
    points = OperatingPoints.from_json(record["points"]) if record.get("points") else OperatingPoints()
    points.check(exits.layers, config.vocab_size, has_classifiers=exits.classifier)
    checkpoint = CheckpointOf(
        model=model.eval(),
        hf_config=hf_config,
        policy=policy,
        points=points,
        calibration=record.get("calibration"),
        provenance=record.get("provenance", {}),
        path=directory,
        sha256=record.get("sha256") or {},
    )
    return checkpoint, stored


def names_above(model: MultiExitDecoder[Any, Any]) -> tuple[str, ...]:
    """What the names of parameters begin with that belong to layers or exits which `model` dropped."""
    layers = [f"layers.{index}." for index in range(model.depth, model.config.num_layers)]
    return (*layers, *(f"exits.{layer}." for layer in model.exit_config.layers if layer > model.depth))


def save_checkpoint(
    path: str | os.PathLike[str],
    checkpoint: AnyCheckpoint,
    *,
    assets: str | os.PathLike[str] | None = None,
    backbone: Path | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a checkpoint directory; it appears whole or not at all.

    Args:
        path: directory to create.
        checkpoint: what to write.
        assets: directory to copy tokenizer and generation files from; the checkpoint's own path if None.
        backbone: directory whose files of backbone weights, which are the checkpoint's, are copied to the bit.
        overwrite: replace an existing checkpoint directory.
    """
    target = Path(path)
    source = Path(assets) if assets is not None else checkpoint.path
    with _replacing(target, overwrite) as scratch:
        state = checkpoint.model.state_dict()
        heads = {name: tensor.cpu().contiguous() for name, tensor in state.items() if name.startswith(_EXIT_PREFIX)}
        if backbone is None:
            weights = {name: tensor for name, tensor in state.items() if name not in heads}
            write_weights(scratch, weights, names=weight_names(checkpoint.model.config))
        else:
            files = weight_files(backbone)
            for file in files if files[0].name == SINGLE else [*files, backbone / INDEX]:
                shutil.copyfile(file, scratch / file.name)
        # Both names of the field are read by transformers; the one that is there is kept, so that config.json is too.
        field = "torch_dtype" if "torch_dtype" in checkpoint.hf_config else "dtype"
        hf_config = {**checkpoint.hf_config, field: str(state["norm.weight"].dtype).removeprefix("torch.")}
        (scratch / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n", encoding="utf-8")
        if heads:
            save_file(heads, scratch / EXITS_WEIGHTS, metadata={"format": "pt"})
        if source is not None:
            for pattern in _ASSETS:
                for file in source.glob(pattern):
                    if file.is_file():
                        shutil.copy2(file, scratch / file.name)
        if checkpoint.exits.layers or checkpoint.provenance:
            write_record(scratch, checkpoint)
    return target


def write_record(directory: Path, checkpoint: AnyCheckpoint) -> None:
    """Write `exits.json` for the weights that lie in `directory` (a new policy or calibration needs nothing else)."""
    record = {
        "schema_version": SCHEMA_VERSION,
        "exits": checkpoint.exits.to_json(),
        "policy": checkpoint.policy.to_json() if checkpoint.policy else None,
        "points": checkpoint.points.to_json(),
        "calibration": checkpoint.calibration,
        "provenance": checkpoint.provenance,
        "sha256": {file.name: sha256(file) for file in hashed_files(directory)},
    }
    text = json.dumps(record, indent=2) + "\n"
    scratch = directory / f".{EXITS_JSON}.{os.getpid()}"
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(directory / EXITS_JSON)


def hashed_files(directory: Path) -> list[Path]:
    """Every file with weights."""
    heads = directory / EXITS_WEIGHTS
    return [*weight_files(directory), *([heads] if heads.is_file() else [])]


def _read_record(directory: Path, verify: bool) -> dict[str, Any]:
    path = directory / EXITS_JSON
    record = read_json(path)
    if (version := record.get("schema_version")) != SCHEMA_VERSION:
        raise OfframpError(
            f"{path} has schema version {version!r}, this Offramp reads {SCHEMA_VERSION}; export it again, or install "
            "a matching Offramp."
        )
    if unknown := set(record) - {"schema_version", "exits", "policy", "points", "calibration", "provenance", "sha256"}:
        raise OfframpError(f"{path} has unknown sections {sorted(unknown)}.")
    if "exits" not in record:
        raise OfframpError(f"{path} lacks the section 'exits'.")
    if verify:
        _check_hashes(directory, record.get("sha256"))
    return record


def _check_hashes(directory: Path, hashes: Any) -> None:
    path = directory / EXITS_JSON
    if not isinstance(hashes, dict):
        raise OfframpError(f"{path} lacks the section 'sha256', so nobody knows its weights; export it again.")
    files = hashed_files(directory)
    for name, expected in hashes.items():
        file = directory / name
        if not file.is_file():
            raise OfframpError(f"{file} is missing, although {path} lists it; copy the whole directory again.")
        if sha256(file) != expected:
            raise OfframpError(
                f"{file} is not the file that {path} was written for (its SHA-256 differs); copy the whole "
                "directory again, or export it again."
            )
    for file in files:
        if file.name not in hashes:
            raise OfframpError(f"{path} has no SHA-256 of {file.name}, so it is not trusted; export it again.")


def _stored_exit_weights(file: Path) -> dict[str, StoredTensor]:
    weights = stored_tensors(file)
    if foreign := sorted(name for name in weights if not name.startswith(_EXIT_PREFIX)):
        raise OfframpError(f"{file} holds {foreign[0]!r}, which is not a tensor of an exit head; export it again.")
    return weights


def _check_tensors(directory: Path, model: nn.Module, stored: Mapping[str, StoredTensor]) -> None:
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if missing := sorted(expected.keys() - stored.keys()):
        raise OfframpError(
            f"{directory} lacks {len(missing)} tensors, the first is {missing[0]!r}; the directory is incomplete or "
            "its config.json belongs to another model."
        )
    if extra := sorted(stored.keys() - expected.keys()):
        raise OfframpError(
            f"{directory} holds {len(extra)} tensors the model does not have, the first is {extra[0]!r}; its "
            f"config.json or {EXITS_JSON} belongs to another model."
        )
    readable = {str(dtype).removeprefix("torch.") for dtype in DTYPES.values()}
    for name, shape in expected.items():
        if stored[name].shape != tuple(shape):
            raise OfframpError(
                f"{directory}: tensor {name!r} has shape {list(stored[name].shape)}, the config says {list(shape)}."
            )
        if stored[name].dtype not in readable:
            raise OfframpError(
                f"{directory}: tensor {name!r} is {stored[name].dtype}; Offramp reads {', '.join(DTYPES)} only."
            )


@contextmanager
def _replacing(target: Path, overwrite: bool) -> Iterator[Path]:
    """A scratch directory that becomes `target` when all went well."""
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        if not overwrite:
            raise OfframpError(f"{target} already exists; choose another directory or remove it.")
        if not (target / "config.json").is_file():
            raise OfframpError(f"{target} exists and is not a checkpoint directory, so it is not overwritten.")
    target = target.resolve()  # through a link to the directory it names, so that the link stays
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        new, old = scratch / "new", scratch / "old"
        try:
            new.mkdir()
            yield new
            for file in new.iterdir():
                file.chmod(0o644)  # safetensors writes for the owner alone
            if target.exists():
                target.replace(old)
            new.replace(target)
        finally:
            if old.exists() and not target.exists():
                old.replace(target)
            shutil.rmtree(scratch, ignore_errors=True)
    except (OSError, SafetensorError) as fault:
        raise OfframpError(f"{target} cannot be written: {fault}.") from fault
