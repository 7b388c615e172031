"""TorchServe's keys: it writes them into `key_file.json` when it starts, and lets each live for an hour.

Asking for a new key ends the old one, which others may be using, so one is asked for only when the old one is over. The
file can be half-written for a moment: whoever reads it tries again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

Kind = Literal["management", "inference"]
KeyName = Literal["management", "inference", "API"]
"""`API` is what a new key is asked for with."""

_REFUSALS = (400, 401, 403)


@dataclass(frozen=True)
class Keys:
    """What the file holds. A key is never part of a message.

    Attributes:
        entries: name -> key and when it is over.
    """

    entries: Mapping[str, Mapping[str, Any]]

    @classmethod
    def read(cls, path: Path) -> Keys:
        """Reads the file.

        Raises:
            OSError: It cannot be read.
            ValueError: It holds no keys, at this moment or at all.
        """
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("no keys")
        is_key = {name: isinstance(entry, dict) and isinstance(entry.get("key"), str) for name, entry in found.items()}
        if not all(is_key.values()):
            raise ValueError("no keys")
        return cls(found)

    def header(self, name: KeyName) -> dict[str, str]:
        """What a request with this key carries; nothing without one."""
        return {"authorization": f"Bearer {self.entries[name]['key']}"} if name in self.entries else {}

    def is_over(self, name: KeyName, now: datetime) -> bool:
        """Whether a key is too old, as the file says; then nobody else can be using it."""
        ends = str(self.entries.get(name, {}).get("expiration time", ""))
        try:
            # TorchServe writes nanoseconds, and `Z`; Python 3.10 reads neither.
            moment = datetime.fromisoformat(ends.partition(".")[0].removesuffix("Z")).replace(tzinfo=timezone.utc)
        except ValueError:
            return False
        return moment <= now


def is_about_the_key(status: int, body: bytes) -> bool:
    """Whether an answer of TorchServe refuses a request for its key."""
    return status in _REFUSALS and b"InvalidKeyException" in body
