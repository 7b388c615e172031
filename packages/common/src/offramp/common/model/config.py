"""What a decoder-only model of the Llama family is made of, read strictly from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from offramp.common.errors import OfframpError

ModelType = Literal["llama", "mistral", "qwen2", "qwen3"]
RopeType = Literal["default", "linear", "dynamic", "llama3"]

_ENCODER_DECODER = ("t5",)

# What transformers assumes where a config.json is silent, as far as it is not the same for all.
_SILENT: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        theta: base of the geometric series of wavelengths.
        type: how frequencies are changed for contexts longer than the one trained on.
        factor: by how much the context is stretched (all types but `default`).
        low_freq_factor: llama3: wavelengths longer than `original_length / low_freq_factor` are stretched in full.
        high_freq_factor: llama3: wavelengths shorter than `original_length / high_freq_factor` are left alone.
        original_length: context length in tokens that the frequencies were made for.
    """

    theta: float
    type: RopeType = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 0

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> RopeConfig:
        """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
        scaling = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
        if nested := [key for key, value in scaling.items() if isinstance(value, Mapping)]:
            raise OfframpError(f"rope_parameters differ between kinds of layers ({', '.join(nested)}); not supported.")
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in get_args(RopeType):
            raise OfframpError(f"rope_type {kind!r} is not supported; Offramp knows {', '.join(get_args(RopeType))}.")
        if float(scaling.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0)) or 1.0) != 1.0:
            raise OfframpError("partial_rotary_factor other than 1 is not supported.")
        length = int(hf["max_position_embeddings"])
        return cls(
            theta=float(scaling.get("rope_theta", hf.get("rope_theta", 10000.0))),
            type=kind,
            factor=1.0 if kind == "default" else float(scaling["factor"]),
            low_freq_factor=float(scaling["low_freq_factor"]) if kind == "llama3" else 1.0,
            high_freq_factor=float(scaling["high_freq_factor"]) if kind == "llama3" else 4.0,
            # transformers reads the original length for llama3 only; dynamic starts from the promised length.
            original_length=int(scaling.get("original_max_position_embeddings", length))
            if kind == "llama3"
            else length,
        )


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the model. Field names are Hugging Face's where it has one; counts start with `num_`.

    Attributes:
        num_layers: L, Transformer blocks; exit layers are counted 1 .. L.
        head_dim: E; not always `hidden_size / num_heads` (Qwen3).
        max_position_embeddings: longest sequence in tokens.
        qkv_bias: biases on the query, key and value projections (Qwen2).
        output_bias: a bias on the attention output projection.
        qk_norm: RMS norm of each query and key head before the rotation (Qwen3).
        sliding_window: a token sees only this many tokens, itself included; None is all.
        initializer_range: standard deviation of freshly initialised weights.
    """

    model_type: ModelType
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    initializer_range: float = 0.02

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """Read a Hugging Face configuration.

        Raises:
            OfframpError: the architecture or one of its options is not supported, or a field is missing.
        """
        model_type: Any = hf.get("model_type")
        refuse_encoder_decoder(hf)
        if model_type not in get_args(ModelType):
            raise OfframpError(
                f"model_type {model_type!r} is not supported; Offramp knows {', '.join(get_args(ModelType))} and "
                f"{', '.join(_ENCODER_DECODER)}."
            )
        if (activation := hf.get("hidden_act", "silu")) != "silu":
            raise OfframpError(f"hidden_act {activation!r} is not supported; only 'silu' is.")
        if hf.get("quantization_config"):
            raise OfframpError("quantised weights (quantization_config) are not supported; give the unquantised model.")
        hf = {**_SILENT[model_type], **hf}
        try:
            num_heads = int(hf["num_attention_heads"])
            hidden_size = int(hf["hidden_size"])
            num_kv_heads = int(hf.get("num_key_value_heads") or num_heads)
            if num_heads % num_kv_heads:
                raise OfframpError(
                    f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}."
                )
            attention_bias = bool(hf.get("attention_bias", False))
            return cls(
                model_type=model_type,
                vocab_size=int(hf["vocab_size"]),
                hidden_size=hidden_size,
                intermediate_size=int(hf["intermediate_size"]),
                num_layers=int(hf["num_hidden_layers"]),
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=int(hf.get("head_dim") or hidden_size // num_heads),
                max_position_embeddings=int(hf["max_position_embeddings"]),
                rms_norm_eps=float(hf["rms_norm_eps"]),
                rope=RopeConfig.from_hf(hf),
                tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
                qkv_bias=model_type == "qwen2" or (model_type in ("llama", "qwen3") and attention_bias),
                output_bias=model_type in ("llama", "qwen3") and attention_bias,
                mlp_bias=model_type == "llama" and bool(hf.get("mlp_bias", False)),
                qk_norm=model_type == "qwen3",
                sliding_window=_sliding_window(hf),
                initializer_range=float(hf.get("initializer_range", 0.02)),
            )
        except KeyError as missing:
            raise OfframpError(
                f"config.json lacks {missing}; it is not a complete {model_type} configuration."
            ) from None
        except (TypeError, ValueError) as fault:
            raise OfframpError(f"config.json is not understood: {fault}.") from None


def refuse_encoder_decoder(hf: Mapping[str, Any]) -> None:
    """Raise `OfframpError` where a configuration is one of an encoder-decoder model."""
    if (model_type := hf.get("model_type")) in _ENCODER_DECODER:
        raise OfframpError(
            f"model_type {model_type!r} is an encoder-decoder model, which is imported, trained, exported and served "
            f"so far; this needs one of {', '.join(get_args(ModelType))}."
        )


def _sliding_window(hf: Mapping[str, Any]) -> int | None:
    window = hf.get("sliding_window")
    # Qwen configs carry a window that is off unless `use_sliding_window` says otherwise.
    if window is None or (hf["model_type"] != "mistral" and not hf.get("use_sliding_window", False)):
        return None
    kinds = set(hf.get("layer_types") or ())
    if not kinds:
        full = 0 if hf["model_type"] == "mistral" else int(hf.get("max_window_layers", 28))
        kinds = {"sliding_attention" if index >= full else "full_attention" for index in range(hf["num_hidden_layers"])}
    if kinds == {"full_attention"}:
        return None
    if kinds != {"sliding_attention"}:
        raise OfframpError(f"a mix of kinds of layers ({', '.join(sorted(kinds))}) is not supported.")
    return int(window)
