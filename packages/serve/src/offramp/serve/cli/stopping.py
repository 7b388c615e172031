"""Commands that run until a signal comes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stop(BaseException):
    """A signal asked for the end. Not an `Exception`, so that nothing on the way takes it for a fault."""


@contextmanager
def signals_raise_stop() -> Iterator[None]:
    """SIGTERM and SIGINT end the command in order, so that no server stays behind."""

    def stop(number: int, frame: FrameType | None) -> None:
        # A second one must not interrupt the stopping.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Stop

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
