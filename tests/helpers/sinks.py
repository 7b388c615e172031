"""Requests for an engine in a thread, and a sink for what it says of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from offramp.serve.request.constraint import Constraint
from offramp.serve.request.output import RequestOutput
from offramp.serve.request.request import Request
from offramp.serve.request.sampling_params import SamplingParams


class RecordingSink:
    """A sink that keeps everything and can be waited for."""

    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []
        self.failures: list[tuple[str, Exception]] = []
        self.over = threading.Event()

    def put(self, output: RequestOutput) -> None:
        self.outputs.append(output)
        if output.finish_reason is not None:
            self.over.set()

    def fail(self, request_id: str, cause: Exception) -> None:
        self.failures.append((request_id, cause))
        self.over.set()

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)


def request(name: str, max_tokens: int = 4, constraint: Constraint | None = None) -> Request:
    return Request(name, (1, 2), SamplingParams(max_tokens=max_tokens, constraint=constraint))


def eventually(condition: Callable[[], bool], timeout_s: float = 5.0, every_s: float = 0.005) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(every_s)
