"""The vocabulary as one process has it: whole, or a part of it in each of several ranks. No graphs are made here.

Legend: N tokens, V vocabulary (or the part of it), R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from offramp.train.tensor_group import TensorGroup


@dataclass(frozen=True)
class VocabularyShard:
    """The consecutive part of the vocabulary that is this rank's.

    Attributes:
        ranks: that share the vocabulary.
        start: first token of the part.
        stop: one past its last.
        whole: tokens in all parts.
    """

    ranks: TensorGroup
    start: int
    stop: int
    whole: int


def locate(tokens: Tensor, shard: VocabularyShard | None) -> tuple[Tensor, Tensor]:
    """Where tokens of any shape lie in this rank's part, and whether they do (bool); elsewhere the place is 0."""
    if shard is None:
        return tokens, torch.ones_like(tokens, dtype=torch.bool)
    inside = (tokens >= shard.start) & (tokens < shard.stop)
    return torch.where(inside, tokens - shard.start, 0), inside


def log_softmax(logits: Tensor, shard: VocabularyShard | None) -> tuple[Tensor, Tensor]:
    """Log-probabilities over the whole vocabulary, from the logits of this rank's part.

    Args:
        logits: [N, V], fp32 or fp64.
        shard: the part; None is all.

    Returns:
        [N, V] log-probabilities, and [N] the most probable tokens of the whole vocabulary.
    """
    log_p = logits.log_softmax(dim=-1)
    if shard is None:
        return log_p, log_p.argmax(dim=-1)
    largest, place = logits.max(dim=-1)
    # Within the part the most probable token has the log-probability -log sum exp(logits - largest).
    log_sum = -log_p.gather(1, place[:, None])[:, 0]
    # As fp64, which holds token numbers exactly, so that one message is enough.
    own = torch.stack((largest.double(), log_sum.double(), (place + shard.start).double()))
    largest, log_sum, tokens = shard.ranks.gather(own).unbind(dim=1)  # [R, N] each
    peak, winner = largest.max(dim=0)
    whole = (largest - peak + log_sum).logsumexp(dim=0)
    log_p += ((own[0] - peak) + (own[1] - whole)).to(log_p.dtype)[:, None]
    return log_p, tokens.gather(0, winner[None])[0].long()


def largest(values: Tensor, shard: VocabularyShard | None) -> Tensor:
    """[N, V] of this rank's part -> [N] the largest of the whole vocabulary."""
    top = values.amax(dim=-1)
    if shard is not None:
        dist.all_reduce(top, dist.ReduceOp.MAX, group=shard.ranks.group)
    return top
