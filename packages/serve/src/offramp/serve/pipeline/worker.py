"""The process of a later stage; see `offramp.serve.pipeline.processes`."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from offramp.common.checkpoint import DTYPES
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.serve.pipeline.make_stage import StageSettings, make_stage
from offramp.serve.pipeline.messages import Kind, Message, encode, fault_message
from offramp.serve.pipeline.processes import NEIGHBOUR_LOST
from offramp.serve.pipeline.relay import relay
from offramp.serve.pipeline.stage import Stage
from offramp.serve.pipeline.stages import load_stage


def main(fds: Sequence[int]) -> int:
    """Load a stage and run what comes.

    Args:
        fds: file descriptors of the pipe from the stage before, of that to the next one, if there is one, and of that
            to the first.

    Returns:
        The exit status.
    """
    # The terminal's interrupt is for the first stage, which ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    order = json.loads(sys.stdin.readline())
    settings = StageSettings.from_json(sys.stdin.readline())
    threading.Thread(target=_end_with_first_stage, name="lifeline", daemon=True).start()
    before = Connection(fds[0], writable=False)
    following = Connection(fds[1], readable=False) if len(fds) > 2 else None
    first = Connection(fds[-1], readable=False)
    try:
        stage = _load(order["path"], order["exits"], settings)
        first.send_bytes(encode(Message(Kind.READY)))
        while True:
            relay(stage, before.recv_bytes(), first.send_bytes, None if following is None else following.send_bytes)
    except (EOFError, BrokenPipeError):
        return NEIGHBOUR_LOST
    except Exception as fault:
        cause = str(fault) if isinstance(fault, OfframpError) else f"{type(fault).__name__}: {fault}"
        first.send_bytes(encode(fault_message(cause)))
        return 1


def _load(path: str, exits: dict[str, object] | None, settings: StageSettings) -> Stage:
    config = settings.config
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    checkpoint = load_stage(
        path,
        settings.index,
        settings.num_stages,
        DTYPES[config.dtype],
        exits=None if exits is None else ExitConfig.from_json(exits),
        verify=False,
    )
    return make_stage(checkpoint.model, settings, release_weights=True)


def _end_with_first_stage() -> None:
    """End this process, whatever it is doing, once the first stage has closed its end of the standard input."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main([int(argument) for argument in sys.argv[1:]]))
