"""What a gateway sees of TorchServe: predictions by name and version, and the management's view of a model.

Real answers come from a made-up engine behind the real protocol; what TorchServe says in its own words is scripted.
"""

from __future__ import annotations

import contextlib
import json
import threading
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from helpers.door import Opened, engine_backend, open_door
from helpers.openai_service import Engine
from helpers.sinks import eventually
from offramp.serve.gateway.settings import GatewaySettings
from offramp.serve.gateway.torchserve_backend import TorchServeBackend
from offramp.serve.http.backend import Asked
from offramp.serve.http.server import Server
from offramp.serve.http.settings import DoorSettings, make_settings
from offramp.serve.protocol.errors import ApiError
from offramp.serve.protocol.replies import Complete


@dataclass
class FakeTorchServe:
    """Serves the model `m` in the version 1.0.

    Attributes:
        engine: Answers.
        url: Of predictions and of the management.
        default: The version that the management calls the default.
        versions: Those that are registered; all have the same engine.
        asked: Method, path with query, and headers of everything that came.
        key_file: Where its keys lie, if it wants any.
        saying: What it says in its own words to the next requests for completions, one after the other.
    """

    engine: Engine = field(default_factory=Engine)
    url: str = ""
    default: str = "1.0"
    versions: set[str] = field(default_factory=lambda: {"1.0"})
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    key_file: Path | None = None
    saying: list[Response] = field(default_factory=list)
    _keys: dict[str, dict[str, str]] = field(default_factory=dict)
    _old: set[str] = field(default_factory=set)

    @contextlib.contextmanager
    def running(self) -> Iterator[FakeTorchServe]:
        backend = engine_backend(self.engine)

        @contextlib.asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            async with backend.running():
                yield

        async def predict(scope: Scope, receive: Receive, send: Send) -> None:
            request = Request(scope, receive)
            self.asked.append((request.method, str(request.url).removeprefix(self.url), dict(request.headers)))
            version, path = request.path_params["version"], request.path_params["path"]
            if not self._knows("inference", request):
                await _KEY_REFUSED(scope, receive, send)
            elif version not in self.versions:
                said = own_words(404, f"Model version: {version} does not exist for model: m")
                await said(scope, receive, send)
            elif path.endswith("completions") and self.saying:
                await self.saying.pop(0)(scope, receive, send)
            elif path == "health":
                await JSONResponse({"status": "ok"})(scope, receive, send)
            else:
                async with anyio.create_task_group() as tasks:
                    body = await request.body()
                    tasks.start_soon(_until_gone, receive, tasks.cancel_scope)
                    asked = Asked(path, body, request.headers.get("offramp-request-id", "none"))
                    try:
                        async with backend.open(asked) as answer:
                            make = Response if isinstance(answer.body, bytes) else StreamingResponse
                            headers = {**answer.headers, "x-request-id": "of-torchserve", "ts_stream_next": "true"}
                            said = make(answer.body, answer.status, headers, answer.content_type)  # pyright: ignore[reportArgumentType]
                            await said(scope, _never, send)
                    except ApiError as error:
                        whole = Complete.of_error(error)
                        said = Response(whole.body, whole.status, whole.headers, "application/json")
                        await said(scope, _never, send)
                    tasks.cancel_scope.cancel()

        class Predict:
            async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
                await predict(scope, receive, send)

        async def describe(request: Request) -> Response:
            self.asked.append((request.method, str(request.url).removeprefix(self.url), dict(request.headers)))
            if not self._knows("management", request):
                return _KEY_REFUSED
            return JSONResponse([{"modelName": "m", "modelVersion": self.default}])

        async def renew(request: Request) -> Response:
            if not self._knows("API", request):
                return _KEY_REFUSED
            self.write_keys(expired=False)
            return Response()

        app = Starlette(
            routes=[
                Route("/predictions/m/{version}/{path:path}", Predict(), methods=["GET", "POST"]),
                Route("/models/m", describe),
                Route("/token", renew),
            ],
            lifespan=lifespan,
        )
        ready = threading.Event()
        server = Server(app, DoorSettings(port=0, drain_timeout_s=1), on_ready=ready.set)
        self.url = server.url
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            eventually(ready.is_set, 30)
            yield self
        finally:
            server.should_exit = True
            thread.join(60)

    def write_keys(self, *, expired: bool) -> None:
        """Makes new keys, as TorchServe does when it starts and when it is asked to."""
        assert self.key_file is not None
        ends = "2001-01-01T00:00:00.123456789Z" if expired else "2999-01-01T00:00:00.123456789Z"
        kinds = ("management", "inference")
        keys: dict[str, dict[str, str]] = {kind: {"key": uuid.uuid4().hex, "expiration time": ends} for kind in kinds}
        # As TorchServe, it knows its keys without the file, which is half-written for a moment.
        self._keys = {**keys, "API": {"key": "renewing"}}
        self._old = {kind for kind in kinds if expired}
        self.key_file.write_text(json.dumps(self._keys))

    def _knows(self, kind: str, request: Request) -> bool:
        if self.key_file is None:
            return True
        return kind not in self._old and request.headers.get("authorization") == f"Bearer {self._keys[kind]['key']}"


async def _until_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def _never() -> Message:
    await anyio.sleep_forever()
    raise AssertionError


_KEY_REFUSED = Response(
    json.dumps({"code": 400, "type": "InvalidKeyException", "message": "Token Authorization failed."}), 400
)


def own_words(status: int, message: str) -> Response:
    """As TorchServe words what it says itself."""
    said = json.dumps({"code": status, "type": "SomeException", "message": message}, indent=2)
    return Response(said, status, media_type="application/json")


def open_gateway(
    models: dict[str, dict[str, str]], engine: Engine, *, poll_s: float = 0.05, **door: Any
) -> contextlib.AbstractContextManager[Opened]:
    """A gateway that looks often, behind a door without keys."""
    given = {"keys": "none", "models": models, "poll_s": poll_s}
    return open_door(TorchServeBackend(make_settings(GatewaySettings, given, where="test")), engine, **door)
