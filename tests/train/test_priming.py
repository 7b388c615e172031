"""Priming in one process: what is trained, what is exported, and that it goes on where it stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from helpers.fitting import Memory, Numbers, comparable, fit
from helpers.tiny import tiny_checkpoint
from offramp.common.checkpoint import load_checkpoint
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy
from offramp.train.export import export_checkpoint
from offramp.train.priming import ExitPrimingModule, PrimingDataModule
from offramp.train.state_training import StateBatch, StateLoader


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    policy = ExitPolicy(thresholds={1: 0.9}, shortlist=(1, 5, 9))
    exits = ExitConfig((1, 2), head="adapter")
    return tiny_checkpoint(tmp_path_factory.mktemp("start") / "model", exits, policy, tie_word_embeddings=True)


def test_priming_trains_heads_alone_and_exports_the_shortlist(checkpoint: Path, tmp_path: Path) -> None:
    memory = Memory()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=60,
        logger=memory,
        log_every_n_steps=20,
        check_val_every_n_epoch=20,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(ExitPrimingModule(str(checkpoint)), PrimingDataModule(Numbers(), batch_size=64))
    losses = [value for (_, name), value in sorted(memory.metrics.items()) if name == "train/loss_exit_02"]
    assert losses[-1] < losses[0]
    trainer.save_checkpoint(tmp_path / "primed.ckpt")
    primed = load_checkpoint(export_checkpoint(tmp_path / "primed.ckpt", tmp_path / "primed"))
    assert primed.policy is not None
    assert primed.policy.shortlist == (1, *range(10, 60)), "the end of text, and the tokens that targets contain"
    before = load_checkpoint(checkpoint).model.state_dict()
    changed = {name for name, value in primed.model.state_dict().items() if not torch.equal(value, before[name])}
    assert {name.split(".")[1] for name in changed} == {"1", "2"}
    assert all(name.startswith("exits.") for name in changed)


@pytest.mark.parametrize("step", [3, 12])
def test_priming_resumes_as_if_nothing_had_happened(checkpoint: Path, tmp_path: Path, step: int) -> None:
    """12 steps are more than an epoch of 10."""
    settings: dict[str, Any] = {"priming": True, "max_steps": 14, "trainer": {"val_check_interval": 1.0}}
    whole = fit(str(checkpoint), str(tmp_path / "whole.ckpt"), **settings)
    (half_way,) = tmp_path.glob(f"whole-step={step}.ckpt")
    resumed = fit(str(checkpoint), str(tmp_path / "resumed.ckpt"), resume=str(half_way), **settings)
    left = range(step, 14)
    assert comparable(resumed, left) == comparable(whole, left)
    assert {key for key, _ in comparable(whole, left)} == set(left)


def test_priming_on_other_states_is_not_resumed() -> None:
    def take(rows: torch.Tensor) -> StateBatch:
        return StateBatch(torch.zeros(len(rows), 2, 3), torch.zeros(len(rows), 3))

    state = StateLoader(take, 20, 4, 5, seed=0).state_dict()
    StateLoader(take, 20, 4, 5, seed=0).load_state_dict(state)
    for other in (StateLoader(take, 20, 5, 4, seed=0), StateLoader(take, 20, 4, 5, seed=1)):
        with pytest.raises(OfframpError, match=r"on these states: (batch_size was 4 and is 5|seed was 0)"):
            other.load_state_dict(state)
