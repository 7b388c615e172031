"""Cross-entropy of `x @ weight.T` without the logits: a few rows at a time, gradients made along with the loss.

A vocabulary of 50,000 turns 1,000 states of 2 KB into logits of 200 KB each, in fp32, several times over (logits,
log-probabilities, their gradients). Here a chunk of rows goes all the way from state to gradient while it is in the
cache; nothing of the size [N, V] ever exists. The gradient of a sum of cross-entropies is known in closed form,
(softmax - one-hot), so it needs no graph, and the backward pass only scales it.

Legend: N tokens, D model, V vocabulary.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

CHUNK_ROWS = 64
"""Rows whose logits exist at a time: fp32 logits of 50,000 tokens take 13 MB then."""


def linear_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of cross-entropies (nats) of the logits `x @ weight.T`, and the most probable tokens.

    Under autocast the products are computed in its type. Everything else is in fp32, or fp64 if the logits are.

    Args:
        x: [N, D].
        weight: [V, D].
        labels: [N].

    Returns:
        A scalar, and [N] token ids, which have no gradient.
    """
    device = x.device.type
    if not torch.is_grad_enabled():  # inside an autograd function nothing tells
        x, weight = x.detach(), weight.detach()
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, weight = x.to(dtype), weight.to(dtype)
    return cast("tuple[Tensor, Tensor]", _LinearCrossEntropy.apply(x, weight, labels))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        wants_x, wants_weight, _ = ctx.needs_input_grad
        exact = torch.float64 if x.dtype == torch.float64 else torch.float32
        total, predicted = x.new_zeros((), dtype=exact), torch.empty_like(labels)
        grad_x = torch.empty_like(x) if wants_x else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if wants_weight else None
        with torch.autocast(x.device.type, enabled=False):
            for start in range(0, len(x), CHUNK_ROWS):
                rows = slice(start, start + CHUNK_ROWS)
                own, label = x[rows], labels[rows, None]
                log_p = (own @ weight.T).to(exact).log_softmax(dim=-1)
                total -= log_p.gather(1, label).sum()
                torch.argmax(log_p, dim=-1, out=predicted[rows])
                if wants_x or wants_weight:
                    error = log_p.exp_().scatter_add_(1, label, log_p.new_full(label.shape, -1.0)).to(x.dtype)
                    if grad_x is not None:
                        torch.mm(error, weight, out=grad_x[rows])
                    if grad_weight is not None:
                        grad_weight += error.T @ own
        # Summed over thousands of tokens it may be more than fp16 can hold, where the mean is not; so scale it first.
        if grad_weight is not None and weight.dtype != torch.float16:
            grad_weight = grad_weight.to(weight.dtype)
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.mark_non_differentiable(predicted)
        return total, predicted

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_x, grad_weight = ctx.saved_tensors
        scale = grads[0]
        return (
            None if grad_x is None else grad_x * scale.to(grad_x.dtype),
            None if grad_weight is None else grad_weight * scale.to(grad_weight.dtype),
            None,
        )
