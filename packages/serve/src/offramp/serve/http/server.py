"""Running the application: uvicorn with TLS, times for what the application never sees, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from offramp.common.errors import OfframpError
from offramp.serve.http.exchange import log as access_log
from offramp.serve.http.settings import DoorSettings

_MAX_HEAD_BYTES = 32_768


class Server(uvicorn.Server):
    """An HTTP server for one application, on a socket of its own from the beginning.

    On SIGTERM or SIGINT it takes no more connections, answers what is under way, and returns; on a second signal at
    once.

    Args:
        app: The application.
        settings: Where to listen, and how long to wait for what.
        on_ready: Called when it answers.
        check: Called every tenth of a second; an exception from it ends the server and is raised by `serve_forever`.

    Raises:
        OfframpError: The address cannot be listened at, or the certificate is none.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: DoorSettings,
        *,
        on_ready: Callable[[], None] = lambda: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        tls: dict[str, Any] = {}
        if settings.tls is not None:
            certificate, key = settings.tls.certificate, settings.tls.key
            _check_certificate(certificate, key)
            tls = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
        super().__init__(
            uvicorn.Config(
                app,
                http=_protocol(settings),
                ws="none",
                loop="asyncio",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
                timeout_keep_alive=max(1, round(settings.keep_alive_s)),
                timeout_graceful_shutdown=max(1, round(settings.drain_timeout_s)),
                **tls,
            )
        )
        self._socket = _listen(settings.host, settings.port)
        self._on_ready = on_ready
        self._check = check
        self._fault: Exception | None = None
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.url = f"{'https' if tls else 'http'}://{host}:{self._socket.getsockname()[1]}"

    def serve_forever(self) -> None:
        """Serves until a signal comes, or the check fails.

        Raises:
            OfframpError: The application could not be started.
        """
        try:
            self.run(sockets=[self._socket])
        except SystemExit as error:
            raise OfframpError("the server could not be started; its log says why.") from error
        finally:
            self._socket.close()
        if self._fault is not None:
            raise self._fault

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Of uvicorn: called once, returns when it answers."""
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        """Of uvicorn: called every tenth of a second; whether to stop."""
        try:
            self._check()
        except Exception as fault:
            self._fault = fault
            self.should_exit = True
        return await super().on_tick(counter)


def log_to(settings: DoorSettings) -> None:
    """Sets up the log: what goes wrong to standard error, and a line for each request to where the settings say.

    Raises:
        OfframpError: The file cannot be written.
    """
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    try:
        handler = logging.StreamHandler() if settings.access_log is None else logging.FileHandler(settings.access_log)
    except OSError as error:
        raise OfframpError(f"{settings.access_log} cannot be written ({error.strerror}); choose another.") from error
    handler.setFormatter(logging.Formatter("%(message)s"))
    access_log.handlers = [handler]
    access_log.setLevel(logging.INFO)
    access_log.propagate = False


def _protocol(settings: DoorSettings) -> type[H11Protocol]:
    """HTTP/1.1 for clients that are slow on purpose: uvicorn would wait for ever for a head, and for a reader."""

    class ImpatientProtocol(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._head = _Deadline(self.loop, settings.header_timeout_s, transport.abort)
            self._reader = _Deadline(self.loop, settings.write_timeout_s, transport.abort)
            self._head.set()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            # Between two requests uvicorn's own timer runs, until the first byte of the next.
            if self.conn.their_state is h11.IDLE:
                self._head.set()
            else:
                self._head.lift()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.conn.trailing_data[0]:  # a part of the next head has come already
                self._head.set()

        def connection_lost(self, exc: Exception | None) -> None:
            self._head.lift()
            self._reader.lift()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._reader.set()

        def resume_writing(self) -> None:
            self._reader.lift()
            super().resume_writing()

    return ImpatientProtocol


class _Deadline:
    """Does something unless it is lifted in time; once set it stays until then."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, then: Callable[[], None]) -> None:
        self._loop, self._seconds, self._then = loop, seconds, then
        self._timer: asyncio.TimerHandle | None = None

    def set(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._then)

    def lift(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise OfframpError(f"port {port} of {host} cannot be used ({error.strerror}); choose another.") from error


def _check_certificate(certificate: Path, key: Path) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (OSError, ssl.SSLError) as error:
        raise OfframpError(f"tls: {certificate} and {key} cannot be used ({error}); give PEM files.") from error
