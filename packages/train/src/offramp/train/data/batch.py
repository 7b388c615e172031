"""What the data side hands to the training side: one batch of token rows.

Legend: B batch (rows), T time (positions in a row, of targets for an encoder-decoder model), M source tokens of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

IGNORED_LABEL = -100
"""The label of a position that is not trained on (PyTorch's and Hugging Face's convention)."""


class TokenBatch(NamedTuple):
    """Rows of packed or padded examples, all of one length.

    A named tuple and not a dataclass: Lightning, DeepSpeed and `torch.distributed` all walk tuples of tensors when
    they move, split or send a batch.

    Attributes:
        input_ids: [B, T] int64.
        labels: [B, T] int64, already shifted: `labels[b, t]` is the token that `input_ids[b, t]` should predict,
            `IGNORED_LABEL` where nothing is trained.
        segment_ids: [B, T] int64: 0, 1, ... for the examples packed in a row, in order. Padding forms the last
            segment of its row, so that every position can attend at least to itself and no attention row is empty.
            Positions restart at 0 in every segment.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    segment_ids: torch.Tensor

    @property
    def num_rows(self) -> int:
        """B, the number of rows."""
        return self.input_ids.shape[0]

    @property
    def row_length(self) -> int:
        """T, positions of a row."""
        return self.input_ids.shape[1]

    def num_trained_tokens(self) -> torch.Tensor:
        """The number of positions with a label, as a scalar int64 tensor."""
        return (self.labels != IGNORED_LABEL).sum()

    def rows(self, start: int, stop: int) -> TokenBatch:
        """Rows `start` up to `stop`: a micro-batch."""
        return TokenBatch(*(tensor[start:stop] for tensor in self))

    def generated(self) -> torch.Tensor:
        """[B, T] bool: input tokens that a served model would have generated.

        Those are the tokens with a label whose predecessor in the same segment has one too: the last prompt token also
        predicts a target.
        """
        labelled = self.labels != IGNORED_LABEL
        generated = torch.zeros_like(labelled)
        same_segment = self.segment_ids[:, 1:] == self.segment_ids[:, :-1]
        generated[:, 1:] = labelled[:, 1:] & labelled[:, :-1] & same_segment
        return generated

    def generated_positions(self) -> torch.Tensor:
        """[B, T]: how many tokens of its segment were generated before this one; -1 where none was generated."""
        mask = self.generated()
        starts = torch.ones_like(mask)
        starts[:, 1:] = self.segment_ids[:, 1:] != self.segment_ids[:, :-1]
        done = mask.cumsum(dim=1)  # this one included
        before = torch.where(starts, done - mask.long(), 0).cummax(dim=1).values
        return torch.where(mask, done - before - 1, -1)


class PairBatch(NamedTuple):
    """Rows of sources and their targets, for an encoder-decoder model.

    Attributes:
        source_ids: [B, M] int64: what the encoder reads.
        source_segment_ids: [B, M] int64: 1, 2, ... for the pairs packed in a row, in order; 0 is padding.
        input_ids: [B, T] int64: what the decoder reads: labels shifted right, the model's start token before the first
            of each target.
        labels: [B, T] int64: targets, `IGNORED_LABEL` on padding.
        segment_ids: [B, T] int64: as those of sources. A target sees the source of its own segment alone.
    """

    source_ids: torch.Tensor
    source_segment_ids: torch.Tensor
    input_ids: torch.Tensor
    labels: torch.Tensor
    segment_ids: torch.Tensor

    @property
    def targets(self) -> TokenBatch:
        """The targets alone."""
        return TokenBatch(self.input_ids, self.labels, self.segment_ids)

    @property
    def num_rows(self) -> int:
        """B, the number of rows."""
        return self.input_ids.shape[0]

    @property
    def row_length(self) -> int:
        """M + T, positions of a row."""
        return self.source_ids.shape[1] + self.input_ids.shape[1]

    def num_trained_tokens(self) -> torch.Tensor:
        """See `TokenBatch`."""
        return self.targets.num_trained_tokens()

    def rows(self, start: int, stop: int) -> PairBatch:
        """Rows `start` up to `stop`: a micro-batch."""
        return PairBatch(*(tensor[start:stop] for tensor in self))

    def generated(self) -> torch.Tensor:
        """[B, T] bool, see `TokenBatch`; the start token is not generated."""
        return self.targets.generated()

    def generated_positions(self) -> torch.Tensor:
        """[B, T], see `TokenBatch`."""
        return self.targets.generated_positions()


AnyBatch = TokenBatch | PairBatch
"""Of a model of either family."""
