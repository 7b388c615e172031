"""The loss of an exit from `x @ weight.T` without the logits: a few rows at a time, gradients made along with the loss.

A vocabulary of 50,000 turns 1,000 states of 2 KB into logits of 200 KB each, in fp32, several times over (logits,
log-probabilities, their gradients). Here a chunk of rows goes all the way from state to gradient while it is in the
cache; nothing of the size [N, V] ever exists. The gradient of a sum of cross-entropies is known in closed form,
(softmax - target), so it needs no graph, and the backward pass only scales it. The teacher of a distillation is
computed anew for each of its students, chunk by chunk, so that its logits do not exist either.

Where ranks share the vocabulary, each does its part of every chunk: sums over tokens of the vocabulary are partial
until the end, and ranks exchange three numbers for each row.

Legend: N tokens, D model, V vocabulary (or the part of it that is this rank's).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offramp.train.vocabulary import VocabularyShard, largest, locate, log_softmax

CHUNK_ROWS = 64
"""Rows whose logits exist at a time: fp32 logits of 50,000 tokens take 13 MB then."""

PRODUCT_ROWS = 2048
"""Tokens of the vocabulary whose gradients are made at a time where they are converted: they fit into a cache."""


@dataclass(frozen=True)
class TokenLoss:
    """What one token costs.

    From its logits z and its label y, with p = softmax(z / temperature):

        c * [(1 - smoothing) * -log p_y + smoothing * mean_v (-log p_v)]

    Attributes:
        temperature: above 1 softens p, so that the exit learns sharper logits; serving does not divide by it.
        smoothing: share of the target that is spread over the whole vocabulary.
        by_confidence: c = max_v softmax(z)_v, a constant for the gradient (EE-Tuning); otherwise c = 1.
    """

    temperature: float = 1.0
    smoothing: float = 0.0
    by_confidence: bool = False


class Teacher(NamedTuple):
    """The final exit as it teaches an early one, by scale * T^2 * KL(softmax(z_teacher / T) || softmax(z / T)).

    z are the logits of `TokenLoss`, divided by its temperature.

    Attributes:
        state: [N, D] as its unembedding reads it, without gradient.
        weight: [V, D].
        known: [N] bool: tokens that it saw; None is all of them.
        temperature: T; the factor T^2 keeps gradients of the same size (Hinton et al., 2015).
        scale: factor on the divergence.
    """

    state: Tensor
    weight: Tensor
    known: Tensor | None = None
    temperature: float = 1.0
    scale: float = 1.0


class TokenSums(NamedTuple):
    """Sums over N tokens, each a scalar, and what the exit says; only `loss` has a gradient.

    Attributes:
        loss: scale * target + teacher.scale * divergence.
        target: of `TokenLoss`, in nats.
        cross_entropy: of the plain logits with the labels, in nats.
        divergence: T^2 times the Kullback-Leibler divergence to the teacher, in nats; zero without one.
        correct: tokens whose label is the most probable one.
        predicted: [N] the most probable tokens.
    """

    loss: Tensor
    target: Tensor
    cross_entropy: Tensor
    divergence: Tensor
    correct: Tensor
    predicted: Tensor


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    kind: TokenLoss | None = None,
    teacher: Teacher | None = None,
    scale: float = 1.0,
    shard: VocabularyShard | None = None,
) -> TokenSums:
    """Sums over tokens with logits `x @ weight.T`.

    Under autocast the products are computed in its type. Everything else is in fp32, or fp64 if the logits are.

    Args:
        x: [N, D].
        weight: [V, D].
        labels: [N] in the whole vocabulary.
        kind: of the loss; plain cross-entropy if None.
        teacher: to distil from.
        scale: factor on the loss of the labels.
        shard: the part of the vocabulary that weights are of; None is all. Everything else is the same on all ranks,
            and so is what comes back.
    """
    device = x.device.type
    if not torch.is_grad_enabled():  # inside an autograd function nothing tells
        x, weight = x.detach(), weight.detach()
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, weight = x.to(dtype), weight.to(dtype)
        if teacher is not None:
            teacher = teacher._replace(state=teacher.state.to(dtype), weight=teacher.weight.to(dtype))
    return TokenSums(*_LinearCrossEntropy.apply(x, weight, labels, kind or TokenLoss(), teacher, scale, shard))


def add_product(total: Tensor, error: Tensor, x: Tensor) -> None:
    """Add `error.T @ x` to `total`, which may be of a wider type, without a product of its size beside it.

    Args:
        total: [V, D].
        error: [n, V].
        x: [n, D].
    """
    if total.dtype == error.dtype:
        total.addmm_(error.T, x)
        return
    step = PRODUCT_ROWS if total.device.type == "cpu" else len(total)  # devices would rather have one large product
    for start in range(0, len(total), step):
        total[start : start + step] += error[:, start : start + step].T @ x


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        kind: TokenLoss,
        teacher: Teacher | None,
        scale: float,
        shard: VocabularyShard | None,
    ) -> tuple[Tensor, ...]:
        wants_x, wants_weight, *_ = ctx.needs_input_grad
        exact = torch.float64 if x.dtype == torch.float64 else torch.float32
        totals = x.new_zeros(3, dtype=exact)
        target, plain, divergence = totals.unbind()
        predicted = torch.empty_like(labels)
        grad_x = torch.empty_like(x) if wants_x else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if wants_weight else None

        def run(rows: slice) -> None:  # a function, so that these logits are gone before the next are made
            own = x[rows]
            chunk = _Chunk((own @ weight.T).to(exact), labels[rows, None], kind, shard)
            target.add_(chunk.losses.sum())
            plain.add_(chunk.cross_entropies.sum())
            predicted[rows] = chunk.best
            lesson = None
            if teacher is not None:
                taught = (teacher.state[rows] @ teacher.weight.T).to(exact)
                known = None if teacher.known is None else teacher.known[rows, None]
                value, lesson = chunk.divergence(taught, known, teacher.temperature)
                divergence.add_(value)
            if not (wants_x or wants_weight):
                return
            error = chunk.error().mul_(scale)
            if lesson is not None and teacher is not None:
                error.add_(lesson, alpha=teacher.scale)
            error = error.to(x.dtype)
            if grad_x is not None:
                torch.mm(error, weight, out=grad_x[rows])
            if grad_weight is not None:
                add_product(grad_weight, error, own)

        with torch.autocast(x.device.type, enabled=False):
            step = CHUNK_ROWS if shard is None else CHUNK_ROWS * shard.ranks.size
            for start in range(0, len(x), step):
                run(slice(start, start + step))
            if shard is not None:
                shard.ranks.sum_(totals)
                if grad_x is not None:
                    shard.ranks.sum_(grad_x)
        # Summed over thousands of tokens it may be more than fp16 can hold, where the mean is not; so scale it first.
        if grad_weight is not None and weight.dtype != torch.float16:
            grad_weight = grad_weight.to(weight.dtype)
        ctx.save_for_backward(grad_x, grad_weight)
        loss = scale * target + (0.0 if teacher is None else teacher.scale) * divergence
        sums = (target.clone(), plain.clone(), divergence.clone(), (predicted == labels).sum(), predicted)
        ctx.mark_non_differentiable(*sums)
        return loss, *sums

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_x, grad_weight = ctx.saved_tensors
        scale = grads[0]
        return (
            None if grad_x is None else grad_x * scale.to(grad_x.dtype),
            None if grad_weight is None else grad_weight * scale.to(grad_weight.dtype),
            *(None,) * 5,
        )


class _Chunk:
    """Some rows: their losses, and the gradients of these with respect to their logits [n, V].

    Where ranks share the vocabulary, `losses`, `cross_entropies` and `divergence` are this rank's terms of sums.
    """

    def __init__(self, logits: Tensor, label: Tensor, kind: TokenLoss, shard: VocabularyShard | None) -> None:
        self.logits, self.kind, self.shard = logits, kind, shard
        self.place, here = locate(label, shard)
        self.here = here.to(logits.dtype)
        self.size = logits.shape[1] if shard is None else shard.whole
        warm = kind.temperature != 1.0
        self.log_p, self.best = log_softmax(logits / kind.temperature if warm else logits, shard)
        plain = log_softmax(logits, shard)[0] if warm else self.log_p
        self.losses = self._minus_label(self.log_p)
        self.cross_entropies = self._minus_label(plain) if warm else self.losses
        if kind.smoothing:
            self.losses = (1.0 - kind.smoothing) * self.losses - kind.smoothing / self.size * self.log_p.sum(dim=-1)
        self.certainty = None
        if kind.by_confidence:
            self.certainty = largest(plain, shard).exp()
            self.losses = self.losses * self.certainty

    def _minus_label(self, log_p: Tensor) -> Tensor:
        return -(log_p.gather(1, self.place) * self.here)[:, 0]

    def divergence(self, taught: Tensor, known: Tensor | None, temperature: float) -> tuple[Tensor, Tensor]:
        """T^2 KL(teacher || student), summed, and its gradient [n, V].

        Args:
            taught: [n, V] the teacher's logits.
            known: [n, 1] bool.
            temperature: T.
        """
        student, _ = log_softmax(self.logits / (self.kind.temperature * temperature), self.shard)
        taught, _ = log_softmax(taught / temperature, self.shard)
        p = taught.exp()
        values = (p * (taught - student)).sum(dim=-1, keepdim=True)
        gradient = student.exp_().sub_(p).mul_(temperature / self.kind.temperature)
        if known is not None:
            values, gradient = values * known, gradient.mul_(known)
        return temperature**2 * values.sum(), gradient

    def error(self) -> Tensor:
        """Gradient [n, V] of the summed losses; takes the place of the log-probabilities."""
        smoothing = self.kind.smoothing
        error = self.log_p.exp_().scatter_add_(1, self.place, (smoothing - 1.0) * self.here)
        if smoothing:
            error.sub_(smoothing / self.size)
        if self.certainty is not None:
            error.mul_(self.certainty[:, None])
        return error if self.kind.temperature == 1.0 else error.div_(self.kind.temperature)
