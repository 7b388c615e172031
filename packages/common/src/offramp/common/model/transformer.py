"""The decoder-only multi-exit Transformer of the Llama family.

Legend: B batch, T time, D model, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from offramp.common.exits.config import ExitConfig
from offramp.common.model.attention import Layout
from offramp.common.model.block import Block
from offramp.common.model.config import ModelConfig
from offramp.common.model.multi_exit import MultiExitDecoder, MultiExitOutput


class MultiExitTransformer(MultiExitDecoder[ModelConfig, Layout]):
    """A Llama-family model with early exits; parameter names are Hugging Face's without `model.`."""

    def __init__(self, config: ModelConfig, exits: ExitConfig | None = None) -> None:
        super().__init__(config, exits, lambda: Block(config))

    def layout(self, input_ids: Tensor, segment_ids: Tensor | None = None, exit_depths: Tensor | None = None) -> Layout:
        """`Layout.build` for this model."""
        return Layout.build(self.config, input_ids, segment_ids, exit_depths)

    def forward(
        self, input_ids: Tensor, layout: Layout | None = None, exits: Iterable[int] | None = None
    ) -> MultiExitOutput:
        """Run the whole model.

        Args:
            input_ids: [B, T].
            layout: plain causal if None.
            exits: exit layers to compute logits for; all of them if None.
        """
        return self.run_exits(self.embed(input_ids), layout or self.layout(input_ids), exits)
