"""A stage of a T5: a slice of the encoder, of the decoder, or of both, with all that decoder layers share.

The encoder lies on the first stages. Both sides are embedded on the first stage of all, and go through the pipeline
together as one message [B, M + T, D], sources first: encoder layers change its first part, decoder layers the second,
and read what has become of the first. Its gradient comes back the same way, so that of the encoder's states is summed
over all decoder layers of all stages.

Every stage with decoder layers holds a copy of the decoder's table of relative biases, and each with encoder layers one
of the encoder's; their gradients are summed as those of any parameter that stages share.

Legend: B batch, T time (target), M source tokens, D model, H heads.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from offramp.common.t5.layout import Encoded, source_mask
from offramp.common.t5.model import Encoder, MultiExitT5
from offramp.train.data.batch import PairBatch
from offramp.train.losses import MicroBatch
from offramp.train.model_input import target_layout
from offramp.train.pipeline.stages import Cut, Stage, StageOutput, StagePlan


class EncoderSlice(nn.Module):
    """Some layers of an encoder, under their names there; its norm comes with the last one."""

    def __init__(self, encoder: Encoder, start: int, stop: int) -> None:
        super().__init__()
        self.relative_attention_bias = encoder.relative_attention_bias
        self.layers = nn.ModuleDict({str(layer): encoder.layers[layer] for layer in range(start, stop)})
        self.norm = encoder.norm if stop == len(encoder.layers) else None


class T5Stage(Stage):
    """See the module, and `Stage`."""

    def __init__(self, model: MultiExitT5, plan: StagePlan, index: int, checkpoint_activations: bool = False) -> None:
        super().__init__(model, plan, index, checkpoint_activations)
        start, stop = plan.encoder_bounds[index], plan.encoder_bounds[index + 1]
        self.encoder = EncoderSlice(model.encoder, start, stop) if start < stop else None
        self.relative_attention_bias = model.relative_attention_bias if self.layers else None

    @property
    def trains_backbone(self) -> bool:
        """See `Stage`."""
        own = [part for part in (self.encoder, self.relative_attention_bias) if part is not None]
        return super().trains_backbone or any(p.requires_grad for part in own for p in part.parameters())

    def layout(self, batch: MicroBatch) -> MicroBatch:
        """The pairs themselves: their layout holds the encoder's states, which are not there yet."""
        return batch

    def forward(self, x: Tensor, layout: MicroBatch) -> StageOutput:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Run this stage's layers.

        Args:
            x: [B, M + T, D] states of sources and targets; not read on the first stage.
            layout: see `layout`.

        Returns:
            The states [B, M + T, D], on the last stage those [B, T, D] of targets alone.
        """
        tokens = layout.tokens
        assert isinstance(tokens, PairBatch)
        if self.index == 0:
            assert self.embed_tokens is not None
            # Each with a graph of its own, since both are back-propagated one after the other.
            source, h = self.embed_tokens(tokens.source_ids), self.embed_tokens(tokens.input_ids)
        else:
            length = tokens.source_ids.shape[1]
            source, h = x[:, :length], x[:, length:]
        if self.encoder is not None:
            source = self._encode(self.encoder, source, tokens.source_segment_ids)
        cuts: dict[int, Cut] = {}
        carried: tuple[Cut, ...] = ()
        if self.relative_attention_bias is not None:
            # All decoder layers read both, and are back-propagated in pieces: what these find out is summed first.
            # Part of a message has gaps, and each product would copy it to be rid of them.
            encoded = Cut.of(source.contiguous())
            source = encoded.above
            shared = target_layout(self, Encoded(source, tokens.source_segment_ids), layout)
            bias = Cut.of(shared.self_mask)
            carried = encoded, bias
            h, cuts = self._run_decoder(h, replace(shared, self_mask=bias.above))
        last = self.index == self.plan.num_stages - 1
        return StageOutput(h if last else torch.cat((source, h), dim=1), cuts, carried)

    def _encode(self, encoder: EncoderSlice, h: Tensor, segment_ids: Tensor) -> Tensor:
        mask = source_mask(encoder.relative_attention_bias, h.shape[1], segment_ids)
        for block in encoder.layers.values():
            h = self._run(block, h, mask)
        return h if encoder.norm is None else encoder.norm(h)


def make_stage(model: nn.Module, plan: StagePlan, index: int, checkpoint_activations: bool = False) -> Stage:
    """The stage of a model of either family."""
    kind = T5Stage if isinstance(model, MultiExitT5) else Stage
    return kind(model, plan, index, checkpoint_activations)  # pyright: ignore[reportArgumentType]
