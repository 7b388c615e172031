"""The door: the one ASGI application that everybody meets, and everything that is asked of a request before it passes.

What is cheap is asked first, and nothing is read of a body before it is known whose it is.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from offramp.serve.http.backend import Asked, Backend
from offramp.serve.http.endpoints import DOCUMENT, ENDPOINTS, LIVE, METRICS, Endpoint, find_endpoint
from offramp.serve.http.exchange import CLIENT_GONE, Exchange
from offramp.serve.http.framing import check_framing, has_body
from offramp.serve.http.key_limits import KeyLimits
from offramp.serve.http.keys import ApiKey, KeysFile
from offramp.serve.http.prometheus import CONTENT_TYPE as METRICS_TYPE
from offramp.serve.http.request_body import ClientGoneError, read_body
from offramp.serve.http.response import Response
from offramp.serve.http.settings import DoorSettings
from offramp.serve.protocol.errors import ApiError, internal
from offramp.serve.protocol.faults import log_fault
from offramp.serve.protocol.openapi import openapi_document
from offramp.serve.protocol.replies import JSON, encode

log = logging.getLogger(__name__)


def application(backend: Backend, settings: DoorSettings) -> ASGIApp:
    """The whole application: a door with `backend` behind it.

    Raises:
        OfframpError: The file of keys cannot be read.
    """
    door = Door(backend, settings)

    @asynccontextmanager
    async def lifespan(app: object) -> AsyncIterator[None]:
        async with backend.running():
            yield

    # Starlette is not to look at paths: what is no path by its own idea would get an answer of its own.
    app = Router(default=door, lifespan=lifespan)
    if not settings.cors_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=settings.cors_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["authorization", "content-type"],
        expose_headers=["x-request-id"],
    )


class Door:
    """Lets requests in, or says why not.

    Args:
        backend: Answers those that pass.
        settings: What is asked of them.

    Raises:
        OfframpError: The file of keys cannot be read.
    """

    def __init__(self, backend: Backend, settings: DoorSettings) -> None:
        self._backend = backend
        self._settings = settings
        self._keys = None if settings.keys is None else KeysFile(settings.keys)
        self._limits = KeyLimits(settings.max_concurrent)
        self._endpoints = ENDPOINTS if backend.metrics() is None else (*ENDPOINTS, METRICS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        exchange = Exchange.of(scope)
        response = Response(exchange, receive, send)
        try:
            try:
                await self._pass(scope, receive, response, exchange)
            except ApiError as error:
                await response.fail(error)
            except ClientGoneError:
                exchange.status = CLIENT_GONE
            except Exception as error:
                log_fault(log, f"Request {exchange.request_id} failed", error)
                await response.fail(internal(type(error).__name__))
        finally:
            exchange.write()

    async def _pass(self, scope: Scope, receive: Receive, response: Response, exchange: Exchange) -> None:
        headers = Headers(scope=scope)
        response.ends_connection = has_body(headers)
        endpoint = find_endpoint(self._endpoints, scope["method"], scope["raw_path"].decode("latin-1"))
        exchange.endpoint = endpoint.label
        check_framing(headers, scope["http_version"], takes_body=endpoint.takes_body)
        if endpoint.public:
            await self._tell_health(endpoint, response)
            return
        key = self._who(headers)
        exchange.key = None if key is None else key.name
        if key is not None and key.use != endpoint.use:
            raise ApiError(403, f"This API key is not for {endpoint.label}; ask for another.", code="wrong_api_key")
        if endpoint is DOCUMENT:
            document = _document(self._backend.model_names(), self._keys is not None)
            await response.whole(200, document, JSON, {})
            return
        if endpoint is METRICS:
            await response.whole(200, self._backend.metrics() or b"", METRICS_TYPE, {})
            return
        with self._limits.admitted(key):
            body = b""
            if endpoint.takes_body:
                limits = self._settings
                body = await read_body(
                    headers, receive, max_bytes=limits.max_body_bytes, timeout_s=limits.body_timeout_s
                )
                response.ends_connection = False
            asked = Asked(scope["path"].strip("/"), body, exchange.request_id)
            fault = await self._answer(asked, receive, response, exchange)
            if fault is not None:
                raise fault

    async def _tell_health(self, endpoint: Endpoint, response: Response) -> None:
        reason = None if endpoint is LIVE else self._backend.unready()
        if reason is not None:
            raise ApiError(
                503, f"Not ready: {reason}.", type="server_error", code="not_ready", headers={"Retry-After": "1"}
            )
        await response.whole(200, encode({"status": "ok"}), JSON, {})

    def _who(self, headers: Headers) -> ApiKey | None:
        if self._keys is None:
            return None
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secret:
            raise _unauthorized("You gave no API key; send it in the header Authorization: Bearer KEY.")
        key = self._keys.find(secret.strip(" "))
        if key is None:
            raise _unauthorized("This API key is not known here; check it, or ask for another.")
        return key

    async def _answer(self, asked: Asked, receive: Receive, response: Response, exchange: Exchange) -> Exception | None:
        """Sends what the backend answers, and stops it when the client leaves or the time is over.

        Returns:
            Why the answer is not whole, for the client.

        Raises:
            ClientGoneError: The client has left.
        """
        fault: Exception | None = None
        gone = False

        async def until_gone() -> None:
            nonlocal gone
            while (await receive())["type"] != "http.disconnect":
                pass
            gone = True
            tasks.cancel_scope.cancel()

        with anyio.move_on_after(self._settings.answer_timeout_s) as limit:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(until_gone)
                try:
                    await self._relay(asked, response, exchange)
                except Exception as error:  # raised inside the group, it would come out as a group of errors
                    fault = error
                tasks.cancel_scope.cancel()
        if gone and fault is None and not response.over:
            raise ClientGoneError
        if limit.cancelled_caught:
            return ApiError(
                504,
                f"The answer took longer than {self._settings.answer_timeout_s:g} s; ask for less at once.",
                type="server_error",
                code="timeout",
            )
        return fault

    async def _relay(self, asked: Asked, response: Response, exchange: Exchange) -> None:
        async with self._backend.open(asked) as answer:
            exchange.model, exchange.upstream_id = answer.model, answer.upstream_id
            if isinstance(answer.body, bytes):
                await response.whole(answer.status, answer.body, answer.content_type, answer.headers)
                return
            await response.start(answer.status, answer.content_type, answer.headers, None)
            async for piece in answer.body:
                await response.write(piece, last=False)
            await response.write(b"", last=True)


@functools.cache
def _document(models: tuple[str, ...], keys: bool) -> bytes:
    return encode(openapi_document(models, keys=keys))


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
