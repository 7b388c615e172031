"""Answers from TorchServe, which nothing reaches but what is written here.

Addresses are made of the settings, of versions that have been checked and of a few constants; headers are made anew in
both directions. So whatever a client writes into a path, a query or a header ends here.

A whole answer is passed on when all of it is there: TorchServe sends its status before the engine has begun, so a fault
that comes later is only found in the body, and gets the status that it should have had. Events are passed on as they
come. There is one for every token, so the client that reads them is the one that takes the least for each piece.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from yarl import URL

from offramp.serve.gateway.deployments import FAULTS, Deployment, Deployments, Target, not_ready
from offramp.serve.gateway.settings import GatewaySettings
from offramp.serve.http.backend import Answer, Asked
from offramp.serve.protocol.errors import ApiError, busy, status_of, unknown_model
from offramp.serve.protocol.replies import EVENT_STREAM, JSON, encode
from offramp.serve.protocol.requests import model_of
from offramp.serve.protocol.service import decode_body
from offramp.serve.torchserve.jobs import REQUEST_ID_HEADER
from offramp.serve.torchserve.key_file import is_about_the_key

log = logging.getLogger(__name__)

_MAX_ANSWER_BYTES = 64_000_000
# Well before a server or a proxy between ends a quiet connection: a request that is sent just then is lost.
_IDLE_CONNECTION_S = 4.0
_GONE = "server_gone"
_PASSED_ON = ("offramp-version", "offramp-run-id", "offramp-config-hash", "retry-after")


class TorchServeBackend:
    """The models of one or several TorchServes.

    Args:
        settings: Which models, and where.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """See `Backend`; does not wait for the models."""
        settings = self._settings
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=settings.connect_timeout_s, sock_read=settings.silence_timeout_s
        )
        async with aiohttp.ClientSession(
            timeout=timeout,
            # Each request that is let in has a connection, and there are some to look after the models.
            connector=aiohttp.TCPConnector(
                limit=settings.max_concurrent + 2 * len(settings.models), keepalive_timeout=_IDLE_CONNECTION_S
            ),
            headers={"user-agent": "offramp-gateway", "accept-encoding": "identity"},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        ) as client:
            self._client = client
            self._deployments = Deployments(settings, client)
            watching = asyncio.create_task(self._deployments.watch())
            try:
                yield
            finally:
                watching.cancel()

    @asynccontextmanager
    async def open(self, asked: Asked) -> AsyncIterator[Answer]:
        """See `Backend`."""
        if asked.path == "v1/models":
            cards = [found.card for found in self._deployments.by_name.values() if found.card is not None]
            yield Answer(200, encode({"object": "list", "data": cards}))
        elif asked.path.startswith("v1/models/"):
            name = asked.path.removeprefix("v1/models/")
            deployment, version = self._deployments.find(name)
            if version is not None:
                raise unknown_model(name, ", ".join(self._deployments.by_name))
            if deployment.card is None:
                raise not_ready(name)
            yield Answer(200, encode(deployment.card))
        else:
            deployment, version = self._deployments.find(model_of(decode_body(asked.body)))
            target = deployment.target(version)
            try:
                async with self._ask(target, deployment, asked) as answer:
                    yield answer
            except _StaleError as stale:
                # Since TorchServe was asked for them last, its default may have been switched and the old version taken
                # away, or its key may have been renewed.
                await self._refresh(deployment, stale)
                again = deployment.target(version)
                if stale.key is None and again == target:
                    raise unknown_model(target.name, ", ".join(self._deployments.by_name)) from None
                try:
                    async with self._ask(again, deployment, asked) as answer:
                        yield answer
                except _StaleError:
                    raise not_ready(target.model) from None

    def metrics(self) -> None:
        """See `Backend`: TorchServe has an address for them."""
        return

    def model_names(self) -> tuple[str, ...]:
        """See `Backend`."""
        return tuple(self._settings.models)

    def unready(self) -> str | None:
        """See `Backend`."""
        for name, deployment in self._deployments.by_name.items():
            if deployment.unready is not None:
                return f"model {name}: {deployment.unready}"
        return None

    async def _refresh(self, deployment: Deployment, stale: _StaleError) -> None:
        try:
            if stale.key is not None and deployment.keys is not None:
                await deployment.keys.refresh("inference", stale.key)
            await deployment.find_version()
        except (*FAULTS, ValueError, LookupError, TypeError) as error:
            raise _gone(error) from error

    @asynccontextmanager
    async def _ask(self, target: Target, deployment: Deployment, asked: Asked) -> AsyncIterator[Answer]:
        key = deployment.header("inference")
        headers = {"content-type": JSON, REQUEST_ID_HEADER: asked.request_id, **key}
        address = URL(target.address(asked.path), encoded=True)
        try:
            response = await self._client.post(address, data=asked.body, headers=headers, allow_redirects=False)
        except FAULTS as error:
            raise _gone(error) from error
        try:
            kind = response.headers.get("content-type", "").partition(";")[0].strip()
            named = {name: response.headers[name] for name in _PASSED_ON if name in response.headers}
            upstream_id = response.headers.get("x-request-id")
            if response.status == 200 and kind == EVENT_STREAM:
                yield Answer(200, _events(response), EVENT_STREAM, named, target.name, upstream_id)
                return
            body = await _whole(response)
            error = _error(body)
            status = response.status
            if error is None and status != 200:
                raise _own_words(status, body, deployment, key)
            if error is not None and status == 200:
                status = status_of(error)
            yield Answer(status, body, JSON, named, target.name, upstream_id)
        except ApiError as error:  # also of a stream, in the middle
            if error.code == _GONE:
                deployment.cut_off()
            raise
        finally:
            # Gives back a connection whose answer has been read to its end, and ends any other.
            response.close()


class _StaleError(Exception):
    """TorchServe has no such version, or does not take this key; either may have changed since it was learnt.

    Attributes:
        key: The header with the key, if it is that.
    """

    def __init__(self, key: dict[str, str] | None) -> None:
        super().__init__()
        self.key = key


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    try:
        async for piece in response.content.iter_any():
            yield piece
    except FAULTS as error:
        raise _gone(error) from error


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    try:
        async for piece in response.content.iter_any():
            body += piece
            if len(body) > _MAX_ANSWER_BYTES:
                raise ApiError(500, "The answer is too long.", type="server_error", code="answer_too_long")
    except FAULTS as error:
        raise _gone(error) from error
    return bytes(body)


def _gone(error: Exception) -> ApiError:
    """What a client is told when TorchServe does not answer, or stops in the middle; the log has the cause."""
    log.warning("TorchServe failed a request: %s %s", type(error).__name__, error)
    if isinstance(error, asyncio.TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError):
        return ApiError(504, "The model's server says nothing; try again later.", type="server_error", code="timeout")
    return ApiError(
        503,
        "The model's server has ended the connection, or takes none; send the request again.",
        type="server_error",
        code=_GONE,
        headers={"Retry-After": "2"},
    )


def _error(body: bytes) -> dict[str, Any] | None:
    """The error that a body is, if it is one of the API's."""
    if not body.startswith(b'{"error"'):
        return None
    try:
        error = json.loads(body)["error"]
    except (ValueError, LookupError, RecursionError):
        return None
    return error if isinstance(error, dict) else None


def _own_words(status: int, body: bytes, deployment: Deployment, key: dict[str, str]) -> Exception:
    """What TorchServe says by itself, in no words of the API."""
    if status == 404 and b"ersion" in body:
        return _StaleError(None)
    if is_about_the_key(status, body):
        return _StaleError(key)
    if status == 413:
        return ApiError(
            413, "The request body is longer than the model's server takes; send less.", code="request_too_large"
        )
    if status == 503 and deployment.unready is None:  # its queue is full: the same words as for a dead worker
        return busy("The model's server has as many requests waiting as it takes; try again later.")
    return _gone(RuntimeError(f"it answers with {status} of its own"))
