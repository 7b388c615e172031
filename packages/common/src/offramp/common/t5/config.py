"""What a model of the T5 family is made of, read strictly from a Hugging Face `config.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from offramp.common.errors import OfframpError

MODEL_TYPE = "t5"

FeedForwardKind = Literal["relu", "gated-gelu"]
"""T5's feed-forward, and that of v1.1 and Flan-T5 (GEGLU; Shazeer, 2020)."""

# What transformers derives from each kind and writes beside it.
_DERIVED: dict[FeedForwardKind, dict[str, Any]] = {
    "relu": {"dense_act_fn": "relu", "is_gated_act": False},
    "gated-gelu": {"dense_act_fn": "gelu_new", "is_gated_act": True},
}
_ARCHITECTURES = ("T5ForConditionalGeneration", "T5WithLMHeadModel")


@dataclass(frozen=True)
class T5Config:
    """Shape of the model. Fields have the names they have in `ModelConfig`, so that exits are the same for both.

    Dropout is a matter of training and not of the shape, so it is not read.

    Attributes:
        hidden_size: D (`d_model`).
        intermediate_size: F (`d_ff`).
        num_encoder_layers: layers of the encoder (`num_layers` in Hugging Face's words).
        num_layers: L, layers of the decoder (`num_decoder_layers`); exit layers are counted 1 .. L.
        num_heads: H of every attention.
        head_dim: E (`d_kv`); H times E need not be D.
        feed_forward: its kind.
        relative_buckets: classes of distances, each with a learned bias for every head.
        relative_max_distance: distances in tokens from here on share one class.
        tie_word_embeddings: the unembedding is the embedding.
        scale_outputs: states that meet the unembedding are multiplied by `hidden_size**-0.5`. T5 ties and scales, v1.1
            and Flan-T5 do neither; a v1.1 that transformers 5 made anew ties without scaling.
        decoder_start_token_id: what the decoder reads first.
        pad_token_id: fills up rows.
        initializer_factor: on the standard deviations of freshly initialised weights.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_encoder_layers: int
    num_layers: int
    num_heads: int
    head_dim: int
    feed_forward: FeedForwardKind
    rms_norm_eps: float
    relative_buckets: int
    relative_max_distance: int
    tie_word_embeddings: bool
    scale_outputs: bool
    decoder_start_token_id: int = 0
    pad_token_id: int = 0
    initializer_factor: float = 1.0

    model_type = MODEL_TYPE

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values: each head has its own."""
        return self.num_heads

    @property
    def initializer_range(self) -> float:
        """Standard deviation of fresh weights that have no rule of their own."""
        return self.initializer_factor * self.hidden_size**-0.5

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> T5Config:
        """Read a Hugging Face configuration.

        transformers 5 writes `tie_word_embeddings: true` and `scale_decoder_outputs: false` for v1.1, whose unembedding
        is its own wherever one was ever trained. So that is what it means here; who has the weights knows better.

        Raises:
            OfframpError: one of its options is not supported, or a field is missing or makes no sense.
        """
        if hf.get("model_type") != MODEL_TYPE:
            raise OfframpError(f"model_type {hf.get('model_type')!r} is not {MODEL_TYPE!r}.")
        _check_architecture(hf)
        try:
            vocab_size = _whole(hf, "vocab_size")
            num_layers = _whole(hf, "num_layers")
            buckets = _whole(hf, "relative_attention_num_buckets", 32, low=4)
            is_tied = hf.get("tie_word_embeddings", True) is not False
            scales = bool(hf.get("scale_decoder_outputs", is_tied))
            pad = _token(hf, "pad_token_id", 0, vocab_size)
            return cls(
                vocab_size=vocab_size,
                hidden_size=_whole(hf, "d_model"),
                intermediate_size=_whole(hf, "d_ff"),
                num_encoder_layers=num_layers,
                num_layers=_whole(hf, "num_decoder_layers", num_layers),
                num_heads=_whole(hf, "num_heads"),
                head_dim=_whole(hf, "d_kv"),
                feed_forward=_feed_forward(hf),
                rms_norm_eps=_positive(hf, "layer_norm_epsilon", 1e-6),
                relative_buckets=buckets,
                # Half of the decoder's classes are for one distance each; what follows them must lie beyond.
                relative_max_distance=_whole(hf, "relative_attention_max_distance", 128, low=buckets // 2 + 1),
                tie_word_embeddings=is_tied and scales,
                scale_outputs=scales,
                decoder_start_token_id=_token(hf, "decoder_start_token_id", pad, vocab_size),
                pad_token_id=pad,
                initializer_factor=_positive(hf, "initializer_factor", 1.0),
            )
        except KeyError as missing:
            raise OfframpError(f"config.json lacks {missing}; it is not a complete t5 configuration.") from None
        except (TypeError, ValueError) as fault:
            raise OfframpError(f"config.json is not understood: {fault}.") from None


def _check_architecture(hf: Mapping[str, Any]) -> None:
    named = hf.get("architectures") or ()
    if named and not set(named) & set(_ARCHITECTURES):
        raise OfframpError(
            f"architectures {list(named)} are not supported; of T5, Offramp knows {_ARCHITECTURES[0]}, which has a "
            "decoder that writes text."
        )
    if hf.get("is_encoder_decoder", True) is not True:
        raise OfframpError("is_encoder_decoder is false, but T5 has an encoder and a decoder; set it to true.")
    if hf.get("quantization_config"):
        raise OfframpError("quantised weights (quantization_config) are not supported; give the unquantised model.")


def _feed_forward(hf: Mapping[str, Any]) -> FeedForwardKind:
    kind = hf.get("feed_forward_proj", "relu")
    if not isinstance(kind, str) or kind not in _DERIVED:
        raise OfframpError(f"feed_forward_proj {kind!r} is not supported; Offramp knows {', '.join(_DERIVED)}.")
    for field, value in _DERIVED[kind].items():
        if hf.get(field, value) != value:
            raise OfframpError(
                f"{field} {hf[field]!r} contradicts feed_forward_proj {kind!r}, which means {value!r}; leave {field} "
                "out of config.json."
            )
    return kind


def _whole(hf: Mapping[str, Any], field: str, silent: int | None = None, low: int = 1) -> int:
    """A whole number of at least `low`; where the configuration is silent, what transformers assumes."""
    value = hf.get(field)
    if value is None:
        if silent is None:
            raise KeyError(field)
        value = silent
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise OfframpError(f"{field} {value!r} must be a whole number of at least {low}.")
    return value


def _positive(hf: Mapping[str, Any], field: str, silent: float) -> float:
    value = float(hf.get(field, silent))
    if not 0.0 < value < math.inf:
        raise OfframpError(f"{field} {hf[field]!r} must be above 0, and finite.")
    return value


def _token(hf: Mapping[str, Any], field: str, silent: int, vocab_size: int) -> int:
    token = _whole(hf, field, silent, low=0)
    if token >= vocab_size:
        raise OfframpError(f"{field} {token} lies outside the vocabulary of {vocab_size} tokens.")
    return token
