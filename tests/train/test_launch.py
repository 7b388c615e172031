"""What launchers say is understood as Lightning has it, and what would make processes wait for ever is refused."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import yaml
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.utilities import rank_zero_only
from torch.distributed import DistNetworkError, DistStoreError, TCPStore

from helpers.nodes import LAUNCHERS, Variables, deepspeed, slurm_job, srun, torchrun
from offramp.common.errors import OfframpError
from offramp.train import shared_directory
from offramp.train.cli import build
from offramp.train.launch import LaunchEnvironment, cluster_environment, find_launch
from offramp.train.lost_process import LostProcess, lost_process
from offramp.train.pipeline.placement import Placement
from offramp.train.recipe import parse_command_line
from offramp.train.shared_directory import SharedDirectory

MODEL = {"class_path": "helpers.probe.Probe"}
DATA = {"tokenizer": "none", "batch_size": 1, "train": {"kind": "files", "path": "none.jsonl"}}


def believe(monkeypatch: pytest.MonkeyPatch, variables: Variables) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_process_knows_its_place(launcher: str) -> None:
    launches = [find_launch(variables) for variables in LAUNCHERS[launcher](3, 2, 4321)]
    assert [(one.rank, one.node, one.local_rank) for one in launches if one] == [
        (0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1), (4, 2, 0), (5, 2, 1),
    ]  # fmt: skip
    assert {(one.nodes, one.per_node, one.world_size) for one in launches if one} == {(3, 2, 6)}
    assert {(one.address, one.port) for one in launches if one} == {("127.0.0.1", 4321)}


@pytest.mark.parametrize(("launcher", "theirs"), [("torchrun", TorchElasticEnvironment), ("srun", SLURMEnvironment)])
def test_it_is_what_lightning_reads(launcher: str, theirs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for variables in LAUNCHERS[launcher](2, 2, 4321):
        if launcher == "srun":  # so that both have to find it out
            del variables["MASTER_ADDR"], variables["MASTER_PORT"]
        ours = cluster_environment(find_launch(variables), variables)
        assert isinstance(ours, LaunchEnvironment)
        with monkeypatch.context() as patch:
            believe(patch, variables)
            other = theirs()
            for question in ("global_rank", "local_rank", "node_rank", "world_size"):
                assert getattr(ours, question)() == getattr(other, question)()
            assert (ours.main_address, ours.main_port) == (other.main_address, other.main_port)
            for name in ("MASTER_ADDR", "MASTER_PORT"):  # where Lightning puts what it found out
                os.environ.pop(name, None)
        if launcher == "srun":
            assert (ours.main_address, ours.main_port) == ("node1", 15505)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu07", "gpu07"), ("gpu[3,5-9]", "gpu3"), ("rack1n[01-04],rack2n[01-02]", "rack1n01"), ("a,b", "a")],
)
def test_processes_of_srun_meet_on_the_first_node(nodes: str, first: str) -> None:
    variables = srun(2, 1, 1)[1]
    del variables["MASTER_ADDR"]
    launch = find_launch({**variables, "SLURM_STEP_NODELIST": nodes})
    assert launch is not None
    assert launch.address == first


def test_a_part_of_a_job_is_not_the_job() -> None:
    """`srun --nodes=2 --ntasks=4` within a job of four nodes."""
    job = slurm_job(4, 2)
    step = {name: value for name, value in srun(2, 2, 1)[3].items() if "STEP" in name}
    place = {"SLURM_PROCID": "3", "SLURM_NODEID": "1", "SLURM_LOCALID": "1"}
    launch = find_launch({**job, **step, **place})
    assert launch is not None
    assert (launch.rank, launch.nodes, launch.per_node, launch.address) == (3, 2, 2, "node1")


def test_torchrun_within_srun_is_torchrun() -> None:
    launch = find_launch({**srun(2, 1, 1)[1], **torchrun(2, 4, 2)[5]})
    assert launch is not None
    assert (launch.launcher, launch.rank, launch.per_node) == ("torchrun", 5, 4)


@pytest.mark.parametrize("variables", [slurm_job(2, 4), srun(1, 1, 1)[0]], ids=["script", "one task"])
def test_without_several_tasks_lightning_starts_the_processes(variables: Variables) -> None:
    assert find_launch(variables) is None
    assert isinstance(cluster_environment(None, variables), LightningEnvironment)
    assert cluster_environment(None, {}) is None


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({**srun(2, 2, 1)[1], "SLURM_NODEID": "1", "SLURM_LOCALID": "0"}, "rank 1 to process 0 of node 1.*=block"),
        ({**srun(2, 2, 1)[0], "SLURM_STEP_NUM_TASKS": "3"}, "3 tasks on 2 nodes.*--ntasks-per-node"),
        (
            {**srun(3, 2, 1)[0], "SLURM_STEP_TASKS_PER_NODE": "3,2,1"},
            r"6 tasks on 3 nodes, 3,2,1, but every node must have the same number",
        ),
        ({**torchrun(2, 2, 1)[0], "WORLD_SIZE": "3"}, "torchrun started 3 processes, 2 of them on this one"),
        ({**deepspeed(2, 2, 1)[3], "LOCAL_RANK": "0"}, "rank 3 to process 0 of node 1.*number the nodes from 0"),
        ({"CROSS_RANK": "0", "RANK": "0"}, "'LOCAL_RANK' is not set"),
    ],
)
def test_what_cannot_be_is_refused(variables: Variables, words: str) -> None:
    with pytest.raises(OfframpError, match=words):
        find_launch(variables)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # a trainer sets it for the whole process
    file = Path("recipe.yaml")
    trainer = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    file.write_text(yaml.safe_dump({"trainer": trainer, "model": MODEL, "data": DATA}))
    return file


def built(*overrides: str) -> pl.Trainer:
    return build(parse_command_line(["-c", "recipe.yaml", *overrides])).trainer


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_recipe_takes_the_processes_that_were_started(
    launcher: str, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    believe(monkeypatch, LAUNCHERS[launcher](2, 2, 4321)[3])
    for overrides in ((), ("--trainer.devices=auto",), ("--trainer.devices=2", "--trainer.num_nodes=2")):
        trainer = built(*overrides)
        assert (trainer.num_nodes, trainer.num_devices, trainer.world_size) == (2, 2, 4)
        assert (trainer.global_rank, trainer.local_rank, trainer.node_rank) == (3, 1, 1)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_other_processes_than_a_recipe_wants_are_one_sentence(
    launcher: str, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    believe(monkeypatch, LAUNCHERS[launcher](2, 2, 4321)[3])
    with pytest.raises(OfframpError, match="started 2 processes on each of 2 nodes, but the recipe wants 4 processes"):
        built("--trainer.devices=4")
    pipeline = "offramp.train.pipeline.strategy.DeepSpeedPipelineStrategy"
    trainer = built(f"--trainer.strategy.class_path={pipeline}", "--trainer.strategy.init_args.pipe=3")
    with pytest.raises(OfframpError, match=r"4 processes .* cannot form pipelines of 3 stages"):
        trainer.strategy.setup_environment()


def test_several_nodes_need_a_launcher(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    believe(monkeypatch, slurm_job(2, 1))
    by_hand = {"NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4321"}
    for name in by_hand:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        OfframpError,
        match="1 process on each of 2 nodes, but no launcher started this process, and MASTER_ADDR, MASTER_PORT, "
        "NODE_RANK are not set",
    ):
        built("--trainer.num_nodes=2")
    for name in by_hand:
        with monkeypatch.context() as patch:
            believe(patch, {other: value for other, value in by_hand.items() if other != name})
            with pytest.raises(OfframpError, match=f"and {name} is not set"):
                built("--trainer.num_nodes=2")
    believe(monkeypatch, by_hand)
    assert built("--trainer.num_nodes=2").global_rank == 1


@pytest.mark.parametrize(
    ("pipe", "tensor", "nodes", "per_node", "words"),
    [
        (4, 2, 2, 4, "stage 0 on node 0, stage 1 on node 0, stage 2 on node 1.*go states and gradients .* 1 and 2$"),
        (2, 1, 2, 4, "stage 0 on node 0, stage 1 on node 1; from node to node go states and gradients .* 0 and 1$"),
        (1, 2, 2, 2, "stage 0 on nodes 0 to 1; from node to node go sums of gradients over replicas$"),
        (1, 2, 2, 1, "stage 0 on nodes 0 to 1; from node to node go sums within layers$"),
        (2, 2, 4, 2, "stage 0 on nodes 0 to 1.*go sums of gradients over replicas and states and gradients"),
    ],
)
def test_ranks_lie_as_deepspeed_has_them_and_tensor_groups_on_one_node(
    pipe: int, tensor: int, nodes: int, per_node: int, words: str
) -> None:
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    placement = Placement.of(pipe, tensor, nodes, per_node)
    topology: Any = PipeModelDataParallelTopology(pipe, tensor, placement.replicas)
    for rank in range(nodes * per_node):
        coordinate = topology.get_coord(rank)
        assert placement.rank(coordinate.pipe, coordinate.data, coordinate.model) == rank
        assert placement.replica_of(rank) == coordinate.data
    apart = any(len({rank // per_node for rank in group}) > 1 for group in topology.get_axis_comm_lists("model"))
    assert placement.splits_tensor_groups == apart == bool(per_node % tensor)
    assert re.search(words, placement.describe())


def test_an_environment_of_the_recipe_comes_before_ours(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    believe(monkeypatch, torchrun(2, 2, 4321)[3])
    theirs = "lightning.pytorch.plugins.environments.TorchElasticEnvironment"
    trainer = built(f'--trainer.plugins=[{{"class_path": "{theirs}"}}]')
    assert isinstance(getattr(trainer.strategy, "cluster_environment"), TorchElasticEnvironment)  # noqa: B009
    assert (trainer.world_size, trainer.global_rank) == (4, 3)


def test_parameters_that_stages_on_different_nodes_share_are_said() -> None:
    shared = {"embed_tokens.weight": (0, 3), "norm.weight": (2, 3)}
    words = Placement.of(4, 1, 2, 4).describe_shared(shared)
    assert words is not None
    assert words.startswith("stages on different nodes share embed_tokens.weight: sums of gradients go from node to")
    assert Placement.of(4, 1, 1, 4).describe_shared(shared) is None
    assert Placement.of(4, 1, 2, 4).describe_shared({"norm.weight": (2, 3)}) is None


@pytest.mark.parametrize(("appears", "rank"), [(2, 1), (None, 1), (None, 0)])
def test_a_directory_is_looked_at_again_until_the_file_is_seen(
    appears: int | None, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, faults, folder = 0, [], tmp_path / "checkpoints"

    def look(path: Path) -> list[str]:
        nonlocal looks
        looks += 1
        if looks == appears:
            folder.mkdir()
            (folder / ".seen-by-all-0").touch()
        raise FileNotFoundError(path)

    assert shared_directory.PATIENCE_S > 60.0, "as long as NFS may remember"
    monkeypatch.setattr(shared_directory, "PATIENCE_S", 1.0)
    monkeypatch.setattr(shared_directory.os, "listdir", look)
    monkeypatch.setattr(SharedDirectory, "_agree", faults.append)
    strategy = SimpleNamespace(broadcast=lambda name: ".seen-by-all-0")
    trainer: Any = SimpleNamespace(
        checkpoint_callback=SimpleNamespace(dirpath=str(folder)), num_nodes=2, strategy=strategy,
        is_global_zero=rank == 0, global_rank=rank,
    )  # fmt: skip
    SharedDirectory().setup(trainer, pl.LightningModule(), "fit")
    assert faults[0] is None
    assert (faults[1] is None) == (rank == 0 or appears is not None)
    if rank == 0:
        assert looks == 0, "what is seen at once costs nothing"
        assert not (folder / ".seen-by-all-0").exists()


@pytest.mark.parametrize("several", [True, False])
def test_alone_nobody_is_lost(several: bool) -> None:
    assert (lost_process(RuntimeError("the kernel timed out"), 0, alone=not several) is not None) == several
    assert lost_process(DistStoreError("Timed out after 2 seconds waiting for clients."), 0, alone=True) is not None


def test_a_port_that_is_taken_is_no_lost_process() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(DistNetworkError) as raised:
            TCPStore("127.0.0.1", taken.getsockname()[1], 2, is_master=True)
    fault = lost_process(raised.value, 0, alone=True)
    assert not isinstance(fault, LostProcess)
    assert re.search(r"^rank 0 cannot let .*; another program has that port, choose another MASTER_PORT", str(fault))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:4"), "when it ended"),
        (RuntimeError("[x.cc:81] Timed out waiting 1800000ms for recv operation to complete"), "waited in vain.*Timed"),
        (RuntimeError("shape mismatch"), None),
        (TimeoutError("timed out"), None),
    ],
)
def test_a_lost_process_is_told_from_other_faults(fault: Exception, words: str | None) -> None:
    lost = lost_process(fault, 3, alone=False)
    assert (lost is None) == (words is None)
    if lost is not None and words is not None:
        assert re.search(f"^rank 3 .*{words}", str(lost))
