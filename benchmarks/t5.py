"""The engine on a T5, beside `generate` of transformers and CTranslate2, at full depth and with early exits.

    benchmarks/peers/setup.sh ctranslate2                 once
    python benchmarks/t5.py                               random weights in the shape of t5-v1_1-small: minutes
    python benchmarks/t5.py --shape t5-small --batch 1    further arguments go to `offramp bench engine`

Random weights say nothing about texts or exits, and are as fast as any. Every token leaves at a third of the decoder's
layers, or none does. The model is a plain Hugging Face directory, written to `build/bench/random-<shape>` once, which
CTranslate2 gets through its own converter. Figures go to `build/bench/<shape>`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from offramp.common.checkpoint import AnyCheckpoint, CheckpointOf, save_checkpoint
from offramp.common.cli import main
from offramp.common.t5.config import T5Config
from offramp.common.t5.model import MultiExitT5

BENCH = Path("build/bench")
WORKER = Path(__file__).parent / "peers" / "ctranslate2_worker.py"
_SPECIAL = ("<pad>", "</s>", "<unk>")
_COMMON: dict[str, Any] = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "is_encoder_decoder": True,
    "d_kv": 64,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "dropout_rate": 0.1,
    "vocab_size": 32128,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "eos_token_id": 1,
}
_V1 = {"feed_forward_proj": "relu", "tie_word_embeddings": True}
_V1_1 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}


def _shape(layers: int, width: int, feed_forward: int, heads: int, kind: dict[str, Any]) -> dict[str, Any]:
    sizes = {"num_layers": layers, "num_decoder_layers": layers, "d_model": width, "d_ff": feed_forward}
    return {**_COMMON, **sizes, "num_heads": heads, **kind}


SHAPES = {
    "tiny": {**_shape(3, 64, 128, 4, _V1_1), "d_kv": 16, "vocab_size": 512},
    "t5-small": _shape(6, 512, 2048, 8, _V1),
    "t5-v1_1-small": _shape(8, 512, 1024, 6, _V1_1),
    "t5-v1_1-base": _shape(12, 768, 2048, 12, _V1_1),
}
"""`config.json` of each."""


def write_random(shape: str, directory: Path) -> None:
    """Write a plain Hugging Face directory of random weights, with a tokenizer that knows bytes."""
    with torch.device("meta"):
        model = MultiExitT5(T5Config.from_hf(SHAPES[shape]))
    model = model.to_empty(device="cpu").eval()
    model.reset_parameters(seed=0)
    checkpoint: AnyCheckpoint = CheckpointOf(model, SHAPES[shape])
    save_checkpoint(directory, checkpoint)
    names = (*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in _SPECIAL])
    pad, eos, unknown = _SPECIAL
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, eos_token=eos, unk_token=unknown
    ).save_pretrained(str(directory))


def run(arguments: list[str]) -> int:
    """Make the model, and hand over to the benchmark."""
    parser = argparse.ArgumentParser(prog="benchmarks/t5.py", description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--shape", choices=SHAPES, default="t5-v1_1-small", help="(default: t5-v1_1-small)")
    options, further = parser.parse_known_args(arguments)
    model = BENCH / f"random-{options.shape}"
    if not (model / "config.json").is_file():
        print(f"Drawing the weights of {model} ...", file=sys.stderr, flush=True)
        write_random(options.shape, model)
    third = max(1, SHAPES[options.shape]["num_decoder_layers"] // 3)
    python = Path(os.environ.get("OFFRAMP_PEERS", BENCH / "peers")) / "ctranslate2" / "bin" / "python"
    defaults = ["--dtype", "fp32,bf16", "--batch", "1,8,32", "--prompt-tokens", "128", "--new-tokens", "64"]
    defaults += ["--sync-policy", "regroup", "--exit-at", str(third), "--static-layer", str(third)]
    defaults += ["--against", "transformers", "--peer", f"ctranslate2={python} {WORKER}"]
    defaults += ["--peer", f"ctranslate2 int8={python} {WORKER} --int8", "--out", str(BENCH / options.shape)]
    return main(["bench", "engine", str(model), *defaults, *further])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
