"""The model is the one transformers runs: same logits, same states at every exit, same tensors after a round trip."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from helpers.tiny import jitter, tiny_config, tiny_tokenizer
from offramp.common.checkpoint import Checkpoint, load_checkpoint
from offramp.common.exits.config import ExitConfig
from offramp.common.generation import generate
from offramp.common.importing import NewExits, import_model
from offramp.common.model.config import ModelConfig

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "llama 3 scaling": {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
    "linear scaling": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "dynamic scaling, beyond the length": {
        "max_position_embeddings": 16,
        # transformers starts from max_position_embeddings, whatever the scaling says.
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8},
    },
    "dynamic scaling, within the length": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "mistral": {"model_type": "mistral"},
    "mistral with a window shorter than the text": {"model_type": "mistral", "sliding_window": 5},
    "qwen2": {"model_type": "qwen2"},
    "qwen2 with a window in every layer": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 0,
    },
    "qwen2 with a window in no layer": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 28,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "qwen3 with biases": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True},
}
LENGTH = 24


def hugging_face(directory: Path, dtype: torch.dtype = torch.float32, **overrides: Any) -> nn.Module:
    """A random model of transformers, saved as transformers saves it."""
    hf_config = tiny_config(**overrides)
    config = AutoConfig.for_model(**hf_config)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    jitter(model, torch.Generator().manual_seed(7))
    model.save_pretrained(directory)
    return model


def ids(rows: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(5, 300, (rows, length), generator=torch.Generator().manual_seed(3))


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[nn.Module, Checkpoint]:
    """The same weights in transformers and in Offramp."""
    theirs = hugging_face(tmp_path / "hf", **FAMILIES[request.param])
    return theirs, load_checkpoint(tmp_path / "hf")


@torch.no_grad()
def test_logits_and_every_hidden_state_equal_transformers(family: tuple[nn.Module, Checkpoint]) -> None:
    theirs, ours = family
    expected = theirs(ids(), output_hidden_states=True)
    layout = ours.model.layout(ids())
    h = ours.model.embed(ids())
    torch.testing.assert_close(h, expected.hidden_states[0], rtol=0, atol=0)
    for layer in range(1, ours.config.num_layers):
        h = ours.model.run_layers(h, layer - 1, layer, layout)
        torch.testing.assert_close(h, expected.hidden_states[layer], rtol=1e-5, atol=1e-5)
    h = ours.model.run_layers(h, ours.config.num_layers - 1, ours.config.num_layers, layout)
    # transformers gives the last state after the final norm.
    final = ours.model.exit_state(h, ours.config.num_layers)
    torch.testing.assert_close(final, expected.hidden_states[-1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.model.exit_logits(h, ours.config.num_layers), expected.logits, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_jittered_norms_and_biases_matter(tmp_path: Path) -> None:
    """The parity above would not see a norm or a bias that is never applied if these were at their first values."""
    hugging_face(tmp_path / "hf", **FAMILIES["qwen3 with biases"])
    ours = load_checkpoint(tmp_path / "hf").model
    before = ours(ids(), exits=[4]).logits[4]
    seen = 0
    for name, parameter in ours.named_parameters():
        if parameter.dim() != 1 or name.endswith("k_proj.bias"):
            continue  # without rotation a key bias adds the same to all scores; with it, little
        kept = parameter.clone()
        parameter.fill_(1.0 if "norm" in name else 0.0)
        changed = (ours(ids(), exits=[4]).logits[4] - before).abs().max()
        parameter.copy_(kept)
        assert changed > 1e-4, name
        seen += 1
    assert seen == 4 * (3 + 4) + 1  # three biases and four norms in each layer, and the final norm


# Beyond the length, transformers' cache keeps keys that were rotated for shorter texts: the next test has no cache.
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"dynamic scaling, beyond the length"}), indirect=True)
@torch.no_grad()
def test_greedy_text_equals_that_of_transformers(family: tuple[nn.Module, Checkpoint]) -> None:
    theirs, ours = family
    prompt = ids(1, 5)
    # The mask is given: without it transformers guesses one from the pad id, and masks tokens that are none.
    text = theirs.generate(  # pyright: ignore[reportCallIssue]
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False, eos_token_id=None
    )
    assert generate(ours.model, prompt[0].tolist(), 16).token_ids == text[0, 5:].tolist()


@torch.no_grad()
def test_dynamic_scaling_without_cache(tmp_path: Path) -> None:
    theirs = hugging_face(tmp_path / "hf", **FAMILIES["dynamic scaling, beyond the length"])
    ours = load_checkpoint(tmp_path / "hf").model
    text = ids(1, 12)
    for token in generate(ours, text[0].tolist(), 12).token_ids:
        assert token == int(theirs(text).logits[0, -1].argmax())
        text = torch.cat((text, torch.tensor([[token]])), dim=1)


@torch.no_grad()
def test_packed_segments_equal_separate_texts(family: tuple[nn.Module, Checkpoint]) -> None:
    model = family[1].model.double()  # the kernels for packed and for plain texts round differently
    packed = ids(1)
    lengths = [7, 1, 11, 5]
    segments = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]
    logits = model(packed, model.layout(packed, segments), exits=[4]).logits[4][0]
    for part, got in zip(packed[0].split(lengths), logits.split(lengths), strict=True):
        torch.testing.assert_close(got, model(part[None]).logits[4][0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("dtype", "head"), [(torch.float32, "norm"), (torch.bfloat16, "adapter")])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral with a window shorter than the text"])
def test_import_with_exits_keeps_tensors_config_and_logits(
    tmp_path: Path, name: str, dtype: torch.dtype, head: Any
) -> None:
    theirs = hugging_face(tmp_path / "hf", dtype, **FAMILIES[name])
    tiny_tokenizer().save_pretrained(str(tmp_path / "hf"))
    import_model(str(tmp_path / "hf"), tmp_path / "out", exits=NewExits(ExitConfig((1, 3), head)))
    assert_same_tensors(tmp_path / "hf", tmp_path / "out")
    for file in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "hf" / file).read_bytes(), file
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    again, report = loaded
    assert not any(report.values()), report
    assert again.dtype == dtype
    with torch.no_grad():
        assert torch.equal(again(ids()).logits, theirs(ids()).logits)


def test_import_reads_shards_and_other_spellings(tmp_path: Path) -> None:
    theirs = hugging_face(tmp_path / "hf")
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="50KB")  # pyright: ignore[reportCallIssue]
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 1
    config = json.loads((tmp_path / "shards/config.json").read_text())
    config["torch_dtype"] = config.pop("dtype")  # transformers before version 5
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    (tmp_path / "shards/config.json").write_text(json.dumps(config))
    import_model(str(tmp_path / "shards"), tmp_path / "out")
    assert_same_tensors(tmp_path / "hf", tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text()) == config
    assert not (tmp_path / "out/exits.json").exists()  # a plain directory stays one


def assert_same_tensors(one: Path, other: Path) -> None:
    first, second = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype
        assert torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("scaling", [None, LLAMA3, {"rope_type": "linear", "factor": 2.0}])
def test_both_spellings_of_rope_are_one(scaling: dict[str, Any] | None) -> None:
    old = tiny_config(rope_theta=500000.0, rope_scaling=scaling)
    new = {**old, "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": 500000.0}}
    del new["rope_theta"], new["rope_scaling"]
    assert ModelConfig.from_hf(old) == ModelConfig.from_hf(new)
    assert ModelConfig.from_hf(new).rope.theta == 500000.0


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_silent_config_means_what_transformers_assumes(model_type: str) -> None:
    silent = {
        "model_type": model_type,
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
    }
    spelled_out = AutoConfig.for_model(**silent).to_dict()
    assert ModelConfig.from_hf(silent) == ModelConfig.from_hf(spelled_out)
