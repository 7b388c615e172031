"""Which stage runs which layers, and what it needs of a checkpoint.

Legend: L layers, S stages.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping

import torch

from offramp.common.checkpoint import AnyCheckpoint, open_any_checkpoint
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.families import AnyModel, check_dtype
from offramp.common.stored_tensor import StoredTensor, read_stored
from offramp.common.t5.model import MultiExitT5


def stage_layers(num_layers: int, num_stages: int) -> list[range]:
    """For each stage the indices of its layers, as many as the others have, or one more.

    Raises:
        OfframpError: there are more stages than layers.
    """
    if num_stages > num_layers:
        raise OfframpError(
            f"pipeline_stages {num_stages} are more than the {num_layers} layers of this model; a stage has at least "
            "one."
        )
    bounds = [num_layers * stage // num_stages for stage in range(num_stages + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]


def check_family(model: AnyModel) -> None:
    """Raise `OfframpError` for a model that cannot run in stages."""
    if isinstance(model, MultiExitT5):
        raise OfframpError("pipeline_stages are for decoder-only models, and this one has an encoder; leave them out.")


def stage_weights(model: AnyModel, layers: range, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors that a stage needs.

    Args:
        model: with the names of all; its weights may be absent.
        layers: indices of the stage's layers.
        stored: all tensors of the checkpoint.
    """
    exits = [layer for layer in model.exit_config.layers if layer - 1 in layers]
    is_first, is_last = layers.start == 0, layers.stop == model.config.num_layers
    prefixes = [*(f"layers.{index}." for index in layers), *(f"exits.{layer}." for layer in exits)]
    if is_first:
        prefixes.append("embed_tokens.")
    if is_last or (exits and model.exit_config.head == "final"):
        prefixes.append("norm.")
    if is_last or (exits and model.exit_config.tied):
        prefixes.append("embed_tokens." if model.config.tie_word_embeddings else "lm_head.")
    return {name: tensor for name, tensor in stored.items() if name.startswith(tuple(prefixes))}


def load_stage(
    path: str | os.PathLike[str],
    stage: int,
    num_stages: int,
    dtype: torch.dtype,
    *,
    exits: ExitConfig | None = None,
    verify: bool = True,
) -> AnyCheckpoint:
    """Load the part of a checkpoint directory that one stage needs; other weights of the model are absent.

    Args:
        path: the directory.
        stage: counted from 0.
        num_stages: S.
        dtype: of weights.
        exits: exits to declare; see `load_any_checkpoint`.
        verify: compare the hashes in `exits.json`, of all files.

    Raises:
        OfframpError: the directory is not complete and consistent, or its model cannot run in so many stages.
    """
    checkpoint, stored = open_any_checkpoint(path, exits=exits, verify=verify)
    model = checkpoint.model
    check_family(model)
    check_dtype(model.config, dtype)
    layers = stage_layers(model.config.num_layers, num_stages)[stage]
    weights = read_stored(stage_weights(model, layers, stored))
    model.load_state_dict(weights, assign=True, strict=False)
    model.to(dtype).eval()
    return checkpoint
