"""What a launcher of several processes tells each of them: torchrun, the deepspeed launcher and SLURM's srun.

Each has environment variables of its own. Lightning reads those of torchrun and most of SLURM's; under the deepspeed
launcher it would take every node for the first. Here all three become one `Launch`, checked before anything waits for
another process. Without a launcher Lightning starts the processes of this machine itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment, SLURMEnvironment
from typing_extensions import override

from offramp.common.errors import OfframpError

TORCHRUN, DEEPSPEED, SRUN = "torchrun", "the deepspeed launcher", "srun"

BY_HAND = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
"""Variables without which processes that no launcher started do not find those of other nodes."""


@dataclass(frozen=True)
class Launch:
    """This process among those that a launcher started; every node has as many, and those of a node follow each other.

    Attributes:
        launcher: its name, for people.
        rank: of this process among all.
        local_rank: of this process on its node.
        node: number of its node.
        nodes: how many there are.
        per_node: processes on each.
        address: of the node of rank 0, where processes meet.
        port: on which they meet.
    """

    launcher: str
    rank: int
    local_rank: int
    node: int
    nodes: int
    per_node: int
    address: str
    port: int

    @property
    def world_size(self) -> int:
        """All processes."""
        return self.nodes * self.per_node


def find_launch(environment: Mapping[str, str]) -> Launch | None:
    """Who started this process, from its environment variables; None if no launcher did.

    torchrun comes first, since it also runs as a task of srun; a single task of srun is no launch, so that Lightning
    may start processes in it.

    Raises:
        OfframpError: nodes have different numbers of processes, or ranks do not follow each other within a node.
    """
    if "TORCHELASTIC_RUN_ID" in environment:
        return _checked(
            TORCHRUN, environment, rank="RANK", local_rank="LOCAL_RANK", node="GROUP_RANK", world_size="WORLD_SIZE",
            per_node="LOCAL_WORLD_SIZE",
        )  # fmt: skip
    if "CROSS_RANK" in environment and "RANK" in environment:
        return _checked(
            DEEPSPEED, environment, rank="RANK", local_rank="LOCAL_RANK", node="CROSS_RANK", world_size="WORLD_SIZE",
            per_node="LOCAL_SIZE",
        )  # fmt: skip
    return _slurm_step(environment)


class LaunchEnvironment(ClusterEnvironment):
    """A `Launch`, as Lightning asks for it."""

    def __init__(self, launch: Launch) -> None:
        super().__init__()
        self.launch = launch

    @property
    @override
    def creates_processes_externally(self) -> bool:
        """The launcher did."""
        return True

    @property
    @override
    def main_address(self) -> str:
        """Where processes meet."""
        return self.launch.address

    @property
    @override
    def main_port(self) -> int:
        """Where processes meet."""
        return self.launch.port

    @staticmethod
    @override
    def detect() -> bool:
        """Lightning is handed it and need not look for it."""
        return False

    @override
    def world_size(self) -> int:
        """All processes."""
        return self.launch.world_size

    @override
    def set_world_size(self, size: int) -> None:
        """It is the launcher's; `check_launch` sees that the trainer's is the same."""

    @override
    def global_rank(self) -> int:
        """Among all processes."""
        return self.launch.rank

    @override
    def set_global_rank(self, rank: int) -> None:
        """It is the launcher's."""

    @override
    def local_rank(self) -> int:
        """On this node."""
        return self.launch.local_rank

    @override
    def node_rank(self) -> int:
        """Number of this node."""
        return self.launch.node


def cluster_environment(launch: Launch | None, environment: Mapping[str, str]) -> ClusterEnvironment | None:
    """What to hand to the trainer; None lets Lightning look for itself.

    In a job of SLURM that srun did not start, Lightning would wait for tasks that never come.
    """
    if launch is not None:
        return LaunchEnvironment(launch)
    return LightningEnvironment() if "SLURM_JOB_ID" in environment else None


def with_launch(trainer: Mapping[str, Any], launch: Launch | None) -> dict[str, Any]:
    """Settings of a trainer; nodes and devices that it leaves open are those that were started."""
    settings = dict(trainer)
    if launch is None:
        return settings
    for key, started in (("devices", launch.per_node), ("num_nodes", launch.nodes)):
        if settings.get(key) in (None, "auto", -1, "-1"):
            settings[key] = started
    return settings


def check_launch(trainer: pl.Trainer, launch: Launch | None, environment: Mapping[str, str]) -> None:
    """Compares what a trainer wants with what was started; otherwise processes would wait for some that never come.

    Raises:
        OfframpError: it is not the same.
    """
    wanted = (trainer.num_nodes, trainer.num_devices)
    if launch is not None and wanted != (launch.nodes, launch.per_node):
        raise OfframpError(
            f"{launch.launcher} started {_each(launch.nodes, launch.per_node)}, but the recipe wants {_each(*wanted)}; "
            "leave trainer.num_nodes and trainer.devices out of the recipe, or start as many."
        )
    by_hand = isinstance(getattr(trainer.strategy, "cluster_environment", None), LightningEnvironment)
    missing = [name for name in BY_HAND if name not in environment]
    if launch is None and by_hand and trainer.num_nodes > 1 and missing:
        raise OfframpError(
            f"the recipe wants {_each(*wanted)}, but no launcher started this process, and {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set; start it on all of them with torchrun, deepspeed or "
            f"srun, or by hand with {', '.join(BY_HAND)}."
        )


def _each(nodes: int, per_node: int) -> str:
    processes = "1 process" if per_node == 1 else f"{per_node} processes"
    return f"{processes} on one node" if nodes == 1 else f"{processes} on each of {nodes} nodes"


def _checked(launcher: str, environment: Mapping[str, str], **names: str) -> Launch:
    """From variables that say it all."""
    try:
        told = {meaning: int(environment[name]) for meaning, name in names.items()}
        address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    except (KeyError, ValueError) as fault:
        raise OfframpError(f"{launcher} started this process without telling it all: {fault} is not set.") from fault
    world_size, per_node = told.pop("world_size"), told["per_node"]
    if world_size % per_node:
        raise _uneven(launcher, f"{world_size} processes, {per_node} of them on this one")
    return _in_order(Launch(launcher, nodes=world_size // per_node, address=address, port=port, **told))


def _slurm_step(environment: Mapping[str, str]) -> Launch | None:
    """A task of srun. The script of a job has most of the variables too, but not those of a step."""

    def told(*names: str) -> str:
        return next((environment[name] for name in names if name in environment), "")

    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", 1))
    if tasks == 1 or "SLURM_PROCID" not in environment:
        return None
    nodes = int(told("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES") or 1)
    layout = told("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    counts = {int(count) for count in re.findall(r"(\d+)(?:\(x\d+\))?(?:,|$)", layout)} or {tasks // nodes}
    if len(counts) > 1 or tasks % nodes:
        raise _uneven(SRUN, f"{tasks} tasks on {nodes} nodes" + (f", {layout}" if layout else ""))
    # As Lightning has it: any port will do that all tasks can work out and that two jobs seldom share.
    job = told("SLURM_JOB_ID")
    port = int(job[-4:]) + 15000 if job else 12910
    first = SLURMEnvironment.resolve_root_node_address(
        told("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST") or "127.0.0.1"
    )
    return _in_order(
        Launch(
            SRUN,
            rank=int(environment["SLURM_PROCID"]),
            local_rank=int(environment["SLURM_LOCALID"]),
            node=int(environment["SLURM_NODEID"]),
            nodes=nodes,
            per_node=tasks // nodes,
            address=environment.get("MASTER_ADDR", first),
            port=int(environment.get("MASTER_PORT", port)),
        )
    )


def _uneven(launcher: str, started: str) -> OfframpError:
    remedy = "set --ntasks-per-node" if launcher == SRUN else "start as many everywhere"
    return OfframpError(f"{launcher} started {started}, but every node must have the same number; {remedy}.")


def _in_order(launch: Launch) -> Launch:
    if launch.rank != launch.node * launch.per_node + launch.local_rank:
        remedy = "start it with --distribution=block" if launch.launcher == SRUN else "number the nodes from 0"
        raise OfframpError(
            f"{launch.launcher} gave rank {launch.rank} to process {launch.local_rank} of node {launch.node}, but with "
            f"{launch.per_node} on each node ranks must follow each other within a node; {remedy}."
        )
    return launch
