"""A GGUF file, or the installed package that carries one, as the parts of an ordinary Hugging Face directory.

Only what can be turned back exactly is read: Llama architecture, byte-level BPE. Quantised tensors are dequantised to
fp32, which repeats the file's numbers exactly but not the weights it was quantised from; the provenance says so.

Legend: D model, H heads, E head dim.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.file_hash import sha256
from offramp.common.model.config import ModelConfig
from offramp.common.model.transformer import MultiExitTransformer

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
# How text is cut before byte-pair merging, by the name GGUF has for it. Another cut gives other tokens without a word
# of warning, so an unknown name is refused.
_PRE_TOKENIZERS = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}
_MAGIC = b"GGUF"
_CONTROL_TOKEN = 3
_UNQUANTISED = {"F32", "F16", "BF16"}


@dataclass(frozen=True)
class GGUFModel:
    """What a GGUF file holds.

    Attributes:
        model: fp32, in evaluation mode, without early exits.
        hf_config: `config.json`.
        generation_config: `generation_config.json`.
        tokenizer: with the chat template of the file.
        provenance: file name, SHA-256, and how the tensors were stored.
    """

    model: MultiExitTransformer
    hf_config: dict[str, Any]
    generation_config: dict[str, Any]
    tokenizer: PreTrainedTokenizerFast
    provenance: dict[str, Any]


def find_in_package(name: str) -> Path | None:
    """The GGUF file inside an installed package, which is not imported; None if there is no such package.

    Args:
        name: of the distribution or the module; `-` and `_` are alike.

    Raises:
        OfframpError: the package carries no GGUF file, or several.
    """
    module = name.replace("-", "_")
    if not module.isidentifier() or (spec := importlib.util.find_spec(module)) is None:
        return None
    files = sorted(file for place in spec.submodule_search_locations or () for file in Path(place).rglob("*.gguf"))
    if len(files) != 1:
        found = f"{len(files)} GGUF files ({', '.join(str(file) for file in files)})" if files else "no GGUF file"
        raise OfframpError(f"the installed package {module!r} carries {found}; give the path of one file.")
    return files[0]


class _Reader(GGUFReader):
    """Slices a plain array of the mapped file: of a `memmap`, the words and merges of a tokenizer take seconds."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, np.asarray(value) if isinstance(value, np.memmap) else value)


def read_gguf(file: Path) -> GGUFModel:
    """Read a GGUF file.

    Raises:
        OfframpError: it is no GGUF file, or holds something else than a Llama with a byte-level BPE tokenizer.
    """
    with file.open("rb") as start:
        if (first := start.read(len(_MAGIC))) != _MAGIC:
            raise OfframpError(
                f"{file} cannot be read as GGUF: it begins with {first!r}, not with {_MAGIC!r}; give a GGUF file or "
                "a Hugging Face directory."
            )
    try:
        reader = _Reader(file)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (OSError, ValueError, IndexError) as fault:
        raise OfframpError(f"{file} cannot be read as GGUF: {fault}; it may be cut short, copy it again.") from None
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    try:
        hf_config, generation_config = _configs(fields, tensors)
        tokenizer = _tokenizer(fields)
    except KeyError as missing:
        raise OfframpError(f"{file} lacks the GGUF field or tensor {missing}; it is not a complete model.") from None
    weights: dict[str, Tensor] = {}
    for name, tensor in tqdm(
        tensors.items(), desc=f"reading {file.name}", unit="tensor", disable=not sys.stderr.isatty()
    ):
        hf_name = _hf_name(name, file)
        weight = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        if ".attn_q." in name or ".attn_k." in name:
            heads = hf_config["num_attention_heads" if ".attn_q." in name else "num_key_value_heads"]
            weight = _unpermute(weight, heads)
        weights[hf_name] = weight
    with torch.device("meta"):
        model = MultiExitTransformer(ModelConfig.from_hf(hf_config), ExitConfig())
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as fault:
        raise OfframpError(f"{file} is not the Llama its fields describe: {' '.join(str(fault).split())}") from None
    kinds = sorted({tensor.tensor_type.name for tensor in tensors.values()})
    provenance = {
        "gguf": file.name,
        "gguf_sha256": sha256(file),
        "gguf_tensor_types": kinds,
        "dequantised": not _UNQUANTISED.issuperset(kinds),
        "gguf_name": fields.get("general.name"),
        "gguf_license": fields.get("general.license"),
    }
    return GGUFModel(model.eval(), hf_config, generation_config, tokenizer, provenance)


def _configs(fields: Mapping[str, Any], tensors: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """`config.json` and `generation_config.json`."""
    if (architecture := fields["general.architecture"]) != "llama":
        raise OfframpError(
            f"the GGUF architecture {architecture!r} is not supported, only 'llama' is; give a Hugging Face directory."
        )
    if fields.get("llama.expert_count"):
        raise OfframpError("a GGUF with experts (llama.expert_count) is not supported.")
    vocab_size, hidden_size = (int(size) for size in reversed(tensors["token_embd.weight"].shape))
    num_heads = int(fields["llama.attention.head_count"])
    special = {
        f"{name}_token_id": int(fields[key])
        for name, key in (
            ("bos", "tokenizer.ggml.bos_token_id"),
            ("eos", "tokenizer.ggml.eos_token_id"),
            ("pad", "tokenizer.ggml.padding_token_id"),
        )
        if key in fields
    }
    hf_config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(fields.get("llama.attention.head_count_kv", num_heads)),
        "head_dim": int(fields.get("llama.attention.key_length", hidden_size // num_heads)),
        "max_position_embeddings": int(fields["llama.context_length"]),
        # Stored in fp32, so that 1e-5 reads 9.99999975e-06.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": float(fields.get("llama.rope.freq_base", 10000.0)),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in tensors,
        **special,
    }
    if (scaling := fields.get("llama.rope.scaling.type", "none")) == "linear":
        factor = float(fields["llama.rope.scaling.factor"])
        hf_config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif scaling != "none":
        raise OfframpError(f"the GGUF rope scaling {scaling!r} is not supported; give the Hugging Face directory.")
    return hf_config, special


def _tokenizer(fields: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    kind, cut = fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or cut not in _PRE_TOKENIZERS:
        raise OfframpError(
            f"the GGUF tokenizer {kind!r} with pre-tokenizer {cut!r} is not supported, only 'gpt2' with one of "
            f"{', '.join(_PRE_TOKENIZERS)} is; give the Hugging Face directory."
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [(first, second) for first, second in (merge.split(" ") for merge in fields["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[cut]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    named = {
        f"{name}_token": tokens[fields[key]]
        for name, key in (
            ("bos", "tokenizer.ggml.bos_token_id"),
            ("eos", "tokenizer.ggml.eos_token_id"),
            ("pad", "tokenizer.ggml.padding_token_id"),
            ("unk", "tokenizer.ggml.unknown_token_id"),
        )
        if key in fields
    }
    if fields.get("tokenizer.ggml.add_bos_token", False):
        bos = named["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, tokens.index(bos))]
        )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=int(fields["llama.context_length"]),
        clean_up_tokenization_spaces=False,
        **named,
    )
    if template := fields.get("tokenizer.chat_template"):
        wrapped.chat_template = template
    return wrapped


def _hf_name(name: str, file: Path) -> str:
    match name.split("."):
        case ["blk", index, part, "weight"] if part in _LAYER_NAMES:
            return f"layers.{index}.{_LAYER_NAMES[part]}.weight"
        case [part, "weight"] if part in _OUTER_NAMES:
            return f"{_OUTER_NAMES[part]}.weight"
    raise OfframpError(f"{file} holds the tensor {name!r}, which a plain Llama does not have; it is not supported.")


def _unpermute(weight: Tensor, num_heads: int) -> Tensor:
    """Undo llama.cpp's order of channels, [H*E, D]: it rotates neighbours (2i, 2i+1), Hugging Face (i, i + E/2)."""
    rows, columns = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
