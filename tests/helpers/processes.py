"""Processes that are forked from one that has imported what they need: a start takes a moment, not ten seconds."""

from __future__ import annotations

import importlib
import io
import multiprocessing as mp
import os
import queue
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from helpers.nodes import enter_network

PRELOADED = [
    "accelerate",
    "datasets",
    "offramp.common.gguf",
    "offramp.serve.offline",
    "offramp.train.cli",
    "offramp.train.confidence_training",
    "offramp.train.export",
    "offramp.train.module",
    "offramp.train.data.datamodule",
    "offramp.train.pipeline.strategy",
    "offramp.train.plan",
    "offramp.train.priming",
    "mlflow.server.fastapi_app",
    "mlflow.server.handlers",
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def forkserver() -> ForkServerContext:
    """Whose processes have `PRELOADED` in them; there is one server for all tests of a process."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def run_processes(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """What `function(*args)` returns in each process of a group, by rank; what it raises fails the test.

    Args:
        function: importable.
        world_size: number of processes.
        args: picklable.
        timeout_s: a deadlock must not hang the tests.
    """
    context = forkserver()
    answers: mp.Queue[tuple[int, Any, str | None]] = context.Queue()
    port = free_port()
    workers = [
        context.Process(target=_enter, args=(answers, rank, world_size, port, function, args), daemon=True)
        for rank in range(world_size)
    ]
    for worker in workers:
        worker.start()
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    try:
        while len(results) < world_size:
            try:
                rank, result, fault = answers.get(timeout=0.5)
            except queue.Empty:
                died = [rank for rank, worker in enumerate(workers) if worker.exitcode not in (None, 0)]
                if died or time.monotonic() > deadline:
                    raise AssertionError(
                        f"ranks {died} died" if died else f"timed out; done: {sorted(results)}"
                    ) from None
                continue
            if fault is not None:
                raise AssertionError(f"rank {rank} failed:\n{fault}")
            results[rank] = _unpack(result)
    finally:
        for worker in workers:
            if len(results) == world_size:
                worker.join(10)
            if worker.is_alive():
                worker.kill()
            worker.join()
    return [results[rank] for rank in range(world_size)]


def start_command(arguments: list[str], log: Path, ranks: int = 1) -> Sequence[BaseProcess]:
    """Start `offramp` here, as a launcher would start its ranks; what they print is added to `log`."""
    port = str(free_port())
    told = [{}] if ranks == 1 else [
        {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for rank in range(ranks)
    ]  # fmt: skip
    return [start_rank(arguments, log, variables) for variables in told]


def start_rank(
    arguments: list[str],
    log: Path,
    variables: dict[str, str],
    directory: str | Path = ".",
    network: str | None = None,
) -> BaseProcess:
    """Start `offramp` once.

    Args:
        arguments: of the command.
        log: what it prints is added to it.
        variables: of the environment, beside those of this process.
        directory: where it runs.
        network: that it sees, see `helpers.nodes`.
    """
    where = str(Path(directory).resolve())
    process = forkserver().Process(target=_command, args=(arguments, str(log.resolve()), where, variables, network))
    process.start()
    return process


def start_launcher(module: str, arguments: list[str], log: Path, directory: Path) -> BaseProcess:
    """Start what torchrun or deepspeed starts.

    Args:
        module: with a function `main`, which the launcher's script calls.
        arguments: of the script.
        log: what it prints, and the processes that it starts.
        directory: where it runs.
    """
    process = forkserver().Process(target=_launcher, args=(module, arguments, str(log), str(directory)))
    process.start()
    return process


def _launcher(module: str, arguments: list[str], log: str, directory: str) -> None:
    os.chdir(directory)
    with open(log, "ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    importlib.import_module(module).main(arguments)


def _command(
    arguments: list[str], log: str, directory: str, variables: dict[str, str], network: str | None = None
) -> None:
    os.chdir(directory)
    with open(log, "ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.update(variables)
    if network is not None:
        enter_network(network)
    import torch

    from offramp.common import cli

    torch.set_num_threads(1)
    sys.argv = ["offramp", *arguments]
    sys.exit(cli.main(arguments))


def _unpack(packed: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(packed), weights_only=False)


def _enter(
    answers: Any, rank: int, world_size: int, port: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    import torch

    torch.set_num_threads(1)
    try:
        # As bytes: a queue would lend tensors out, and they would be gone with this process.
        packed = io.BytesIO()
        torch.save(function(*args), packed)
        answers.put((rank, packed.getvalue(), None))
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))
        raise
