"""What a T5 configuration may say, what it must not, and who refuses the family today."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import T5Config as HuggingFaceConfig

from helpers.tiny_t5 import SHAPES, hugging_face_t5, load_t5
from offramp.common import cli
from offramp.common.checkpoint import load_any_checkpoint, load_checkpoint
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.families import read_config, weight_names
from offramp.common.importing import NewExits, import_model, main
from offramp.common.model.config import ModelConfig
from offramp.common.t5.config import T5Config
from offramp.common.t5.model import MultiExitT5

SMALL = {
    **{"model_type": "t5", "vocab_size": 300, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    "architectures": ["T5ForConditionalGeneration"],
}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d_kv": 0}, "d_kv 0 must be a whole number of at least 1"),
        ({"d_kv": 7.5}, "d_kv 7.5 must be a whole number"),
        ({"d_kv": True}, "d_kv True must be a whole number"),
        ({"num_heads": "8"}, "num_heads '8' must be a whole number"),
        ({"num_heads": None}, "config.json lacks 'num_heads'; it is not a complete t5 configuration"),
        ({"num_decoder_layers": 0}, "num_decoder_layers 0 must be a whole number of at least 1"),
        (
            {"feed_forward_proj": "gated-silu"},
            "feed_forward_proj 'gated-silu' is not supported; Offramp knows relu",
        ),
        ({"feed_forward_proj": None}, "feed_forward_proj None is not supported"),
        ({"feed_forward_proj": ["relu"]}, r"feed_forward_proj \['relu'\] is not supported"),
        ({"dense_act_fn": "silu"}, "dense_act_fn 'silu' contradicts feed_forward_proj 'relu', which means 'relu'"),
        ({"feed_forward_proj": "gated-gelu", "is_gated_act": False}, "is_gated_act False contradicts"),
        (
            {"relative_attention_num_buckets": 3},
            "relative_attention_num_buckets 3 must be .* at least 4",
        ),
        ({"relative_attention_num_buckets": "x"}, "relative_attention_num_buckets 'x' must be a whole number"),
        ({"relative_attention_max_distance": 16}, "relative_attention_max_distance 16 must be .* at least 17"),
        ({"layer_norm_epsilon": "small"}, "config.json is not understood"),
        ({"layer_norm_epsilon": 0}, "layer_norm_epsilon 0 must be above 0"),
        ({"architectures": ["T5EncoderModel"]}, r"architectures \['T5EncoderModel'\] are not supported"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder is false"),
        ({"quantization_config": {"bits": 8}}, "quantised weights"),
        ({"decoder_start_token_id": 300}, "decoder_start_token_id 300 lies outside the vocabulary of 300 tokens"),
        ({"pad_token_id": -1}, "pad_token_id -1 must be a whole number of at least 0"),
        ({"model_type": "mt5"}, "model_type 'mt5' is not supported; Offramp knows llama, mistral, qwen2, qwen3 and t5"),
    ],
)
def test_a_malformed_configuration_gets_one_sentence(fields: dict[str, Any], message: str) -> None:
    read_config(SMALL)
    with pytest.raises(OfframpError, match=message) as caught:
        read_config({**SMALL, **fields})
    assert "\n" not in str(caught.value)


def test_a_silent_configuration_means_what_transformers_assumes() -> None:
    spelled_out = HuggingFaceConfig(**{k: v for k, v in SMALL.items() if k != "model_type"}).to_dict()
    assert read_config({**SMALL, "decoder_start_token_id": 0}) == read_config(
        {**spelled_out, "decoder_start_token_id": 0}
    )
    assert read_config({**SMALL, "pad_token_id": 5}).decoder_start_token_id == 5  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("shape", ["t5, deep decoder", "v1.1, deep decoder"])
def test_names_are_one_to_one(tmp_path: Path, shape: str) -> None:
    hugging_face_t5(tmp_path / "hf", **SHAPES[shape])
    ours = load_t5(tmp_path / "hf")
    names = weight_names(ours.config)
    stored = load_file(tmp_path / "hf/model.safetensors")
    assert {names.stored(name) for name in ours.model.state_dict()} == stored.keys()
    assert all(names.stored(str(names.own(name))) == name for name in stored)
    for unknown in ("decoder.block.0.layer.3.layer_norm.weight", "encoder.block.0.layer.0.SelfAttention.z.weight", "x"):
        assert names.own(unknown) == unknown


def test_tensors_of_the_other_feed_forward_are_superfluous(tmp_path: Path) -> None:
    hugging_face_t5(tmp_path / "hf", **SHAPES["v1.1"])
    config = json.loads((tmp_path / "hf/config.json").read_text())
    config |= {"feed_forward_proj": "relu", "dense_act_fn": "relu", "is_gated_act": False}
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    with pytest.raises(OfframpError, match="lacks 8 tensors"):
        load_any_checkpoint(tmp_path / "hf")


def test_fp16_is_refused_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hugging_face_t5(tmp_path / "hf")
    reason = r"T5 does not run in fp16, because its states outgrow .* choose bf16 or fp32"
    with pytest.raises(OfframpError, match=reason):
        load_any_checkpoint(tmp_path / "hf", dtype=torch.float16)
    assert cli.main(["import", str(tmp_path / "hf"), str(tmp_path / "half"), "--dtype", "fp16"]) == 1
    assert "T5 does not run in fp16" in capsys.readouterr().err
    assert not (tmp_path / "half").exists()
    stored = {name: tensor.half() for name, tensor in load_file(tmp_path / "hf/model.safetensors").items()}
    save_file(stored, tmp_path / "hf/model.safetensors")
    with pytest.raises(OfframpError, match=reason):
        load_any_checkpoint(tmp_path / "hf")
    for dtype in (torch.float32, torch.bfloat16):
        made = import_model(str(tmp_path / "hf"), tmp_path / str(dtype), dtype=dtype)
        assert {tensor.dtype for tensor in made.model.state_dict().values()} == {dtype}


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    hugging_face_t5(tmp_path / "hf")
    (tmp_path / "hf/model.safetensors").rename(tmp_path / "hf/pytorch_model.bin")
    with pytest.raises(OfframpError, match="pickled weights"):
        load_any_checkpoint(tmp_path / "hf")


@pytest.mark.parametrize("head", ["mlp", "block"])
def test_heads_made_for_the_other_family_are_refused(tmp_path: Path, head: Any) -> None:
    hugging_face_t5(tmp_path / "hf")
    with pytest.raises(OfframpError, match=f"exit head '{head}' is made for decoder-only models; choose bare, final"):
        import_model(str(tmp_path / "hf"), tmp_path / "out", exits=NewExits(ExitConfig((1,), head)))


def test_exits_are_on_decoder_layers(tmp_path: Path) -> None:
    hugging_face_t5(tmp_path / "hf", num_layers=5, num_decoder_layers=2)
    with pytest.raises(OfframpError, match=r"exit layers \[4\] are outside 1\.\.1"):
        import_model(str(tmp_path / "hf"), tmp_path / "out", exits=NewExits(ExitConfig((4,))))


def test_import_says_what_it_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hugging_face_t5(tmp_path / "hf", **SHAPES["t5, deep decoder"])
    assert main([str(tmp_path / "hf"), str(tmp_path / "out"), "--exits", "1,3", "--head", "final"]) == 0
    assert "t5, 2 encoder and 5 decoder layers, exits at 1, 3" in capsys.readouterr().out
    assert main([str(tmp_path / "out"), str(tmp_path / "more"), "--exits", "4", "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert (described["model_type"], described["num_layers"], described["exits"]["layers"]) == ("t5", 5, [1, 3, 4])
    assert load_t5(tmp_path / "more").exits == ExitConfig((1, 3, 4), "final")


def test_layers_above_a_depth_are_not_read(tmp_path: Path) -> None:
    hugging_face_t5(tmp_path / "hf")
    import_model(str(tmp_path / "hf"), tmp_path / "out", exits=NewExits(ExitConfig((2, 3), "norm")))
    model = load_t5(tmp_path / "out", depth=2).model
    assert (model.depth, len(model.encoder.layers), list(model.exits)) == (2, 4, ["2"])


def test_what_has_only_decoder_only_models_refuses_in_one_sentence(tmp_path: Path) -> None:
    """A plan reads the configuration first, benchmarks load the directory: both say the same."""
    hugging_face_t5(tmp_path / "hf")
    sentence = "model_type 't5' is an encoder-decoder model, which is imported, trained, exported and served so far"
    with pytest.raises(OfframpError, match=sentence):
        load_checkpoint(tmp_path / "hf")
    with pytest.raises(OfframpError, match=sentence):
        ModelConfig.from_hf(json.loads((tmp_path / "hf/config.json").read_text()))


def test_fresh_weights_have_the_spread_of_hugging_face() -> None:
    shape = {**SMALL, "vocab_size": 2000, "d_model": 64, "d_ff": 256, "d_kv": 32}
    config = T5Config.from_hf({**shape, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False})
    model = MultiExitT5(config)
    model.reset_parameters(seed=0)
    expected = {
        "embed_tokens.weight": 1.0,
        "relative_attention_bias.weight": 64**-0.5,
        "layers.0.self_attn.q_proj.weight": (64 * 32) ** -0.5,
        "layers.1.cross_attn.k_proj.weight": 64**-0.5,
        "encoder.layers.1.self_attn.o_proj.weight": (4 * 32) ** -0.5,
        "layers.0.mlp.up_proj.weight": 64**-0.5,
        "layers.0.mlp.down_proj.weight": 256**-0.5,
        "lm_head.weight": 64**-0.5,
    }
    for name, spread in expected.items():
        assert float(model.get_parameter(name).detach().std()) == pytest.approx(spread, rel=0.1), name
    assert all(float(p.detach().min()) == 1 for name, p in model.named_parameters() if name.endswith("norm.weight"))
    again = MultiExitT5(config)
    again.reset_parameters(seed=0)
    assert all(torch.equal(p, again.get_parameter(name)) for name, p in model.named_parameters())
