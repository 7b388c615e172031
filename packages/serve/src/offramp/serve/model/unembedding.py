"""What tokens are predicted from: all rows of a matrix, or those of a shortlist, gathered once.

Early exits say their tokens from the shortlist of an exit policy where that is all they may say, and measure how sure
they are over it. The final exit has one in benchmarks (`Engine(shortlist_head=True)`): most of what an early exit saves
at small batches may be the unembedding, so an early-exit engine has to be compared with a full-depth one that predicts
from its shortlist too.

Legend: N rows, D model, V vocabulary, S tokens of the shortlist.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from offramp.serve.model.head_output import HeadOutput
from offramp.serve.model.linear import PackedLinear


class Unembedding:
    """D -> V; outside a shortlist every logit is minus infinity.

    Attributes:
        linear: the product: D -> V, or D -> S.
        tokens: [S] int64, the shortlist, each token once; None: all tokens.
    """

    def __init__(self, linear: PackedLinear, tokens: Tensor | None = None, vocab_size: int | None = None) -> None:
        """Wrap a product.

        Args:
            linear: see there.
            tokens: see there.
            vocab_size: V; None without a shortlist.
        """
        assert (tokens is None) == (vocab_size is None), "a shortlist is one of a vocabulary"
        self.linear, self.tokens = linear, tokens
        self._vocab_size = vocab_size

    def logits(self, x: Tensor) -> Tensor:
        """Logits [N, V] in fp32 of states [N, D]."""
        listed = self.linear.logits(x)
        if self.tokens is None or self._vocab_size is None:
            return listed
        logits = torch.full((len(x), self._vocab_size), -math.inf, device=x.device)
        logits[:, self.tokens] = listed
        return logits

    def head(self, x: Tensor) -> HeadOutput:
        """Best tokens of states [N, D]; on a tie the one that comes first in the shortlist."""
        return self.named(self.linear.head(x))

    def named(self, head: HeadOutput) -> HeadOutput:
        """With token ids for the numbers of logits that `linear` gave."""
        return head if self.tokens is None else head.renumbered(self.tokens)
