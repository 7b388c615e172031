"""One hash for a checkpoint directory, so that what was registered and what is loaded can be compared."""

from __future__ import annotations

import hashlib
from pathlib import Path

from offramp.common.file_hash import sha256


def directory_sha256(directory: Path) -> str:
    """Hash over the names and contents of all files below a directory; hidden files do not count."""
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            digest.update(f"{name.as_posix()}\0{sha256(path)}\n".encode())
    return digest.hexdigest()
