"""A stage divided among tensor-parallel ranks (Megatron-LM: Shoeybi et al., 2019, section 3).

Query, key, value, gate and up projections are divided by rows (heads, units), output and down projections by columns,
embedding and unembeddings by tokens. Norms, adapters and the biases that come after a sum are on every rank. What is
divided keeps its name. Each attention and each feed-forward sums states once in the forward pass and gradients once in
the backward pass; nothing of the model's own code knows of it.

Shares differ by one head, unit or token at most, so sizes need not be divisible. With more ranks than key/value heads,
several ranks hold the same head, and their gradients of it are summed.

Legend: B batch, T time, D model, H query heads, K key/value heads, E head dim, F feed-forward, V vocabulary, R ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offramp.common.errors import OfframpError
from offramp.common.model.attention import Attention
from offramp.common.model.block import MLP
from offramp.common.model.config import ModelConfig
from offramp.train.pipeline.stages import Stage
from offramp.train.stage_files import Slice
from offramp.train.tensor_group import TensorGroup, share_of
from offramp.train.vocabulary import VocabularyShard, locate


def check_tensor_parallel(config: ModelConfig, size: int, *, lora: bool = False, compiled: bool = False) -> None:
    """Raise `OfframpError` unless the model, with these settings of its module, can be divided among `size` ranks."""
    if size > 1 and (lora or compiled):
        setting = "lora" if lora else "compile_layers"
        raise OfframpError(f"model.{setting} does not go with tensor {size}; do without one of them.")
    heads, kv_heads = config.num_heads, config.num_kv_heads
    possible = [n for n in range(1, heads + 1) if n <= kv_heads or (n % kv_heads == 0 and heads % n == 0)]
    possible = [n for n in possible if n <= min(config.intermediate_size, config.vocab_size)]
    if size not in possible:
        raise OfframpError(
            f"tensor is {size}, but {heads} query heads with {kv_heads} key/value heads cannot be divided among so "
            f"many ranks; choose one of {', '.join(map(str, possible))}."
        )


def slices(stage: nn.Module, config: ModelConfig, rank: int, size: int) -> dict[str, Slice]:
    """What a rank holds of the parameters that are divided, by name.

    Args:
        stage: with whole parameters, which may be on the meta device.
        config: the model.
        rank: from 0.
        size: R.
    """
    found: dict[str, Slice] = {}

    def divide(name: str, dim: int, total: int, start: int, stop: int, unit: int = 1, owned: bool = True) -> None:
        own = Slice(dim, start * unit, stop * unit, total * unit, owned)
        found[f"{name}.weight"] = own
        if dim == 0 and stage.get_submodule(name).bias is not None:
            found[f"{name}.bias"] = own

    (query, key), owned = _heads(config, rank, size)
    units, tokens = share_of(config.intermediate_size, rank, size), share_of(config.vocab_size, rank, size)
    for name, module in stage.named_modules():
        if isinstance(module, Attention):
            divide(f"{name}.q_proj", 0, config.num_heads, *query, config.head_dim)
            divide(f"{name}.k_proj", 0, config.num_kv_heads, *key, config.head_dim, owned)
            divide(f"{name}.v_proj", 0, config.num_kv_heads, *key, config.head_dim, owned)
            divide(f"{name}.o_proj", 1, config.num_heads, *query, config.head_dim)
        elif isinstance(module, MLP):
            divide(f"{name}.gate_proj", 0, config.intermediate_size, *units)
            divide(f"{name}.up_proj", 0, config.intermediate_size, *units)
            divide(f"{name}.down_proj", 1, config.intermediate_size, *units)
        elif isinstance(module, nn.Embedding):
            found[f"{name}.weight"] = Slice(0, *tokens, config.vocab_size)
        elif isinstance(module, nn.Linear) and module.out_features == config.vocab_size and _unembeds(name):
            divide(name, 0, config.vocab_size, *tokens)
    return found


def _unembeds(name: str) -> bool:
    return name.rpartition(".")[2] in ("lm_head", "unembed")


def _heads(config: ModelConfig, rank: int, size: int) -> tuple[tuple[tuple[int, int], tuple[int, int]], bool]:
    """Query heads and key/value heads of a rank, and whether it owns the latter."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if size <= kv_heads:
        start, stop = share_of(kv_heads, rank, size)
        group = heads // kv_heads
        return ((start * group, stop * group), (start, stop)), True
    head = rank * kv_heads // size
    return (share_of(heads, rank, size), (head, head + 1)), rank % (size // kv_heads) == 0


@dataclass(frozen=True)
class Sharding:
    """How a stage is divided.

    Attributes:
        ranks: that share it.
        slices: of the parameters that are divided, by name; the others are whole on every rank.
        partial: parameters of which each rank has the gradient of its own heads only, though others hold them too.
    """

    ranks: TensorGroup
    slices: Mapping[str, Slice]
    partial: tuple[str, ...]

    def owned(self, name: str) -> bool:
        """Whether this rank writes a parameter, or its slice of it, and counts it in norms."""
        return self.slices[name].owned if name in self.slices else self.ranks.rank == 0

    @torch.no_grad()
    def sum_partial_gradients(self, stage: nn.Module) -> None:
        """Make the gradients of `partial` parameters whole, in one message."""
        parameters = [(name, stage.get_parameter(name)) for name in self.partial]
        parameters = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
        if not parameters:
            return
        wholes = [self._whole_gradient(name, parameter) for name, parameter in parameters]
        flat = self.ranks.sum_(torch.cat([whole.flatten() for whole in wholes]))
        for (name, parameter), part in zip(parameters, flat.split([whole.numel() for whole in wholes]), strict=True):
            whole = part.view(self._whole_shape(name, parameter))
            parameter.grad = self._own(name, whole).clone()

    def _whole_gradient(self, name: str, parameter: nn.Parameter) -> Tensor:
        whole = parameter.new_zeros(self._whole_shape(name, parameter))
        if parameter.grad is not None:
            self._own(name, whole).copy_(parameter.grad)
        return whole

    def _own(self, name: str, whole: Tensor) -> Tensor:
        return self.slices[name].of(whole) if name in self.slices else whole

    def _whole_shape(self, name: str, parameter: nn.Parameter) -> tuple[int, ...]:
        shape = tuple(parameter.shape)
        return self.slices[name].whole_shape(shape) if name in self.slices else shape


def shard_stage(stage: Stage, ranks: TensorGroup) -> Sharding:
    """Keep this rank's part of a stage, in place; the stage then computes what it did, together with the other ranks.

    Raises:
        OfframpError: the model cannot be divided so.
    """
    config = stage.plan.config
    assert isinstance(config, ModelConfig)  # `check_pipeline` refuses others
    check_tensor_parallel(config, ranks.size)
    own = slices(stage, config, ranks.rank, ranks.size)
    for name, part in own.items():
        owner, _, attribute = name.rpartition(".")
        whole = stage.get_parameter(name)
        kept = nn.Parameter(part.of(whole.detach()).clone(memory_format=torch.contiguous_format), whole.requires_grad)
        # DeepSpeed's norms count a parameter without this mark on the first rank only.
        setattr(kept, "tensor_model_parallel", part.owned)  # noqa: B010 - not an attribute of parameters
        setattr(stage.get_submodule(owner), attribute, kept)
    partial: list[str] = []
    (query, key), _ = _heads(config, ranks.rank, ranks.size)
    for name, module in list(stage.named_modules()):
        if isinstance(module, Attention):
            module.num_heads, module.num_kv_heads = query[1] - query[0], key[1] - key[0]
            module.o_proj = cast("nn.Linear", _RowParallelLinear(module.o_proj, ranks))
            _enter(module, ranks)
            partial += [f"{name}.{norm}.weight" for norm in ("q_norm", "k_norm") if config.qk_norm]
            if ranks.size > config.num_kv_heads:
                kinds = ("weight", "bias") if config.qkv_bias else ("weight",)
                partial += [f"{name}.{matrix}.{kind}" for matrix in ("k_proj", "v_proj") for kind in kinds]
        elif isinstance(module, MLP):
            module.down_proj = cast("nn.Linear", _RowParallelLinear(module.down_proj, ranks))
            _enter(module, ranks)
    stage.vocabulary = VocabularyShard(ranks, *share_of(config.vocab_size, ranks.rank, ranks.size), config.vocab_size)
    if stage.embed_tokens is not None:
        stage.embed_tokens = cast("nn.Embedding", _VocabularyParallelEmbedding(stage.embed_tokens, stage.vocabulary))
    return Sharding(ranks, own, tuple(partial))


def _enter(module: nn.Module, ranks: TensorGroup) -> None:
    def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (ranks.enter(args[0]), *args[1:])

    module.register_forward_pre_hook(enter)


class _RowParallelLinear(nn.Module):
    """Columns of a matrix, for a share of the input; the output is whole."""

    def __init__(self, linear: nn.Linear, ranks: TensorGroup) -> None:
        super().__init__()
        self.weight, self.bias, self.ranks = linear.weight, linear.bias, ranks

    def forward(self, x: Tensor) -> Tensor:
        y = self.ranks.leave(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


class _VocabularyParallelEmbedding(nn.Module):
    """Rows of an embedding; the output is whole."""

    def __init__(self, embedding: nn.Embedding, shard: VocabularyShard) -> None:
        super().__init__()
        self.weight, self.shard = embedding.weight, shard

    def forward(self, tokens: Tensor) -> Tensor:
        place, here = locate(tokens, self.shard)
        return self.shard.ranks.leave(F.embedding(place, self.weight).where(here[..., None], 0.0))
