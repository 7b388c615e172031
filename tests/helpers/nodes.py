"""Nodes on this machine: what each launcher tells its processes, and networks of their own for them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

Variables = dict[str, str]


def torchrun(nodes: int, per_node: int, port: int) -> list[Variables]:
    common = {
        "TORCHELASTIC_RUN_ID": "none",
        # True where torchrun keeps the store in which processes meet.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "WORLD_SIZE": str(nodes * per_node),
        "LOCAL_WORLD_SIZE": str(per_node),
    }
    return _each(nodes, per_node, port, common, ("RANK", "LOCAL_RANK", "GROUP_RANK"))


def deepspeed(nodes: int, per_node: int, port: int) -> list[Variables]:
    common = {"CROSS_SIZE": str(nodes), "WORLD_SIZE": str(nodes * per_node), "LOCAL_SIZE": str(per_node)}
    return _each(nodes, per_node, port, common, ("RANK", "LOCAL_RANK", "CROSS_RANK"))


def srun(nodes: int, per_node: int, port: int) -> list[Variables]:
    """Of a step that is the whole job. Its nodes are this machine under other names, so the address is given."""
    common = {
        **slurm_job(nodes, per_node),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": f"node[1-{nodes}]",
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NUM_TASKS": str(nodes * per_node),
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})",
    }
    return _each(nodes, per_node, port, common, ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"))


def _each(nodes: int, per_node: int, port: int, common: Variables, names: tuple[str, str, str]) -> list[Variables]:
    """For each process what all are told, and under these names its rank, its rank on its node, and its node."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        common | meeting | dict(zip(names, map(str, (node * per_node + local, local, node)), strict=True))
        for node in range(nodes)
        for local in range(per_node)
    ]


def slurm_job(nodes: int, per_node: int) -> Variables:
    """What the script of a job of SLURM sees."""
    return {
        "SLURM_JOB_ID": "200505",
        "SLURM_JOB_NAME": "offramp",
        "SLURM_JOB_NODELIST": f"node[1-{nodes}]",
        "SLURM_NODELIST": f"node[1-{nodes}]",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NNODES": str(nodes),
        "SLURM_NTASKS": str(nodes * per_node),
        "SLURM_NTASKS_PER_NODE": str(per_node),
        "SLURM_TASKS_PER_NODE": f"{per_node}(x{nodes})",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
    }


LAUNCHERS: dict[str, Callable[[int, int, int], list[Variables]]] = {
    "torchrun": torchrun,
    "deepspeed": deepspeed,
    "srun": srun,
}

NETWORKS = ("offramp-test-0", "offramp-test-1")
ADDRESSES = ("10.213.0.1", "10.213.0.2")
INTERFACE = "offramp"


@contextmanager
def two_networks() -> Iterator[Callable[[], None]]:
    """Two machines' worth of network with one cable between them; yields what cuts it. Skips where this is not allowed.

    Processes enter one by `enter_network`.
    """
    _delete_networks()  # left over by a run that was killed
    try:
        _ip("netns", "add", NETWORKS[0])
    except (OSError, subprocess.CalledProcessError) as fault:
        pytest.skip(f"no network namespaces here: {getattr(fault, 'stderr', fault)}")
    try:
        _ip("netns", "add", NETWORKS[1])
        _ip(
            "link", "add", INTERFACE, "netns", NETWORKS[0], "type", "veth",
            "peer", "name", INTERFACE, "netns", NETWORKS[1],
        )  # fmt: skip
        for network, address in zip(NETWORKS, ADDRESSES, strict=True):
            _ip("-n", network, "address", "add", f"{address}/24", "dev", INTERFACE)
            _ip("-n", network, "link", "set", INTERFACE, "up")
            _ip("-n", network, "link", "set", "lo", "up")
        yield lambda: _ip("-n", NETWORKS[1], "link", "set", INTERFACE, "down")
    finally:
        _delete_networks()


def _delete_networks() -> None:
    for network in NETWORKS:
        with suppress(OSError):  # no such command
            subprocess.run(["ip", "netns", "delete", network], capture_output=True, check=False)


def enter_network(name: str) -> None:
    """Let this thread, and those it starts, see one network alone."""
    import ctypes

    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, 0x40000000):  # CLONE_NEWNET
        raise OSError(ctypes.get_errno(), "setns")
    os.close(descriptor)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
