"""An unembedding that knows a few tokens of the vocabulary only, and speaks of them by their ids in all of it.

Legend: N rows, D model, V vocabulary, S tokens of the shortlist.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from offramp.serve.model.head_output import HeadOutput
from offramp.serve.model.linear import ChosenKernels, PackedLinear


class ShortlistHead(PackedLinear):
    """D -> V by a product with S rows; every other logit is minus infinity."""

    def __init__(
        self,
        unembedding: Tensor,
        shortlist: Sequence[int],
        kernels: ChosenKernels,
        *,
        int8_for: torch.dtype | None = None,
    ) -> None:
        """Gather the rows.

        Args:
            unembedding: [V, D].
            shortlist: S token ids, each once.
            kernels: what is to compute the product.
            int8_for: see `PackedLinear`.
        """
        self._tokens = torch.tensor(shortlist, device=unembedding.device)
        self._vocab_size = len(unembedding)
        super().__init__(unembedding[self._tokens], kernels=kernels, int8_for=int8_for)

    def logits(self, x: Tensor) -> Tensor:
        """Logits [N, V] in fp32."""
        logits = torch.full((len(x), self._vocab_size), -math.inf, device=x.device)
        logits[:, self._tokens] = super().logits(x)
        return logits

    def head(self, x: Tensor) -> HeadOutput:
        """Best tokens of rows [N, D]; on a tie the one that comes first in the shortlist."""
        # Elsewhere `PackedLinear.head` asks for logits, and those of this class are of the whole vocabulary.
        best = super().head(x) if self.kernels == "native" else HeadOutput.of(super().logits(x))
        return HeadOutput(self._tokens[best.token_ids], best.best, best.second, best.logsumexp)
