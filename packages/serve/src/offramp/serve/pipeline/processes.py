"""Stages 2 .. S as processes of this machine, joined by pipes.

Each process gets its messages from the stage before it, and has a pipe of its own back to the first stage, which a
thread there reads all the time: so a stage never waits for the first one to listen, and nothing can wait in a circle.
A pipe has an end as soon as the process at its other end has one, however it ended. So a lost stage is known at once.
The other way round, the standard input of every stage is a pipe that nobody writes to and that ends with this process:
then the stage ends too, whatever it is doing.

torch.distributed was rejected for this: gloo cannot say whether a message has come without waiting for it, and it knows
by a time-out only that a peer is gone.

Legend: S stages.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import NoReturn

from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.serve.pipeline.make_stage import StageSettings
from offramp.serve.pipeline.messages import Kind, decode, kind_of, text_of

NEIGHBOUR_LOST = 3
"""Exit status of a stage that could not go on because the one before or after it had ended."""

Pair = tuple
_WORKER = "offramp.serve.pipeline.worker"
_END_S = 5.0
"""Seconds that a process is given to end by itself."""

Arrivals = queue.SimpleQueue[tuple[int, bytes | None]]


class StageProcesses:
    """Starts the processes, and is their `LaterStages`."""

    def __init__(self, path: str | os.PathLike[str], settings: StageSettings, exits: ExitConfig | None = None) -> None:
        """Start them; they load their parts of the checkpoint.

        Args:
            path: the checkpoint directory, whose hashes have been compared.
            settings: of the first stage.
            exits: exits declared on a plain directory.
        """
        num_stages = settings.num_stages
        # Stage i reads what stage i - 1 writes; the last one writes to nobody.
        links = [_pipe() for _ in range(num_stages - 1)]
        backs = [_pipe() for _ in range(num_stages - 1)]
        self._onward = links[0][1]
        self._arrivals: Arrivals = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[str]] = []
        self._lost = threading.Event()
        self._finalizer = weakref.finalize(self, _end, self._processes, self._onward)
        for number in range(1, num_stages):
            given = [
                links[number - 1][0],
                *([links[number][1]] if number + 1 < num_stages else []),
                backs[number - 1][1],
            ]
            fds = [connection.fileno() for connection in given]
            process = subprocess.Popen(
                [sys.executable, "-m", _WORKER, *map(str, fds)], stdin=subprocess.PIPE, pass_fds=fds, text=True
            )
            self._processes.append(process)
            for connection in given:  # else their ends here would outlive those there
                connection.close()
            declared = None if exits is None else exits.to_json()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                order = {"path": os.fspath(path), "exits": declared}
                print(json.dumps(order), replace(settings, index=number).to_json(), sep="\n", file=process.stdin)
                process.stdin.flush()
            threading.Thread(
                target=_listen,
                args=(number, backs[number - 1][0], self._arrivals, self._lost),
                name=f"stage-{number + 1}",
                daemon=True,
            ).start()

    @property
    def process_ids(self) -> list[int]:
        """Of stages 2 .. S."""
        return [process.pid for process in self._processes]

    @property
    def is_lost(self) -> bool:
        """See `LaterStages`."""
        return self._lost.is_set()

    def wait_until_ready(self) -> None:
        """Wait until all stages have loaded their weights.

        Raises:
            OfframpError: one of them cannot.
        """
        for _ in self._processes:
            number, data = self._arrivals.get()
            if data is None:
                self._fail()
            if kind_of(data) is not Kind.READY:
                self._arrivals.put((number, data))
                self._fail()

    def send(self, message: bytes) -> None:
        """See `LaterStages`."""
        try:
            self._onward.send_bytes(message)
        except OSError:
            self._fail()

    def receive(self, *, wait: bool) -> Sequence[bytes]:
        """See `LaterStages`."""
        found: list[bytes] = []
        while True:
            try:
                number, data = self._arrivals.get(block=wait and not found)
            except queue.Empty:
                return found
            if data is None or kind_of(data) is Kind.FAULT:
                self._arrivals.put((number, data))
                self._fail()
            found.append(data)

    def close(self) -> None:
        """End the processes."""
        self._finalizer()

    def _fail(self) -> NoReturn:
        """Raise what is wrong, and end all stages."""
        self._lost.set()
        deadline = time.monotonic() + _END_S
        # Who ended first is not always heard of first. Its neighbours end after it, with a status of their own.
        guilty = None
        while guilty is None and time.monotonic() < deadline:
            ended = {number: process.poll() for number, process in enumerate(self._processes, start=2)}
            guilty = next((n for n, status in ended.items() if status not in (None, NEIGHBOUR_LOST)), None)
            if guilty is None:
                time.sleep(0.01)
        total = len(self._processes) + 1
        cause = self._said()
        status = None if guilty is None else self._processes[guilty - 2].poll()
        self.close()
        if cause is not None:
            raise OfframpError(cause)
        where = "a stage" if guilty is None else f"stage {guilty}"
        raise OfframpError(
            f"{where} of {total} has ended without a word (exit status {status}; the kernel ends a process with -9 "
            "when memory runs out); start the engine again."
        )

    def _said(self) -> str | None:
        """What a stage has said of its end."""
        with contextlib.suppress(queue.Empty):
            while True:
                number, data = self._arrivals.get_nowait()
                if data is not None and (message := decode(data)).kind is Kind.FAULT:
                    return f"stage {number + 1} of {len(self._processes) + 1}: {text_of(message)}"
        return None


def _pipe() -> tuple[Connection, Connection]:
    """A pipe: the end to read from, and the end to write to."""
    reading, writing = os.pipe()
    return Connection(reading, writable=False), Connection(writing, readable=False)


def _listen(number: int, connection: Connection, arrivals: Arrivals, lost: threading.Event) -> None:
    """Take in what a stage sends back, until there is nobody any more."""
    with connection:
        while True:
            try:
                data = connection.recv_bytes()
            except (EOFError, OSError):
                lost.set()
                arrivals.put((number, None))
                return
            arrivals.put((number, data))


def _end(processes: Sequence[subprocess.Popen[str]], onward: Connection) -> None:
    """End processes that only wait to be told; kill those that do not listen."""
    onward.close()
    for process in processes:
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
    deadline = time.monotonic() + _END_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
