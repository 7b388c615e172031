"""Exits trained on a frozen backbone: what lies above them is neither held nor run, and no bit of the rest changes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.fitting import fit, fit_all
from helpers.processes import run_processes
from helpers.tiny import tiny_checkpoint
from offramp.common.checkpoint import load_checkpoint, save_checkpoint
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.importing import import_model
from offramp.train.export import export_checkpoint, main
from offramp.train.stage_files import read_stages

FROZEN: dict[str, Any] = {"freeze": ["backbone"], "final_weight": 0.0}
BOTH = {**FROZEN, "exit_weights": [1.0, 1.0]}
FIRST = {**FROZEN, "exit_weights": [1.0, 0.0]}
SECOND = {**FROZEN, "exit_weights": [0.0, 1.0]}
PIPELINE = {"pipe": 2, "micro_batches": 3}
RUNS: dict[str, dict[str, Any]] = {
    "pipeline": {"strategy": PIPELINE, "module": BOTH},
    "ZeRO-1": {"strategy": {**PIPELINE, "zero_stage": 1}, "module": BOTH},
    # Nothing to train before the last stage.
    "idle": {"strategy": {**PIPELINE, "stage_bounds": [1]}, "module": SECOND},
    "idle, ZeRO-1": {"strategy": {**PIPELINE, "stage_bounds": [1], "zero_stage": 1}, "module": SECOND},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of six layers in bf16, with exits after two and three of them."""
    folder = tmp_path_factory.mktemp("source")
    plain = tiny_checkpoint(folder / "fp32", ExitConfig((2, 3), head="adapter"), num_hidden_layers=6)
    import_model(str(plain), folder / "bf16", dtype=torch.bfloat16)
    shutil.copy(plain / "tokenizer.json", folder / "bf16")
    return folder / "bf16"


@pytest.fixture(scope="module")
def parts(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Training checkpoints of runs in one process."""
    folder = tmp_path_factory.mktemp("parts")
    modules = {"both": BOTH, "first": FIRST, "second": SECOND}
    for name, module in modules.items():
        fit(str(source), str(folder / f"{name}.ckpt"), module=module)
    return {name: folder / f"{name}.ckpt" for name in modules}


@pytest.fixture(scope="module")
def pipelines(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("pipelines")
    paths = {name: folder / f"{number}.ckpt" for number, name in enumerate(RUNS)}
    runs = [{"checkpoint": str(source), "out": str(paths[name]), "devices": 2, **RUNS[name]} for name in RUNS]
    answers = run_processes(fit_all, 2, runs, timeout_s=400)
    return {name: (paths[name], answers[0][number]) for number, name in enumerate(RUNS)}


def digest(directory: Path) -> str:
    return hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()


def exit_weights(directory: Path) -> dict[str, torch.Tensor]:
    state = load_checkpoint(directory).model.state_dict()
    return {name: tensor for name, tensor in state.items() if name.startswith("exits.")}


def test_what_lies_above_the_last_exit_is_not_loaded(source: Path) -> None:
    whole, part = load_checkpoint(source).model, load_checkpoint(source, depth=2).model
    assert part.depth == 2
    kept = ("embed_tokens", "norm", "lm_head", "layers.0.", "layers.1.", "exits.2.")
    assert set(part.state_dict()) == {name for name in whole.state_dict() if name.startswith(kept)}
    ids = torch.arange(10)[None]
    assert torch.equal(part(ids, exits=[2]).logits[2], whole(ids, exits=[2]).logits[2])


def test_the_exported_backbone_is_the_file_it_was(source: Path, parts: dict[str, Path], tmp_path: Path) -> None:
    held = torch.load(parts["first"], weights_only=True)["state_dict"]
    assert not any(name.startswith(("model.layers.2", "model.exits.3")) for name in held)
    for name, path in parts.items():
        exported = export_checkpoint(path, tmp_path / name)
        assert digest(exported) == digest(source)
        assert load_checkpoint(exported).model.norm.weight.dtype == torch.bfloat16
        assert (exported / "tokenizer.json").is_file()
    converted = export_checkpoint(parts["both"], tmp_path / "fp32", dtype="fp32")
    before = load_checkpoint(source, dtype=torch.float32).model.state_dict()
    after = load_checkpoint(converted).model.state_dict()
    changed = {name.split(".")[1] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"2", "3"}
    assert all(torch.equal(before[name], after[name]) for name in before if not name.startswith("exits."))


def test_exits_learn_what_they_learn_beneath_the_whole_model(source: Path, tmp_path: Path) -> None:
    tuned = fit(str(source), str(tmp_path / "tuned.ckpt"), module=BOTH)["metrics"]
    whole = fit(str(source), str(tmp_path / "whole.ckpt"), module={**BOTH, "final_weight": 1.0})["metrics"]
    for metric in ("train/loss_exit_02", "train/accuracy_exit_03", "val/loss_exit_03"):
        assert tuned[5, metric] == pytest.approx(whole[5, metric], rel=1e-6)
    assert (5, "val/loss_exit_06") in whole
    assert (5, "val/loss_exit_06") not in tuned


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_stages_end_at_the_last_exit(
    name: str, source: Path, parts: dict[str, Path], pipelines: dict[str, Any], tmp_path: Path
) -> None:
    path, answer = pipelines[name]
    held = read_stages(path / "checkpoint")
    assert not any(tensor.startswith(("layers.3", "layers.4", "layers.5", "norm")) for tensor in held)
    exported = export_checkpoint(path, tmp_path / "exported")
    assert digest(exported) == digest(source)
    alone = fit(str(source), str(tmp_path / "alone.ckpt"), module=RUNS[name]["module"])
    assert answer["metrics"][5, "train/loss"] == pytest.approx(alone["metrics"][5, "train/loss"], rel=1e-4)
    assert answer["metrics"][5, "val/loss"] == pytest.approx(alone["metrics"][5, "val/loss"], rel=1e-4)
    expected = exit_weights(export_checkpoint(tmp_path / "alone.ckpt", tmp_path / "whole", dtype="fp32"))
    found = exit_weights(export_checkpoint(path, tmp_path / "found", dtype="fp32"))
    for tensor, value in expected.items():
        torch.testing.assert_close(found[tensor], value, rtol=1e-3, atol=1e-4)


def test_exits_of_several_runs_are_joined(source: Path, parts: dict[str, Path], tmp_path: Path) -> None:
    assert main([str(parts["first"]), str(parts["second"]), str(tmp_path / "joined"), "--dtype", "fp32"]) == 0
    joined = exit_weights(tmp_path / "joined")
    for layer, name in ((2, "first"), (3, "second")):
        own = exit_weights(export_checkpoint(parts[name], tmp_path / name, dtype="fp32"))
        start = exit_weights(source)
        mine = [tensor for tensor in own if tensor.startswith(f"exits.{layer}.")]
        assert all(torch.equal(joined[tensor], own[tensor]) for tensor in mine)
        assert not all(torch.equal(joined[tensor], start[tensor].float()) for tensor in mine)
    kept = export_checkpoint(parts["second"], tmp_path / "kept", others=[parts["first"]])
    assert digest(kept) == digest(source), "in the type of the source unless another is asked for"
    assert set(json.loads((kept / "exits.json").read_text())["provenance"]["joined"]) == {
        str(parts["first"]),
        str(parts["second"]),
    }


def test_exits_at_other_layers_of_one_backbone_are_joined(source: Path, parts: dict[str, Path], tmp_path: Path) -> None:
    other = with_exits(source, tmp_path / "other", ExitConfig((4,), head="adapter"))
    fit(str(other), str(tmp_path / "other.ckpt"), module={**FROZEN, "exit_weights": [1.0]})
    joined = export_checkpoint(parts["both"], tmp_path / "joined", others=[tmp_path / "other.ckpt"])
    assert load_checkpoint(joined).exits.layers == (2, 3, 4)
    assert digest(joined) == digest(source)


def test_what_does_not_belong_together_is_not_joined(source: Path, parts: dict[str, Path], tmp_path: Path) -> None:
    mlp = with_exits(source, tmp_path / "mlp", ExitConfig((4,), head="mlp"))
    fit(str(mlp), str(tmp_path / "mlp.ckpt"), module={**FROZEN, "exit_weights": [1.0]}, max_steps=1)
    fit(str(source), str(tmp_path / "trained.ckpt"), module={}, max_steps=1)
    stranger = tiny_checkpoint(tmp_path / "x", ExitConfig((4,), head="adapter"), seed=1, num_hidden_layers=6)
    fit(str(stranger), str(tmp_path / "stranger.ckpt"), module={**FROZEN, "exit_weights": [1.0]}, max_steps=1)
    for other, message in (
        (parts["both"], "have both trained the exit at layer 2"),
        (tmp_path / "mlp.ckpt", r"adapter, tied, those of .* mlp, tied"),
        (tmp_path / "trained.ckpt", "has trained its backbone"),
        (tmp_path / "stranger.ckpt", "different backbones"),
    ):
        with pytest.raises(OfframpError, match=message):
            export_checkpoint(parts["first"], tmp_path / "out", others=[other])
    assert not (tmp_path / "out").exists()


def test_upper_layers_come_from_where_training_started_and_nowhere_else(source: Path, tmp_path: Path) -> None:
    start = tmp_path / "start"
    shutil.copytree(source, start)
    fit(str(start), str(tmp_path / "tuned.ckpt"), module=BOTH, max_steps=1)
    whole = load_checkpoint(start)
    with torch.no_grad():
        whole.model.layers[5].get_parameter("mlp.up_proj.weight").add_(1.0)
    save_checkpoint(start, whole, overwrite=True)
    with pytest.raises(OfframpError, match=r"does not hold the weights that the run of .* started from"):
        export_checkpoint(tmp_path / "tuned.ckpt", tmp_path / "out")
    assert digest(export_checkpoint(tmp_path / "tuned.ckpt", tmp_path / "out", assets=source)) == digest(source)


def with_exits(source: Path, out: Path, exits: ExitConfig) -> Path:
    from offramp.common.importing import NewExits

    import_model(str(source), out, exits=NewExits(exits), replace_exits=True)
    return out


def test_a_run_stands_for_its_newest_whole_checkpoint(
    source: Path, parts: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    with pytest.raises(OfframpError, match="has not written one yet"):
        main([str(run), str(tmp_path / "none")])
    for age, name in enumerate(("both", "first")):
        shutil.copy(parts[name], run / "checkpoints" / f"{name}.ckpt")
        os.utime(run / "checkpoints" / f"{name}.ckpt", (1000 - age, 1000 - age))
    assert main([str(run), str(tmp_path / "newest"), "--dtype", "fp32"]) == 0
    expected = exit_weights(export_checkpoint(parts["both"], tmp_path / "both", dtype="fp32"))
    torch.testing.assert_close(exit_weights(tmp_path / "newest"), expected, rtol=0, atol=0)
    (run / "checkpoints" / "both.ckpt").write_bytes(b"cut")
    os.utime(run / "checkpoints" / "both.ckpt", (1000, 1000))
    capsys.readouterr()
    assert main([str(run), str(tmp_path / "before"), "--dtype", "fp32"]) == 0
    assert "both.ckpt is left out" in capsys.readouterr().err
    expected = exit_weights(export_checkpoint(parts["first"], tmp_path / "first", dtype="fp32"))
    torch.testing.assert_close(exit_weights(tmp_path / "before"), expected, rtol=0, atol=0)
