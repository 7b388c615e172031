"""`offramp` commands of shells and other programs, forked from a process that has imported everything.

An `offramp` that stands first on PATH hands arguments, directory, environment and standard streams over a socket. What
the command does, prints and returns is its own; only the ten seconds of imports are left out.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing as mp
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from helpers import forked_command
from helpers.processes import forkserver


@contextlib.contextmanager
def forked_offramp(directory: Path) -> Iterator[Path]:
    """Puts a quick `offramp` into a directory, and serves it as long as the context lasts; gives its path."""
    listening = directory / "socket"
    script = directory / "offramp"
    script.write_text(f"#!{sys.executable} -IS\n{Path(forked_command.__file__).read_text()}")
    script.chmod(0o755)
    ready = forkserver().Event()
    server = forkserver().Process(target=_serve, args=(str(listening), ready))
    server.start()
    try:
        assert ready.wait(120), "the server of commands does not start"
        yield script
    finally:
        server.kill()
        server.join()


def _serve(path: str, ready: Event) -> None:
    tests = mp.parent_process()
    assert tests is not None
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        ready.set()
        while tests.sentinel not in wait([listener, tests.sentinel]):
            connection, _ = listener.accept()
            with connection:
                mp.get_context("fork").Process(target=_answer, args=(connection,)).start()


def _answer(connection: socket.socket) -> None:
    """Starts the command that is asked for, says its process id, and in the end its exit code, as a shell has it."""
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    request = json.loads(connection.makefile().readline())
    command = mp.get_context("fork").Process(target=_run, args=(request, streams))
    command.start()
    for stream in streams:
        os.close(stream)
    connection.sendall(f"{command.pid}\n".encode())
    threading.Thread(target=_end_when_abandoned, args=(connection, command), daemon=True).start()
    command.join()
    code = command.exitcode
    assert code is not None
    with contextlib.suppress(BrokenPipeError):  # who asked was killed, and has ended the command with it
        connection.sendall(f"{code if code >= 0 else 128 - code}\n".encode())


def _end_when_abandoned(connection: socket.socket, command: BaseProcess) -> None:
    """Who asked says no more; its end of the connection closes when it is killed. What it has started ends with it."""
    if not connection.recv(1) and command.pid is not None:
        with contextlib.suppress(ProcessLookupError):  # it had ended before
            os.killpg(command.pid, signal.SIGKILL)


def _run(request: dict[str, Any], streams: list[int]) -> None:
    os.setsid()  # Lightning kills its whole process group when a rank has died
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115 - as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    sys.argv = request["words"]  # Lightning starts other ranks with them
    from offramp.common import cli

    sys.exit(cli.main(sys.argv[1:]))
