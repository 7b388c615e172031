"""What TorchServe had registered when it ended, however it ended.

TorchServe forgets its models when it ends, but each time that one is registered, made the default or removed it writes
a snapshot: a file of properties, one of which holds JSON. Only that is read here. Its own way back from a snapshot
would take the rest of the file as its configuration, ports and all.
"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

_PROPERTY = "model_snapshot="
_ESCAPE = re.compile(r"\\(.)")


@dataclass(frozen=True)
class Registered:
    """A version that was registered.

    Attributes:
        name: The model's name.
        version: Its version.
        folder: In the model store.
        is_default: Whether it answered who asked for no version.
    """

    name: str
    version: str
    folder: str
    is_default: bool


class Snapshots:
    """The snapshots that TorchServe writes.

    Args:
        folder: Where it writes them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def newest(self) -> list[Registered]:
        """What was registered last, default versions first; nothing when there is no snapshot.

        Removes all that are older. One that is not whole, because TorchServe was killed while it wrote it, counts for
        nothing.
        """
        found: list[Registered] | None = None
        # Their names begin with the time.
        for path in sorted(self._folder.glob("*.cfg"), reverse=True):
            if found is None:
                with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
                    found = _read(path)
                    continue
            path.unlink(missing_ok=True)
        return sorted(found or [], key=lambda one: not one.is_default)


def _read(path: Path) -> list[Registered]:
    lines = path.read_text(encoding="latin-1").splitlines()  # as properties are written, by Java's definition
    [text] = [line.removeprefix(_PROPERTY) for line in lines if line.startswith(_PROPERTY)]
    said = json.loads(_ESCAPE.sub(lambda match: "\n" if match[1] == "n" else match[1], text))
    return [
        Registered(name, version, str(about["marName"]), bool(about["defaultVersion"]))
        for name, versions in said["models"].items()
        for version, about in versions.items()
    ]
