"""Running the application: uvicorn with TLS, times for what the application never sees, and an orderly end."""

from __future__ import annotations

import logging
import resource
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from offramp.common.errors import OfframpError
from offramp.serve.http.connection import MAX_HEAD_BYTES, connection_type
from offramp.serve.http.exchange import log as access_log
from offramp.serve.http.settings import DoorSettings

_OTHER_FILES = 256


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
                http=connection_type(settings, _connections(settings)),
                ws="none",
                loop="asyncio",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
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
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("offramp.serve").setLevel(logging.INFO)
    try:
        handler = logging.StreamHandler() if settings.access_log is None else logging.FileHandler(settings.access_log)
    except OSError as error:
        raise OfframpError(f"{settings.access_log} cannot be written ({error.strerror}); choose another.") from error
    handler.setFormatter(logging.Formatter("%(message)s"))
    access_log.handlers = [handler]
    access_log.setLevel(logging.INFO)
    access_log.propagate = False


def _connections(settings: DoorSettings) -> int:
    """How many connections there may be; raises what the system lets this process open, if that is less."""
    # A request may have another connection behind the gateway, and the process needs some files beside.
    others = settings.max_concurrent + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = settings.max_connections + others
    if soft < wanted:
        soft = min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(settings.max_connections, soft - others))


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
