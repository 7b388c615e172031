"""The families of models: which one a `config.json` describes, and what differs between them outside of the model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

import torch

from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.hf import DECODER_ONLY_NAMES, WeightNames, stored_names
from offramp.common.model.config import ModelConfig
from offramp.common.model.transformer import MultiExitTransformer
from offramp.common.t5.config import MODEL_TYPE, T5Config
from offramp.common.t5.hf_names import t5_names
from offramp.common.t5.model import MultiExitT5

AnyConfig = ModelConfig | T5Config
AnyModel = MultiExitTransformer | MultiExitT5


def read_config(
    hf: Mapping[str, Any], directory: Path | None = None, tensors: Collection[str] | None = None
) -> AnyConfig:
    """The configuration of either family.

    Args:
        hf: a Hugging Face configuration.
        directory: with the weights, where they are to be read: transformers 5 writes the same configuration for a v1.1
            with an unembedding of its own and for one without, and only the files tell.
        tensors: names of the weights in place of the directory, where they are known.

    Raises:
        OfframpError: the architecture or one of its options is not supported, or a field is missing.
    """
    if hf.get("model_type") != MODEL_TYPE:
        return ModelConfig.from_hf(hf)
    config = T5Config.from_hf(hf)
    is_open = hf.get("tie_word_embeddings", True) is not False and not config.tie_word_embeddings
    if tensors is None and directory is not None and is_open:
        tensors = stored_names(directory)
    if is_open and tensors is not None and "lm_head.weight" not in tensors:
        return replace(config, tie_word_embeddings=True)
    return config


@overload
def make_model(config: ModelConfig, exits: ExitConfig) -> MultiExitTransformer: ...
@overload
def make_model(config: T5Config, exits: ExitConfig) -> MultiExitT5: ...
def make_model(config: AnyConfig, exits: ExitConfig) -> AnyModel:
    """A model of the configuration's family, with weights that mean nothing yet."""
    return MultiExitT5(config, exits) if isinstance(config, T5Config) else MultiExitTransformer(config, exits)


def check_dtype(config: AnyConfig, dtype: torch.dtype) -> None:
    """Raise `OfframpError` for a type of weights in which a model of that shape does not work."""
    if dtype == torch.float16 and isinstance(config, T5Config):
        raise OfframpError(
            "T5 does not run in fp16, because its states outgrow the largest number there (65,504) and become "
            "infinite; choose bf16 or fp32."
        )


def weight_names(config: AnyConfig) -> WeightNames:
    """What tensors are called in files."""
    return t5_names(config.feed_forward != "relu") if isinstance(config, T5Config) else DECODER_ONLY_NAMES
