"""An OpenAI service on a made-up engine, and what its replies say."""

from __future__ import annotations

import json
import time
from typing import Any

from helpers.fake_engine import FakeEngine
from offramp.common.exits.operating_point import OperatingPoint, OperatingPoints
from offramp.common.exits.policy import ExitPolicy
from offramp.serve.protocol.card import ModelCard
from offramp.serve.protocol.replies import Complete, Generation
from offramp.serve.request.request import Request

COMPLETIONS, CHAT = "v1/completions", "v1/chat/completions"


def card(**changes: Any) -> ModelCard:
    fields: dict[str, Any] = {
        "name": "m",
        "version": "1.0",
        "created": 1,
        "vocab_size": 300,
        "num_layers": 4,
        "exit_layers": (1, 2),
        "policy": ExitPolicy(thresholds={1: 0.9, 2: 0.8}),
        "eos_token_ids": frozenset({1, 3}),
        "max_model_len": 100,
        "cache_tokens": 80,
        "run_id": "abc",
        "config_hash": "def",
        "points": OperatingPoints({"safe": OperatingPoint("recompute", ExitPolicy(thresholds={2: 0.99}), 4)}),
    }
    return ModelCard(**(fields | changes))


class Engine(FakeEngine):
    """Remembers requests whole."""

    def __init__(self) -> None:
        super().__init__(delay_s=0.001)
        self.requests: list[Request] = []

    def add_request(self, request: Request) -> None:
        self.requests.append(request)
        super().add_request(request)


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


def chat_body(text: str = "Hi", **fields: Any) -> bytes:
    return body(messages=[{"role": "user", "content": text}], **fields)


def collect(reply: Complete | Generation, max_bytes: int = 1_000_000) -> bytes:
    assert isinstance(reply, Generation), reply
    deadline = time.monotonic() + 5
    answer = b""
    while True:
        piece, last = reply.take(max_bytes)
        assert len(piece) <= max_bytes
        answer += piece
        if last:
            return answer
        assert time.monotonic() < deadline
        time.sleep(0.001)


def answer(reply: Complete | Generation) -> dict[str, Any]:
    return json.loads(collect(reply))


def events(reply: Complete | Generation) -> list[dict[str, Any]]:
    lines = collect(reply).decode().split("\n\n")
    assert lines[-1] == ""
    assert lines[-2] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def refusal(reply: Complete | Generation, status: int) -> dict[str, Any]:
    assert isinstance(reply, Complete)
    assert reply.status == status
    error = json.loads(reply.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error
