"""What is asked of a row's logits when nothing is drawn and nothing reported: the best token, and how sure it is.

A kernel that multiplies by the unembedding can give these without ever storing the logits.

Legend: N rows, V vocabulary (or a shortlist of it).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class HeadOutput:
    """Four numbers for each row.

    Attributes:
        token_ids: [N] int64 the largest logit's; the lowest on ties.
        best: [N] fp32 the largest logit.
        second: [N] fp32 the second largest logit; equal to `best` on a tie.
        logsumexp: [N] fp32 of all logits.
    """

    token_ids: Tensor
    best: Tensor
    second: Tensor
    logsumexp: Tensor

    @classmethod
    def of(cls, logits: Tensor) -> HeadOutput:
        """From logits [N, V], V at least 2. A row with NaN has NaN as its `best`."""
        logits = logits.float()
        best, token_ids = logits.max(dim=-1)  # the first of equal values; lets a NaN through
        second = logits.topk(2, dim=-1).values[:, 1]
        return cls(token_ids, best, second, logits.logsumexp(dim=-1))

    def renumbered(self, token_ids: Tensor) -> HeadOutput:
        """With the token ids that a shortlist's own numbers stand for."""
        return HeadOutput(token_ids[self.token_ids], self.best, self.second, self.logsumexp)

    @property
    def max_probability(self) -> Tensor:
        """[N] probability of the best token."""
        return (self.best - self.logsumexp).exp()

    @property
    def margin(self) -> Tensor:
        """[N] probability of the best token minus that of the second."""
        return self.max_probability - (self.second - self.logsumexp).exp()
