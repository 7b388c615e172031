"""What trains the exits' classifiers, and how good they are (CALM, section 3.5 and its appendix). No framework in here.

A classifier says from the state at its exit how likely it is that the exit says what the final exit would say: its
label. Two objectives:

- `independent`: each classifier's binary cross-entropy, the two classes weighted so that they count the same. CALM
  found it the better one.
- `geometric`: the decisions of one token are taken one after the other. It leaves at exit e with the probability
  M_e prod_(j<e) (1 - M_j), and at the final exit with what is left; the loss is minus the log of the probability that
  it leaves at the first exit that agrees. An exit is thus judged on tokens at which none before it agreed. (CALM has a
  classifier at the final exit too, and normalises; here nobody asks whether to leave there.)

Legend: N tokens, X early exits.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

ClassifierObjective = Literal["independent", "geometric"]


def classifier_losses(logits: Tensor, agrees: Tensor, objective: ClassifierObjective, shares: Tensor) -> Tensor:
    """The part of each classifier in the loss, in nats per token: [X].

    Args:
        logits: [N, X] of leaving.
        agrees: [N, X] bool, the labels.
        objective: see the module.
        shares: [X] how often the label is true in all data, for `independent`.
    """
    losses = F.binary_cross_entropy_with_logits(logits, agrees.to(logits), reduction="none")
    if objective == "geometric":
        still_in = agrees.cumsum(dim=1) - agrees.long() == 0
        return (losses * still_in).mean(dim=0)
    # As in CALM's code, where a class weighs what the other one's share is; but one half each instead of their product,
    # so that the weight of a token is 1 on average. A class that never occurs has no weight to give.
    weights = torch.where(agrees, 0.5 / shares, 0.5 / (1.0 - shares))
    weights = torch.where((shares > 0.0) & (shares < 1.0), weights, 1.0)
    return (losses * weights).mean(dim=0)


def balanced_accuracy(logits: Tensor, agrees: Tensor) -> float:
    """How often a confidence above one half is right, the mean of both classes; NaN if there is one class only.

    Args:
        logits: [N] of leaving.
        agrees: [N] bool.
    """
    says = logits > 0.0
    return float((says[agrees].double().mean() + (~says[~agrees]).double().mean()) / 2.0)


def area_under_curve(scores: Tensor, agrees: Tensor) -> float:
    """How often a token that agrees is more certain than one that does not (area under the ROC curve).

    Equal scores count one half (Mann and Whitney's U). Chance is 0.5; NaN if there is one class only.

    Args:
        scores: [N].
        agrees: [N] bool.
    """
    _, place, counts = scores.unique(return_inverse=True, return_counts=True)
    ranks = counts.cumsum(0).double() - (counts.double() - 1.0) / 2.0  # the mean rank of equal scores, from 1
    positive, negative = int(agrees.sum()), int((~agrees).sum())
    if not positive or not negative:
        return float("nan")
    return float((ranks[place][agrees].sum() - positive * (positive + 1) / 2.0) / (positive * negative))
