"""`offramp fit` on several nodes: processes that are told what launchers tell, some of them on networks of their own.

Two launchers are tried themselves: torchrun with the command, deepspeed with the variables it sets.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from mlflow import MlflowClient

from helpers.nodes import ADDRESSES, INTERFACE, LAUNCHERS, NETWORKS, Variables, torchrun, two_networks
from helpers.processes import free_port, start_launcher, start_rank
from helpers.tiny import tiny_checkpoint
from offramp.common.checkpoint import load_checkpoint
from offramp.common.exits.config import ExitConfig
from offramp.train.export import export_checkpoint
from offramp.train.launch import find_launch
from offramp.train.sample_log import FILE, read_samples
from offramp.train.training_checkpoint import CHECKPOINTS

STEPS = 4
PIPELINE = "offramp.train.pipeline.strategy.DeepSpeedPipelineStrategy"
RECIPE: dict[str, Any] = {
    "trainer": {
        "accelerator": "cpu",
        "max_steps": STEPS,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": {
            "class_path": "offramp.train.tracking.logger.OfframpMLFlowLogger",
            "init_args": {"system_metrics": False},
        },
        "callbacks": [
            {"class_path": "ModelCheckpoint", "init_args": {"every_n_train_steps": 2}},
            {"class_path": "offramp.train.sample_log.SampleLog"},
        ],
    },
    "model": {"checkpoint": "model", "optimizer": {"lr": 1.0e-2, "warmup_steps": 1, "schedule": "constant"}},
    "data": {
        "tokenizer": "model",
        "sequence_length": 64,
        "batch_size": 4,
        "pack": False,
        "cache_directory": "cache",
        "train": {"kind": "generator", "path": "helpers.rows:counted", "options": {"count": 40}},
    },
}


def pipeline(**settings: Any) -> dict[str, Any]:
    return {"class_path": PIPELINE, "init_args": {"micro_batches": 2, **settings}}


RUNS: dict[str, tuple[int, int, Any, int]] = {  # nodes, processes on each, strategy, rows of a replica
    "torchrun": (2, 2, pipeline(pipe=2), 2),
    "deepspeed": (2, 1, pipeline(pipe=2, zero_stage=1), 4),
    "srun": (2, 1, "ddp", 2),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Iterator[Path]:
    """A directory with a model, a recipe and an MLflow store, which all nodes share."""
    folder = tmp_path_factory.mktemp("home")
    shutil.copy(empty_store, folder / "mlflow.db")
    tiny_checkpoint(folder / "model", ExitConfig((1, 2), "adapter"), tie_word_embeddings=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
        yield folder


def written(name: str, strategy: Any, rows: int = 4, **more: Any) -> str:
    """The file of a recipe whose run has this name; `more` are settings of the trainer."""
    trainer = {**RECIPE["trainer"], "strategy": strategy, "default_root_dir": name, **more}
    recipe = {**RECIPE, "trainer": trainer, "data": {**RECIPE["data"], "batch_size": rows}}
    Path(f"{name}.yaml").write_text(yaml.safe_dump(recipe))
    return f"{name}.yaml"


def log_of(name: str, rank: int) -> Path:
    return Path(f"{name}.{rank}.log")


def fit(name: str, told: list[Variables]) -> list[BaseProcess]:
    """Start a run whose recipe is written."""
    return [start_rank(["fit", "-c", f"{name}.yaml"], log_of(name, rank), one) for rank, one in enumerate(told)]


def finish(processes: list[BaseProcess], *logs: Path, code: int | None = 0) -> None:
    """Wait for the end of all; the code that each ends with is the same, or anything but 0."""
    try:
        for process in processes:
            process.join(600)
            said = "\n".join(log.read_text()[-4000:] for log in logs)
            assert process.exitcode == code if code is not None else process.exitcode, said
    finally:
        for process in processes:
            process.kill()
            process.join()


def losses(run: Path) -> list[float]:
    return [float(row["loss"]) for row in read_samples(run / FILE)]


def store() -> MlflowClient:
    return MlflowClient(os.environ["MLFLOW_TRACKING_URI"])


def logged_runs(name: str) -> list[Any]:
    found = store().search_runs([experiment.experiment_id for experiment in store().search_experiments()])
    return [run for run in found if run.data.params.get("trainer/default_root_dir") == name]


@pytest.fixture(scope="module")
def expected(home: Path) -> Path:
    """The run directory of one process on one machine."""
    written("one", "auto", devices=1)
    finish(fit("one", [{}]), log_of("one", 0))
    return home / "one"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", RUNS)
def test_nodes_train_as_one_process_does(launcher: str, home: Path, expected: Path, tmp_path: Path) -> None:
    nodes, per_node, strategy, rows = RUNS[launcher]
    written(launcher, strategy, rows)
    told = LAUNCHERS[launcher](nodes, per_node, free_port())
    finish(fit(launcher, told), *(log_of(launcher, rank) for rank in range(len(told))))

    assert losses(home / launcher) == pytest.approx(losses(expected), rel=1e-5)
    samples = [sorted(row["samples"].split()) for row in read_samples(home / launcher / FILE)]
    assert samples == [sorted(row["samples"].split()) for row in read_samples(expected / FILE)]
    (logged,) = logged_runs(launcher)
    assert logged.info.status == "FINISHED"
    assert logged.data.params["trainer/num_nodes"] == str(nodes)
    history = store().get_metric_history(logged.info.run_id, "train/loss")
    assert [point.step for point in history] == list(range(STEPS))
    one, several = (
        load_checkpoint(export_checkpoint(next((run / CHECKPOINTS).iterdir()), tmp_path / run.name)).model
        for run in (expected, home / launcher)
    )
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(several.state_dict()[name], tensor, rtol=1e-3, atol=1e-4)
    if launcher != "srun":  # there it is DDP
        placed = f"{nodes} nodes of {per_node} processes: stage 0 on node 0, stage 1 on node 1"
        assert placed in log_of(launcher, 0).read_text()


@pytest.mark.slow
def test_two_torchruns_train_as_one_process_does(home: Path, expected: Path, quick_offramp: Path) -> None:
    recipe = written("torchruns", pipeline(pipe=2))
    launch = ["--nnodes=2", "--nproc-per-node=1", f"--master-port={free_port()}", "--master-addr=127.0.0.1"]
    command = ["--no-python", str(quick_offramp), "fit", "-c", recipe]
    logs = [log_of("torchruns", node) for node in range(2)]
    nodes = [
        start_launcher("torch.distributed.run", [*launch, f"--node-rank={node}", *command], log, home)
        for node, log in enumerate(logs)
    ]
    finish(nodes, *logs)
    assert losses(home / "torchruns") == pytest.approx(losses(expected), rel=1e-5)
    (logged,) = logged_runs("torchruns")
    assert logged.info.status == "FINISHED"


@pytest.mark.slow
def test_the_deepspeed_launcher_says_what_is_understood(tmp_path: Path) -> None:
    """Two real ones, without ssh, on the two nodes of a host file."""
    (tmp_path / "hosts").write_text("node1 slots=2\nnode2 slots=2\n")
    launch = [
        "--hostfile", "hosts", "--no_ssh", "--master_addr", "127.0.0.1", "--master_port", "29700", "--no_python",
        "--no_local_rank", "--node_rank",
    ]  # fmt: skip
    note = ["sh", "-c", "env > variables.$RANK"]
    logs = [tmp_path / f"{node}.log" for node in range(2)]
    nodes = [
        start_launcher("deepspeed.launcher.runner", [*launch, str(node), *note], log, tmp_path)
        for node, log in enumerate(logs)
    ]
    finish(nodes, *logs)
    for rank in range(4):
        lines = (tmp_path / f"variables.{rank}").read_text().splitlines()
        found = find_launch(dict(line.split("=", 1) for line in lines if "=" in line))
        assert found == find_launch(LAUNCHERS["deepspeed"](2, 2, 29700)[rank])


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "strategy"), [(1, pipeline(pipe=2)), (0, pipeline(pipe=1)), (1, "ddp")])
def test_when_a_node_dies_the_other_ends_and_says_so(victim: int, strategy: Any, home: Path) -> None:
    name = f"rank-{victim}-dies-{'ddp' if strategy == 'ddp' else strategy['init_args']['pipe']}"
    death = {"rank": victim, "step": 2, "note": f"{name}.time"}
    callbacks = [*RECIPE["trainer"]["callbacks"], {"class_path": "helpers.faults.Death", "init_args": death}]
    written(name, strategy, 2, callbacks=callbacks)
    processes, survivor = fit(name, torchrun(2, 1, free_port())), 1 - victim
    finish([processes[survivor]], log_of(name, survivor), code=1)
    # Up to five seconds of that it waits for rank 0 to say the same, and ten for MLflow.
    assert time.time() - float(Path(f"{name}.time").read_text()) < 60
    finish([processes[victim]], log_of(name, victim), code=-9)
    said = log_of(name, survivor).read_text()
    (sentence,) = [line for line in said.splitlines() if line.startswith("offramp: error: ")]
    assert re.search("another process when it ended|when another process ended|when stage 1 .* ended", sentence)
    assert "message of that process says why" in sentence
    assert "Traceback" not in said
    if survivor == 0:
        (logged,) = logged_runs(name)
        assert logged.info.status == "FAILED"


@pytest.mark.slow
def test_nodes_that_do_not_share_the_run_directory_are_refused(home: Path, tmp_path: Path) -> None:
    """The paths of the recipe are relative, and node 1 has a directory of its own."""
    recipe = written("apart", pipeline(pipe=2), logger=False, callbacks=[{"class_path": "helpers.faults.Haste"}])
    for path in ("model", recipe):
        (tmp_path / path).symlink_to(home / path)
    processes = [
        start_rank(["fit", "-c", recipe], log_of("apart", rank), one, where)
        for rank, (one, where) in enumerate(zip(torchrun(2, 1, free_port()), (home, tmp_path), strict=True))
    ]
    finish(processes, log_of("apart", 0), code=1)
    said = log_of("apart", 0).read_text()
    assert "rank 1 on " in said
    assert "does not see what rank 0 writes to apart/checkpoints; put trainer.default_root_dir on storage" in said
    assert not list((home / "apart" / "checkpoints").iterdir())


@pytest.mark.slow
def test_two_networks_train_until_the_cable_is_cut(home: Path, expected: Path) -> None:
    callbacks = [*RECIPE["trainer"]["callbacks"], {"class_path": "helpers.faults.Impatience", "init_args": {"step": 4}}]
    strategy = pipeline(pipe=2, timeout_minutes=10.0)
    recipe = written("networks", strategy, logger=False, max_steps=100_000, callbacks=callbacks)
    logs, samples = [log_of("networks", rank) for rank in range(2)], home / "networks" / FILE
    with two_networks() as cut:
        variables = {"MASTER_ADDR": ADDRESSES[0], "GLOO_SOCKET_IFNAME": INTERFACE}
        processes = [
            start_rank(["fit", "-c", recipe], log, {**one, **variables}, network=network)
            for log, one, network in zip(logs, torchrun(2, 1, free_port()), NETWORKS, strict=True)
        ]
        try:
            deadline = time.monotonic() + 600
            while not samples.is_file() or len(losses(samples.parent)) <= STEPS:
                assert all(process.is_alive() for process in processes), "\n".join(log.read_text() for log in logs)
                assert time.monotonic() < deadline
                time.sleep(0.1)
            cut()
            start = time.monotonic()
            finish(processes, *logs, code=1)
        finally:
            for process in processes:
                process.kill()
    assert time.monotonic() - start < 120
    assert losses(samples.parent)[:STEPS] == pytest.approx(losses(expected), rel=1e-5)
    for rank, log in enumerate(logs):
        # For a message of the pipeline or for one that all processes share, whichever came when the cable was cut.
        said, waited = log.read_text(), r"waited (0\.1 minutes \(timeout_minutes|in vain for another process)"
        assert re.search(rf"offramp: error: .*\brank {rank}\b.* {waited}", said), said
        assert "Traceback" not in said
