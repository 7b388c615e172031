"""Classifiers are trained in a second phase: nothing else changes, and what is exported is what was measured."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from helpers.fitting import Memory, Numbers, comparable, fit
from helpers.tiny import tiny_checkpoint
from offramp.common.checkpoint import Checkpoint, load_checkpoint
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig, HeadKind
from offramp.common.exits.policy import ExitPolicy
from offramp.train.classifier_objective import ClassifierObjective, area_under_curve
from offramp.train.confidence_training import ConfidenceTrainingModule, Standard
from offramp.train.data.batch import IGNORED_LABEL
from offramp.train.export import export_checkpoint
from offramp.train.module import MultiExitModule
from offramp.train.optim import OptimizerConfig
from offramp.train.priming import ExitPrimingModule, PrimingDataModule

EXITS = ExitConfig((1, 2, 3), head="final")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    policy = ExitPolicy(thresholds={1: 0.9}, shortlist=(1, 5, 9))
    return tiny_checkpoint(tmp_path_factory.mktemp("start") / "model", EXITS, policy)


def train(
    checkpoint: Path, out: Path, objective: ClassifierObjective = "independent", **settings: Any
) -> tuple[Checkpoint, Memory]:
    memory = Memory()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=60,
        logger=memory,
        log_every_n_steps=20,
        check_val_every_n_epoch=None,
        val_check_interval=60,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    optimizer = OptimizerConfig(lr=0.1)
    module = ConfidenceTrainingModule(str(checkpoint), objective, optimizer=optimizer, **settings)
    trainer.fit(module, PrimingDataModule(Numbers(), batch_size=64))
    trainer.save_checkpoint(out.with_suffix(".ckpt"))
    return load_checkpoint(export_checkpoint(out.with_suffix(".ckpt"), out)), memory


@torch.no_grad()
def by_hand(checkpoint: Checkpoint, batches: Any) -> dict[int, tuple[Tensor, Tensor]]:
    """Of each exit, on target tokens: how sure its classifier is, and whether it says what the final exit says."""
    model, found = checkpoint.model, {}
    for layer in checkpoint.exits.layers:
        sure, agrees = [], []
        for batch in batches:
            mask = batch.labels != IGNORED_LABEL
            out = model(batch.input_ids, model.layout(batch.input_ids, batch.segment_ids))
            classifier = model.exit_classifier(layer)
            assert classifier is not None
            sure.append(classifier(out.hidden_states[layer][mask]))
            agrees.append(out.logits[layer][mask].argmax(dim=-1) == out.logits[4][mask].argmax(dim=-1))
        found[layer] = torch.cat(sure), torch.cat(agrees)
    return found


@pytest.mark.parametrize("objective", ["independent", "geometric"])
@pytest.mark.parametrize("cached", [False, True])
def test_classifiers_learn_and_nothing_else_changes(
    checkpoint: Path, tmp_path: Path, objective: ClassifierObjective, cached: bool
) -> None:
    cache = str(tmp_path / "cache") if cached else None
    trained, memory = train(checkpoint, tmp_path / "trained", objective, cache=cache)
    assert trained.exits == ExitConfig((1, 2, 3), head="final", classifier=True)
    assert trained.policy == ExitPolicy("classifier", {}, shortlist=(1, 5, 9))
    start = load_checkpoint(checkpoint).model.state_dict()
    now = trained.model.state_dict()
    added = {name for name in now if name not in start}
    assert added == {f"exits.{layer}.classifier.{part}" for layer in (1, 2, 3) for part in ("weight", "bias")}
    assert all(torch.equal(now[name], start[name]) for name in start)
    assert (tmp_path / "trained" / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    losses = [value for (_, name), value in sorted(memory.metrics.items()) if name == "train/loss"]
    assert losses[-1] < losses[0]
    # What the exported classifiers make of the validation data is what was logged.
    data = Numbers()
    data.trainer = pl.Trainer(logger=False, accelerator="cpu", enable_progress_bar=False)
    logged = {name: value for (_, name), value in memory.metrics.items() if name.startswith("val/")}
    for layer, (sure, agrees) in by_hand(trained, list(data.val_dataloader())).items():
        assert 0 < int(agrees.sum()) < len(agrees)
        assert logged[f"val/agreement_exit_{layer:02d}"] == pytest.approx(float(agrees.float().mean()), abs=1e-6)
        assert logged[f"val/auc_exit_{layer:02d}"] == pytest.approx(area_under_curve(sure, agrees), abs=1e-3)
        right = [float((sure[agrees] > 0.5).float().mean()), float((sure[~agrees] <= 0.5).float().mean())]
        assert logged[f"val/balanced_accuracy_exit_{layer:02d}"] == pytest.approx(sum(right) / 2, abs=1e-5)
    # On what they have seen they know a lot.
    if objective == "independent":
        for sure, agrees in by_hand(trained, list(data.train_dataloader())).values():
            assert area_under_curve(sure, agrees) > 0.7  # chance is 0.5


def test_a_shortlist_that_alone_may_be_said_decides_what_agrees(tmp_path: Path) -> None:
    listed = tuple(range(0, 300, 2))
    policy = ExitPolicy(shortlist=listed, shortlist_only=True)
    directory = tiny_checkpoint(tmp_path / "model", ExitConfig((2,), "norm"), policy)
    _, memory = train(directory, tmp_path / "trained")
    data, start = Numbers(), load_checkpoint(directory).model
    data.trainer = pl.Trainer(logger=False, accelerator="cpu", enable_progress_bar=False)
    agrees: list[bool] = []
    with torch.no_grad():
        for batch in data.val_dataloader():
            mask = batch.labels != IGNORED_LABEL
            logits = start(batch.input_ids, start.layout(batch.input_ids, batch.segment_ids)).logits
            said = torch.tensor(listed)[logits[2][mask][:, list(listed)].argmax(dim=-1)]
            agrees += (said == logits[4][mask].argmax(dim=-1)).tolist()
    (logged,) = [value for (_, name), value in memory.metrics.items() if name == "val/agreement_exit_02"]
    assert logged == pytest.approx(sum(agrees) / len(agrees), abs=1e-6)


def test_it_resumes_as_if_nothing_had_happened(checkpoint: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"classifiers": True, "max_steps": 14, "trainer": {"val_check_interval": 1.0}}
    whole = fit(str(checkpoint), str(tmp_path / "whole.ckpt"), **settings)
    (half_way,) = tmp_path.glob("whole-step=12.ckpt")
    resumed = fit(str(checkpoint), str(tmp_path / "resumed.ckpt"), resume=str(half_way), **settings)
    assert comparable(resumed, range(12, 14)) == comparable(whole, range(12, 14))
    assert resumed["validated"] == whole["validated"]
    ends = [export_checkpoint(tmp_path / f"{name}.ckpt", tmp_path / name) for name in ("whole", "resumed")]
    weights = [load_checkpoint(end).model.state_dict() for end in ends]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_later_training_leaves_classifiers_alone(checkpoint: Path, tmp_path: Path) -> None:
    classified, _ = train(checkpoint, tmp_path / "classified")
    assert classified.path is not None
    fit(str(classified.path), str(tmp_path / "joint.ckpt"), max_steps=2)
    joint = load_checkpoint(export_checkpoint(tmp_path / "joint.ckpt", tmp_path / "joint")).model.state_dict()
    before = classified.model.state_dict()
    kept = {name for name, value in joint.items() if torch.equal(value, before[name])}
    assert {name for name in joint if ".classifier." in name} <= kept
    assert len(kept) < len(joint)


@pytest.mark.parametrize("head", [None, "block"])
def test_exits_that_cannot_be_asked_token_by_token_are_refused(tmp_path: Path, head: HeadKind | None) -> None:
    directory = tiny_checkpoint(tmp_path / "model", None if head is None else ExitConfig((2,), head))
    with pytest.raises(OfframpError, match="there must be exits, and none with a block"):
        train(directory, tmp_path / "out")


def test_an_objective_that_nobody_knows_is_refused() -> None:
    with pytest.raises(OfframpError, match="'joint' is unknown; choose one of independent, geometric"):
        ConfidenceTrainingModule("somewhere", "joint")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("module", [MultiExitModule, ExitPrimingModule])
def test_states_are_fed_to_those_who_train_on_them(checkpoint: Path, module: type[MultiExitModule]) -> None:
    data = PrimingDataModule(Numbers())
    trainer = pl.Trainer(logger=False, accelerator="cpu", enable_progress_bar=False, max_steps=1)
    if module is MultiExitModule:
        with pytest.raises(OfframpError, match="feeds an ExitPrimingModule or a ConfidenceTrainingModule, not Multi"):
            trainer.fit(module(str(checkpoint)), data)
    else:
        with pytest.raises(OfframpError, match="priming trains heads"):
            trainer.fit(module(str(checkpoint)), data)


def test_standard_states_and_what_is_folded_say_the_same() -> None:
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(500, 2, 16, generator=generator).double()
    states[:, :, 3] = 1e3 + 20 * states[:, :, 3]  # such numbers there are in every Transformer
    states[:, :, 5] = 2.0  # and maybe one that never changes
    standard = Standard.of(torch.stack((states.sum(dim=0), states.square().sum(dim=0))), len(states))
    made = standard(states)
    varies = [place for place in range(16) if place != 5]
    torch.testing.assert_close(made.mean(dim=0), torch.zeros(2, 16), atol=1e-3, rtol=0)
    torch.testing.assert_close(made[:, :, varies].std(dim=0), torch.ones(2, 15), atol=1e-2, rtol=0)
    weight, bias = torch.randn(1, 16, generator=generator), torch.randn(1, generator=generator)
    folded_weight, folded_bias = standard.fold(1, weight, bias)
    expected = made[:, 1].double() @ weight[0].double() + bias.double()
    got = states[:, 1] @ folded_weight[0].double() + folded_bias.double()
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-4)
    assert math.isfinite(float(folded_weight.abs().max()))
