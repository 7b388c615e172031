"""The checkpoint directory is read strictly and written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.tiny import tiny_checkpoint, tiny_config, tiny_model
from offramp.common import checkpoint as module
from offramp.common.checkpoint import Checkpoint, load_checkpoint, save_checkpoint, write_record
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.operating_point import OperatingPoint, OperatingPoints
from offramp.common.exits.policy import ExitPolicy
from offramp.common.exits.profile import TokenProfile
from offramp.common.hf import write_weights

EXITS = ExitConfig((1, 3), "adapter", adapter_dim=5)
POLICY = ExitPolicy("margin", {1: 0.9, 3: 0.4}, min_layer=1, decay=2.0, shortlist=(4, 9), shortlist_only=True)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path / "model", EXITS, POLICY)


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file in place."""
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def rehash(directory: Path) -> None:
    """Bring the hashes up to date, which would tell first that files were changed."""
    files = directory.glob("*.safetensors")
    edit(directory / "exits.json", lambda record: record.update(sha256={f.name: module.sha256(f) for f in files}))


def edit_tensors(file: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change a safetensors file in place, and its hash."""
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)
    if (file.parent / "exits.json").exists():
        rehash(file.parent)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    model = tiny_model(EXITS)
    profile = TokenProfile.of([1, 2, 2], [0.5, 0.75, None])
    points = OperatingPoints({"safe": OperatingPoint("recompute", POLICY, 4, profile)}, "safe")
    saved = Checkpoint(model, tiny_config(), POLICY, {"risk": 0.1}, {"run": "a"}, points=points)
    loaded = load_checkpoint(save_checkpoint(tmp_path / "model", saved))
    assert loaded.exits == EXITS
    assert loaded.policy == POLICY
    assert loaded.points == points
    assert (loaded.calibration, loaded.provenance) == ({"risk": 0.1}, {"run": "a"})
    assert loaded.hf_config == {**tiny_config(), "dtype": "float32"}
    assert not loaded.model.training
    state = model.state_dict()
    assert state.keys() == loaded.model.state_dict().keys()
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    assert all(parameter.requires_grad for parameter in loaded.model.parameters())


def test_exits_lie_beside_a_plain_directory(directory: Path) -> None:
    assert not any("exits" in name for name in load_file(directory / "model.safetensors"))
    assert all(name.startswith("exits.") for name in load_file(directory / "exits.safetensors"))
    for name in ("exits.json", "exits.safetensors"):
        (directory / name).unlink()
    plain = load_checkpoint(directory)
    assert plain.exits.layers == ()
    assert plain.policy is None


def _drop(name: str) -> Callable[[Path], None]:
    file = "exits.safetensors" if name.startswith("exits.") else "model.safetensors"
    return lambda path: edit_tensors(path / file, lambda tensors: tensors.pop(name))


def _set(name: str, tensor: torch.Tensor, file: str = "model.safetensors") -> Callable[[Path], None]:
    return lambda path: edit_tensors(path / file, lambda tensors: tensors.update({name: tensor}))


def _record(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return lambda path: edit(path / "exits.json", change)


def _config(**fields: Any) -> Callable[[Path], None]:
    return lambda path: edit(path / "config.json", lambda config: config.update(fields))


def _cut(file: str) -> Callable[[Path], None]:
    def cut(path: Path) -> None:
        (path / file).write_bytes((path / file).read_bytes()[:-100])
        rehash(path)

    return cut


def _only_pickle(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def _flip_a_bit(path: Path) -> None:
    content = bytearray((path / "exits.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "exits.safetensors").write_bytes(content)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a tensor is missing": (_drop("model.layers.2.mlp.up_proj.weight"), r"lacks 1 tensors.*'layers.2.mlp.up_proj"),
    "an exit's tensor is missing": (_drop("exits.3.adapter.proj.weight"), r"lacks 1 tensors.*'exits.3.adapter.proj"),
    "a tensor too many": (_set("model.layers.4.mlp.up_proj.weight", torch.zeros(2)), r"holds 1 tensors.*'layers.4"),
    "another shape": (_set("model.norm.weight", torch.zeros(31)), r"'norm.weight' has shape \[31\].*\[32\]"),
    "another type": (
        _set("model.norm.weight", torch.zeros(32, dtype=torch.int8)),
        r"'norm.weight' is int8; Offramp reads fp32",
    ),
    "a backbone tensor among the exits": (
        _set("norm.weight", torch.zeros(32), "exits.safetensors"),
        r"exits.safetensors holds 'norm.weight', which is not a tensor of an exit head",
    ),
    "weights are cut short": (_cut("model.safetensors"), r"cannot be read as safetensors.*cut short"),
    "exits are cut short": (_cut("exits.safetensors"), r"cannot be read as safetensors.*cut short"),
    "a bit flipped": (_flip_a_bit, r"exits.safetensors is not the file.*SHA-256 differs"),
    "no hashes": (_record(lambda r: r.pop("sha256")), r"lacks the section 'sha256'"),
    "hashes are no table": (_record(lambda r: r.update(sha256="none")), r"lacks the section 'sha256'"),
    "a hash is missing": (_record(lambda r: r["sha256"].pop("model.safetensors")), r"no SHA-256 of model.safetensors"),
    "a hash of the exits is missing": (
        _record(lambda r: r["sha256"].pop("exits.safetensors")),
        r"no SHA-256 of exits.safetensors",
    ),
    "exit weights are gone": (lambda path: (path / "exits.safetensors").unlink(), r"exits.safetensors is missing"),
    "weights are gone": (lambda path: (path / "model.safetensors").unlink(), r"holds neither|is missing"),
    "config.json is gone": (lambda path: (path / "config.json").unlink(), r"config.json does not exist"),
    "config.json is not JSON": (lambda path: (path / "config.json").write_text("{"), r"config.json is not valid JSON"),
    "only pickled weights": (_only_pickle, r"pickled weights.*save_pretrained|model.safetensors is missing"),
    "a schema from the future": (_record(lambda r: r.update(schema_version=2)), r"schema version 2.*reads 1"),
    "no schema version": (_record(lambda r: r.pop("schema_version")), r"schema version None"),
    "an unknown section": (_record(lambda r: r.update(speculation={})), r"unknown sections \['speculation'\]"),
    "no section of exits": (_record(lambda r: r.pop("exits")), r"lacks the section 'exits'"),
    "an unknown field of exits": (_record(lambda r: r["exits"].update(tide=True)), r"'exits' is not understood.*tide"),
    "an unknown field of the policy": (
        _record(lambda r: r["policy"].update(tau=1)),
        r"'policy' is not understood.*tau",
    ),
    "a threshold without exit": (
        _record(lambda r: r["policy"]["thresholds"].update({"2": 0.5})),
        r"layers \[2\], but the model has exits at \[1, 3\]",
    ),
    "a threshold that is not a number": (
        _record(lambda r: r["policy"]["thresholds"].update({"3": "high"})),
        r"'policy' is not understood.*high",
    ),
    "a shortlist beyond the vocabulary": (
        _record(lambda r: r["policy"].update(shortlist=[4, 300])),
        r"token 300, outside the vocabulary of 300",
    ),
    "an exit beyond the model": (
        _record(lambda r: r["exits"].update(layers=[1, 4])),
        r"exit layers \[4\] are outside 1..3",
    ),
    "another head": (_record(lambda r: r["exits"].update(head="block", adapter_dim=None)), r"lacks .* tensors"),
    "tied, but the tensors differ": (_config(tie_word_embeddings=True), r"ties.*but the stored tensors differ"),
    "another model type": (_config(model_type="gpt2"), r"model_type 'gpt2' is not supported.*llama"),
    "another activation": (_config(hidden_act="gelu"), r"hidden_act 'gelu' is not supported"),
    "another rope": (
        _config(rope_scaling={"rope_type": "yarn", "factor": 2.0}),
        r"rope_type 'yarn' is not supported.*llama3",
    ),
    "a rope without its factor": (_config(rope_scaling={"rope_type": "linear"}), r"config.json lacks 'factor'"),
    "quantised weights": (_config(quantization_config={"bits": 4}), r"quantised weights.*not supported"),
    "a size that is none": (_config(hidden_size="wide"), r"config.json is not understood.*wide"),
    "heads that do not divide": (_config(num_key_value_heads=3), r"4 is not a multiple of num_key_value_heads 3"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_directory_is_refused(directory: Path, fault: str) -> None:
    breaks, message = BROKEN[fault]
    breaks(directory)
    with pytest.raises(OfframpError, match=message) as raised:
        load_checkpoint(directory)
    assert "\n" not in str(raised.value)


def test_a_plain_directory_with_pickled_weights_only_is_refused(tmp_path: Path) -> None:
    plain = tiny_checkpoint(tmp_path / "plain")
    (plain / "model.safetensors").rename(plain / "pytorch_model.bin")
    with pytest.raises(OfframpError, match=r"pickled weights \(\*.bin\), which Offramp never loads.*safetensors"):
        load_checkpoint(plain)


def test_exit_weights_without_their_record_are_refused(directory: Path) -> None:
    (directory / "exits.json").unlink()
    with pytest.raises(OfframpError, match=r"holds 8 tensors the model does not have, the first is 'exits.1"):
        load_checkpoint(directory)


@pytest.mark.parametrize("name", ["nowhere", "model/config.json"])
def test_a_path_that_is_no_directory_is_refused(directory: Path, name: str) -> None:
    with pytest.raises(OfframpError, match=r"is not a directory; give a checkpoint directory"):
        load_checkpoint(directory.parent / name)


def test_a_stored_copy_of_a_tied_unembedding_is_taken_if_equal(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "tied", tie_word_embeddings=True)
    edit_tensors(
        path / "model.safetensors",
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] * 1}),
    )
    assert load_checkpoint(path).model.lm_head is None


def test_shards_are_read_and_a_lost_one_is_named(directory: Path) -> None:
    whole = load_checkpoint(directory).model.state_dict()
    backbone = {name: tensor.clone() for name, tensor in whole.items() if not name.startswith("exits.")}
    (directory / "model.safetensors").unlink()
    write_weights(directory, backbone, max_shard_size="60KB")
    shards = sorted(directory.glob("model-*.safetensors"))
    assert len(shards) > 2
    rehash(directory)
    again = load_checkpoint(directory).model.state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())
    shards[1].unlink()
    with pytest.raises(OfframpError, match=rf"lacks {shards[1].name}, which model.safetensors.index.json names"):
        load_checkpoint(directory)


def test_mixed_types_become_the_narrowest_that_loses_nothing(tmp_path: Path) -> None:
    model = tiny_model(ExitConfig((2,)))
    model.bfloat16()
    model.exits.float()
    path = save_checkpoint(tmp_path / "mixed", Checkpoint(model, tiny_config()))
    assert {p.dtype for p in load_checkpoint(path).model.parameters()} == {torch.float32}
    assert {p.dtype for p in load_checkpoint(path, dtype=torch.bfloat16).model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("head", ["final", "bare"])
def test_exits_without_weights_can_be_declared_on_a_plain_directory(tmp_path: Path, head: Any) -> None:
    plain = tiny_checkpoint(tmp_path / "plain")
    declared = load_checkpoint(plain, exits=ExitConfig((2,), head))
    ids = torch.tensor([[5, 6, 7]])
    out = declared.model(ids)
    state = out.hidden_states[2]
    expected = declared.model.norm(state) if head == "final" else state
    assert declared.model.lm_head is not None
    torch.testing.assert_close(out.logits[2], declared.model.lm_head(expected))


def test_exits_can_be_declared_where_a_record_only_says_where_weights_come_from(tmp_path: Path) -> None:
    plain = tiny_checkpoint(tmp_path / "plain")
    checkpoint = load_checkpoint(plain)
    checkpoint.provenance = {"dequantised_from": "a file"}
    write_record(plain, checkpoint)
    declared = load_checkpoint(plain, exits=ExitConfig((2,), "final"))
    assert declared.exits.layers == (2,)
    assert declared.provenance == checkpoint.provenance
    assert load_checkpoint(plain).exits.layers == ()


def test_exits_that_need_weights_cannot_be_declared(tmp_path: Path, directory: Path) -> None:
    plain = tiny_checkpoint(tmp_path / "plain")
    with pytest.raises(OfframpError, match=r"head 'norm' need weights; add them with `offramp import --exits`"):
        load_checkpoint(plain, exits=ExitConfig((2,)))
    with pytest.raises(OfframpError, match=r"already has exits at \["):
        load_checkpoint(directory, exits=ExitConfig((2,), "final"))


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (1, None, (1,)),
        (None, None, ()),
        ([1, 2], {}, (1, 2)),
        (128001, {"eos_token_id": [128001, 128009]}, (128001, 128009)),
        (2, {"eos_token_id": 3}, (3, 2)),
        (None, {"eos_token_id": 0}, (0,)),
    ],
)
def test_any_listed_eos_ends_a_text(tmp_path: Path, config: Any, generation: Any, expected: tuple[int, ...]) -> None:
    path = tiny_checkpoint(tmp_path / "model", with_tokenizer=False, eos_token_id=config)
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    assert load_checkpoint(path).eos_token_ids == expected


def test_nothing_is_left_behind_when_saving_fails(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {file.name: file.read_bytes() for file in directory.iterdir()}

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_record", full)
    with pytest.raises(OfframpError, match=r"cannot be written.*No space left"):
        save_checkpoint(directory, load_checkpoint(directory), overwrite=True)
    with pytest.raises(OfframpError, match="cannot be written"):
        save_checkpoint(directory.parent / "other", load_checkpoint(directory))
    assert {file.name: file.read_bytes() for file in directory.iterdir()} == before
    assert [file.name for file in directory.parent.iterdir()] == ["model"]


def test_the_old_directory_comes_back_when_the_new_one_cannot_take_its_place(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {file.name: file.read_bytes() for file in directory.iterdir()}
    checkpoint, replace = load_checkpoint(directory), Path.replace

    def stumble(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise OSError(5, "Input/output error")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", stumble)
    with pytest.raises(OfframpError, match="cannot be written"):
        save_checkpoint(directory, checkpoint, overwrite=True)
    assert {file.name: file.read_bytes() for file in directory.iterdir()} == before


def test_saving_over_itself_keeps_everything(directory: Path) -> None:
    before = {file.name: file.read_bytes() for file in directory.iterdir()}
    with pytest.raises(OfframpError, match="already exists"):
        save_checkpoint(directory, load_checkpoint(directory))
    save_checkpoint(directory, load_checkpoint(directory), overwrite=True)
    assert {file.name: file.read_bytes() for file in directory.iterdir()} == before
    assert {oct(file.stat().st_mode & 0o777) for file in directory.iterdir()} == {"0o644"}


def test_what_is_no_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/one.jpg").write_text("precious")
    checkpoint = Checkpoint(tiny_model(), tiny_config())
    with pytest.raises(OfframpError, match="is not a checkpoint directory, so it is not overwritten"):
        save_checkpoint(tmp_path / "photos", checkpoint, overwrite=True)
    assert (tmp_path / "photos/one.jpg").read_text() == "precious"


def test_a_link_to_a_directory_stays_a_link(directory: Path) -> None:
    link = directory.parent / "latest"
    link.symlink_to(directory.name)
    save_checkpoint(link, load_checkpoint(link), overwrite=True)
    assert link.is_symlink()
    assert load_checkpoint(link).exits == EXITS
