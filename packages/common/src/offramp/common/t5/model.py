"""The multi-exit T5: an encoder that always runs whole, and a decoder that may be left early.

Legend: B batch, T time (target), M source tokens, D model, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from offramp.common.exits.config import ExitConfig
from offramp.common.model.multi_exit import MultiExitDecoder, MultiExitOutput
from offramp.common.model.norm import RMSNorm
from offramp.common.t5.attention import RelativeAttentionBias
from offramp.common.t5.block import DecoderBlock, EncoderBlock
from offramp.common.t5.config import T5Config
from offramp.common.t5.layout import Encoded, KeyValueCache, TargetLayout, source_mask


class Encoder(nn.Module):
    """Layers over the source, each token seeing all others; the embedding is the decoder's."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.relative_attention_bias = RelativeAttentionBias(config, both_ways=True)
        self.layers = nn.ModuleList(EncoderBlock(config) for _ in range(config.num_encoder_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, h: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        """States [B, M, D] of embedded tokens [B, M, D]; segment ids [B, M] as in `offramp.common.t5.layout`."""
        mask = source_mask(self.relative_attention_bias, h.shape[1], segment_ids)
        for block in self.layers:
            h = block(h, mask)
        return self.norm(h)


class MultiExitT5(MultiExitDecoder[T5Config, TargetLayout]):
    """T5, T5 v1.1 or Flan-T5 with early exits on decoder layers.

    The decoder has the names of a decoder-only model (`layers.0.self_attn.q_proj.weight`), beside `encoder.*` and the
    decoder's `relative_attention_bias`. Each layer is called with states and a layout, and the layout holds all that
    layers share: what the encoder made, the relative bias, masks. So a slice of layers needs nothing else.
    """

    def __init__(self, config: T5Config, exits: ExitConfig | None = None) -> None:
        super().__init__(config, exits, lambda: DecoderBlock(config))
        if config.scale_outputs:
            self.output_scale = config.hidden_size**-0.5
        self.relative_attention_bias = RelativeAttentionBias(config, both_ways=False)
        self.encoder = Encoder(config)

    def encode(self, source_ids: Tensor, segment_ids: Tensor | None = None) -> Encoded:
        """Run the encoder.

        Args:
            source_ids: [B, M].
            segment_ids: [B, M], a padding mask of ones and zeros or packed sources; see `offramp.common.t5.layout`.
        """
        return Encoded(self.encoder(self.embed(source_ids), segment_ids), segment_ids)

    def layout(
        self,
        encoded: Encoded,
        target_ids: Tensor,
        segment_ids: Tensor | None = None,
        exit_depths: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> TargetLayout:
        """`TargetLayout.build` for this model; targets [B, T] are read for their shape only."""
        bias, time = self.relative_attention_bias, target_ids.shape[1]
        return TargetLayout.build(bias, encoded, time, segment_ids, exit_depths, cache=cache)

    def forward(
        self,
        source_ids: Tensor,
        target_ids: Tensor,
        source_segment_ids: Tensor | None = None,
        target_segment_ids: Tensor | None = None,
        exits: Iterable[int] | None = None,
    ) -> MultiExitOutput:
        """Run the whole model.

        Args:
            source_ids: [B, M].
            target_ids: [B, T] what the decoder reads, `decoder_start_token_id` first.
            source_segment_ids: [B, M]; see `encode`.
            target_segment_ids: [B, T]; all of a row are segment 1 if None.
            exits: exit layers to compute logits for; all of them if None.
        """
        encoded = self.encode(source_ids, source_segment_ids)
        return self.run_exits(self.embed(target_ids), self.layout(encoded, target_ids, target_segment_ids), exits)

    def fresh_spread(self, name: str) -> float:
        """As Hugging Face draws them: scores have no scale, so the weights of queries carry it.

        An unembedding of its own starts smaller than there, where its logits would be `hidden_size**0.5` too large.
        """
        config, factor = self.config, self.config.initializer_factor
        if name == "embed_tokens.weight":
            return factor
        if name.endswith("attn.q_proj.weight"):
            return factor * (config.hidden_size * config.head_dim) ** -0.5
        if name.endswith("attn.o_proj.weight"):
            return factor * (config.num_heads * config.head_dim) ** -0.5
        if name.endswith("mlp.down_proj.weight"):
            return factor * config.intermediate_size**-0.5
        return config.initializer_range
