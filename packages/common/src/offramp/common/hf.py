"""Reading and writing the plain Hugging Face part of a checkpoint directory: config, weights, and their names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor

from offramp.common.errors import OfframpError
from offramp.common.stored_tensor import StoredTensor, open_safetensors, read_stored, stored_tensors


@dataclass(frozen=True)
class WeightNames:
    """What tensors are called in Hugging Face's files, and here.

    Attributes:
        own: a name in files -> our name; None: the tensor holds nothing that is not known otherwise. A name that is not
            understood stays as it is, so that it is reported.
        stored: our name -> the name in files that are written.
    """

    own: Callable[[str], str | None]
    stored: Callable[[str], str]


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Buffers that old Llama checkpoints carry; they are derived from the config and hold nothing.
_DERIVED = ("rotary_emb.inv_freq",)

DECODER_ONLY_NAMES = WeightNames(
    own=lambda name: None if name.endswith(_DERIVED) else name.removeprefix("model."),
    stored=lambda name: name if name.startswith("lm_head.") else f"model.{name}",
)
"""Ours are Hugging Face's without the leading `model.`."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, or raise an `OfframpError` that names the file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise OfframpError(f"{path} does not exist; {path.parent} is not a complete checkpoint directory.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as fault:
        raise OfframpError(f"{path} is not valid JSON: {fault}.") from None
    if not isinstance(data, dict):
        raise OfframpError(f"{path} must hold a JSON object, not {type(data).__name__}.")
    return data


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a directory: the single one, or the shards that the index names."""
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    if (directory / INDEX).is_file():
        names = sorted(set(read_json(directory / INDEX).get("weight_map", {}).values()))
        files = [directory / name for name in names]
        if not files:
            raise OfframpError(f"{directory / INDEX} names no shards; copy it again.")
        if missing := [file.name for file in files if not file.is_file()]:
            raise OfframpError(
                f"{directory} lacks {', '.join(missing)}, which {INDEX} names; copy the whole directory."
            )
        return files
    if any(directory.glob("*.bin")):
        raise OfframpError(
            f"{directory} holds pickled weights (*.bin), which Offramp never loads; save them again as safetensors "
            "(transformers: save_pretrained)."
        )
    raise OfframpError(f"{directory} holds neither {SINGLE} nor {INDEX}; it is not a complete checkpoint directory.")


def read_tensors(file: Path, wanted: Callable[[str], bool] | None = None) -> dict[str, Tensor]:
    """The tensors of a safetensors file; those alone whose names are `wanted`, if that is given."""
    with open_safetensors(file) as handle:
        names = [name for name in handle.keys() if wanted is None or wanted(name)]  # noqa: SIM118 - not a dict
        return {name: handle.get_tensor(name) for name in names}


def stored_names(directory: Path) -> set[str]:
    """Names of all tensors in the files with weights."""
    return {name for file in weight_files(directory) for name in stored_tensors(file)}


def stored_weights(
    directory: Path,
    tied: bool,
    wanted: Callable[[str], bool] | None = None,
    names: WeightNames = DECODER_ONLY_NAMES,
) -> dict[str, StoredTensor]:
    """Backbone weights under our names, not read yet.

    Args:
        directory: with `model.safetensors` or shards.
        tied: the config says that the unembedding is the embedding; a stored copy must then be equal, and is left out.
        wanted: which of our names; None is all of them.
        names: of the model's family.
    """
    found: dict[str, StoredTensor] = {}
    for file in weight_files(directory):
        for name, tensor in stored_tensors(file).items():
            own = names.own(name)
            if own is None or not (wanted is None or wanted(own)):
                continue
            if own in found and not tensor.equals(found[own]):
                raise OfframpError(
                    f"{directory}: the stored tensor {name!r} is a copy of another one and differs from it; save the "
                    "model again with transformers (save_pretrained)."
                )
            found[own] = tensor
    if tied and "lm_head.weight" in found:
        head = found.pop("lm_head.weight")
        if "embed_tokens.weight" in found and not head.equals(found["embed_tokens.weight"]):
            raise OfframpError(
                f"{directory}: config.json ties the unembedding to the embedding, but the stored tensors differ; set "
                "tie_word_embeddings to false in config.json."
            )
    return found


def read_weights(directory: Path, tied: bool, names: WeightNames = DECODER_ONLY_NAMES) -> dict[str, Tensor]:
    """As `stored_weights`, all of them, read."""
    return read_stored(stored_weights(directory, tied, names=names))


def write_weights(
    directory: Path,
    weights: Mapping[str, Tensor],
    max_shard_size: str = "5GB",
    names: WeightNames = DECODER_ONLY_NAMES,
) -> None:
    """Write backbone weights (our names) as Hugging Face does: one file, or shards and an index."""
    named = {names.stored(name): tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    split = split_torch_state_dict_into_shards(named, max_shard_size=max_shard_size)
    for file, inside in split.filename_to_tensors.items():
        save_file({name: named[name] for name in inside}, directory / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
