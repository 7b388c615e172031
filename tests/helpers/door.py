"""A door on a real socket in a thread, made-up engines behind it, and ways to knock that no client has."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from helpers.openai_service import Engine, card
from helpers.sinks import eventually
from offramp.serve.engine_thread import EngineThread
from offramp.serve.http.backend import Answer, Asked, Backend
from offramp.serve.http.door import application
from offramp.serve.http.engine_backend import EngineBackend, OnIteration
from offramp.serve.http.server import Server
from offramp.serve.http.settings import DoorSettings, make_settings
from offramp.serve.measures.records import EngineMetrics
from offramp.serve.protocol.service import OpenAIService

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_REQUESTS = 4


class ByteTokenizer:
    """Bytes are tokens: what the service needs of a tokenizer, without the seconds that a real one takes to import."""

    chat_template = "messages"

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, ids: list[int], **options: Any) -> str:
        return bytes(token % 256 for token in ids).decode(errors="replace")

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        return "".join(message["content"] for message in messages)


def engine_backend(engine: Engine) -> EngineBackend:
    def start(on_iteration: OnIteration) -> tuple[EngineThread, OpenAIService]:
        thread = EngineThread(engine, max_requests=MAX_REQUESTS, on_iteration=on_iteration)
        tokenizer = cast("PreTrainedTokenizerBase", ByteTokenizer())
        return thread, OpenAIService(thread, tokenizer, card(max_model_len=100_000, cache_tokens=100_000))

    return EngineBackend(start, EngineMetrics())


@dataclass
class Opened:
    """An open door.

    Attributes:
        server: Behind it.
        engine: Behind the server.
    """

    server: Server
    engine: Engine
    thread: threading.Thread

    @property
    def port(self) -> int:
        return int(self.server.url.rpartition(":")[2])

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of one request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            given = {} if body is None else {"content-type": "application/json"}
            connection.request(method, path, body, {**given, **(headers or {})})
            response = connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        finally:
            connection.close()

    def complete(self, headers: dict[str, str] | None = None, **fields: Any) -> tuple[int, dict[str, str], Any]:
        """A completion; the body decoded, unless it is a stream."""
        body = json.dumps({"model": "m", "prompt": [4], **fields}).encode()
        status, told, said = self.ask("POST", "/v1/completions", body, headers)
        return status, told, said if fields.get("stream") and status == 200 else json.loads(said)

    def knock(self, octets: bytes) -> tuple[int, bytes]:
        """Sends octets as they are; status and body of what comes back, 0 if nothing does."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as connection:
            response = http.client.HTTPResponse(connection)
            try:
                connection.sendall(octets)
                response.begin()
                return response.status, response.read()
            except (http.client.BadStatusLine, ConnectionError):
                return 0, b""

    def connect(self, octets: bytes) -> socket.socket:
        """A connection on which something has been sent."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        connection.sendall(octets)
        return connection

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()


def post(path: str = "/v1/completions", headers: str = "", **fields: Any) -> bytes:
    """A whole POST as it goes over the wire; `headers` are lines."""
    body = json.dumps({"model": "m", "prompt": [4], **fields}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return (head + headers + "\r\n").encode() + body


@contextlib.contextmanager
def open_door(backend: Backend, engine: Engine, **settings: Any) -> Iterator[Opened]:
    ready = threading.Event()
    chosen = make_settings(DoorSettings, {"port": 0, **settings}, where="test")
    server = Server(application(backend, chosen), chosen, on_ready=ready.set)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    eventually(lambda: ready.is_set() or not thread.is_alive(), 30)
    assert ready.is_set()
    opened = Opened(server, engine, thread)
    try:
        yield opened
    finally:
        opened.stop()


@dataclass
class ScriptedBackend:
    """Answers with what it was given, for ever if `endless`.

    Attributes:
        left: How many answers were left, by whatever way.
    """

    pieces: list[bytes] = field(default_factory=list)
    endless: bool = False
    error: Exception | None = None
    left: int = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield

    @contextlib.asynccontextmanager
    async def open(self, asked: Asked) -> AsyncIterator[Answer]:
        try:
            yield Answer(200, self._body(), "text/event-stream")
        finally:
            self.left += 1

    def metrics(self) -> None:
        return None

    def model_names(self) -> tuple[str, ...]:
        return ("m",)

    def unready(self) -> str | None:
        return None

    async def _body(self) -> AsyncIterator[bytes]:
        import asyncio

        for piece in self.pieces:
            yield piece
        while self.endless:
            yield self.pieces[-1]
            await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
