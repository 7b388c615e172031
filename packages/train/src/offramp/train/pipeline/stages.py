"""A model cut into pipeline stages: the plan, and one stage's part of the model (for a T5 see `t5_stages`).

A stage is the model with modules missing: its parameters have the names they have in the whole model. Checkpoints of
any number of stages are therefore the same set of named tensors.

Legend: B batch, T time, M source tokens, D model, F feed-forward, V vocabulary, L layers, S stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.families import AnyConfig, make_model
from offramp.common.model.config import ModelConfig
from offramp.common.model.exit_head import ExitHead
from offramp.common.model.layout import BatchLayout
from offramp.common.model.multi_exit import MultiExitDecoder, run_layer
from offramp.common.t5.block import DecoderBlock
from offramp.common.t5.config import T5Config
from offramp.common.t5.model import MultiExitT5
from offramp.train.losses import ExitReader, MicroBatch
from offramp.train.vocabulary import VocabularyShard

ExitPlacement = Literal["next_stage", "same_stage"]
"""Where an exit between two stages is computed: at the start of the later one, or at the end of the earlier one."""


@dataclass(frozen=True)
class StagePlan:
    """Which stage runs which layers and exits.

    Attributes:
        config: the model.
        exits: its early exits.
        bounds: [S + 1] stage s runs layers `bounds[s]` + 1 .. `bounds[s + 1]`. Where they end before the last layer of
            the model, what lies above is on no stage, nor is the final exit.
        exit_placement: of exits between two stages. The later stage holds the state anyway and has fewer micro-batches
            in flight (EE-LLM, section 3.2), so it is the default.
        encoder_bounds: [S + 1] the same of the layers of an encoder, which end where those of the decoder begin; empty
            without one.
    """

    config: AnyConfig
    exits: ExitConfig
    bounds: tuple[int, ...]
    exit_placement: ExitPlacement = "next_stage"
    encoder_bounds: tuple[int, ...] = ()

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.bounds) - 1

    def exits_of(self, stage: int) -> tuple[int, ...]:
        """Exit layers whose heads lie on a stage; what lies after the last layer that runs is the last one's."""
        start, stop = self.bounds[stage], self.bounds[stage + 1]
        if self.exit_placement == "same_stage":
            own = tuple(layer for layer in self.exits.layers if start < layer <= stop)
        else:
            own = tuple(layer for layer in self.exits.layers if start <= layer < stop)
        if stage < self.num_stages - 1:
            return own
        return tuple(layer for layer in (*self.exits.layers, self.config.num_layers) if layer in own or layer == stop)

    @property
    def depth(self) -> int:
        """Layers that run."""
        return self.bounds[-1]

    @cached_property
    def shared(self) -> dict[str, tuple[int, ...]]:
        """Parameters that several stages hold a copy of: name -> those stages, the owner first. Sorted by name."""
        holders: dict[str, set[int]] = {"embed_tokens.weight": {0}, "lm_head.weight": set(), "norm.weight": set()}
        head = "embed_tokens.weight" if self.config.tie_word_embeddings else "lm_head.weight"
        for stage in range(self.num_stages):
            for layer in self.exits_of(stage):
                final = layer == self.config.num_layers
                if final or self.exits.tied:
                    holders[head].add(stage)
                if final or self.exits.head == "final":
                    holders["norm.weight"].add(stage)
        for prefix, bounds in (("encoder.", self.encoder_bounds), ("", self.bounds if self.encoder_bounds else ())):
            running = {stage for stage, (start, stop) in enumerate(pairwise(bounds)) if start < stop}
            holders[f"{prefix}relative_attention_bias.weight"] = running
        return {name: tuple(sorted(stages)) for name, stages in sorted(holders.items()) if len(stages) > 1}


@dataclass(frozen=True)
class LayerCosts:
    """Multiplications per token, forward.

    Attributes:
        blocks: of each layer; those of an encoder come first.
        exits: exit layer -> of its head, the unembedding included; the final exit last.
    """

    blocks: tuple[float, ...]
    exits: dict[int, float]

    @property
    def total(self) -> float:
        """Of the whole model."""
        return sum(self.blocks) + sum(self.exits.values())


def layer_costs(
    config: AnyConfig, exits: ExitConfig, labelled_share: float = 1.0, source_share: float = 1.0
) -> LayerCosts:
    """What layers and exits cost; the embedding is a look-up and costs nothing.

    Args:
        config: the model.
        exits: its early exits.
        labelled_share: share of positions with a label; only they meet the unembedding.
        source_share: M / T, source tokens for each target token, whose layers' cost is counted for that one.
    """
    with torch.device("meta"):
        model: MultiExitDecoder[Any, Any] = make_model(config, exits)
    blocks = [float(_matrix_elements(block)) for block in model.layers]
    if isinstance(model, MultiExitT5):
        for index, block in enumerate(model.layers):
            assert isinstance(block, DecoderBlock)
            keys_values = block.cross_attn.k_proj.weight.numel() + block.cross_attn.v_proj.weight.numel()
            blocks[index] += (source_share - 1.0) * keys_values  # of source tokens
        blocks = [source_share * _matrix_elements(block) for block in model.encoder.layers] + blocks
    vocabulary = config.vocab_size * config.hidden_size * labelled_share
    heads = {layer: _transform_elements(_head(model, layer)) for layer in exits.layers}
    return LayerCosts(tuple(blocks), {**{k: v + vocabulary for k, v in heads.items()}, config.num_layers: vocabulary})


def plan_stages(
    config: AnyConfig,
    exits: ExitConfig,
    num_stages: int,
    bounds: Sequence[int] | None = None,
    labelled_share: float = 1.0,
    exit_placement: ExitPlacement = "next_stage",
    depth: int | None = None,
    source_share: float = 1.0,
) -> StagePlan:
    """Divide a model among stages.

    Args:
        config: the model.
        exits: its early exits.
        num_stages: S.
        bounds: [S - 1] the last layer of every stage but the last, counted through an encoder and on through the
            decoder; None balances the cost.
        labelled_share: see `layer_costs`.
        exit_placement: see `StagePlan`.
        depth: (decoder) layers that run, the last of them with an exit; all if None.
        source_share: see `layer_costs`.

    Raises:
        OfframpError: there are fewer layers than stages, or the bounds leave a stage empty.
    """
    depth = config.num_layers if depth is None else depth
    encoder = config.num_encoder_layers if isinstance(config, T5Config) else 0
    total = encoder + depth
    if not 1 <= num_stages <= total:
        what = f"a model of {total} layers" if depth == config.num_layers else f"{total} layers below the last exit"
        raise OfframpError(f"{what} cannot be divided into {num_stages} stages; choose 1..{total}.")
    if exit_placement not in get_args(ExitPlacement):
        raise OfframpError(f"exit_placement is {exit_placement!r}; choose one of {', '.join(get_args(ExitPlacement))}.")
    if bounds is None:
        costs = layer_costs(config, exits, labelled_share, source_share)
        costs = LayerCosts(costs.blocks, {encoder + layer: cost for layer, cost in costs.exits.items()})
        edges = _balanced(costs, num_stages, exit_placement, total)
    else:
        edges = (0, *bounds, total)
    if len(edges) != num_stages + 1 or any(a >= b for a, b in pairwise(edges)):
        raise OfframpError(
            f"stage_bounds {list(edges[1:-1])} must be {num_stages - 1} ascending layer numbers inside 1.."
            f"{total - 1}: the last layer of every stage but the last."
        )
    own, others = (
        tuple(min(max(edge - first, 0), size) for edge in edges) for first, size in ((encoder, depth), (0, encoder))
    )
    return StagePlan(config, exits, own, exit_placement, others if encoder else ())


def replicas(processes: int, pipe: int, tensor: int) -> int:
    """Data-parallel replicas of a pipeline; raises `OfframpError` if processes would be left over."""
    if processes % (pipe * tensor):
        each, multiple = ("", "pipe") if tensor == 1 else (f" with {tensor} tensor ranks each", "pipe x tensor")
        raise OfframpError(
            f"{processes} processes (trainer.devices x num_nodes) cannot form pipelines of {pipe} stages{each}; set "
            f"trainer.devices to a multiple of {multiple}."
        )
    return processes // (pipe * tensor)


class Cut(NamedTuple):
    """The state [B, T, D] that an exit reads, where a stage's graph is cut, so that it is back-propagated in pieces.

    Attributes:
        below: the end of the graph of the layers below; None if those are on the stage before.
        above: a leaf, read by the exit and by the layers above, which leave their gradients there.
    """

    below: Tensor | None
    above: Tensor

    @classmethod
    def of(cls, below: Tensor) -> Cut:
        """Cut a graph at its end."""
        return cls(below, below.detach().requires_grad_(below.requires_grad))


class StageOutput(NamedTuple):
    """What a stage makes of a micro-batch.

    Attributes:
        states: [B, T, D] after its last layer.
        cuts: exit layer -> what its exits read. Exits are not computed in the forward pass; see `ExitReader`.
        carried: what many of its layers read beside the states, and have gradients of.
    """

    states: Tensor
    cuts: dict[int, Cut]
    carried: tuple[Cut, ...] = ()


class Stage(nn.Module):
    """The modules of one stage, under their names in the whole model, which they are taken from (not copied).

    Args:
        model: the whole model.
        plan: how it is divided.
        index: of this stage.
        checkpoint_activations: layers keep their input alone for the backward pass, and run again there (Chen et al.,
            2016). Exit heads need no such thing: they are computed within the backward pass, one after the other.
    """

    def __init__(
        self, model: MultiExitDecoder[Any, Any], plan: StagePlan, index: int, checkpoint_activations: bool = False
    ) -> None:
        super().__init__()
        self.plan, self.index, self.checkpoint_activations = plan, index, checkpoint_activations
        start, stop = plan.bounds[index], plan.bounds[index + 1]
        self.exit_layers = plan.exits_of(index)
        final = plan.config.num_layers in self.exit_layers
        reads_head = final or (bool(self.exit_layers) and plan.exits.tied)
        reads_norm = final or (bool(self.exit_layers) and plan.exits.head == "final")
        reads_embedding = index == 0 or (reads_head and model.lm_head is None)
        self.embed_tokens = model.embed_tokens if reads_embedding else None
        self.layers = nn.ModuleDict({str(layer): model.layers[layer] for layer in range(start, stop)})
        self.norm = model.norm if reads_norm else None
        self.lm_head = model.lm_head if reads_head else None
        early = [layer for layer in self.exit_layers if layer < plan.config.num_layers]
        self.exits = nn.ModuleDict({str(layer): model.exits[str(layer)] for layer in early})
        self.vocabulary: VocabularyShard | None = None  # what the unembeddings hold of it; None: all
        self.output_scale = model.output_scale

    @property
    def trains_backbone(self) -> bool:
        """Whether a gradient with respect to this stage's output reaches a parameter of this stage."""
        below = [*self.layers.parameters()]
        if self.index == 0 and self.embed_tokens is not None:
            below += self.embed_tokens.parameters()
        return any(parameter.requires_grad for parameter in below)

    def shared_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this stage that other stages hold too, in an order that is the same on all of them."""
        for name, stages in self.plan.shared.items():
            if self.index in stages:
                yield name, self.get_parameter(name)

    def reader(self, layer: int) -> ExitReader:
        """The reader of an exit of this stage."""
        final = layer == self.plan.config.num_layers
        head = None if final else self.exits[str(layer)]
        assert head is None or isinstance(head, ExitHead)
        norm = self.norm if final or self.plan.exits.head == "final" else None
        if head is not None and head.unembed is not None:
            return ExitReader(head, norm, head.unembed.weight, self.vocabulary)
        shared = self.embed_tokens if self.lm_head is None else self.lm_head
        assert shared is not None
        return ExitReader(head, norm, shared.weight, self.vocabulary, self.output_scale)

    def layout(self, batch: MicroBatch) -> BatchLayout:
        """What `forward` is to know of a micro-batch beside its states."""
        assert isinstance(self.plan.config, ModelConfig)
        return batch.layout(self.plan.config)

    def forward(self, x: Tensor, layout: BatchLayout) -> StageOutput:
        """Run this stage's layers.

        Args:
            x: [B, T] token ids on the first stage, [B, T, D] states on the others.
            layout: of the micro-batch.
        """
        if self.index == 0:
            assert self.embed_tokens is not None
            x = self.embed_tokens(x)
        return StageOutput(*self._run_decoder(x, layout))

    def _run_decoder(self, h: Tensor, layout: BatchLayout) -> tuple[Tensor, dict[int, Cut]]:
        start, cuts = self.plan.bounds[self.index], {}
        for name, block in self.layers.items():
            layer = int(name)
            if layer in self.exit_layers:
                cuts[layer] = Cut(None, h) if layer == start and h.is_leaf else Cut.of(h)
                h = cuts[layer].above
            h = self._run(run_layer, block, h, layer, layout)
        if (stop := self.plan.bounds[self.index + 1]) in self.exit_layers:
            cuts[stop] = Cut.of(h)
            h = cuts[stop].above
        return h, cuts

    def _run(self, layer: Callable[..., Tensor], *arguments: Any) -> Tensor:
        if self.checkpoint_activations and torch.is_grad_enabled():
            # Not the reentrant kind, which would start a backward pass of its own for every layer. It comes back to
            # the autocast of this moment.
            return checkpoint(layer, *arguments, use_reentrant=False)
        return layer(*arguments)


def _head(model: MultiExitDecoder[Any, Any], layer: int) -> ExitHead:
    head = model.exits[str(layer)]
    assert isinstance(head, ExitHead)
    return head


def _transform_elements(head: ExitHead) -> int:
    own = 0 if head.unembed is None else head.unembed.weight.numel()
    return _matrix_elements(head) - own


def _matrix_elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.dim() == 2)


def _balanced(costs: LayerCosts, num_stages: int, exit_placement: ExitPlacement, num_layers: int) -> tuple[int, ...]:
    """Bounds whose dearest stage is cheapest; dynamic programming over (stages, layers)."""
    # An exit after layer e is paid by the stage that runs layer e + 1, or e; the one after all layers by the last.
    shift = 1 if exit_placement == "same_stage" else 0
    paid = [costs.blocks[i] + costs.exits.get(i + shift, 0.0) for i in range(num_layers)]
    if not shift:
        paid[-1] += costs.exits[num_layers]
    upto = [0.0]
    for cost in paid:
        upto.append(upto[-1] + cost)
    best: list[tuple[float, tuple[int, ...]]] = [(upto[stop], (0, stop)) for stop in range(num_layers + 1)]
    for stage in range(1, num_stages):
        best = [
            min(
                ((max(best[cut][0], upto[stop] - upto[cut]), (*best[cut][1], stop)) for cut in range(stage, stop)),
                default=(float("inf"), ()),
            )
            for stop in range(num_layers + 1)
        ]
    return best[num_layers][1]
