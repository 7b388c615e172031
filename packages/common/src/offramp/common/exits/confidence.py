"""How sure is an exit? Each measure maps a row to one number; larger is surer, 1 is certain.

Computed in fp32 on raw logits, whatever the model's dtype. A row with NaN gets NaN, which no threshold is below, so NaN
never lets a token leave.

Legend: N packed tokens, D model, V vocabulary (or a shortlist of it).
"""

from __future__ import annotations

import math

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


def confidence(measure: Measure, logits: Tensor | None, state: Tensor, previous: Tensor) -> Tensor:
    """Apply a measure by name: [N].

    Args:
        measure: its name.
        logits: [N, V]; `cosine` does not need them and accepts None.
        state: [N, D] after the exit layer.
        previous: [N, D] after the layer before.
    """
    if measure == "cosine":
        return cosine(state, previous)
    if logits is None:
        raise ValueError(f"the measure {measure!r} is computed on logits")
    return {"max_probability": max_probability, "margin": margin, "entropy": entropy}[measure](logits)
