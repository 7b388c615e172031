"""llama.cpp as a peer: all sequences in one batch, greedily, on the same weights as everybody (bf16 or fp32)."""

from __future__ import annotations

import argparse
import ctypes
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from worker import Generate, Times, serve

BATCH_TOKENS = 2048
_TYPES = {"bf16": gguf.GGMLQuantizationType.BF16, "fp32": gguf.GGMLQuantizationType.F32}
_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def load(options: argparse.Namespace) -> tuple[str, Generate]:
    import llama_cpp as lib

    config = json.loads((Path(options.model) / "config.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        write_gguf(Path(options.model), config, file, _TYPES[options.dtype])
        lib.llama_backend_init()
        model_params = lib.llama_model_default_params()
        model_params.use_mmap = False  # the file goes away
        model = lib.llama_model_load_from_file(str(file).encode(), model_params)
    if not model:
        raise RuntimeError("llama.cpp does not load the model")
    params = lib.llama_context_default_params()
    params.n_ctx = options.max_batch * (-(-options.max_tokens // 256) * 256)
    params.n_batch = params.n_ubatch = BATCH_TOKENS
    params.n_seq_max = options.max_batch
    params.n_threads = params.n_threads_batch = options.threads
    context = lib.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError("llama.cpp makes no context of this size")
    batch = lib.llama_batch_init(BATCH_TOKENS, 0, 1)
    vocab_size = config["vocab_size"]
    ends = config.get("eos_token_id")
    stops = set(ends if isinstance(ends, list) else [ends])

    def decode(rows: Sequence[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Run (token, position, seat, asks) rows; the best next token of each seat that asks."""
        batch.n_tokens = len(rows)
        for index, (token, position, seat, asks) in enumerate(rows):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, seat
            batch.logits[index] = asks
        if lib.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        best: dict[int, int] = {}
        for index, (_, _, seat, asks) in enumerate(rows):
            if asks:
                pointer: Any = ctypes.cast(lib.llama_get_logits_ith(context, index), ctypes.POINTER(ctypes.c_float))
                best[seat] = int(np.ctypeslib.as_array(pointer, (vocab_size,)).argmax())
        return best

    def generate(prompts: Sequence[Sequence[int]], new_tokens: int, ignore_eos: bool, in_flight: int) -> Times:
        memory = lib.llama_get_memory(context)
        lib.llama_memory_clear(memory, False)
        starts: list[float] = []
        times: list[list[float]] = [[] for _ in prompts]
        seated: dict[int, int] = {}  # seat -> index of the prompt
        # Rows to come: the newest token of each sequence, and prompts after them.
        rows: list[tuple[int, int, int, bool]] = []

        def begin(seat: int) -> None:
            if len(starts) == len(prompts):
                return
            prompt = prompts[len(starts)]
            seated[seat] = len(starts)
            starts.append(time.perf_counter())
            rows.extend((token, position, seat, position + 1 == len(prompt)) for position, token in enumerate(prompt))

        for seat in range(min(in_flight, len(prompts))):
            begin(seat)
        while rows:
            chunk, rows = rows[:BATCH_TOKENS], rows[BATCH_TOKENS:]
            best = decode(chunk)
            now = time.perf_counter()
            newest: list[tuple[int, int, int, bool]] = []
            for seat, token in best.items():
                index = seated[seat]
                times[index].append(now)
                if len(times[index]) < new_tokens and (ignore_eos or token not in stops):
                    newest.append((token, len(prompts[index]) + len(times[index]) - 1, seat, True))
                else:
                    lib.llama_memory_seq_rm(memory, seat, -1, -1)
                    begin(seat)
            rows = newest + rows
        return starts, times

    return f"llama.cpp (llama-cpp-python {lib.__version__}), {options.dtype}", generate


def write_gguf(directory: Path, config: dict[str, Any], file: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Turn a Hugging Face directory of a Llama into a GGUF file without a vocabulary: all prompts are token ids."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_rope_freq_base((config.get("rope_parameters") or config).get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    for name, weight in read_weights(directory):
        name = name.removeprefix("model.")
        stem, _, end = name.rpartition(".")
        if stem.startswith("layers."):
            _, number, inner = stem.split(".", 2)
            target = f"blk.{number}.{_NAMES[inner]}.{end}"
        else:
            target = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[stem] + f".{end}"
        if "q_proj" in stem or "k_proj" in stem:
            # GGUF rotates neighbours, Hugging Face halves.
            count = heads if "q_proj" in stem else kv_heads
            weight = weight.reshape(count, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)
        stored = kind if weight.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(target, gguf.quantize(np.ascontiguousarray(weight), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_weights(directory: Path) -> Any:
    """(name, fp32 array) of every tensor. By hand: numpy has no bf16, and PyTorch is not installed here."""
    for file in sorted(directory.glob("model*.safetensors")):
        raw = np.memmap(file, dtype=np.uint8, mode="r")
        size = int(raw[:8].view(np.uint64)[0])
        for name, entry in json.loads(raw[8 : 8 + size].tobytes()).items():
            if name == "__metadata__":
                continue
            start, stop = (8 + size + offset for offset in entry["data_offsets"])
            yield name, _fp32(raw[start:stop], entry["dtype"]).reshape(entry["shape"])


def _fp32(octets: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "BF16":
        return (octets.copy().view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return octets.copy().view({"F32": np.float32, "F16": np.float16}[dtype]).astype(np.float32)


if __name__ == "__main__":
    serve(load)
