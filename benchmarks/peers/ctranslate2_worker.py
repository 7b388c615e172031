"""CTranslate2 as a peer: a T5 through its own converter, greedily, all sequences in one batch from start to end."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import ctranslate2
from worker import Generate, Times, serve

_TYPES = {"fp32": "float32", "bf16": "bfloat16"}


def load(options: argparse.Namespace) -> tuple[str, Generate]:
    config = json.loads((Path(options.model) / "config.json").read_text())
    if config.get("model_type") != "t5":
        raise RuntimeError(f"model type {config.get('model_type')!r} is not asked of CTranslate2 here; give a T5")
    kind = f"int8_{_TYPES[options.dtype]}" if options.int8 else _TYPES[options.dtype]
    supported = ctranslate2.get_supported_compute_types("cpu")
    if kind not in supported:
        # Asked for it, CTranslate2 would compute in another type without a word.
        raise RuntimeError(f"CTranslate2 does not compute in {kind} here, but in {', '.join(sorted(supported))}")
    with tempfile.TemporaryDirectory() as folder:
        # A process of its own: torch, which reads the weights, must not set up threads in this one.
        converter = Path(sys.executable).parent / "ct2-transformers-converter"
        done = subprocess.run(
            [str(converter), "--model", options.model, "--output_dir", f"{folder}/model", "--quantization", kind],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"its converter refuses the model: {done.stderr.strip().splitlines()[-1]}")
        translator = ctranslate2.Translator(
            f"{folder}/model", compute_type=kind, inter_threads=1, intra_threads=options.threads
        )
        names: list[str] = json.loads((Path(folder) / "model" / "shared_vocabulary.json").read_text())

    def generate(prompts: Sequence[Sequence[int]], new_tokens: int, ignore_eos: bool, in_flight: int) -> Times:
        if in_flight < len(prompts):
            raise RuntimeError("it starts all its sequences together, so it keeps no seats full")
        times: list[list[float]] = [[] for _ in prompts]

        def note(step: ctranslate2.GenerationStepResult) -> bool:
            times[step.batch_id].append(time.perf_counter())
            return False

        sources = [[names[token] for token in prompt] for prompt in prompts]
        start = time.perf_counter()
        translator.translate_batch(
            sources,
            beam_size=1,
            max_input_length=0,
            max_decoding_length=new_tokens,
            min_decoding_length=new_tokens if ignore_eos else 0,
            callback=note,
        )
        return [start] * len(prompts), times

    return f"CTranslate2 {ctranslate2.__version__}, {kind}", generate


if __name__ == "__main__":
    serve(load, [("--int8", "products of int8, beside the dtype for all the rest")])
