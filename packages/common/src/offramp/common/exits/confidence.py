"""How sure is an exit? Each measure maps a row to one number; larger is surer, 1 is certain.

Computed in fp32 on raw logits, whatever the model's dtype. A row with NaN gets NaN, which no threshold is below, so NaN
never lets a token leave.

Legend: N packed tokens, D model, V vocabulary (or a shortlist of it).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from offramp.common.exits.policy import Measure


def max_probability(logits: Tensor) -> Tensor:
    """Largest softmax probability (EE-LLM; CALM's softmax response): [N, V] -> [N]."""
    return logits.float().softmax(dim=-1).amax(dim=-1)


def margin(logits: Tensor) -> Tensor:
    """Largest minus second largest softmax probability (CALM, section 3.4): [N, V] -> [N]."""
    top = logits.float().softmax(dim=-1).topk(2, dim=-1).values
    return top[..., 0] - top[..., 1]


def entropy(logits: Tensor) -> Tensor:
    """One minus the entropy as a share of its maximum, log V: [N, V] -> [N]."""
    # entr(0) is 0, so a masked token (a logit of -inf) counts as impossible rather than as NaN.
    return 1.0 - torch.special.entr(logits.float().softmax(dim=-1)).sum(dim=-1) / math.log(logits.shape[-1])


def cosine(state: Tensor, previous: Tensor) -> Tensor:
    """Cosine between the states after the exit layer and the layer before it (CALM's saturation): [N, D] x2 -> [N]."""
    # Rounding can push the cosine of near-equal states above 1, where it would pass a threshold that means "never".
    return F.cosine_similarity(state.float(), previous.float(), dim=-1).clamp(max=1.0)


def classifier(state: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """What a linear classifier makes of the state (CALM, section 3.5): [N, D], [D], [1] -> [N]."""
    # In what order torch adds depends on the rows beside. In fp64 that is lost when the sum is rounded to fp32.
    return ((state.double() * weight).sum(dim=-1) + bias).float().sigmoid()


def confidence(
    measure: Measure,
    logits: Tensor | None,
    state: Tensor,
    previous: Tensor,
    exit_classifier: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Apply a measure by name: [N].

    Args:
        measure: its name.
        logits: [N, V]; measures of states (`STATE_MEASURES`) do not need them and accept None.
        state: [N, D] after the exit layer.
        previous: [N, D] after the layer before.
        exit_classifier: that of the exit, [N, D] -> [N]; `classifier` needs it.
    """
    if measure == "cosine":
        return cosine(state, previous)
    if measure == "classifier":
        if exit_classifier is None:
            raise ValueError("the measure 'classifier' is what a classifier of the exit says")
        return exit_classifier(state)
    if logits is None:
        raise ValueError(f"the measure {measure!r} is computed on logits")
    return {"max_probability": max_probability, "margin": margin, "entropy": entropy}[measure](logits)
