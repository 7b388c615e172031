"""The keys of a TorchServe behind the gateway: kept until it refuses one, then read again and renewed if need be."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import aiohttp

from offramp.serve.torchserve.key_file import Keys, Kind

log = logging.getLogger(__name__)

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
        client: aiohttp.ClientSession,
        now: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
    ) -> None:
        self._path = path
        self._management = management
        self._client = client
        self._now = now
        self._keys = Keys({})
        self._refreshing = asyncio.Lock()

    def header(self, kind: Kind) -> dict[str, str]:
        """What a request to that API carries; nothing before the first `refresh`."""
        return self._keys.header(kind)

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
            if self._keys.is_over(kind, self._now()):
                address = f"{self._management}/token"
                async with self._client.get(address, params={"type": kind}, headers=self._keys.header("API")) as said:
                    await said.read()
                await self._read()

    async def _read(self) -> None:
        for _ in range(_TRIES):
            try:
                self._keys = Keys.read(self._path)
                return
            except (OSError, ValueError):
                await asyncio.sleep(_TRY_EVERY_S)
        log.error("The keys of TorchServe in %s cannot be read", self._path)
