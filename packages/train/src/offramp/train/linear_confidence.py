"""The largest probability of softmax(`x @ weight.T`) without the logits, and its gradient: a few rows at a time.

Legend: N tokens, D model, V vocabulary.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from offramp.train.linear_cross_entropy import CHUNK_ROWS, add_product
from offramp.train.vocabulary import VocabularyShard, largest, locate, log_softmax


def linear_max_probability(x: Tensor, weight: Tensor, shard: VocabularyShard | None = None) -> Tensor:
    """max_v softmax(x @ weight.T)_v for each token: [N], in fp32, or fp64 if the logits are.

    Under autocast the products are computed in its type. The backward pass computes the logits once more.

    Args:
        x: [N, D].
        weight: [V, D].
        shard: the part of the vocabulary that `weight` is of; None is all. `x` is the same on all ranks then.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, weight = x.to(dtype), weight.to(dtype)
    return cast("Tensor", _LinearMaxProbability.apply(x, weight, shard))


class _LinearMaxProbability(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, shard: VocabularyShard | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.shard = shard
        out = x.new_empty(len(x), dtype=_exact(x))
        with torch.autocast(x.device.type, enabled=False):
            for rows in _chunks(x):
                logits = (x[rows] @ weight.T).to(out.dtype)
                log_p, _ = log_softmax(logits, shard)
                out[rows] = largest(log_p, shard).exp()
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, _ = ctx.needs_input_grad
        grad_x = torch.empty_like(x) if wants_x else None
        grad_weight = torch.zeros_like(weight, dtype=_exact(x)) if wants_weight else None
        with torch.autocast(x.device.type, enabled=False):
            for rows in _chunks(x):
                own = x[rows]
                log_p, best = log_softmax((own @ weight.T).to(_exact(x)), ctx.shard)
                place, here = locate(best[:, None], ctx.shard)
                # d p_best / d z = p_best * (one-hot(best) - p)
                factor = largest(log_p, ctx.shard).exp()[:, None] * grads[0][rows, None]
                error = log_p.exp_().mul_(-factor).scatter_add_(1, place, factor * here).to(x.dtype)
                if grad_x is not None:
                    torch.mm(error, weight, out=grad_x[rows])
                if grad_weight is not None:
                    add_product(grad_weight, error, own)
        if ctx.shard is not None and grad_x is not None:
            ctx.shard.ranks.sum_(grad_x)
        return grad_x, None if grad_weight is None else grad_weight.to(weight.dtype), None


def _exact(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _chunks(x: Tensor) -> list[slice]:
    return [slice(start, start + CHUNK_ROWS) for start in range(0, len(x), CHUNK_ROWS)]
