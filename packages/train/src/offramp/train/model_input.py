"""What decoder layers of either family are run on: embedded tokens, and how they lie.

Legend: B batch, T time (of targets for an encoder-decoder model), M source tokens, D model.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from offramp.common.model.layout import BatchLayout
from offramp.common.model.multi_exit import MultiExitDecoder
from offramp.common.t5.layout import Encoded, TargetLayout
from offramp.common.t5.model import MultiExitT5
from offramp.train.data.batch import PairBatch
from offramp.train.losses import MicroBatch


def enter(model: MultiExitDecoder[Any, Any], batch: MicroBatch) -> tuple[Tensor, BatchLayout]:
    """States [B, T, D] before the first decoder layer, and the layout; an encoder is run for it."""
    h = model.embed(batch.tokens.input_ids)
    if not isinstance(model, MultiExitT5):
        return h, batch.layout(model.config)
    assert isinstance(batch.tokens, PairBatch)
    encoded = model.encode(batch.tokens.source_ids, batch.tokens.source_segment_ids)
    return h, target_layout(model, encoded, batch)


def target_layout(model: Any, encoded: Encoded, batch: MicroBatch) -> TargetLayout:
    """How targets lie.

    Args:
        model: or a stage of it, with the decoder's `relative_attention_bias`.
        encoded: states [B, M, D] of the sources.
        batch: the pairs.
    """
    tokens, bias = batch.tokens, model.relative_attention_bias
    time = tokens.input_ids.shape[1]
    return TargetLayout.build(bias, encoded, time, tokens.segment_ids, batch.exit_depths, batch.skipped_layers)
