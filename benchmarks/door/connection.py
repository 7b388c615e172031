"""A connection as a client sees it on the wire: little work for each octet, and every way to leave."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

_NOTHING = struct.pack("ii", 1, 0)  # SO_LINGER: on, for 0 s


@dataclass(frozen=True)
class Head:
    """The head of a response.

    Attributes:
        status: HTTP status code.
        headers: By their names in lower case.
    """

    status: int
    headers: dict[str, str]


def request(
    method: str, path: str, body: bytes | dict[str, Any] | None = None, headers: dict[str, str] | None = None
) -> bytes:
    """A whole request; a body that is no bytes is sent as JSON."""
    named = {"host": "localhost", **({} if body is None else {"content-type": "application/json"}), **(headers or {})}
    if isinstance(body, dict):
        body = json.dumps(body).encode()
    if body is not None:
        named.setdefault("content-length", str(len(body)))
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in named.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + (body or b"")


class Connection:
    """One HTTP/1.1 connection, for one request after the other.

    Args:
        reader: What comes.
        writer: What goes.

    Attributes:
        open: Whether another request may follow.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.open = True
        self._used = time.monotonic()

    @property
    def quiet_s(self) -> float:
        """Seconds since the last response, or the beginning."""
        return time.monotonic() - self._used

    @classmethod
    async def to(cls, port: int) -> Connection:
        """A new one to a port of this machine."""
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def send(self, octets: bytes) -> None:
        """Sends octets as they are."""
        self._writer.write(octets)
        await self._writer.drain()

    async def head(self) -> Head:
        """The head of the next response.

        Raises:
            EOFError: There is none.
        """
        status, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self.open = headers.get("connection", "") != "close"
        return Head(int(status.split(" ", 2)[1]), headers)

    async def pieces(self, head: Head) -> AsyncIterator[bytes]:
        """The body, piece by piece as it was sent.

        Raises:
            EOFError: It ends too early.
        """
        if "content-length" in head.headers:
            yield await self._reader.readexactly(int(head.headers["content-length"]))
        else:
            while size := int(await self._reader.readuntil(b"\r\n"), 16):
                yield (await self._reader.readexactly(size + 2))[:-2]
            await self._reader.readexactly(2)
        self._used = time.monotonic()

    async def body(self, head: Head) -> bytes:
        """All of it."""
        return b"".join([piece async for piece in self.pieces(head)])

    async def some(self) -> bytes:
        """Whatever has come, undecoded; nothing at the end."""
        return await self._reader.read(1 << 16)

    async def close(self) -> None:
        """Leaves in order."""
        self.open = False
        self._writer.close()

    def reset(self) -> None:
        """Leaves without a word: the other side gets a reset."""
        self.open = False
        self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NOTHING)
        self._writer.transport.abort()
