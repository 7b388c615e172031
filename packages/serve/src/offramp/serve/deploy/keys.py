"""TorchServe's keys: it writes them into a file when it starts, and lets each live for an hour.

The file is read anew for every request, because whoever renews a key changes it. A key is never part of a message.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from offramp.common.errors import OfframpError

Kind = Literal["management", "inference"]

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
        return _bearer(self._entry(kind))

    def renewal_header(self) -> dict[str, str]:
        """What a request for a new key carries."""
        return _bearer(self._entry("API"))

    def is_expired(self, kind: Kind) -> bool:
        """Whether the key is too old, as the file says; then nobody else can be using it."""
        ends = str(self._entry(kind).get("expiration time", ""))
        try:
            # TorchServe writes nanoseconds, and `Z`; Python 3.10 reads neither.
            moment = datetime.fromisoformat(ends.partition(".")[0].removesuffix("Z")).replace(tzinfo=timezone.utc)
        except ValueError:
            return False
        return moment <= self._now()

    def _entry(self, kind: str) -> dict[str, Any]:
        deadline = time.monotonic() + _WRITING_S
        while True:
            try:
                entry = json.loads(self.path.read_text(encoding="utf-8"))[kind]
                if isinstance(entry, dict) and isinstance(entry.get("key"), str):
                    return entry
                raise ValueError(f"it has no {kind} key")
            except OSError as fault:
                # Its text is the system's; that of other faults could quote what the file holds.
                raise OfframpError(f"the key file {self.path} cannot be read: {fault.strerror}.") from None
            except (ValueError, LookupError, TypeError):
                if time.monotonic() > deadline:
                    raise OfframpError(
                        f"the key file {self.path} holds no {kind} key; give TorchServe's own key_file.json."
                    ) from None
                time.sleep(0.05)


def _bearer(entry: dict[str, Any]) -> dict[str, str]:
    return {"authorization": f"Bearer {entry['key']}"}
