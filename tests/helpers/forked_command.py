"""The `offramp` that tests put on PATH: hands the command to the process behind a socket, which forks and runs it.

A copy of this file lies beside the socket. It needs nothing but Python's own library, for it must start in a moment.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path
from types import FrameType


def main() -> int:
    script = Path(__file__).absolute()
    words = [str(script), *sys.argv[1:]]
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(str(script.with_name("socket")))
        request = {"words": words, "directory": os.getcwd(), "environment": dict(os.environ)}
        socket.send_fds(server, [b"\n"], [0, 1, 2])
        server.sendall(json.dumps(request).encode() + b"\n")
        answers = server.makefile()
        process = int(answers.readline())

        def pass_on(number: int, frame: FrameType | None) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, pass_on)
        return int(answers.readline())


if __name__ == "__main__":
    sys.exit(main())
