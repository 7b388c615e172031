"""Names of T5's tensors in Hugging Face's files, and here."""

from __future__ import annotations

import re

from offramp.common.hf import WeightNames

_OWN = {
    "shared.weight": "embed_tokens.weight",
    # Older files hold the one embedding under several names.
    "encoder.embed_tokens.weight": "embed_tokens.weight",
    "decoder.embed_tokens.weight": "embed_tokens.weight",
    "encoder.final_layer_norm.weight": "encoder.norm.weight",
    "decoder.final_layer_norm.weight": "norm.weight",
    # The first layer has it, and all use it.
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": "encoder.relative_attention_bias.weight",
    "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": "relative_attention_bias.weight",
}
_STORED = {own: stored for stored, own in reversed(_OWN.items())}
# Some published files carry a bias of cross-attention, which no implementation reads.
_UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"

_PARTS = {
    "0.SelfAttention": "self_attn",
    "0.layer_norm": "input_layernorm",
    "1.EncDecAttention": "cross_attn",
    "1.layer_norm": "cross_attention_layernorm",
    "2.DenseReluDense": "mlp",
    "2.layer_norm": "post_attention_layernorm",
}
# The encoder has no cross-attention, so its feed-forward comes second.
_ENCODER_PARTS = {
    **{part: own for part, own in _PARTS.items() if part[0] == "0"},
    **{f"1{part[1:]}": own for part, own in _PARTS.items() if part[0] == "2"},
}
_MATRICES = {**{letter: f"{letter}_proj" for letter in "qkvo"}, "wo": "down_proj"}
_GATED = {**_MATRICES, "wi_0": "gate_proj", "wi_1": "up_proj"}
_PLAIN = {**_MATRICES, "wi": "up_proj"}

_IN_FILES = re.compile(r"(encoder|decoder)\.block\.(\d+)\.layer\.(\d\.\w+)(?:\.(\w+))?\.weight")
_HERE = re.compile(r"(encoder\.)?layers\.(\d+)\.(\w+?)(?:\.(\w+))?\.weight")


def t5_names(gated: bool) -> WeightNames:
    """The names of one kind of feed-forward: a gated one has two input matrices where the other has one."""
    matrices = _GATED if gated else _PLAIN
    stored_matrices = {own: stored for stored, own in matrices.items()}
    stored_parts = {own: part for part, own in _PARTS.items()}
    stored_encoder_parts = {own: part for part, own in _ENCODER_PARTS.items()}

    def own(name: str) -> str | None:
        if name == _UNUSED:
            return None
        if name in _OWN:
            return _OWN[name]
        if (found := _IN_FILES.fullmatch(name)) is None:
            return name
        stack, index, part, matrix = found.groups()
        ours = (_ENCODER_PARTS if stack == "encoder" else _PARTS).get(part)
        if ours is None or (matrix is not None and matrix not in matrices):
            return name
        end = "" if matrix is None else f".{matrices[matrix]}"
        return f"{'encoder.' if stack == 'encoder' else ''}layers.{index}.{ours}{end}.weight"

    def stored(name: str) -> str:
        if name in _STORED:
            return _STORED[name]
        if (found := _HERE.fullmatch(name)) is None:
            return name
        encoder, index, part, matrix = found.groups()
        theirs = (stored_encoder_parts if encoder else stored_parts)[part]
        end = "" if matrix is None else f".{stored_matrices[matrix]}"
        return f"{'encoder' if encoder else 'decoder'}.block.{index}.layer.{theirs}{end}.weight"

    return WeightNames(own, stored)
