"""The engine on a GPU: captured graphs beside operations one by one, at full depth and with early exits.

    python benchmarks/gpu.py                              a model of 1.2 billion random weights, bf16: minutes
    python benchmarks/gpu.py --shape 3b --batch 1,64      a larger one; further arguments go to `offramp bench engine`
    python benchmarks/gpu.py --device cpu --shape tiny    whether all of it runs, without a GPU

Random weights say nothing about texts or exits, and are as fast as any. Every token leaves at a third of the depth, or
none does. The model is written to `build/bench/random-<shape>` once, and figures to `build/bench/gpu-<shape>`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from offramp.common.checkpoint import Checkpoint, save_checkpoint
from offramp.common.cli import main
from offramp.common.model.config import ModelConfig
from offramp.common.model.transformer import MultiExitTransformer

BENCH = Path("build/bench")
# Layers, width, feed-forward, heads, key/value heads, channels of a head, vocabulary.
SHAPES = {
    "tiny": (3, 64, 128, 4, 2, 16, 512),
    "1b": (16, 2048, 8192, 32, 8, 64, 128256),
    "3b": (28, 3072, 8192, 24, 8, 128, 128256),
}


def config(shape: str) -> dict[str, Any]:
    """The `config.json` of a Llama of that shape."""
    layers, width, feed_forward, heads, kv_heads, head_dim, vocabulary = SHAPES[shape]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": feed_forward,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


def write_random(shape: str, directory: Path) -> None:
    """Write a checkpoint of random weights, with a tokenizer that knows bytes."""
    hf_config = config(shape)
    with torch.device("meta"):
        model = MultiExitTransformer(ModelConfig.from_hf(hf_config)).to(torch.bfloat16)
    model = model.to_empty(device="cpu").eval()
    model.reset_parameters(seed=0)
    save_checkpoint(directory, Checkpoint(model, hf_config))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(str(directory))


def run(arguments: list[str]) -> int:
    """Make the model, and hand over to the benchmark."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu.py", description=__doc__.partition("\n")[0] if __doc__ else ""
    )
    parser.add_argument("--shape", choices=SHAPES, default="1b", help="(default: 1b)")
    parser.add_argument("--device", default="cuda", help="(default: cuda)")
    options, further = parser.parse_known_args(arguments)
    model = BENCH / f"random-{options.shape}"
    if not (model / "config.json").is_file():
        print(f"Drawing the weights of {model} ...", file=sys.stderr, flush=True)
        write_random(options.shape, model)
    defaults = ["--device", options.device, "--dtype", "bf16", "--engine", "cuda_graphs=false,true"]
    defaults += ["--batch", "1,8,32", "--prompt-tokens", "128", "--new-tokens", "64", "--sync-policy", "regroup"]
    defaults += ["--exit-at", str(SHAPES[options.shape][0] // 3), "--out", str(BENCH / f"gpu-{options.shape}")]
    return main(["bench", "engine", str(model), *defaults, *further])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
