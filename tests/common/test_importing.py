"""`offramp import`: from directories, GGUF files, packages and the hub to checkpoint directories."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.tiny import CHAT_TEMPLATE, EOS_ID, PAD_ID, tiny_checkpoint, tiny_model, tiny_tokenizer
from offramp.common import cli
from offramp.common.checkpoint import load_checkpoint, write_record
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.operating_point import OperatingPoint, OperatingPoints
from offramp.common.exits.policy import ExitPolicy
from offramp.common.gguf import find_in_package
from offramp.common.importing import NewExits, import_model, main
from offramp.common.model.transformer import MultiExitTransformer

LLAMA_CPP_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
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


def write_gguf(file: Path, model: MultiExitTransformer, quantise: bool = False, **fields: Any) -> Path:
    """What llama.cpp's converter would write; `fields` replace its strings and flags, None drops one."""
    config, tokenizer = model.config, tiny_tokenizer()
    writer = gguf.GGUFWriter(file, fields.pop("architecture", "llama"))
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    state = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_token_list(tokenizer.convert_ids_to_tokens(list(range(300))))
    writer.add_token_types([3 if token < 5 else 1 for token in range(300)])
    writer.add_token_merges([" ".join(merge) for merge in state["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(EOS_ID)
    writer.add_pad_token_id(PAD_ID)
    writer.add_chat_template(CHAT_TEMPLATE)
    writer.add_tokenizer_model(fields.pop("tokenizer_model", "gpt2"))
    writer.add_tokenizer_pre(fields.pop("pre", "gpt-2"))
    writer.add_add_bos_token(fields.pop("add_bos", False))
    if "rope_factor" in fields:
        writer.add_rope_scaling_type(gguf.RopeScalingType(fields.pop("rope_type", "linear")))
        writer.add_rope_scaling_factor(fields.pop("rope_factor"))
    for name, tensor in model.state_dict().items():
        stem = name.removesuffix(".weight")
        if stem.startswith("layers."):
            _, index, part = stem.split(".", 2)
            stem = f"blk.{index}.{LLAMA_CPP_NAMES[part]}"
            if part in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = config.num_heads if "q_proj" in part else config.num_kv_heads
                tensor = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        else:
            stem = LLAMA_CPP_NAMES[stem]
        data = tensor.numpy()
        if quantise and tensor.dim() == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{stem}.weight", gguf.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{stem}.weight", np.ascontiguousarray(data))
    for name in fields.pop("extra_tensors", ()):
        writer.add_tensor(name, np.ones(4, dtype=np.float32))
    assert not fields
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("tied", [False, True])
def test_an_unquantised_gguf_gives_the_very_model(tmp_path: Path, tied: bool) -> None:
    model = tiny_model(tie_word_embeddings=tied)
    made = import_model(str(write_gguf(tmp_path / "m.gguf", model)), tmp_path / "out")
    loaded = load_checkpoint(tmp_path / "out")
    assert loaded.config == model.config
    assert all(torch.equal(tensor, loaded.model.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert made.provenance == {}
    assert not (tmp_path / "out/exits.json").exists()
    assert loaded.eos_token_ids == (EOS_ID,)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.tensor([[9, 8, 7, 200]])
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, model(ids).logits[4], rtol=1e-5, atol=1e-5)
    tokenizer, expected = AutoTokenizer.from_pretrained(tmp_path / "out"), tiny_tokenizer()
    for text in ("Freshly initialised, said 42 of them.\n", "é🙂 <|im_start|>user"):
        assert tokenizer.encode(text) == expected.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (EOS_ID, PAD_ID, 0)


def test_a_quantised_gguf_says_so(tmp_path: Path) -> None:
    model = tiny_model()
    file = write_gguf(tmp_path / "m.gguf", model, quantise=True)
    import_model(str(file), tmp_path / "out", exits=NewExits(ExitConfig((2,))), dtype=torch.bfloat16)
    loaded = load_checkpoint(tmp_path / "out")
    assert loaded.provenance["dequantised"] is True
    assert loaded.provenance["gguf"] == "m.gguf"
    assert loaded.provenance["gguf_tensor_types"] == ["F32", "Q8_0"]
    assert len(loaded.provenance["gguf_sha256"]) == 64
    for name, tensor in loaded.model.state_dict().items():
        assert tensor.dtype == torch.bfloat16
        if name in model.state_dict():
            torch.testing.assert_close(tensor.float(), model.state_dict()[name], rtol=0.02, atol=0.02)


def test_details_of_a_gguf_are_kept(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", tiny_model(), pre="smollm", add_bos=True, rope_factor=4.0)
    import_model(str(file), tmp_path / "out")
    assert load_checkpoint(tmp_path / "out").config.rope.type == "linear"
    assert load_checkpoint(tmp_path / "out").config.rope.factor == 4.0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer.encode("in 1480")
    assert [tokenizer.decode([token]) for token in ids][-5:] == [" ", "1", "4", "8", "0"]
    assert ids[0] == 0
    assert ids[1] != 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architecture": "gemma"}, "architecture 'gemma' is not supported, only 'llama' is"),
        ({"tokenizer_model": "llama"}, "tokenizer 'llama' with pre-tokenizer 'gpt-2' is not supported"),
        ({"pre": "deepseek-llm"}, "pre-tokenizer 'deepseek-llm' is not supported"),
        ({"rope_type": "yarn", "rope_factor": 4.0}, "rope scaling 'yarn' is not supported"),
        ({"extra_tensors": ["rope_freqs.weight"]}, "holds the tensor 'rope_freqs.weight'"),
        ({"extra_tensors": ["blk.0.attn_q.bias"]}, "holds the tensor 'blk.0.attn_q.bias'"),
        ({"extra_tensors": ["blk.4.attn_norm.weight"]}, "is not the Llama its fields describe"),
    ],
)
def test_a_gguf_that_would_not_be_the_same_model_is_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    file = write_gguf(tmp_path / "m.gguf", tiny_model(), **fields)
    with pytest.raises(OfframpError, match=message):
        import_model(str(file), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    for content, message in (
        (b"", "it begins with b''"),
        (b"hi", "it begins with b'hi'"),
        (b"not at all" * 100, "it begins with b'not '"),
        (b"GGUF\x03\0\0\0" + b"\x01\0\0\0\0\0\0\0" * 2, "it may be cut short"),
    ):
        (tmp_path / "m.gguf").write_bytes(content)
        with pytest.raises(OfframpError, match=f"cannot be read as GGUF: .*{message}"):
            import_model(str(tmp_path / "m.gguf"), tmp_path / "out")
    with pytest.raises(OfframpError, match="does not exist; give the path of a GGUF file"):
        import_model(str(tmp_path / "other.gguf"), tmp_path / "out")


def test_a_package_is_searched_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_tiny"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(OfframpError, match="'llm_tiny' carries no GGUF file"):
        find_in_package("llm-tiny")
    write_gguf(package / "tiny.gguf", tiny_model())
    assert find_in_package("llm-tiny") == find_in_package("llm_tiny") == package / "tiny.gguf"
    assert find_in_package("llm-small") is None
    assert "llm_tiny" not in sys.modules
    assert import_model("llm-tiny", tmp_path / "out").model.config == tiny_model().config


def test_a_hub_name_is_fetched_without_pickles_or_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def fetch(name: str, allow_patterns: list[str]) -> str:
        asked.update(name=name, allow=allow_patterns)
        return str(tiny_checkpoint(tmp_path / "cache"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    made = import_model("some/model", tmp_path / "out", exits=NewExits(ExitConfig((2,))))
    assert asked["name"] == "some/model"
    kept = list(
        huggingface_hub.utils.filter_repo_objects(
            [
                "config.json",
                "model-00001-of-00002.safetensors",
                "model.safetensors.index.json",
                "tokenizer.json",
                "merges.txt",
                "chat_template.jinja",
                "pytorch_model.bin",
                "modeling_evil.py",
                "original/consolidated.00.pth",
                "consolidated.safetensors",
                "README.md",
            ],
            allow_patterns=asked["allow"],
        )
    )
    assert kept == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "merges.txt",
        "chat_template.jinja",
    ]
    assert made.provenance["source"] == "some/model"
    assert load_checkpoint(tmp_path / "out").exits.layers == (2,)


@pytest.mark.parametrize("name", ["some/model", "nosuchmodel", "what is this?"])
def test_a_name_that_cannot_be_fetched_is_one_sentence(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["import", name, str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("offramp: error: ")
    assert name in error
    assert "Hugging Face hub" in error


def test_a_path_that_does_not_exist_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    for name in ("./nothing", str(tmp_path / "nothing"), "a/b/c"):
        with pytest.raises(OfframpError, match="does not exist; give a directory"):
            import_model(name, tmp_path / "out")


def test_exits_are_replaced_only_when_told_to(tmp_path: Path) -> None:
    policy = ExitPolicy("margin", {1: 0.5})
    source = tiny_checkpoint(tmp_path / "in", ExitConfig((1, 3)), policy)
    before = load_checkpoint(source)
    before.points = OperatingPoints({"safe": OperatingPoint("fill", policy)}, "safe")
    write_record(source, before)
    copied = import_model(str(source), tmp_path / "copy")
    assert (copied.exits, copied.policy, copied.points) == (before.exits, policy, before.points)
    assert (tmp_path / "copy/exits.safetensors").read_bytes() == (source / "exits.safetensors").read_bytes()
    new = NewExits(ExitConfig((2,), "mlp", tied=False))
    for other, fault in (
        (new, r"exits of kind norm, tied and the new ones are mlp, untied.*--replace-exits"),
        (NewExits(ExitConfig((2, 3))), r"already has exits at \[3\]; name other layers"),
    ):
        with pytest.raises(OfframpError, match=fault):
            import_model(str(source), tmp_path / "out", exits=other)
    import_model(str(source), tmp_path / "out", exits=new, replace_exits=True)
    after = load_checkpoint(tmp_path / "out")
    assert after.exits == new.config
    assert after.policy is None
    assert after.points == OperatingPoints(), "they are about exits that are gone"
    assert torch.equal(after.model.norm.weight, before.model.norm.weight)


def test_exits_join_those_that_are_there(tmp_path: Path) -> None:
    policy = ExitPolicy("margin", {1: 0.5})
    source = tiny_checkpoint(tmp_path / "in", ExitConfig((1, 3), "adapter", adapter_dim=6), policy)
    assert main([str(source), str(tmp_path / "out"), "--exits", "2", "--norm-scale", "0.5"]) == 0
    before, after = load_checkpoint(source), load_checkpoint(tmp_path / "out")
    assert after.exits == ExitConfig((1, 2, 3), "adapter", adapter_dim=6), "the kind that is there"
    assert after.policy == policy, "thresholds of exits that stay as they are"
    state = after.model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in before.model.state_dict().items())
    assert torch.equal(state["exits.2.norm.weight"], 0.5 * before.model.norm.weight)
    assert (tmp_path / "out/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    with pytest.raises(OfframpError, match="adapter of width 6, tied and the new ones are adapter, tied"):
        main([str(source), str(tmp_path / "no"), "--exits", "2", "--head", "adapter"])


def test_the_command_line_says_what_the_function_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(tiny_checkpoint(tmp_path / "in"))
    options = ["--exits", "3,1", "--head", "adapter", "--adapter-dim", "6", "--untied", "--init", "random"]
    options += ["--seed", "5", "--dtype", "bf16", "--json"]
    assert main([source, str(tmp_path / "out"), *options]) == 0
    said = json.loads(capsys.readouterr().out)
    loaded = load_checkpoint(tmp_path / "out")
    assert loaded.exits == ExitConfig((1, 3), "adapter", tied=False, adapter_dim=6)
    assert said["exits"] == loaded.exits.to_json()
    assert said["dtype"] == "bfloat16"
    assert said["provenance"]["source"] == source
    expected = MultiExitTransformer(loaded.config, loaded.exits)
    expected.initialise_exits("random", seed=5)
    name = "exits.1.adapter.proj.weight"
    assert torch.equal(loaded.model.state_dict()[name], expected.state_dict()[name].bfloat16())
    AutoTokenizer.from_pretrained(tmp_path / "out")
    with pytest.raises(OfframpError, match="already exists"):
        main([source, str(tmp_path / "out")])
    assert main([source, str(tmp_path / "out"), "--overwrite"]) == 0
    assert "no early exits" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [
        ["--exits", "1,x"],
        ["--exits", ""],
        ["--head", "big"],
        ["--dtype", "int8"],
        ["--no-such"],
        # They describe new exits and would be dropped without a word.
        ["--head", "adapter"],
        ["--untied"],
        ["--replace-exits"],
    ],
)
def test_wrong_usage_is_exit_code_2(tmp_path: Path, options: list[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main([str(tiny_checkpoint(tmp_path / "in")), str(tmp_path / "out"), *options])
    assert done.value.code == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("scale", ["nan", "inf", "-1", "0"])
def test_a_norm_scale_that_ruins_the_exits_is_refused(tmp_path: Path, scale: str) -> None:
    source = str(tiny_checkpoint(tmp_path / "in"))
    with pytest.raises(OfframpError, match=r"norm_scale .* must be a finite number above 0"):
        main([source, str(tmp_path / "out"), "--exits", "2", "--norm-scale", scale])


@pytest.mark.parametrize(("layers", "message"), [("0", "outside 1..3"), ("4", "outside 1..3"), ("2,2", "duplicates")])
def test_impossible_exits_are_refused(tmp_path: Path, layers: str, message: str) -> None:
    with pytest.raises(OfframpError, match=message):
        main([str(tiny_checkpoint(tmp_path / "in")), str(tmp_path / "out"), "--exits", layers])
    assert not (tmp_path / "out").exists()
