"""The hash by which files are told apart."""

from __future__ import annotations

import hashlib
from pathlib import Path


def sha256(file: Path) -> str:
    """Hex digest of a file."""
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        while chunk := handle.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
