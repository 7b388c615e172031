"""Whole runs of the trainer on a tiny T5: the same commands, checkpoints and metrics as for decoder-only models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import T5ForConditionalGeneration

from helpers.fitting import Numbers, Pairs, comparable, fit, fit_all, make_pairs
from helpers.processes import run_processes
from helpers.tiny import tiny_checkpoint
from helpers.tiny_t5 import hugging_face_t5, load_t5
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.importing import NewExits, import_model
from offramp.train.encoder_decoder import check_module
from offramp.train.export import export_checkpoint
from offramp.train.lora import LoraConfig
from offramp.train.trained_model import TrainedModel

TIED: dict[str, Any] = {"num_layers": 2}
V1_1: dict[str, Any] = {"num_layers": 2, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}


def start_from(folder: Path, exits: tuple[int, ...] = (1, 2), head: Any = "adapter", **shape: Any) -> Path:
    hugging_face_t5(folder / "hf", **shape)
    import_model(str(folder / "hf"), folder / "start", exits=NewExits(ExitConfig(exits, head)))
    return folder / "start"


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return start_from(tmp_path_factory.mktemp("tied"), **TIED)


@pytest.fixture(scope="module")
def one(tied: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("one") / "one.ckpt"
    return {**fit(str(tied), str(out), data=Pairs, module={"fill_aware": {1: 0.2}}), "out": out}


def check_export(trained: Path, exported: Path) -> None:
    """Bit-equal, and an ordinary model to transformers, whose logits the final exit has."""
    weights, ours = TrainedModel.read(trained).weights, load_t5(exported).model
    state = ours.state_dict()
    assert weights.keys() == state.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in state.items())
    read: Any = T5ForConditionalGeneration.from_pretrained(exported, output_loading_info=True)
    theirs, loaded = read
    assert not loaded["missing_keys"]
    batch = make_pairs([(7, 0), (30, 0)], 6)
    with torch.no_grad():
        expected = theirs.eval()(input_ids=batch.source_ids[:, :6], decoder_input_ids=batch.input_ids).logits
        torch.testing.assert_close(ours(batch.source_ids[:, :6], batch.input_ids).logits[4], expected)


def test_a_run_learns_is_exported_and_loads_in_transformers(tied: Path, one: dict[str, Any], tmp_path: Path) -> None:
    assert one["metrics"][5, "val/loss"] < one["metrics"][2, "val/loss"]
    assert one["metrics"][5, "train/loss_exit_01"] < one["metrics"][0, "train/loss_exit_01"]
    assert (1, "train/model_tflops_per_second") not in one["metrics"], "what a T5 needs is not counted"
    metrics = one["metrics"]
    assert metrics[1, "train/tokens_per_second"] * metrics[1, "train/step_seconds"] == pytest.approx(4 * (9 + 10))
    exported = export_checkpoint(one["out"], tmp_path / "out")
    check_export(one["out"], exported)
    before, after = load_t5(tied).model.state_dict(), load_t5(exported).model.state_dict()
    assert not [name for name in before if torch.equal(before[name], after[name])], "everything is trained"


def test_resuming_is_as_if_nothing_had_happened(tied: Path, one: dict[str, Any], tmp_path: Path) -> None:
    half = one["out"].with_name("one-step=3.ckpt")
    again = fit(str(tied), str(tmp_path / "x.ckpt"), data=Pairs, module={"fill_aware": {1: 0.2}}, resume=str(half))
    assert comparable(again, range(3, 6)) == comparable(one, range(3, 6))


def test_a_frozen_backbone_stays_the_same_file(tmp_path: Path) -> None:
    start = start_from(tmp_path, **V1_1)
    frozen = {"freeze": ["backbone"], "final_weight": 0.0}
    fit(str(start), str(tmp_path / "run.ckpt"), data=Pairs, max_steps=3, module=frozen)
    exported = export_checkpoint(tmp_path / "run.ckpt", tmp_path / "out")
    assert (exported / "model.safetensors").read_bytes() == (start / "model.safetensors").read_bytes()
    before, after = load_t5(start).model.state_dict(), load_t5(exported).model.state_dict()
    moved = {name.split(".")[1] for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"1", "2"}


@pytest.mark.parametrize("shape", [{"tie_word_embeddings": True}, V1_1], ids=["tied", "v1.1"])
def test_from_scratch_needs_no_weights(shape: dict[str, Any], tmp_path: Path) -> None:
    start = tmp_path / "start"
    start.mkdir()
    sizes = {"vocab_size": 300, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 4}
    config = {"model_type": "t5", "num_heads": 4, "eos_token_id": 1, **sizes, **shape}
    (start / "config.json").write_text(json.dumps({**config, "num_layers": 2}))
    (start / "exits.json").write_text(json.dumps({"schema_version": 1, "exits": ExitConfig((2,)).to_json()}))
    run = fit(str(start), str(tmp_path / "run.ckpt"), data=Pairs, max_steps=3, module={"from_scratch": True})
    assert run["metrics"][0, "train/loss_exit_04"] == pytest.approx(5.7, abs=1.5)  # log 300, and what it is sure of
    check_export(tmp_path / "run.ckpt", export_checkpoint(tmp_path / "run.ckpt", tmp_path / "out"))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "lora": ({"module": {"lora": LoraConfig()}}, "model.lora is made for decoder-only models"),
    "compiled layers": ({"module": {"compile_layers": True}}, "model.compile_layers is made for decoder-only models"),
    "plain tokens": ({"data": Numbers}, r"takes batches of sources and targets \(PairBatch\), not TokenBatch"),
    "tensor ranks": ({"strategy": {"pipe": 1, "tensor": 2}, "devices": 2}, "tensor is 2, but the layers of a T5"),
    "bubbles": ({"strategy": {"pipe": 1, "fill_bubbles": True}}, "fill_bubbles is made for decoder-only models"),
}


@pytest.mark.parametrize("fault", [name for name in REFUSED if name not in ("tensor ranks", "bubbles")])
def test_what_a_t5_does_not_know_is_refused(fault: str, tied: Path, tmp_path: Path) -> None:
    settings, words = REFUSED[fault]
    with pytest.raises(OfframpError, match=words):
        fit(str(tied), str(tmp_path / "x.ckpt"), **{"data": Pairs, **settings})


@pytest.mark.parametrize("kind", ["priming", "classifiers"])
def test_parts_of_exits_learn_on_cached_states(kind: str, tied: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {kind: True, "trainer": {"val_check_interval": 1.0}}
    fit(str(tied), str(tmp_path / "run.ckpt"), data=Pairs, **settings)
    exported = export_checkpoint(tmp_path / "run.ckpt", tmp_path / "out")
    before, after = load_t5(tied).model.state_dict(), load_t5(exported).model.state_dict()
    moved = {name for name in after if name not in before or not torch.equal(before[name], after[name])}
    part = "adapter" if kind == "priming" else "classifier"
    assert {name.split(".")[1] for name in moved if part in name} == {"1", "2"}
    assert all(name.startswith("exits.") for name in moved), "the model stays as it is"


def test_fp16_is_refused(tied: Path) -> None:
    # Not by a run: on CPU, Lightning makes bf16 of it first.
    with pytest.raises(OfframpError, match="T5 does not run in fp16"):
        check_module(load_t5(tied).config, lora=False, compiled=False, precision="16-mixed")


def test_pairs_are_refused_by_a_decoder_only_model(tmp_path: Path) -> None:
    start = tiny_checkpoint(tmp_path / "start", ExitConfig((1,)))
    with pytest.raises(OfframpError, match="takes batches of tokens, not PairBatch"):
        fit(str(start), str(tmp_path / "x.ckpt"), data=Pairs)


@pytest.mark.slow
def test_two_stages_log_what_one_process_logs(tied: Path, one: dict[str, Any], tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.ckpt" for number in range(4)]
    strategy, module = {"pipe": 2, "micro_batches": 3}, {"fill_aware": {1: 0.2}}
    same = {"checkpoint": str(tied), "devices": 2, "data": Pairs, "module": module}
    halves = [str(path.with_name(f"{path.stem}-step=3.ckpt")) for path in paths]
    runs: list[dict[str, Any]] = [
        {**same, "out": str(paths[0]), "strategy": strategy},
        {**same, "out": str(paths[1]), "strategy": {**strategy, "stage_bounds": [4]}, "resume": halves[0]},
        {**same, "out": str(paths[2]), "strategy": strategy, "trainer": {"precision": "bf16-mixed"}},
        {**same, "out": str(paths[3]), **REFUSED["tensor ranks"][0]},
    ]
    for whole, moved, mixed, refused in run_processes(fit_all, 2, runs, timeout_s=600):
        assert comparable(whole) == pytest.approx(comparable(one), rel=1e-4)
        late = comparable(one, range(3, 6))
        assert comparable(moved, range(3, 6)) == pytest.approx(late, rel=1e-4), "on other stages"
        assert mixed["metrics"][5, "val/loss"] == pytest.approx(one["metrics"][5, "val/loss"], rel=0.05)
        assert REFUSED["tensor ranks"][1] in refused["fault"]
    exported = export_checkpoint(paths[0], tmp_path / "out")
    check_export(paths[0], exported)
    alone = load_t5(export_checkpoint(one["out"], tmp_path / "one")).model.state_dict()
    for name, tensor in load_t5(exported).model.state_dict().items():
        torch.testing.assert_close(tensor, alone[name], rtol=1e-3, atol=1e-3)
