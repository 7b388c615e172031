"""One connection: HTTP/1.1 for clients that are slow on purpose, say too much, or write what can be read in two ways.

uvicorn and h11 take heads as generously as the standard allows, and wait for ever. This is what is stricter here; what
a request says is the door's matter.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
from collections.abc import Callable

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from offramp.serve.http.exchange import Exchange
from offramp.serve.http.response import READ_ON_S
from offramp.serve.http.settings import DoorSettings
from offramp.serve.protocol.errors import PHRASES, ApiError, bad_request
from offramp.serve.protocol.replies import JSON, encode

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 32_768
_END_OF_HEAD = re.compile(rb"\n\r?\n")
# A line that ends without a carriage return, and one that goes on in the next.
_LOOSE_LINE = re.compile(rb"(?<!\r)\n|\n[ \t]")
_LENGTH = re.compile(rb"\ncontent-length[ \t]*:([^\r]*)", re.IGNORECASE)
_SAY_EVERY_S = 60.0


def connection_type(settings: DoorSettings, max_connections: int) -> type[H11Protocol]:
    """The class of a server's connections, as uvicorn wants it.

    Args:
        settings: Times.
        max_connections: Most of them at once; others are closed as they come.
    """
    said_at = -_SAY_EVERY_S

    class Connection(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            # asyncio does so for no socket that was made without naming the protocol. Without it the system holds a
            # small piece back until the one before is acknowledged, which a client's system may put off for 40 ms.
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.access_log = False  # uvicorn's own would have queries in it
            self._head = _Deadline(self.loop, settings.header_timeout_s, transport.abort)
            self._reader = _Deadline(self.loop, settings.write_timeout_s, transport.abort)
            self._refused = _Deadline(self.loop, READ_ON_S, transport.close)
            self._head.set()
            if len(self.connections) > max_connections:
                nonlocal said_at
                if time.monotonic() - said_at > _SAY_EVERY_S:
                    said_at = time.monotonic()
                    log.warning("There are %d connections, the most there may be; others are closed", max_connections)
                transport.abort()

        def data_received(self, data: bytes) -> None:
            if self._refused.is_set:
                return
            if self.conn.their_state is h11.MUST_CLOSE:
                return  # what follows a request that was to be the last, such as the line break that some clients add
            super().data_received(data)
            if self._refused.is_set:
                return
            # Between two requests uvicorn's own timer runs, until the first byte of the next.
            if self.conn.their_state is h11.IDLE:
                self._head.set()
            else:
                self._head.lift()
            if self._answering() and self.flow.read_paused:
                # The next request has come already. It waits, but whoever stops reading is not told who leaves.
                if len(self.conn.trailing_data[0]) > MAX_HEAD_BYTES:
                    self.transport.abort()
                else:
                    self.flow.resume_reading()

        def handle_events(self) -> None:
            fault = _head_fault(self.conn.trailing_data[0]) if self.conn.their_state is h11.IDLE else None
            if fault is None:
                super().handle_events()
            else:
                self._refuse(fault)

        def send_400_response(self, msg: str) -> None:
            """Of uvicorn: called for what is no request."""
            self._refuse(_malformed())

        def _refuse(self, error: ApiError) -> None:
            exchange = Exchange(None, self.client[0] if self.client else None, None)
            exchange.fault = error.code
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                body = encode(error.body())
                head = f"HTTP/1.1 {error.status} {PHRASES[error.status]}\r\ncontent-type: {JSON}\r\n"
                head += (
                    f"content-length: {len(body)}\r\nx-request-id: {exchange.request_id}\r\nconnection: close\r\n\r\n"
                )
                self.transport.write(head.encode("ascii") + body)
                self._leave_reading()
                exchange.status, exchange.sent_bytes = error.status, len(body)
            elif self.conn.our_state is h11.SEND_BODY:  # only a refusal is sent before the body has been read
                self._leave_reading()
            else:  # there is no place to say it
                self.transport.abort()
            exchange.write()

        def _leave_reading(self) -> None:
            """Ends the connection when the client does, or soon: what it is still sending is read and forgotten.

            A connection that is closed with something unread is reset, and the client might never see why.
            """
            if self.transport.can_write_eof():
                self.transport.write_eof()
            if self.cycle is not None and not self.cycle.response_complete:
                self.cycle.disconnected = True  # nothing is to be written any more
                self.cycle.message_event.set()
            self.flow.resume_reading()
            self._head.lift()
            self._refused.set()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.conn.trailing_data[0]:  # a part of the next head has come already
                self._head.set()

        def connection_lost(self, exc: Exception | None) -> None:
            self._head.lift()
            self._reader.lift()
            self._refused.lift()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._reader.set()

        def resume_writing(self) -> None:
            self._reader.lift()
            super().resume_writing()

        def _should_upgrade(self) -> bool:
            return False  # to no other protocol, and that needs no advice in the log

        def _answering(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body

    return Connection


def _head_fault(octets: bytes) -> ApiError | None:
    """Why the head that begins here is not one that every server reads in the same way; None while it may be one."""
    end = _END_OF_HEAD.search(octets)
    if (len(octets) if end is None else end.end()) > MAX_HEAD_BYTES:
        return ApiError(431, f"The request's head is longer than {MAX_HEAD_BYTES} bytes.", code="head_too_large")
    if end is None:
        return None
    head = octets[: end.end()]
    lengths = _LENGTH.findall(head)
    if _LOOSE_LINE.search(head) or len(lengths) > 1 or not all(length.strip().isdigit() for length in lengths):
        return _malformed()
    return None


def _malformed() -> ApiError:
    return bad_request("This is no HTTP/1.1 request that can be read in one way only.", code="malformed_request")


class _Deadline:
    """Does something unless it is lifted in time; once set it stays until then."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, then: Callable[[], None]) -> None:
        self._loop, self._seconds, self._then = loop, seconds, then
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_set(self) -> bool:
        return self._timer is not None

    def set(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._then)

    def lift(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
