"""Reading a request's body, as long and as late as it may be."""

from __future__ import annotations

import anyio
from starlette.datastructures import Headers
from starlette.types import Receive

from offramp.serve.protocol.errors import ApiError, too_large


class ClientGoneError(Exception):
    """The client has left before it said all."""


async def read_body(headers: Headers, receive: Receive, *, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body.

    Raises:
        ApiError: 413 for a longer one, at once where its length is announced; 408 where it takes too long.
        ClientGoneError: There is nobody to tell.
    """
    announced = headers.get("content-length", "")
    # Longer numbers than this are none that anybody could send.
    if announced.isdecimal() and (len(announced) > 18 or int(announced) > max_bytes):
        raise too_large(max_bytes)
    body = bytearray()
    with anyio.move_on_after(timeout_s):
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            body += message.get("body", b"")
            if len(body) > max_bytes:
                raise too_large(max_bytes)
            if not message.get("more_body", False):
                return bytes(body)
    raise ApiError(408, f"The request body did not come within {timeout_s:g} s.", code="request_timeout")
