"""Tiny random models and complete checkpoint directories, made in milliseconds.

Freshly initialised models say one token for ever and are never sure of anything. These weights are drawn wider, so that
greedy text wanders, confidences spread over (0, 1), and norms and biases are not what initialisation would make them.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from offramp.common.checkpoint import Checkpoint, save_checkpoint
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy
from offramp.common.model.config import ModelConfig
from offramp.common.model.exit_head import ExitClassifier
from offramp.common.model.transformer import MultiExitTransformer

VOCAB_SIZE = 300
BOS_ID, EOS_ID, IM_START_ID, IM_END_ID, PAD_ID = 0, 1, 2, 3, 4
# Standard deviation of a matrix's output when its input has unit variance, 1 where none is given. Sharp attention that
# writes more than the embedding holds keeps a text from settling on one token; a loud head is sure now and then.
_GAINS = {"q_proj": 2.0, "k_proj": 2.0, "o_proj": 3.0, "down_proj": 2.0, "lm_head": 3.0, "unembed": 3.0}

SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """The `config.json` of a tiny Llama; overrides win, so `model_type="qwen3"` makes another."""
    model_type = overrides.get("model_type", "llama")
    architecture = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}.get(model_type, "Llama")
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "model_type": model_type,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        # Silence would mean transformers' own sizes here: heads of 128, a window of 4,096.
        **({"head_dim": 16} if model_type == "qwen3" else {}),
        **({"sliding_window": None} if model_type == "mistral" else {}),
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        **overrides,
    }


def tiny_model(exits: ExitConfig | None = None, seed: int = 0, **overrides: Any) -> MultiExitTransformer:
    """A random model in evaluation mode; `overrides` go to `tiny_config`."""
    generator = torch.Generator().manual_seed(seed)
    model = MultiExitTransformer(ModelConfig.from_hf(tiny_config(**overrides)), exits)
    jitter(model, generator)
    return model.eval()


@torch.no_grad()
def jitter(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Draw every parameter anew: matrices by the gains below, norms around one, biases around zero."""
    for name, module in model.named_modules():
        if isinstance(module, ExitClassifier):
            continue
        if isinstance(module, torch.nn.Linear):
            gain = _GAINS.get(name.rpartition(".")[2], 1.0)
            module.weight.normal_(0.0, gain * module.in_features**-0.5, generator=generator)
            if module.bias is not None:
                module.bias.normal_(0.0, 0.2, generator=generator)
        elif isinstance(module, torch.nn.Embedding):
            module.weight.normal_(0.0, 0.3, generator=generator)
        elif type(module).__name__.endswith("RMSNorm"):  # ours or that of transformers
            weight = module.get_parameter("weight")
            weight.normal_(1.0, 0.2, generator=generator)
    # Last, so that a model with classifiers has the other weights of one without.
    for module in model.modules():
        if isinstance(module, ExitClassifier):
            module.weight.normal_(0.0, 2.0 * module.in_features**-0.5, generator=generator)
            module.bias.normal_(0.0, 0.2, generator=generator)


@functools.cache
def tiny_tokenizer(chat_template: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE of exactly `VOCAB_SIZE` tokens: five special ones, 256 bytes, and a few merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([(__doc__ or "") + (jitter.__doc__ or "") * 3], trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL_TOKENS[BOS_ID],
        eos_token=SPECIAL_TOKENS[EOS_ID],
        pad_token=SPECIAL_TOKENS[PAD_ID],
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )
    if chat_template:
        wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def tiny_checkpoint(
    path: str | Path,
    exits: ExitConfig | None = None,
    policy: ExitPolicy | None = None,
    seed: int = 0,
    with_tokenizer: bool = True,
    chat_template: bool = True,
    **overrides: Any,
) -> Path:
    """Write a complete checkpoint directory of a `tiny_model`, with its tokenizer, and return its path."""
    model = tiny_model(exits, seed, **overrides)
    directory = save_checkpoint(path, Checkpoint(model, tiny_config(**overrides), policy))
    if with_tokenizer:
        tiny_tokenizer(chat_template).save_pretrained(str(directory))
    return directory
