"""A stage made of its part of the weights, the same way in every process."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import torch

from offramp.common.checkpoint import DTYPES
from offramp.common.families import AnyModel
from offramp.serve.config import EngineConfig
from offramp.serve.kv_cache.storage import KVStorage
from offramp.serve.measures.iteration_clock import IterationClock
from offramp.serve.model.packed import PackedModel
from offramp.serve.pipeline.stage import Stage
from offramp.serve.pipeline.stages import check_family, stage_layers


@dataclass(frozen=True)
class StageSettings:
    """What all stages must agree on, and which of them this is.

    Attributes:
        config: of the engine; it has `pipeline_stages`.
        index: of the stage, from 0.
        num_blocks: blocks in the KV cache.
        max_model_len: most tokens of one sequence.
    """

    config: EngineConfig
    index: int
    num_blocks: int
    max_model_len: int

    @property
    def num_stages(self) -> int:
        """S."""
        assert self.config.pipeline_stages is not None
        return self.config.pipeline_stages

    def to_json(self) -> str:
        """As text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> StageSettings:
        """Inverse of `to_json`."""
        fields: dict[str, Any] = json.loads(text)
        return cls(**{**fields, "config": EngineConfig(**fields["config"])})


def make_stage(
    model: AnyModel,
    settings: StageSettings,
    release_weights: bool = False,
    poison_cache: bool = False,
    clock: IterationClock | None = None,
) -> Stage:
    """Pack a stage's weights and allocate its cache.

    Args:
        model: with the weights of the stage at least.
        settings: which stage, and of what.
        release_weights: see `Engine`.
        poison_cache: see `Engine`.
        clock: see `Stage`.

    Raises:
        OfframpError: the settings do not fit the model.
    """
    check_family(model)
    config, shape, dtype = settings.config, model.config, DTYPES[settings.config.dtype]
    layers = stage_layers(shape.num_layers, settings.num_stages)[settings.index]
    with torch.no_grad():
        packed = PackedModel(
            model,
            dtype,
            config.kernels,
            quantization=config.quantization,
            release=release_weights,
            stage=layers,
        )
    cache = KVStorage(
        packed.num_cache_layers,
        settings.num_blocks,
        config.block_size,
        shape.num_kv_heads,
        shape.head_dim,
        dtype,
        poison_cache,
    )
    return Stage(packed, layers, cache, settings.max_model_len, clock)
