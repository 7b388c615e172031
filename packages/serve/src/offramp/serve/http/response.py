"""What is sent back: with one place for the headers that every response has, and for what may still be said."""

from __future__ import annotations

from collections.abc import Mapping

import anyio
from starlette.types import Receive, Send

from offramp.serve.http.exchange import Exchange
from offramp.serve.protocol.errors import ApiError
from offramp.serve.protocol.replies import EVENT_STREAM, JSON, encode

READ_ON_S = 2.0
"""How long what is left of a refused request is read."""
_READ_ON_BYTES = 16_000_000


class Response:
    """A response under way.

    Args:
        exchange: Is told what was sent.
        receive: ASGI's.
        send: ASGI's.

    Attributes:
        ends_connection: Whether no other request can follow, because some of this one has not been read.
        over: Whether the last of it has been handed over.
    """

    def __init__(self, exchange: Exchange, receive: Receive, send: Send) -> None:
        self._exchange = exchange
        self._receive = receive
        self._send = send
        self._events = False
        self.ends_connection = False
        self.over = False

    async def start(self, status: int, content_type: str, headers: Mapping[str, str], length: int | None) -> None:
        """Sends the head.

        Args:
            status: HTTP status code.
            content_type: Of the body.
            headers: Further headers.
            length: Of the body in bytes; None while it is not known.
        """
        named = {
            "content-type": content_type,
            "x-request-id": self._exchange.request_id,
            "cache-control": "no-store",
            "x-content-type-options": "nosniff",
            **headers,
        }
        if length is None:
            named["x-accel-buffering"] = "no"  # a proxy in front is not to hold events back either
        else:
            named["content-length"] = str(length)
        if self.ends_connection:
            named["connection"] = "close"
        self._events = content_type == EVENT_STREAM
        self._exchange.status = status
        self._exchange.first_byte_s = self._exchange.elapsed_s
        encoded = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in named.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def write(self, body: bytes, *, last: bool) -> None:
        """Sends a part of the body; waits while the client does not read."""
        self._exchange.sent_bytes += len(body)
        self.over = last
        await self._send({"type": "http.response.body", "body": body, "more_body": not last})

    async def whole(self, status: int, body: bytes, content_type: str, headers: Mapping[str, str]) -> None:
        """Sends all of it."""
        await self.start(status, content_type, headers, len(body))
        if self.ends_connection and status != 408:
            await self.write(body, last=False)
            await self._read_on()
            body = b""
        await self.write(body, last=True)

    async def _read_on(self) -> None:
        """Reads what is left of a request that has been refused, and forgets it, for a while.

        A connection that is closed with something unread is reset, and a client that is still sending would never see
        why it was refused (RFC 9112, section 9.6).
        """
        read = 0
        with anyio.move_on_after(READ_ON_S):
            while read < _READ_ON_BYTES:
                message = await self._receive()
                read += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return

    async def fail(self, error: ApiError) -> None:
        """Says what went wrong: with a status while none is out, then as the last event of a stream."""
        if self.over:
            return
        self._exchange.fault = error.code or error.type
        if self._exchange.status is None:
            await self.whole(error.status, encode(error.body()), JSON, error.headers)
        elif self._events:
            await self.write(b"data: %b\n\ndata: [DONE]\n\n" % encode(error.body()), last=True)
