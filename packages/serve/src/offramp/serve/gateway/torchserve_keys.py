"""The keys of a TorchServe that wants some: it writes them into a file, and lets each live for an hour.

Asking for a new key ends the old one, which others may be using. So one is asked for only when the old one is over.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import httpx2

log = logging.getLogger(__name__)

Kind = Literal["management", "inference"]

_TRIES = 20
_TRY_EVERY_S = 0.05
"""While TorchServe writes its file, there may be only half of it."""


class TorchServeKeys:
    """TorchServe's `key_file.json`.

    Args:
        path: The file.
        management: TorchServe's management address, where a new key is asked for.
        client: Asks.
        now: The time, for tests.
    """

    def __init__(
        self,
        path: Path,
        management: str,
        client: httpx2.AsyncClient,
        now: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
    ) -> None:
        self._path = path
        self._management = management
        self._client = client
        self._now = now
        self._entries: dict[str, dict[str, Any]] = {}
        self._refreshing = asyncio.Lock()

    def header(self, kind: Kind) -> dict[str, str]:
        """What a request to that API carries; nothing before the first `refresh`."""
        return self._header(kind)

    async def refresh(self, kind: Kind, refused: dict[str, str]) -> None:
        """Reads the file again, and asks for another key if its own is over.

        Args:
            kind: The API that has refused a request.
            refused: The header that it has refused.
        """
        async with self._refreshing:
            if self.header(kind) != refused:
                return  # somebody else has been here meanwhile
            await self._read()
            if self._is_over(kind):
                address = f"{self._management}/token"
                await self._client.get(address, params={"type": kind}, headers=self._header("API"))
                await self._read()

    def _header(self, name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self._entries[name]['key']}"} if name in self._entries else {}

    async def _read(self) -> None:
        for _ in range(_TRIES):
            try:
                found = json.loads(self._path.read_text(encoding="utf-8"))
                self._entries = {name: entry for name, entry in found.items() if isinstance(entry["key"], str)}
                return
            except (OSError, ValueError, LookupError, TypeError, AttributeError):
                await asyncio.sleep(_TRY_EVERY_S)
        log.error("The keys of TorchServe in %s cannot be read", self._path)

    def _is_over(self, kind: Kind) -> bool:
        ends = str(self._entries.get(kind, {}).get("expiration time", ""))
        try:
            # TorchServe writes nanoseconds, and `Z`; Python 3.10 reads neither.
            moment = datetime.fromisoformat(ends.partition(".")[0].removesuffix("Z")).replace(tzinfo=timezone.utc)
        except ValueError:
            return False
        return moment <= self._now()


def is_about_the_key(status: int, body: bytes) -> bool:
    """Whether TorchServe refuses a request for its key."""
    return status in (400, 401, 403) and b"InvalidKeyException" in body
