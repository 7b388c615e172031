"""Low-rank corrections: what is trained, what it is called, and that the exported model is the one that was trained."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from helpers.fitting import Numbers, fit, fit_all
from helpers.processes import run_processes
from helpers.tiny import tiny_checkpoint, tiny_model
from offramp.common.checkpoint import load_checkpoint
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.train.export import export_checkpoint
from offramp.train.lora import LoraConfig, add_lora, merge_lora
from offramp.train.module import MultiExitModule
from offramp.train.optim import OptimizerConfig

pytest.importorskip("peft")

TARGETS = ("q_proj", "o_proj", "down_proj")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("start") / "model", ExitConfig((1, 2)), model_type="qwen2")


def test_the_exported_model_says_what_the_trained_one_says(checkpoint: Path, tmp_path: Path) -> None:
    module = MultiExitModule(str(checkpoint), lora=LoraConfig(4, 8.0, TARGETS), optimizer=OptimizerConfig(lr=1e-2))
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_steps=3, limit_val_batches=0, **quiet)
    trainer.fit(module, datamodule=Numbers())
    trainer.save_checkpoint(tmp_path / "lora.ckpt")
    exported = load_checkpoint(export_checkpoint(tmp_path / "lora.ckpt", tmp_path / "out")).model
    start = load_checkpoint(checkpoint).model
    ids = torch.arange(20)[None]
    assert module.model is not None
    with torch.no_grad():
        trained, merged, before = module.model.eval()(ids).logits, exported(ids).logits, start(ids).logits
    for layer in (1, 2, 4):
        torch.testing.assert_close(merged[layer], trained[layer], rtol=1e-5, atol=1e-5)
        assert not torch.allclose(merged[layer], before[layer], atol=1e-3)
    after = exported.state_dict()
    changed = {name for name, tensor in start.state_dict().items() if not torch.equal(after[name], tensor)}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in changed} == {*TARGETS, "norm"}
    assert all(name.startswith(("layers.", "exits.")) for name in changed), "the final norm is none of them"


def test_names_in_a_checkpoint_are_those_of_the_model(checkpoint: Path, tmp_path: Path) -> None:
    fit(str(checkpoint), str(tmp_path / "lora.ckpt"), module={"lora": LoraConfig(targets=("q_proj",))}, max_steps=1)
    held = {name.removeprefix("model.") for name in torch.load(tmp_path / "lora.ckpt", weights_only=True)["state_dict"]}
    plain = set(load_checkpoint(checkpoint).model.state_dict())
    assert held - plain == {
        f"layers.{layer}.self_attn.q_proj.lora_{side}.weight" for layer in range(4) for side in "AB"
    }
    assert plain <= held


@pytest.mark.slow
def test_processes_stages_and_resuming_are_not_seen(checkpoint: Path, tmp_path: Path) -> None:
    module = {"lora": LoraConfig(targets=TARGETS), "final_weight": 0.0}
    whole = fit(str(checkpoint), str(tmp_path / "one.ckpt"), module=module)["metrics"]
    assert min(step for step, _ in whole) == 0
    fit(str(checkpoint), str(tmp_path / "again.ckpt"), module=module, resume=str(tmp_path / "one-step=3.ckpt"))
    settings = {"checkpoint": str(checkpoint), "devices": 2, "module": module}
    pipeline = {"pipe": 2, "micro_batches": 3, "stage_bounds": [1]}
    runs = [
        {**settings, "out": str(tmp_path / "two.ckpt"), "strategy": {**pipeline, "zero_stage": 1}},
        {**settings, "out": str(tmp_path / "on.ckpt"), "strategy": pipeline},
    ]
    runs[1]["resume"] = str(tmp_path / "two-step=3.ckpt")
    for answer in run_processes(fit_all, 2, runs, timeout_s=400)[0]:
        assert answer["metrics"][5, "train/loss"] == pytest.approx(whole[5, "train/loss"], rel=1e-4)
    expected = load_checkpoint(export_checkpoint(tmp_path / "one.ckpt", tmp_path / "one")).model.state_dict()
    for name in ("again", "two", "on"):
        found = load_checkpoint(export_checkpoint(tmp_path / f"{name}.ckpt", tmp_path / name)).model.state_dict()
        for tensor, value in expected.items():
            torch.testing.assert_close(found[tensor], value, rtol=1e-3, atol=1e-4)


def test_merging_adds_the_product() -> None:
    a, b, w = torch.randn(2, 5), torch.randn(3, 2), torch.randn(3, 5)
    weights = {"x.weight": w, "x.bias": w[0], "x.lora_A.weight": a, "x.lora_B.weight": b}
    merged = merge_lora(weights, 0.5)
    assert set(merged) == {"x.weight", "x.bias"}
    torch.testing.assert_close(merged["x.weight"], w + 0.5 * b @ a)


def test_what_cannot_be_corrected_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OfframpError, match=r"a layer has no \['attn'\]; choose from \['down_proj', 'gate_proj'"):
        add_lora(tiny_model(), LoraConfig(targets=("attn", "q_proj")), 4)
    with pytest.raises(OfframpError, match=r"lora\.r is 0"):
        LoraConfig(0)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(OfframpError, match=r"pip install offramp-train\[lora\]"):
        add_lora(tiny_model(), LoraConfig(), 4)
