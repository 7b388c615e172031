"""The key file of a TorchServe, read anew for every request, because whoever renews a key changes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

from offramp.common.errors import OfframpError
from offramp.serve.torchserve.key_file import KeyName, Keys, Kind

_WRITING_S = 2.0
"""Longest time for which the file may be half-written."""


class KeyFile:
    """TorchServe's `key_file.json`.

    Args:
        path: The file, in the directory in which TorchServe was started.
        now: The time, for tests.
    """

    def __init__(self, path: Path, now: Callable[[], datetime] = lambda: datetime.now(timezone.utc)) -> None:
        self.path = path
        self._now = now

    def header(self, kind: Kind) -> dict[str, str]:
        """What a request to that API carries.

        Raises:
            OfframpError: The file cannot be read or holds no such key.
        """
        return self._keys(kind).header(kind)

    def renewal_header(self) -> dict[str, str]:
        """What a request for a new key carries."""
        return self._keys("API").header("API")

    def is_expired(self, kind: Kind) -> bool:
        """Whether the key is too old, as the file says."""
        return self._keys(kind).is_over(kind, self._now())

    def _keys(self, name: KeyName) -> Keys:
        deadline = time.monotonic() + _WRITING_S
        while True:
            try:
                keys = Keys.read(self.path)
            except OSError as fault:
                # Its text is the system's; that of other faults could quote what the file holds.
                raise OfframpError(f"the key file {self.path} cannot be read: {fault.strerror}.") from None
            except ValueError:
                keys = Keys({})
            if name in keys.entries:
                return keys
            if time.monotonic() > deadline:
                raise OfframpError(
                    f"the key file {self.path} holds no {name} key; give TorchServe's own key_file.json."
                )
            time.sleep(0.05)
