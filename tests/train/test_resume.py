"""`offramp fit` is killed with SIGKILL, while it writes checkpoints too, and goes on as if nothing had happened.

In one process it logs to MLflow, which has one run of it in the end.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient

from helpers.draws import read_draws
from helpers.processes import start_command
from helpers.tiny import tiny_checkpoint
from offramp.common.exits.config import ExitConfig
from offramp.train.sample_log import FILE, read_samples
from offramp.train.tracking.logger import RUN_FILE
from offramp.train.tracking.sync import sync

EPOCH, STEPS = 16, 24
"""In steps: the run is killed twice in its first epoch, and ends in the second."""
RECIPE: dict[str, Any] = {
    "trainer": {
        "accelerator": "cpu",
        "max_steps": STEPS,
        "logger": False,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [
            {"class_path": "ModelCheckpoint", "init_args": {"every_n_train_steps": 1}},
            {"class_path": "offramp.train.sample_log.SampleLog"},
            {"class_path": "helpers.draws.Draws"},
        ],
    },
    "model": {
        "checkpoint": "model",
        "fill_aware": {1: 0.2},
        "optimizer": {"lr": 1.0e-2, "exits_lr": 3.0e-3, "warmup_steps": 3, "weight_decay": 0.1},
    },
    "data": {
        "tokenizer": "model",
        "sequence_length": 64,
        "batch_size": 4,
        "pack": False,
        "cache_directory": "cache",
        "train": {"kind": "generator", "path": "helpers.rows:counted", "options": {"count": 4 * EPOCH}},
    },
}
STORE = "sqlite:///mlflow.db"
LOGGER = {"class_path": "offramp.train.tracking.logger.OfframpMLFlowLogger", "init_args": {"tracking_uri": STORE}}
PIPELINE = "offramp.train.pipeline.strategy.DeepSpeedPipelineStrategy"
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {"devices": 1, "logger": LOGGER},
    "two stages": {
        "devices": 2,
        "strategy": {"class_path": PIPELINE, "init_args": {"pipe": 2, "micro_batches": 2}},
    },
    "two replicas, ZeRO-1": {
        "devices": 2,
        "strategy": {"class_path": PIPELINE, "init_args": {"pipe": 1, "micro_batches": 2, "zero_stage": 1}},
    },
}


def start(name: str, ranks: int) -> Sequence[BaseProcess]:
    """`offramp fit` of the run `name`."""
    command = ["fit", "-c", "recipe.yaml", "--ckpt_path=last", f"--trainer.default_root_dir={name}"]
    return start_command(command, Path(f"{name}.log"), ranks)


def finish(name: str, ranks: int) -> None:
    processes = start(name, ranks)
    try:
        for process in processes:
            process.join(600)
            assert process.exitcode == 0, Path(f"{name}.log").read_text()[-4000:]
    finally:
        kill(processes)


def kill(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def kill_after(step: int, name: str, ranks: int) -> bool:
    """Kill a run some time after a step, if possible within the writing of a checkpoint; whether that was so."""
    processes = start(name, ranks)
    samples, checkpoints = Path(name) / FILE, Path(name) / "checkpoints"
    deadline, within = time.monotonic() + 600, False
    try:
        while True:
            assert all(process.is_alive() for process in processes), Path(f"{name}.log").read_text()[-4000:]
            assert time.monotonic() < deadline
            done = [int(row["step"]) for row in read_samples(samples)] if samples.is_file() else []
            if done and done[-1] >= step:
                within = any(checkpoints.glob(".*.part"))
                if within or done[-1] > step + 2:
                    return within
            time.sleep(0.002)
    finally:
        kill(processes)


def spoil_newest(name: str) -> Path:
    """Flip the bits of a byte in a run's newest checkpoint, as a bad disk would."""
    newest = max((Path(name) / "checkpoints").glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    files = [newest] if newest.is_file() else [path for path in newest.rglob("*") if path.is_file()]
    file = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)
    return newest


def check_tracking() -> None:
    """The killed run is one run of MLflow, which has every step once."""
    client = MlflowClient(STORE)
    ids = {}
    for name in ("unbroken", "broken"):
        sync(Path(name), STORE)  # what a slow machine left
        ids[name] = json.loads((Path(name) / RUN_FILE).read_text())["run_id"]
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = {run.info.run_id: run for run in client.search_runs(experiments)}
    assert sorted(runs) == sorted(ids.values())
    losses = {}
    for name, run in ids.items():
        assert runs[run].info.status == "FINISHED"
        histories = {metric: client.get_metric_history(run, metric) for metric in runs[run].data.metrics}
        for metric, history in histories.items():
            twice = [step for step, times in Counter(point.step for point in history).items() if times > 1]
            assert not twice, f"{name} has {metric} more than once at steps {twice}"
        losses[name] = sorted((point.step, point.value) for point in histories["train/loss"])
    assert losses["broken"] == losses["unbroken"]
    assert [step for step, _ in losses["broken"]] == list(range(STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    layout: str, tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(empty_store, "mlflow.db")
    tiny_checkpoint(tmp_path / "model", ExitConfig((1, 2), "adapter"), tie_word_embeddings=True)
    data = {**RECIPE["data"], "batch_size": 2 if layout.startswith("two replicas") else 4}
    recipe = {**RECIPE, "trainer": {**RECIPE["trainer"], **LAYOUTS[layout]}, "data": data}
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    ranks = LAYOUTS[layout]["devices"]
    finish("unbroken", ranks)
    expected = (tmp_path / "unbroken" / FILE).read_text()
    rows = read_samples(tmp_path / "unbroken" / FILE)
    assert [int(row["step"]) for row in rows] == list(range(STEPS))
    first_epoch = [sample for row in rows[:EPOCH] for sample in row["samples"].split()]
    assert sorted(map(int, first_epoch)) == list(range(4 * EPOCH)), "every example once in an epoch"

    kills = (3, 8) if layout != "two replicas, ZeRO-1" else (5,)
    for step in kills:
        kill_after(step, "broken", ranks)
        assert len(read_samples(tmp_path / "broken" / FILE)) < STEPS
    spoiled = spoil_newest("broken")
    finish("broken", ranks)
    assert f"{spoiled} is left out" in " ".join(Path("broken.log").read_text().split())
    assert Path("broken.log").read_text().count("Restored all states") == len(kills)
    assert (tmp_path / "broken" / FILE).read_text() == expected, "losses to the last digit, and samples"
    assert read_draws(tmp_path / "broken") == read_draws(tmp_path / "unbroken")
    assert not list((tmp_path / "broken" / "checkpoints").glob(".*")), "what was being written is cleared away"
    if recipe["trainer"]["logger"]:
        check_tracking()
