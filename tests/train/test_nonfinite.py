"""A step whose loss or gradient is not finite changes nothing, on any rank, and is said."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from safetensors.torch import load_file

from helpers.fitting import Numbers, Steps, fit
from helpers.processes import run_processes
from helpers.tiny import tiny_checkpoint
from offramp.common.checkpoint import load_checkpoint, save_checkpoint
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.train.data.batch import AnyBatch
from offramp.train.nonfinite import MOST_IN_A_ROW, NonfiniteGuard
from offramp.train.pipeline.loss_scale import LossScale

POISON = 299
"""A token whose embedding is no number."""
LAYOUTS: dict[str, Any] = {
    "two stages": {"pipe": 2, "micro_batches": 2},
    "two replicas, ZeRO-1": {"pipe": 1, "micro_batches": 2, "zero_stage": 1},
    "two replicas": {"pipe": 1, "micro_batches": 2},
    "a shared stage": {"pipe": 1, "tensor": 2, "micro_batches": 2},
    "a shared stage, ZeRO-1": {"pipe": 1, "tensor": 2, "micro_batches": 2, "zero_stage": 1},
    "ddp": "ddp",
}


class Poisoned(Numbers):
    """From step 3 on, the last rank's batches hold the poison."""

    def train_dataloader(self) -> Any:
        return PoisonedSteps(super().train_dataloader())


class PoisonedSteps:
    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[AnyBatch]:
        for number, batch in enumerate(self.steps):
            if number >= 3 and self.steps.rank == self.steps.replicas - 1:
                batch.input_ids[-1, -1] = POISON
            yield batch


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("poisoned")
    whole = load_checkpoint(tiny_checkpoint(folder / "whole", ExitConfig((1, 2), "adapter")))
    with torch.no_grad():
        whole.model.embed_tokens.weight[POISON] = math.nan
    return str(save_checkpoint(folder / "poisoned", whole, assets=folder / "whole"))


def reactions(
    checkpoint: str, folder: str, strategy: Any, devices: int, freeze: list[str] | None = None
) -> tuple[dict[tuple[int, str], float], str]:
    """What is logged when steps are skipped, and afterwards, and the fault when the run stops."""
    settings: dict[str, Any] = {
        "strategy": strategy,
        "devices": devices,
        "data": Poisoned,
        "module": {"freeze": freeze},
    }
    skipping: dict[str, Any] = {**settings, "module": {"freeze": freeze, "on_nonfinite": "skip"}}
    run = fit(checkpoint, f"{folder}/skip.ckpt", **skipping)
    again = fit(checkpoint, f"{folder}/on.ckpt", max_steps=7, resume=f"{folder}/skip-step=6.ckpt", **skipping)
    run["metrics"] |= {key: value for key, value in again["metrics"].items() if key[0] == 6}
    try:
        fit(checkpoint, f"{folder}/stop.ckpt", **settings)
    except OfframpError as fault:
        return run["metrics"], str(fault)
    return run["metrics"], "went on"


def all_reactions(checkpoint: str, folder: str) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for number, (name, strategy) in enumerate(LAYOUTS.items()):
        os.makedirs(f"{folder}/{number}", exist_ok=True)
        answers[name] = reactions(checkpoint, f"{folder}/{number}", strategy, 2)
    return answers


def check(metrics: dict[tuple[int, str], float], fault: str) -> None:
    assert [metrics.get((step, "train/skipped_steps")) for step in range(6)] == [None, None, None, 1.0, 2.0, 3.0]
    assert metrics[6, "train/skipped_steps"] == 3.0, "a resumed run goes on counting"
    assert math.isfinite(metrics[6, "train/loss"])
    assert math.isnan(metrics[3, "train/loss"])
    assert all(math.isfinite(metrics[step, "train/loss"]) for step in range(3))
    assert not math.isfinite(metrics[4, "train/grad_norm"])
    assert fault.startswith("step 3: the loss of exit 01, 02, 04 is nan, the gradient norm ")
    assert "weights are those of the step before" in fault


def test_one_process_skips_or_stops(checkpoint: str, tmp_path: Path) -> None:
    check(*reactions(checkpoint, str(tmp_path), "auto", 1))
    before, after = (torch.load(tmp_path / name, weights_only=True) for name in ("skip-step=3.ckpt", "skip.ckpt"))
    torch.testing.assert_close(after["state_dict"], before["state_dict"], rtol=0, atol=0, equal_nan=True)
    states = [content["optimizer_states"][0]["state"] for content in (before, after)]
    torch.testing.assert_close(*states, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("poison", [False, True])
def test_a_scale_that_is_too_high_is_no_fault_but_a_loss_is(checkpoint: str, tmp_path: Path, poison: bool) -> None:
    # Lightning scales losses on CUDA alone, unless it is given what does.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    settings: dict[str, Any] = {
        "trainer": {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]},
        "data": Poisoned if poison else Numbers,
    }
    if poison:
        with pytest.raises(OfframpError, match=r"step 3: the loss of exit 01, 02, 04 is nan"):
            fit(checkpoint, str(tmp_path / "out.ckpt"), **settings)
        return
    run = fit(checkpoint, str(tmp_path / "out.ckpt"), **settings)
    assert not math.isfinite(run["metrics"][0, "train/grad_norm"])
    assert (5, "train/skipped_steps") not in run["metrics"]
    assert scaler.get_scale() < 2.0**100


def test_a_scale_falls_no_lower_than_none(checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    monkeypatch.setattr(scaler, "get_scale", lambda: 1.0)
    with pytest.raises(OfframpError, match="not finite at a loss scale of 1, the lowest; lower the learning rate"):
        fit(checkpoint, str(tmp_path / "out.ckpt"), trainer={"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]})


@pytest.mark.slow
def test_ranks_skip_or_stop_together(checkpoint: str, tmp_path: Path) -> None:
    answers = run_processes(all_reactions, 2, checkpoint, str(tmp_path), timeout_s=400)
    for number, name in enumerate(LAYOUTS):
        for answer in answers:
            check(*answer[name])
        files = sorted((tmp_path / f"{number}").glob("skip.ckpt/checkpoint/*.safetensors"))
        one_writes_weights = name.startswith("two replicas")
        assert len(files) == (0 if name == "ddp" else 3 if one_writes_weights else 4)
        for file in files:
            before = load_file(str(file).replace("skip.ckpt", "skip-step=3.ckpt"))
            torch.testing.assert_close(load_file(file), before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
def test_replicas_of_a_stage_with_nothing_to_train_do_too(checkpoint: str, tmp_path: Path) -> None:
    # One replica of the last stage meets the poison; neither has a gradient of its own to add up.
    strategy = {"pipe": 2, "micro_batches": 2, "zero_stage": 1, "stage_bounds": [3]}
    for answer in run_processes(reactions, 4, checkpoint, str(tmp_path), strategy, 4, ["backbone"], timeout_s=400):
        check(*answer)


def test_a_loss_that_is_no_number_does_not_lower_the_scale(checkpoint: str, tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    run = fit(
        checkpoint, str(tmp_path / "out.ckpt"), module={"on_nonfinite": "skip"}, data=Poisoned,
        trainer={"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]},
    )  # fmt: skip
    assert run["metrics"][5, "train/skipped_steps"] == 3.0
    assert scaler.get_scale() == 16.0
    saved = torch.load(tmp_path / "out-step=6.ckpt", weights_only=True)
    assert saved["MixedPrecision"]["scale"] == 16.0


def test_nor_that_of_a_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *args, **kwargs: None)
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 1)  # who does not say that the scale falls
    scale, fine, bad, cpu = LossScale(2.0), torch.ones(2), torch.tensor([1.0, math.nan]), torch.device("cpu")
    assert scale.unscale([gradient := torch.ones(2)], fine, cpu)
    assert gradient.tolist() == [0.5, 0.5]
    for gradients in (bad, fine):
        assert not scale.unscale([gradients.clone()], bad, cpu)
        assert (scale.value, scale.overflows) == (2.0, 0)
    assert not scale.unscale([bad.clone()], fine, cpu)
    assert (scale.value, scale.overflows) == (1.0, 1)
    assert not scale.unscale([bad.clone()], bad, cpu), "the lowest scale is no fault either"
    with pytest.raises(OfframpError, match="not finite at a loss scale of 1, the lowest"):
        scale.unscale([bad.clone()], fine, cpu)


def test_the_guard_names_step_exits_and_samples(recwarn: pytest.WarningsRecorder) -> None:
    guard = NonfiniteGuard("skip")
    fine = {"loss": 2.0, "loss_exit_02": 1.0, "loss_exit_04": 1.0}
    assert guard.watch(0, fine, 1.0, lambda: [1, 2])
    assert not guard.watch(7, {**fine, "loss": math.inf, "loss_exit_04": math.inf}, 1.0, lambda: [3, 4])
    assert str(recwarn.pop(UserWarning).message) == (
        "step 7: the loss of exit 04 is inf, the gradient norm 1.0, on samples 3, 4; the step is left out (1 so far)"
    )
    with pytest.raises(
        OfframpError, match=r"step 8: the gradient norm is nan on samples that are not known; .*to skip"
    ):
        NonfiniteGuard("stop").watch(8, fine, math.nan, lambda: None)
    with pytest.raises(OfframpError, match=r"on_nonfinite is 'go'; choose stop or skip"):
        NonfiniteGuard("go")  # pyright: ignore[reportArgumentType]


def test_skipping_for_ever_is_no_training() -> None:
    guard = NonfiniteGuard("skip")
    for step in range(3 * MOST_IN_A_ROW):
        guard.watch(step, {"loss": 1.0}, 1.0 if step % MOST_IN_A_ROW == 0 else math.inf, lambda: None)
    for step in range(MOST_IN_A_ROW - (MOST_IN_A_ROW - 1)):
        guard.watch(step, {"loss": 1.0}, math.inf, lambda: None)
    with pytest.raises(OfframpError, match=rf"so were the {MOST_IN_A_ROW} steps before it; the weights are at fault"):
        guard.watch(99, {"loss": 1.0}, math.inf, lambda: None)
