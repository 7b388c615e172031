"""The backward pass of a micro-batch on one stage, from the top down.

An exit is computed when the layers above it are done: what these kept is gone by then, so its logits and gradients
take the place of activations and do not come on top of them.

Legend: B batch, T time, D model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from offramp.train.pipeline.stages import Cut


def back_propagate(
    output: Tensor,
    gradient: Tensor | None,
    cuts: Mapping[int, Cut],
    losses: Callable[[int], Iterable[Tensor]],
    carried: Iterable[Cut] = (),
) -> None:
    """Add a micro-batch's gradients to those of a stage's parameters and of what it received.

    Args:
        output: [B, T, D] the stage's.
        gradient: [B, T, D] of everything later with respect to `output`; None if nothing comes back.
        cuts: exit layer -> where the graph is cut.
        losses: of the exit after a layer, from the state `Cut.above`.
        carried: what many layers read, whose gradients are complete when all of them are done.
    """
    top: Tensor | None = output
    for layer in sorted(cuts, reverse=True):
        cut = cuts[layer]
        _pass_on(top, gradient)
        gradient = None  # gone before the exit is computed
        for loss in losses(layer):
            back_propagate_loss(loss)
            del loss
        top, gradient = cut.below, cut.above.grad
        if top is not None:
            cut.above.grad = None  # it would outlive its use
    _pass_on(top, gradient)
    for cut in carried:
        _pass_on(cut.below, cut.above.grad)
        cut.above.grad = None


def back_propagate_loss(loss: Tensor) -> None:
    """Add the gradients of a scalar, if it has any."""
    if loss.requires_grad:
        _run(loss, None)


def _pass_on(top: Tensor | None, gradient: Tensor | None) -> None:
    if top is not None and gradient is not None and top.requires_grad:
        _run(top, gradient)


def _run(root: Tensor, gradient: Tensor | None) -> None:
    # Backward passes do not belong in an autocast region; nested, it keeps the outer one's converted weights.
    with torch.autocast(root.device.type, enabled=False):
        torch.autograd.backward([root], [gradient])
