"""What every family has in common: a sliceable list of decoder layers with a head after some of them.

Legend: B batch, T time, D model, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Generic, Literal, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.model.exit_head import ExitClassifier, ExitHead, HeadShape
from offramp.common.model.fresh_weights import fresh_weight
from offramp.common.model.layout import BatchLayout
from offramp.common.model.norm import RMSNorm


class DecoderConfig(HeadShape, Protocol):
    """What the shared part must know of a family's configuration; see `ModelConfig` for what the fields mean."""

    @property
    def num_layers(self) -> int: ...  # noqa: D102
    @property
    def tie_word_embeddings(self) -> bool: ...  # noqa: D102
    @property
    def initializer_range(self) -> float: ...  # noqa: D102


ConfigT = TypeVar("ConfigT", bound=DecoderConfig)
LayoutT = TypeVar("LayoutT", bound=BatchLayout)


@dataclass(frozen=True)
class MultiExitOutput:
    """What a forward pass gives, keyed by exit layer.

    Attributes:
        logits: [B, T, V] of every exit asked for.
        hidden_states: [B, T, D] the states those exits read, before any norm.
    """

    logits: dict[int, Tensor]
    hidden_states: dict[int, Tensor]


class MultiExitDecoder(nn.Module, Generic[ConfigT, LayoutT]):
    """Embedding, decoder layers, final norm, unembedding, and the exits between them.

    Args:
        config: shape of the model.
        exits: its early exits; none if None.
        block: makes a layer, which is called with states [B, T, D] and a layout.
    """

    output_scale: float = 1.0
    """On the states that the model's own unembedding reads: those of the final exit, and of every exit that shares it.
    An exit with an unembedding of its own knows no such factor."""

    def __init__(self, config: ConfigT, exits: ExitConfig | None, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.exit_config = exits or ExitConfig()
        self.exit_config.check(config.num_layers)
        embedding = torch.empty(config.vocab_size, config.hidden_size)
        if not embedding.is_meta:  # there, drawing what nobody sees would import torch's compiler: two seconds
            embedding.normal_()
        self.embed_tokens = nn.Embedding.from_pretrained(embedding, freeze=False)
        self.layers = nn.ModuleList(block() for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = (
            None if config.tie_word_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )
        self.exits = nn.ModuleDict({str(e): ExitHead(config, self.exit_config) for e in self.exit_config.layers})

    @property
    def depth(self) -> int:
        """Layers that are there: fewer than the model's own after `drop_layers_above`."""
        return len(self.layers)

    def drop_layers_above(self, depth: int) -> None:
        """Keep layers 1 .. `depth` and the exits they reach, and lose the final exit; the configuration stays."""
        self.layers = self.layers[:depth]
        for exit_layer in self.exit_config.layers:
            if exit_layer > depth:
                del self.exits[str(exit_layer)]

    def add_classifiers(self) -> None:
        """Give every early exit a classifier that knows nothing yet, in place of any that it has."""
        self.exit_config = replace(self.exit_config, classifier=True)
        for head in self.exits.values():
            assert isinstance(head, ExitHead)
            head.classifier = ExitClassifier(self.config.hidden_size).to(self.norm.weight)

    @property
    def exit_layers(self) -> tuple[int, ...]:
        """All exits, the final one last."""
        return (*self.exit_config.layers, self.config.num_layers)

    def embed(self, input_ids: Tensor) -> Tensor:
        """[B, T] -> [B, T, D]."""
        return self.embed_tokens(input_ids)

    def run_layers(self, h: Tensor, start: int, stop: int, layout: LayoutT) -> Tensor:
        """Run layers `start` + 1 .. `stop` on states [B, T, D] that have been through `start` layers."""
        for index in range(start, stop):
            h = run_layer(self.layers[index], h, index, layout)
        return h

    def exit_state(self, h: Tensor, exit_layer: int, layout: LayoutT | None = None) -> Tensor:
        """State [..., D] that the unembedding of `exit_layer` reads, from the state after that layer."""
        is_shared = True
        if exit_layer == self.config.num_layers:
            h = self.norm(h)
        else:
            head = self._head(exit_layer)
            is_shared = head.unembed is None
            h = head.transform(h, layout)
            h = self.norm(h) if self.exit_config.head == "final" else h
        return h * self.output_scale if is_shared and self.output_scale != 1.0 else h

    def unembedding(self, exit_layer: int | None = None) -> Tensor:
        """Weight [V, D] that turns states into logits at an exit; the final one by default."""
        if exit_layer is not None and exit_layer != self.config.num_layers:
            own = self._head(exit_layer).unembed
            if own is not None:
                return own.weight
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def exit_classifier(self, exit_layer: int) -> ExitClassifier | None:
        """What tells from the states after `exit_layer` layers how sure that early exit is; None if it has none."""
        return self._head(exit_layer).classifier

    def exit_logits(self, h: Tensor, exit_layer: int, layout: LayoutT | None = None) -> Tensor:
        """Logits [..., V] of an exit from the state [..., D] after `exit_layer` layers."""
        return F.linear(self.exit_state(h, exit_layer, layout), self.unembedding(exit_layer))

    def run_exits(self, h: Tensor, layout: LayoutT, exits: Iterable[int] | None = None) -> MultiExitOutput:
        """Run embedded tokens [B, T, D] through the layers, and read the exits on the way.

        Args:
            h: what `embed` made of the tokens.
            layout: of the batch.
            exits: exit layers to compute logits for; all of them if None.
        """
        wanted = self.exit_layers if exits is None else tuple(sorted(exits))
        for exit_layer in set(wanted) - {self.config.num_layers}:
            self._head(exit_layer)  # before the work, not after it
        depth, logits, hidden_states = 0, {}, {}
        for exit_layer in wanted:
            h, depth = self.run_layers(h, depth, exit_layer, layout), exit_layer
            hidden_states[exit_layer] = h
            logits[exit_layer] = self.exit_logits(h, exit_layer, layout)
        return MultiExitOutput(logits, hidden_states)

    def fresh_spread(self, name: str) -> float:
        """Standard deviation of a matrix, by its name, when it is drawn anew."""
        return self.config.initializer_range

    @torch.no_grad()
    def reset_parameters(self, seed: int, within: str = "") -> None:
        """Fresh weights, see `fresh_weight`, for all parameters whose names begin with `within`."""
        for name, parameter in self.named_parameters():
            if name.startswith(within):
                parameter.copy_(fresh_weight(name, parameter.shape, self.fresh_spread(name), seed))

    @torch.no_grad()
    def initialise_exits(
        self,
        init: Literal["copy", "random"] = "copy",
        norm_scale: float = 1.0,
        seed: int = 0,
    ) -> None:
        """Give the exit heads their first weights.

        Args:
            init: `copy` from the final norm, head and blocks (EE-Tuning), or `random`.
            norm_scale: factor on the copied final norm. Early states read through the final norm at full scale start
                with a cross-entropy far above chance; a quarter of it starts near chance (measured on SmolLM2-135M).
            seed: of the random numbers.
        """
        for exit_layer in self.exit_config.layers:
            head = self._head(exit_layer)
            self.reset_parameters(seed, f"exits.{exit_layer}.")
            if head.classifier is not None:
                head.classifier.reset_parameters()  # drawn, it would be sure of anything
            if init == "copy":
                block, last = self.layers[exit_layer - 1], self.layers[-1]
                # An own unembedding says at first what the model's says behind its factor.
                head.copy_from(self.norm, block, last, self.unembedding() * self.output_scale, norm_scale)

    def _head(self, exit_layer: int) -> ExitHead:
        try:
            head = self.exits[str(exit_layer)]
        except KeyError:
            raise OfframpError(
                f"there is no exit at layer {exit_layer}; this model has exits at {list(self.exit_layers)}."
            ) from None
        assert isinstance(head, ExitHead)
        return head


def run_layer(block: nn.Module, h: Tensor, index: int, layout: BatchLayout) -> Tensor:
    """Run layer `index` + 1 on states [B, T, D].

    Frozen tokens keep their states and still lend keys and values; rows that skip the layer keep theirs, too.
    """
    y = block(h, layout)
    if layout.skipped_layers is not None:
        # Not left out, so that shapes are fixed and every parameter gets a gradient.
        y = torch.where(layout.skipped_layers[:, index, None, None], h, y)
    if layout.exit_depths is None:
        return y
    return torch.where((layout.exit_depths <= index)[..., None], h, y)
