"""What multi-exit training minimises, and what it reports: sums over tokens, exit by exit. No framework in here.

With w_e the weight of exit e at this step, T_e its trained tokens in the whole global batch (all micro-batches of all
data-parallel ranks), l_e,t what a token costs (`TokenLoss`: cross-entropy, unless a recipe says more) and d the share
of distillation at temperature T,

    L = sum_e w_e * [(1 - d) / |T_e| * sum_{t in T_e} l_e,t + d / |T_L| * sum_{t in T_L} T^2 KL(z_L,t / T || z_e,t / T)]
      + r / |T_L| * (spread of exit depths, see `offramp.train.depth_spread`)

and the final exit L has d = 0. Every part of a batch therefore computes plain sums and divides by counts that are known
before the first forward pass, so it does not matter how the batch is cut up; the spread alone is one of a micro-batch.

Legend: B batch, T time (of targets for an encoder-decoder model), N selected tokens, D model, V vocabulary, L layers,
X exits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offramp.common.errors import OfframpError
from offramp.common.model.attention import Layout
from offramp.common.model.config import ModelConfig
from offramp.common.model.exit_head import ExitHead
from offramp.common.model.layout import BatchLayout
from offramp.common.model.multi_exit import MultiExitDecoder
from offramp.train.agreement import Predictions
from offramp.train.data.batch import IGNORED_LABEL, AnyBatch
from offramp.train.depth_spread import DepthSpread
from offramp.train.linear_confidence import linear_max_probability
from offramp.train.linear_cross_entropy import Teacher, TokenLoss, TokenSums, linear_cross_entropy
from offramp.train.vocabulary import VocabularyShard


class MicroBatch(NamedTuple):
    """Rows that go through the model together.

    Attributes:
        tokens: the rows.
        exit_depths: [B, T] layers after which a token's state is frozen (fill-aware training), or None.
        skipped_layers: [B, L] bool: layers that a row skips (layer dropout), or None.
    """

    tokens: AnyBatch
    exit_depths: Tensor | None = None
    skipped_layers: Tensor | None = None

    def split(self, parts: int) -> list[MicroBatch]:
        """Cut into at most `parts` micro-batches whose numbers of rows differ by one at most."""
        rows, parts = self.tokens.num_rows, min(parts, self.tokens.num_rows)
        edges = [rows * part // parts for part in range(parts + 1)]

        def cut(tensor: Tensor | None, start: int, stop: int) -> Tensor | None:
            return None if tensor is None else tensor[start:stop]

        return [
            MicroBatch(self.tokens.rows(a, b), cut(self.exit_depths, a, b), cut(self.skipped_layers, a, b))
            for a, b in pairwise(edges)
        ]

    def layout(self, config: ModelConfig) -> Layout:
        """How the rows lie, for a decoder-only model of this configuration."""
        return Layout.build(
            config, self.tokens.input_ids, self.tokens.segment_ids, self.exit_depths, skipped_layers=self.skipped_layers
        )

    def trained(self, exit_layer: int) -> Tensor:
        """[B, T] bool: the tokens that the exit after `exit_layer` is trained on.

        A token frozen below an exit never reaches it when serving, so that exit learns nothing from it.
        """
        mask = self.tokens.labels != IGNORED_LABEL
        return mask if self.exit_depths is None else mask & (self.exit_depths >= exit_layer)


@dataclass(frozen=True)
class Objective:
    """What one step minimises.

    Attributes:
        weights: exit layer -> weight w_e, the final exit last.
        distill: d above, in [0, 1].
        distill_temperature: T above.
        token_losses: exit layer -> what a token costs there; plain cross-entropy where absent.
        depth_spread: penalty on the spread of exit depths.
    """

    weights: Mapping[int, float]
    distill: float = 0.0
    distill_temperature: float = 1.0
    token_losses: Mapping[int, TokenLoss] = field(default_factory=dict)
    depth_spread: DepthSpread | None = None

    def __post_init__(self) -> None:
        if any(weight < 0 for weight in self.weights.values()) or not any(self.weights.values()):
            raise OfframpError(f"exit weights {list(self.weights.values())} must not be negative, nor all zero.")

    @property
    def layers(self) -> tuple[int, ...]:
        """Exit layers, the final one last."""
        return tuple(self.weights)

    @property
    def final_layer(self) -> int:
        """L, the last layer."""
        return self.layers[-1]

    @property
    def deepest(self) -> int:
        """The deepest exit layer with a weight: layers above it learn nothing."""
        return max(layer for layer, weight in self.weights.items() if weight > 0)

    @property
    def depth(self) -> int:
        """Layers that have to run: up to the deepest exit whose state is read.

        Those are exits with a weight, the final one as the teacher of distillation, and all early ones for the spread
        of depths.
        """
        if self.distill > 0.0:
            return self.final_layer
        early = self.layers[:-1]
        return max(self.deepest, *early) if self.depth_spread is not None else self.deepest

    @property
    def trained_layers(self) -> tuple[int, ...]:
        """Exit layers up to `depth`."""
        return tuple(layer for layer in self.layers if layer <= self.depth)

    def counts(self, batch: MicroBatch) -> Tensor:
        """[X] float64: trained tokens of each exit."""
        return torch.stack([batch.trained(layer).sum() for layer in self.layers]).double()

    def mix(self, layer: int, counts: Tensor) -> Mix:
        """How sums of one exit become its share of L, by everyone's `counts` [X].

        Exits without tokens have sums of zero; dividing them by one keeps the loss finite.
        """
        own, final = (float(counts[index].clamp(min=1)) for index in (self.layers.index(layer), -1))
        share = self.distill if layer != self.final_layer else 0.0
        return Mix(1.0 - share, share * own / final, self.weights[layer] / own)


class Mix(NamedTuple):
    """An exit's share of L is factor * (target * sum of token losses + divergence * sum of divergences).

    The two inner numbers are of the order of one whatever the batch, so that gradients made with them keep in range in
    half precision.
    """

    target: float
    divergence: float
    factor: float


class ExitSums:
    """Running sums for reports: plain numbers, added up over micro-batches, then over ranks.

    Attributes:
        layers: exit layers, the final one last.
        values: [8, X] float64: token losses, cross-entropy, divergence, correct tokens, trained tokens; then tokens
            where the exit agrees with the final one, and those where both were asked; then the spread of exit depths,
            which is all exits' and stands in the last column.
        predictions: what the exits said.
    """

    def __init__(self, layers: tuple[int, ...], device: torch.device, values: Tensor | None = None) -> None:
        self.layers = layers
        self.values = torch.zeros(8, len(layers), dtype=torch.float64, device=device) if values is None else values
        self.predictions = Predictions()

    def add(self, layer: int, term: TokenSums, count: Tensor) -> None:
        """Add one exit's sums over `count` trained tokens."""
        _, *sums, _ = term
        column = [value.detach().to(self.values) for value in (*sums, count)]
        self.values[:5, self.layers.index(layer)] += torch.stack(column)

    def add_spread(self, spread: Tensor) -> None:
        """Add the spread of exit depths of a micro-batch, a sum over its tokens."""
        self.values[7, -1] += spread.detach().to(self.values)

    def compare(self, final: Tensor | None) -> None:
        """Count agreement with the final exit, once for all predictions.

        Args:
            final: [P] what the final exit says at every position; None if it was not run.
        """
        self.values[5:7] += self.predictions.compare(self.layers, final).to(self.values)

    def report(self, objective: Objective) -> dict[str, float]:
        """Metrics by name, without a prefix: `loss`, then `loss_exit_06` and `accuracy_exit_06` for each exit.

        Early exits have `agreement_exit_06`, too, where the final exit was run: the share of tokens at which they say
        the same.

        Exit losses are cross-entropies of the plain logits in nats per trained token; `loss` is the objective L. An
        exit without a weight that saw no token (see `ExitLosses`) has no metrics. `depth_spread` is there if it is
        penalised: a mean over tokens, as a share of the model's depth.
        """
        counts = self.values[4]
        means = (self.values / counts.clamp(min=1)).T.tolist()
        known = {
            f"{layer:02d}": mean
            for layer, mean, count in zip(self.layers, means, counts.tolist(), strict=True)
            if count > 0 or objective.weights[layer] > 0
        }
        total = 0.0
        for layer, (target, _, divergence, *_) in zip(self.layers, self.values.T.tolist(), strict=True):
            mix = objective.mix(layer, counts)
            total += mix.factor * (mix.target * target + mix.divergence * divergence)
        metrics = {}
        if objective.depth_spread is not None:
            metrics["depth_spread"] = means[-1][7]
            total += objective.depth_spread.weight * means[-1][7]
        return {
            "loss": total,
            **{f"loss_exit_{name}": mean[1] for name, mean in known.items()},
            **{f"accuracy_exit_{name}": mean[3] for name, mean in known.items()},
            **{
                f"agreement_exit_{layer:02d}": agreeing / asked
                for layer, agreeing, asked in zip(self.layers[:-1], *self.values[5:7, :-1].tolist(), strict=True)
                if asked > 0
            },
            **metrics,
        }


@dataclass(frozen=True)
class ExitReader:
    """Turns states after an exit layer into logits, for selected tokens only.

    Attributes:
        head: the exit's own modules; None at the final exit.
        norm: the model's final norm where the exit shares it.
        unembedding: [V, D], or the rows of `shard`.
        shard: the part of the vocabulary that is this rank's; None is all.
        scale: on states, where they meet the model's own unembedding; see `MultiExitDecoder.output_scale`.
    """

    head: ExitHead | None
    norm: nn.Module | None
    unembedding: Tensor
    shard: VocabularyShard | None = None
    scale: float = 1.0

    def state(self, h: Tensor, mask: Tensor, layout: BatchLayout) -> Tensor:
        """[B, T, D] states, [B, T] mask of N tokens -> [N, D] as the unembedding reads them.

        Prompts and padding never meet the vocabulary.
        """
        if self.head is not None and self.head.block is not None:
            x = self.head.transform(h, layout)[mask]  # attends over the sequence, so it needs all of it
        else:
            x = h[mask]
            x = x if self.head is None else self.head.transform(x)
        x = x if self.norm is None else self.norm(x)
        return x if self.scale == 1.0 else x * self.scale

    def __call__(self, h: Tensor, mask: Tensor, layout: BatchLayout) -> Tensor:
        """As `state`, but logits [N, V] of this rank's part of the vocabulary."""
        return F.linear(self.state(h, mask, layout), self.unembedding)

    def zero(self) -> Iterator[Tensor]:
        """A loss of zero that gives the head's trained parameters gradients of zero, if there are any."""
        own = () if self.head is None else self.head.parameters()
        parts = [parameter.flatten()[0] * 0.0 for parameter in own if parameter.requires_grad]
        if parts:
            yield torch.stack(parts).sum()


def exit_reader(model: MultiExitDecoder[Any, Any], layer: int) -> ExitReader:
    """The reader of an exit of a whole model."""
    if layer == model.config.num_layers:
        return ExitReader(None, model.norm, model.unembedding(), scale=model.output_scale)
    head = model.exits[str(layer)]
    assert isinstance(head, ExitHead)
    norm = model.norm if model.exit_config.head == "final" else None
    scale = model.output_scale if head.unembed is None else 1.0
    return ExitReader(head, norm, model.unembedding(layer), scale=scale)


@dataclass(frozen=True)
class ExitLosses:
    """The shares of L (scalars with a graph) of the exits in `states`, one at a time.

    The caller may back-propagate each share before it asks for the next. Logits exist for a few tokens at a time. With
    distillation the final exit must be among the states. While training, exits without a weight are left out: their
    heads get gradients of zero, so that optimizers and data-parallel reductions find one for every parameter.

    Attributes:
        objective: of this step.
        readers: of each exit in `states`.
        states: exit layer -> [B, T, D].
        batch: labels and depths.
        layout: of the batch.
        counts: [X] trained tokens in the whole global batch.
        sums: is added to.
        factor: on all shares.
    """

    objective: Objective
    readers: Mapping[int, ExitReader]
    states: Mapping[int, Tensor]
    batch: MicroBatch
    layout: BatchLayout
    counts: Tensor
    sums: ExitSums
    factor: float = 1.0

    def __iter__(self) -> Iterator[Tensor]:
        """All shares, in the order of the states."""
        for layer in self.states:
            yield from self.of(layer)
        yield from self.spread()

    def of(self, layer: int) -> Iterator[Tensor]:
        """The share of one exit; none if it is left out and has nothing to train."""
        objective, batch, layout, final = self.objective, self.batch, self.layout, self.objective.final_layer
        reader = self.readers[layer]
        if torch.is_grad_enabled() and objective.weights[layer] == 0.0:
            yield from reader.zero()
            return
        mask, mix = batch.trained(layer), objective.mix(layer, self.counts)
        teacher = None
        if mix.divergence > 0.0:
            # Made with a graph and detached: autocast would hand weights that it cast without one to the students.
            lesson = self.readers[final].state(self.states[final], mask, layout).detach()
            known = None if batch.exit_depths is None else batch.trained(final)[mask]
            weight = self.readers[final].unembedding.detach()
            teacher = Teacher(lesson, weight, known, objective.distill_temperature, mix.divergence)
        state, labels = reader.state(self.states[layer], mask, layout), batch.tokens.labels[mask]
        kind = objective.token_losses.get(layer)
        term = linear_cross_entropy(state, reader.unembedding, labels, kind, teacher, mix.target, reader.shard)
        self.sums.add(layer, term, mask.sum())
        self.sums.predictions.add(layer, mask, term.predicted)
        loss = self.factor * mix.factor * term.loss
        del term, state, teacher
        yield loss

    def spread(self) -> Iterator[Tensor]:
        """The penalty on the spread of exit depths, if there is one and all early exits are among the states."""
        objective, batch, final = self.objective, self.batch, self.objective.final_layer
        early = objective.layers[:-1]
        if objective.depth_spread is None or not early or not all(layer in self.states for layer in early):
            return
        positions = batch.tokens.generated_positions()
        mask = (positions >= 0) & batch.trained(final)
        read = [(self.readers[e], self.readers[e].state(self.states[e], mask, self.layout)) for e in early]
        sure = torch.stack([linear_max_probability(state, reader.unembedding, reader.shard) for reader, state in read])
        spread = objective.depth_spread(sure, early, final, positions[mask])
        self.sums.add_spread(spread)
        yield self.factor * objective.depth_spread.weight / float(self.counts[-1].clamp(min=1)) * spread
