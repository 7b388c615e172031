"""Training checkpoints that are damaged, hostile or cut off are found, and never take the place of good ones."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import subprocess
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from pickle import UnpicklingError
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

from helpers.fitting import fit
from helpers.processes import run_processes
from helpers.tiny import tiny_checkpoint
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.train import training_checkpoint
from offramp.train.checkpoint_io import WholeFileIO
from offramp.train.cli import last_checkpoint
from offramp.train.lost_process import LostProcess
from offramp.train.optim import OptimizerConfig
from offramp.train.pipeline import checkpoints
from offramp.train.pipeline.exchange import watched
from offramp.train.pipeline.strategy import DeepSpeedPipelineStrategy
from offramp.train.random_state import random_state, set_random_state
from offramp.train.training_checkpoint import FILES, RECORD_FILE, damage, describe, put_in_place, scratch_of


class Hostile:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def make_directory(path: Path) -> Path:
    """As `deepspeed_pipeline` writes it."""
    weights = path / "checkpoint/stage_00.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"weights")
    (path / RECORD_FILE).write_text(json.dumps({FILES: {"checkpoint/stage_00.safetensors": describe(weights)}}))
    return path


def test_every_damage_of_a_directory_is_found(tmp_path: Path) -> None:
    weights = "checkpoint/stage_00.safetensors"
    assert damage(make_directory(tmp_path / "whole.ckpt")) is None
    (make_directory(tmp_path / "cut.ckpt") / weights).write_bytes(b"weigh")
    (make_directory(tmp_path / "flipped.ckpt") / weights).write_bytes(b"weighty")
    (make_directory(tmp_path / "gone.ckpt") / weights).unlink()
    (make_directory(tmp_path / "early.ckpt") / RECORD_FILE).unlink()
    (make_directory(tmp_path / "record.ckpt") / RECORD_FILE).write_text('{"sha')
    (make_directory(tmp_path / "other.ckpt") / RECORD_FILE).write_text("{}")
    assert damage(tmp_path / "cut.ckpt") == f"{weights} has 5 bytes in place of 7"
    assert damage(tmp_path / "cut.ckpt", read=False) == f"{weights} has 5 bytes in place of 7"
    assert damage(tmp_path / "flipped.ckpt") == f"{weights} is not what was written"
    assert damage(tmp_path / "gone.ckpt") == f"{weights} is missing"
    assert damage(tmp_path / "early.ckpt") == "it has no offramp.json"
    assert damage(tmp_path / "other.ckpt") == "its offramp.json does not list its files"
    assert "is not valid JSON" in str(damage(tmp_path / "record.ckpt"))


def test_every_damage_of_a_file_is_found(tmp_path: Path) -> None:
    file = tmp_path / "a.ckpt"
    WholeFileIO().save_checkpoint({"weights": torch.arange(1000)}, file)
    whole = file.read_bytes()
    assert damage(file) is None
    for cut in (0, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:cut])
        assert damage(file), cut
    middle = len(whole) // 2
    file.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    assert "is not what was written" in str(damage(file))


@pytest.mark.parametrize("exchange", [True, False])
def test_a_checkpoint_takes_the_place_of_another(
    tmp_path: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(training_checkpoint, "_exchange", lambda *paths: False)
    path = make_directory(tmp_path / "a.ckpt")
    newer = make_directory(scratch_of(path))
    (newer / "new").touch()
    put_in_place(newer, path)
    assert (path / "new").exists()
    assert os.listdir(tmp_path) == ["a.ckpt"]
    training_checkpoint.remove(path)
    assert not os.listdir(tmp_path)


def test_a_file_that_cannot_be_written_leaves_the_one_before_it(tmp_path: Path) -> None:
    files, small = WholeFileIO(), {"weights": torch.zeros(10)}
    files.save_checkpoint(small, tmp_path / "a.ckpt")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        for name in ("a.ckpt", "b.ckpt"):
            with pytest.raises(OfframpError, match=rf"{name} cannot be written: .*File too large.*make room"):
                files.save_checkpoint({"weights": torch.zeros(10_000)}, tmp_path / name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == ["a.ckpt"]
    assert damage(tmp_path / "a.ckpt") is None


@pytest.mark.parametrize(
    ("own", "other", "kind", "words"),
    [
        (OSError("No space left"), None, OfframpError, "a.ckpt cannot be written: No space left; make room, and"),
        (KeyError("weights"), None, KeyError, "^'weights'$"),
        (
            None,
            ("KeyError: 'weights'", False),
            OfframpError,
            "a.ckpt cannot be written: rank 1 met KeyError: 'weights'; ",
        ),
        (None, ("No space left", True), OfframpError, "a.ckpt cannot be written: No space left; make room"),
    ],
)
def test_all_ranks_stop_where_one_cannot_write(
    own: Exception | None,
    other: Any,
    kind: type[Exception],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpoints, "_gathered", lambda mine: [mine, other or (None, False)])
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    scratch_of(tmp_path / "a.ckpt").mkdir()

    def write() -> None:
        with checkpoints._together(tmp_path / "a.ckpt"):
            if own is not None:
                raise own

    with pytest.raises(kind, match=words):
        write()
    assert not os.listdir(tmp_path)


def test_whoever_waits_in_vain_for_others_says_for_what(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*args: Any) -> None:
        raise RuntimeError("Timed out waiting 2000ms for recv operation to complete")

    def watch(what: str) -> AbstractContextManager[None]:
        return watched("stage 1 (rank 3)", what, "another process", timedelta(minutes=30))

    strategy = DeepSpeedPipelineStrategy()
    engine: Any = SimpleNamespace(watched=watch, fp16_scale=None)
    strategy._engine = engine
    monkeypatch.setattr(checkpoints, "save", late)
    monkeypatch.setattr(DDPStrategy, "reduce", late)
    monkeypatch.setattr(strategy, "broadcast", lambda name: name)
    monkeypatch.setattr(strategy, "_layout", dict)
    waited = r"^stage 1 \(rank 3\) waited 30 minutes \(timeout_minutes\) for "
    with pytest.raises(LostProcess, match=f"{waited}all parts of a.ckpt and another process did not answer"):
        strategy.save_checkpoint({}, "a.ckpt")
    with pytest.raises(LostProcess, match=f"{waited}sums of metrics over all processes"):
        strategy.reduce(torch.zeros(1), reduce_op="sum")


def test_a_full_disk_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "none", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("may not mount a small file system here")
    try:
        files = WholeFileIO()
        files.save_checkpoint({"weights": torch.zeros(40_000)}, tmp_path / "a.ckpt")
        for name in ("a.ckpt", "b.ckpt"):
            with pytest.raises(OfframpError, match=rf"{name} cannot be written: .*No space left.*make room"):
                files.save_checkpoint({"weights": torch.zeros(60_000)}, tmp_path / name)
        assert os.listdir(tmp_path) == ["a.ckpt"]
        assert damage(tmp_path / "a.ckpt") is None
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_the_last_whole_checkpoint_is_taken(tmp_path: Path) -> None:
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, callbacks=[ModelCheckpoint(dirpath=tmp_path)])
    assert last_checkpoint(trainer) is None
    for age, name in enumerate(("c.ckpt", "b.ckpt", "a.ckpt")):
        path = make_directory(tmp_path / name)
        os.utime(path, (1000 - age, 1000 - age))
    assert last_checkpoint(trainer) == str(tmp_path / "c.ckpt")
    (tmp_path / "c.ckpt/checkpoint/stage_00.safetensors").write_bytes(b"cut")
    with pytest.warns(UserWarning, match=r"c\.ckpt is left out, because checkpoint/stage_00\.safetensors has") as said:
        assert last_checkpoint(trainer) == str(tmp_path / "b.ckpt")
    assert len(said) == 1
    shutil.rmtree(tmp_path / "b.ckpt" / "checkpoint")
    with pytest.warns(UserWarning, match=r"b\.ckpt is left out"):
        assert last_checkpoint(trainer) == str(tmp_path / "a.ckpt")
    (tmp_path / "a.ckpt" / RECORD_FILE).unlink()
    with pytest.warns(UserWarning, match="left out"), pytest.raises(OfframpError, match="none of the 3"):
        last_checkpoint(trainer)


def test_random_states_come_back(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.rand(()))]

    draw()  # leaves a spare number of a pair in two of the generators
    torch.save(random_state(), tmp_path / "state.pt")
    expected = draw()
    draw()
    set_random_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert draw() == expected


@pytest.mark.slow
def test_the_pipeline_resumes_only_what_is_whole_and_harmless(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model", ExitConfig((1, 2), "adapter"), tie_word_embeddings=True)
    (seen,) = run_processes(break_checkpoints, 1, str(checkpoint), str(tmp_path), timeout_s=400)
    assert seen == {"whole": None, "resumed": 2, "hostile": "UnpicklingError", "harmed": False, "cut": True}


def break_checkpoints(checkpoint: str, folder: str) -> dict[str, Any]:
    """What happens with a checkpoint of ZeRO-1 that is damaged in several ways."""
    path, seen = Path(folder) / "0.ckpt", {}
    settings: dict[str, Any] = {"strategy": {"pipe": 1, "micro_batches": 2, "zero_stage": 1}, "max_steps": 2}
    fit(checkpoint, str(path), **settings)
    seen["whole"] = damage(path)
    seen["resumed"] = fit(checkpoint, str(path), resume=str(path), **settings)["steps"]  # over itself

    hostile = Path(folder) / "hostile.ckpt"
    shutil.copytree(path, hostile)
    file, record = hostile / "checkpoint/trainer.pt", json.loads((hostile / RECORD_FILE).read_text())
    torch.save({"loops": Hostile(Path(folder) / "harm")}, file)
    record[FILES]["checkpoint/trainer.pt"] = describe(file)
    (hostile / RECORD_FILE).write_text(json.dumps(record))
    try:
        fit(checkpoint, folder + "/never.ckpt", resume=str(hostile), **settings)
    except UnpicklingError:
        seen["hostile"] = "UnpicklingError"
    seen["harmed"] = (Path(folder) / "harm").exists()
    file.write_bytes(file.read_bytes()[:100])
    try:
        fit(checkpoint, folder + "/never.ckpt", resume=str(hostile), **settings)
    except OfframpError as fault:
        seen["cut"] = "trainer.pt has 100 bytes in place of" in str(fault)
    return seen


LAYOUTS: dict[str, dict[str, Any]] = {
    "2 stages": {"pipe": 2, "micro_batches": 2},
    "2 replicas, ZeRO-1": {"pipe": 1, "micro_batches": 2, "zero_stage": 1},
    "2 stages, ZeRO-1": {"pipe": 2, "micro_batches": 2, "zero_stage": 1},
    "2 replicas": {"pipe": 1, "micro_batches": 2},
}


@pytest.mark.slow
def test_two_ranks_go_on_on_any_layout_and_share_the_fault_of_a_full_disk(tmp_path: Path) -> None:
    """Each layout goes on where the one before it was after another three steps."""
    checkpoint = tiny_checkpoint(tmp_path / "model", ExitConfig((1, 2), "adapter"), tie_word_embeddings=True)
    (losses, fault), (_, other_fault) = run_processes(change_layout, 2, str(checkpoint), str(tmp_path), timeout_s=400)
    for resumed, found in enumerate(losses):
        assert sorted(found) == list(range(3 * resumed, 12))
        assert found == pytest.approx({step: losses[0][step] for step in found}, rel=1e-4)
    assert fault == other_fault
    assert "x-step=3-v1.ckpt cannot be written: " in fault
    assert "File too large" in fault
    assert damage(tmp_path / "x-step=3.ckpt") is None
    assert not list(tmp_path.glob("x-step=3-v1*"))
    assert not list(tmp_path.glob(".*"))


def change_layout(checkpoint: str, folder: str) -> tuple[list[dict[int, float]], str]:
    """Losses of each layout in turn, and the fault when only one rank cannot write."""
    # Rates differ, so that parameters in wrong groups would be seen.
    module = {"optimizer": OptimizerConfig(lr=1e-2, exits_lr=3e-3, warmup_steps=2, weight_decay=0.1)}
    losses = []
    for number, strategy in enumerate(LAYOUTS.values()):
        resume = f"{folder}/{number - 1}-step={3 * number}.ckpt" if number else None
        out = f"{folder}/{number}.ckpt"
        run = fit(checkpoint, out, strategy, devices=2, max_steps=12, module=module, resume=resume)
        losses.append({step: value for (step, name), value in run["metrics"].items() if name == "train/loss"})
    again: dict[str, Any] = {"strategy": LAYOUTS["2 stages"], "devices": 2, "max_steps": 3}
    fit(checkpoint, folder + "/x.ckpt", **again)
    if os.environ["RANK"] == "1":
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    try:
        fit(checkpoint, folder + "/x.ckpt", **again)
    except OfframpError as fault:
        return losses, str(fault)
    return losses, "nothing went wrong"
