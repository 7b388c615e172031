"""What multi-exit training minimises, and what it reports: sums over tokens, exit by exit. No framework in here.

With w_e the weight of exit e, T_e its trained tokens in the whole global batch (all micro-batches of all data-parallel
ranks) and d the share of distillation,

    L = sum_e w_e * [(1 - d) / |T_e| * sum_{t in T_e} CE(z_e,t , y_t) + d / |T_L| * sum_{t in T_L} KL(z_L,t || z_e,t)]

and the final exit L has d = 0. Every part of a batch therefore computes plain sums and divides by counts that are known
before the first forward pass, so it does not matter how the batch is cut up.

Legend: B batch, T time, N selected tokens, D model, V vocabulary, X exits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offramp.common.errors import OfframpError
from offramp.common.model.attention import Layout
from offramp.common.model.exit_head import ExitHead
from offramp.common.model.transformer import MultiExitTransformer
from offramp.train.agreement import Predictions
from offramp.train.data.batch import IGNORED_LABEL, TokenBatch
from offramp.train.linear_cross_entropy import linear_cross_entropy


class MicroBatch(NamedTuple):
    """Rows that go through the model together.

    Attributes:
        tokens: the rows.
        exit_depths: [B, T] layers after which a token's state is frozen (fill-aware training), or None.
    """

    tokens: TokenBatch
    exit_depths: Tensor | None = None

    def split(self, parts: int) -> list[MicroBatch]:
        """Cut into at most `parts` micro-batches whose numbers of rows differ by one at most."""
        rows, parts = self.tokens.num_rows, min(parts, self.tokens.num_rows)
        edges = [rows * part // parts for part in range(parts + 1)]
        depths = self.exit_depths
        return [MicroBatch(self.tokens.rows(a, b), None if depths is None else depths[a:b]) for a, b in pairwise(edges)]

    def trained(self, exit_layer: int) -> Tensor:
        """[B, T] bool: the tokens that the exit after `exit_layer` is trained on.

        A token frozen below an exit never reaches it when serving, so that exit learns nothing from it.
        """
        mask = self.tokens.labels != IGNORED_LABEL
        return mask if self.exit_depths is None else mask & (self.exit_depths >= exit_layer)


@dataclass(frozen=True)
class Objective:
    """Weights of the exits.

    Attributes:
        weights: exit layer -> weight, the final exit last.
        distill: d above, in [0, 1].
    """

    weights: Mapping[int, float]
    distill: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.distill <= 1.0:
            raise OfframpError(f"distill is {self.distill}; it must lie between 0 and 1.")
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
        """Layers that have to run: up to the deepest exit with a weight, or all for the teacher of distillation."""
        return self.final_layer if self.distill > 0.0 else self.deepest

    @property
    def trained_layers(self) -> tuple[int, ...]:
        """Exit layers up to `depth`."""
        return tuple(layer for layer in self.layers if layer <= self.depth)

    def counts(self, batch: MicroBatch) -> Tensor:
        """[X] float64: trained tokens of each exit."""
        return torch.stack([batch.trained(layer).sum() for layer in self.layers]).double()

    def loss(self, layer: int, sums: ExitTerm, counts: Tensor) -> Tensor:
        """One exit's share of L (a scalar) from its sums over some tokens and everyone's `counts` [X].

        Exits without tokens have sums of zero; dividing them by one keeps the loss finite.
        """
        index = self.layers.index(layer)
        share = self.distill if layer != self.final_layer else 0.0
        loss = (1.0 - share) * sums.cross_entropy / float(counts[index].clamp(min=1))
        if share > 0.0:
            loss = loss + share * sums.divergence / float(counts[-1].clamp(min=1))
        return self.weights[layer] * loss


class ExitTerm(NamedTuple):
    """Sums over the N trained tokens of one exit, each a scalar, and what the exit says.

    Attributes:
        cross_entropy: in nats.
        divergence: Kullback-Leibler divergence to the final exit in nats; zero without distillation.
        correct: tokens whose label is the most probable one.
        predicted: [N] the most probable tokens.
    """

    cross_entropy: Tensor
    divergence: Tensor
    correct: Tensor
    predicted: Tensor


class ExitSums:
    """Running sums for reports: plain numbers, added up over micro-batches, then over ranks.

    Attributes:
        layers: exit layers, the final one last.
        values: [6, X] float64: cross-entropy, divergence, correct tokens, trained tokens; then tokens where the exit
            agrees with the final one, and those where both were asked.
        predictions: what the exits said since the last `compare`.
    """

    def __init__(self, layers: tuple[int, ...], device: torch.device, values: Tensor | None = None) -> None:
        self.layers = layers
        self.values = torch.zeros(6, len(layers), dtype=torch.float64, device=device) if values is None else values
        self.predictions = Predictions()

    def add(self, layer: int, term: ExitTerm, count: Tensor) -> None:
        """Add one exit's sums over `count` trained tokens."""
        column = [value.detach().to(self.values) for value in (*term[:3], count)]
        self.values[:4, self.layers.index(layer)] += torch.stack(column)

    def compare(self, final: Tensor | None) -> None:
        """Count agreement with the final exit, and forget the predictions.

        Args:
            final: [P] what the final exit says at every position since the last time; None if it was not run.
        """
        self.values[4:] += self.predictions.compare(self.layers, final).to(self.values)
        self.predictions = Predictions()

    def report(self, objective: Objective) -> dict[str, float]:
        """Metrics by name, without a prefix: `loss`, then `loss_exit_06` and `accuracy_exit_06` for each exit.

        Early exits have `agreement_exit_06`, too, where the final exit was run: the share of tokens at which they say
        the same.

        Exit losses are cross-entropies in nats per trained token; `loss` is the objective L. An exit without a weight
        that saw no token (see `Objective.trained_layers`) has no metrics.
        """
        counts = self.values[3]
        means = (self.values / counts.clamp(min=1)).T.tolist()
        known = {
            f"{layer:02d}": mean
            for layer, mean, count in zip(self.layers, means, counts.tolist(), strict=True)
            if count > 0 or objective.weights[layer] > 0
        }
        nobody = counts.new_empty(0)
        total = sum(
            float(objective.loss(layer, ExitTerm(*self.values[:3, index].unbind(), nobody), counts))
            for index, layer in enumerate(self.layers)
        )
        return {
            "loss": total,
            **{f"loss_exit_{name}": loss for name, (loss, *_) in known.items()},
            **{f"accuracy_exit_{name}": accuracy for name, (_, _, accuracy, *_) in known.items()},
            **{
                f"agreement_exit_{layer:02d}": agreeing / asked
                for layer, agreeing, asked in zip(self.layers[:-1], *self.values[4:, :-1].tolist(), strict=True)
                if asked > 0
            },
        }


@dataclass(frozen=True)
class ExitReader:
    """Turns states after an exit layer into logits, for selected tokens only.

    Attributes:
        head: the exit's own modules; None at the final exit.
        norm: the model's final norm where the exit shares it.
        unembedding: [V, D].
    """

    head: ExitHead | None
    norm: nn.Module | None
    unembedding: Tensor

    def state(self, h: Tensor, mask: Tensor, layout: Layout) -> Tensor:
        """[B, T, D] states, [B, T] mask of N tokens -> [N, D] as the unembedding reads them.

        Prompts and padding never meet the vocabulary.
        """
        if self.head is not None and self.head.block is not None:
            x = self.head.transform(h, layout)[mask]  # attends over the sequence, so it needs all of it
        else:
            x = h[mask]
            x = x if self.head is None else self.head.transform(x)
        return x if self.norm is None else self.norm(x)

    def __call__(self, h: Tensor, mask: Tensor, layout: Layout) -> Tensor:
        """As `state`, but logits [N, V]."""
        return F.linear(self.state(h, mask, layout), self.unembedding)


def exit_reader(model: MultiExitTransformer, layer: int) -> ExitReader:
    """The reader of an exit of a whole model."""
    if layer == model.config.num_layers:
        return ExitReader(None, model.norm, model.unembedding())
    head = model.exits[str(layer)]
    assert isinstance(head, ExitHead)
    return ExitReader(head, model.norm if model.exit_config.head == "final" else None, model.unembedding(layer))


def exit_term(logits: Tensor, labels: Tensor, teacher: Tensor | None = None, known: Tensor | None = None) -> ExitTerm:
    """Sums of one exit over N tokens, in fp32 whatever the logits are.

    Args:
        logits: [N, V].
        labels: [N].
        teacher: [M, V] logits of the final exit, without gradient, for distillation.
        known: [N] bool, the M of the N tokens that the teacher saw (not frozen below it).
    """
    log_p = logits.float().log_softmax(dim=-1)
    divergence = log_p.new_zeros(())
    if teacher is not None:
        student = log_p if known is None else log_p[known]
        divergence = F.kl_div(student, teacher.float().log_softmax(dim=-1), reduction="sum", log_target=True)
    cross_entropy = F.nll_loss(log_p, labels, reduction="sum")
    # Not on the logits themselves: argmax over bf16 is several times slower on CPU.
    predicted = log_p.argmax(dim=-1)
    return ExitTerm(cross_entropy, divergence, (predicted == labels).sum(), predicted)


def exit_losses(
    objective: Objective,
    readers: Mapping[int, ExitReader],
    states: Mapping[int, Tensor],
    batch: MicroBatch,
    layout: Layout,
    counts: Tensor,
    sums: ExitSums,
) -> Iterator[Tensor]:
    """The shares of L (scalars with a graph) of the exits in `states`, one at a time.

    The caller may back-propagate each share before it asks for the next, so that the logits of one exit at a time are
    alive. With distillation the final exit must be among the states.

    Args:
        objective: weights.
        readers: of each exit in `states`.
        states: exit layer -> [B, T, D].
        batch: labels and depths.
        layout: of the batch.
        counts: [X] trained tokens in the whole global batch.
        sums: is added to.
    """
    labels, final = batch.tokens.labels, objective.final_layer
    distilled = objective.distill > 0.0 and len(states) > 1
    teacher = None
    # The teacher goes first. It is detached rather than made without gradient, since autocast would then hand its
    # weight, cast without a graph, to the students that share it.
    for layer in sorted(states, key=lambda layer: distilled and layer != final):
        mask, reader = batch.trained(layer), readers[layer]
        if distilled:
            logits = reader(states[layer], mask, layout)
            known = None if batch.exit_depths is None else batch.trained(final)[mask]
            term = exit_term(logits, labels[mask], None if layer == final else teacher, known)
            if layer == final:
                teacher = logits.detach()
            del logits
        else:
            state = reader.state(states[layer], mask, layout)
            cross_entropy, predicted = linear_cross_entropy(state, reader.unembedding, labels[mask])
            correct = (predicted == labels[mask]).sum()
            term = ExitTerm(cross_entropy, cross_entropy.new_zeros(()), correct, predicted)
            del state
        sums.add(layer, term, mask.sum())
        sums.predictions.add(layer, mask, term.predicted)
        loss = objective.loss(layer, term, counts)
        del term
        yield loss
        del loss
