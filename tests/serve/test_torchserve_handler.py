"""The handler as TorchServe's worker drives it, with the real engine and a tiny model, but without TorchServe."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.tiny import tiny_checkpoint
from offramp.serve.torchserve.archive import archive

pytest.importorskip("ts")

from offramp.serve.torchserve.handler import OfframpHandler

REQUEST_ID = "0123456789abcdef0123456789abcdef"


class Context:
    """The part of TorchServe's context that a handler uses."""

    def __init__(self, folder: Path) -> None:
        self.model_name = "tiny"
        self.manifest = json.loads((folder / "MAR-INF" / "MANIFEST.json").read_text())
        self.model_yaml_config = {"engine": {"num_threads": 1}, "handler": {"wait_ms": 20.0}}
        self.system_properties = {"model_dir": str(folder)}
        metric = SimpleNamespace(add_or_update=lambda value, labels: None)
        self.metrics = SimpleNamespace(add_metric_to_cache=lambda *given: metric)
        self.request_ids: dict[int, str] = {}
        self.headers: list[dict[str, str]] = []
        self.statuses: dict[int, int] = {}
        self.stopping_criteria: list[Any] = []

    def get_request_id(self, index: int) -> str:
        return self.request_ids[index]

    def get_all_request_header(self, index: int) -> dict[str, str]:
        return self.headers[index]

    def set_response_status(self, code: int, phrase: str, index: int) -> None:
        self.statuses[index] = code

    def set_response_content_type(self, index: int, kind: str) -> None:
        pass

    def set_response_header(self, index: int, name: str, value: str) -> None:
        pass


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[OfframpHandler, Context]:
    folder = tmp_path_factory.mktemp("store")
    checkpoint = tiny_checkpoint(folder / "checkpoint", eos_token_id=None)
    context = Context(archive(checkpoint, folder / "tiny", name="tiny", version="1.0"))
    handler = OfframpHandler()
    handler.initialize(context)
    return handler, context


def ask(served: tuple[OfframpHandler, Context], headers: dict[str, str], **fields: Any) -> tuple[int, dict[str, Any]]:
    """One job to its end: the status, and the answer."""
    handler, context = served
    context.headers = [{"url_path": "v1/completions", **headers}]
    data: list[dict[str, Any]] = [{"body": json.dumps({"model": "tiny", "prompt": [5], **fields}).encode()}]
    answer, deadline = b"", time.monotonic() + 60
    while time.monotonic() < deadline:
        context.request_ids = {0: "a-job"}
        [piece] = handler.handle(data, context)
        if 0 in context.request_ids:  # it was given something, so it is shown without its payload from now on
            answer, data = answer + piece, [{}]
        [criterion] = context.stopping_criteria
        if 0 in context.request_ids and criterion(piece) is not False:
            return context.statuses[0], json.loads(answer)
    raise AssertionError("it never ended")


def test_an_answer_is_named_after_the_request_that_the_gateway_names(served: tuple[OfframpHandler, Context]) -> None:
    status, answer = ask(served, {"Offramp-Request-Id": REQUEST_ID}, max_tokens=4)
    assert (status, answer["id"], answer["usage"]["completion_tokens"]) == (200, f"cmpl-{REQUEST_ID}", 4)
    for odd in ("x", REQUEST_ID.upper(), f"{REQUEST_ID}0"):
        assert ask(served, {"offramp-request-id": odd}, max_tokens=1)[1]["id"] == "cmpl-a-job"


def test_a_refusal_has_its_status(served: tuple[OfframpHandler, Context]) -> None:
    status, answer = ask(served, {}, temperature=9)
    assert (status, answer["error"]["param"]) == (400, "temperature")
