"""Tiny random T5 models of transformers, drawn so that greedy text wanders and ends now and then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration

from helpers.tiny import VOCAB_SIZE, tiny_tokenizer
from offramp.common.checkpoint import CheckpointOf, load_any_checkpoint
from offramp.common.t5.model import MultiExitT5

PAD_ID, EOS_ID = 0, 1
# T5, T5 v1.1 and Flan-T5 (which has the shape of v1.1), depths uneven both ways, and heads that fill D or do not.
SHAPES: dict[str, dict[str, Any]] = {
    "t5": {},
    "t5, deep decoder": {"num_layers": 2, "num_decoder_layers": 5},
    "t5, deep encoder": {"num_layers": 5, "num_decoder_layers": 2},
    "t5, narrow classes of distances": {"relative_attention_num_buckets": 6, "relative_attention_max_distance": 9},
    "v1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "v1.1, deep decoder": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_layers": 1},
    "flan, odd heads": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_heads": 3, "d_kv": 7},
}


def hugging_face_t5(directory: Path, seed: int = 0, **overrides: Any) -> T5ForConditionalGeneration:
    """A random model of transformers in evaluation mode, saved as published ones are.

    Args:
        directory: to write; `config.json` says `tie_word_embeddings` as given, which transformers 5 would rewrite.
        seed: of its weights.
        overrides: of its configuration. An unembedding of its own goes with `tie_word_embeddings=False`.
    """
    shape = {
        **{"vocab_size": VOCAB_SIZE, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 4, "num_decoder_layers": 4},
        **{"num_heads": 4, "decoder_start_token_id": PAD_ID, "pad_token_id": PAD_ID, "eos_token_id": EOS_ID},
        **overrides,
    }
    model = T5ForConditionalGeneration(T5Config(**shape)).eval()
    if not shape.get("tie_word_embeddings", True):
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.shared.weight))
    jitter_t5(model, torch.Generator().manual_seed(seed))
    model.save_pretrained(directory)
    if "tie_word_embeddings" in shape:
        config = json.loads((directory / "config.json").read_text())
        config["tie_word_embeddings"] = shape["tie_word_embeddings"]
        del config["scale_decoder_outputs"]
        (directory / "config.json").write_text(json.dumps(config))
    return model


@torch.no_grad()
def jitter_t5(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Draw every parameter anew; those that several modules share, once."""
    for name, parameter in model.named_parameters():
        ending = name.removesuffix(".weight").rpartition(".")[2]
        if name == "decoder.final_layer_norm.weight":
            parameter.normal_(20.0, 4.0, generator=generator)  # a loud head is sure now and then
        elif parameter.dim() == 1:
            parameter.normal_(1.0, 0.2, generator=generator)
        elif ending in ("shared", "relative_attention_bias"):
            parameter.normal_(0.0, {"shared": 0.1}.get(ending, 1.0), generator=generator)
        else:
            # Layers that write more than the embedding holds keep a text from settling on one token. Scores are not
            # scaled, so queries and keys are small.
            gain = {"o": 3.0, "wo": 2.0, "q": 0.9, "k": 0.9, "lm_head": 0.2}.get(ending, 1.0)
            parameter.normal_(0.0, gain * parameter.shape[1] ** -0.5, generator=generator)


def load_t5(directory: Path, **options: Any) -> CheckpointOf[MultiExitT5]:
    """`load_any_checkpoint` of a directory that is known to hold a T5."""
    checkpoint = load_any_checkpoint(directory, **options)
    assert isinstance(checkpoint.model, MultiExitT5)
    return CheckpointOf(checkpoint.model, checkpoint.hf_config, checkpoint.policy, path=checkpoint.path)


def t5_directory(directory: Path, seed: int = 0, **overrides: Any) -> Path:
    """A complete directory, with a tokenizer."""
    hugging_face_t5(directory, seed, **overrides)
    tiny_tokenizer(chat_template=False).save_pretrained(str(directory))
    return directory


def token_ids(rows: int, length: int, seed: int = 3) -> Tensor:
    """Random tokens [B, T] that are neither padding nor the end."""
    return torch.randint(2, VOCAB_SIZE, (rows, length), generator=torch.Generator().manual_seed(seed))
