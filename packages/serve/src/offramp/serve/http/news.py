"""News from a thread to coroutines."""

from __future__ import annotations

import asyncio


class News:
    """Wakes all coroutines that wait whenever a thread says that there is something new.

    A coroutine takes `next` before it looks for what is new, and waits for it if it found nothing: it misses nothing.

    Args:
        loop: Where the coroutines run.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._next = asyncio.Event()
        self._announced = False

    @property
    def next(self) -> asyncio.Event:
        """Set by the next announcement."""
        return self._next

    def announce(self) -> None:
        """There is something new. Any thread may call; announcements that come together are one."""
        if not self._announced:
            self._announced = True
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._announced = False  # first: what is announced from here on wakes those that wait from here on
        self._next, came = asyncio.Event(), self._next
        came.set()
