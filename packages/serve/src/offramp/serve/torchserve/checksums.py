"""SHA-256 of every file of a model folder, so that what is loaded can be compared with what was made.

They lie in the folder as `MAR-INF/SHA256SUMS`, in the format of `sha256sum`: `sha256sum -c MAR-INF/SHA256SUMS` checks
them as well. The hash of that one file stands for the whole folder.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from offramp.common.errors import OfframpError
from offramp.common.file_hash import sha256

SUMS = Path("MAR-INF") / "SHA256SUMS"

_LINE = re.compile(r"(?P<digest>[0-9a-f]{64})  (?P<name>[^\n]+)")
_BYTE_CODE = "__pycache__"  # Python's own, made when the worker imports the handler


def format_sums(files: Mapping[str, Path | bytes]) -> str:
    """The text of `SHA256SUMS`.

    Args:
        files: What each file holds, or where a file with that content lies, by path within the folder.
    """
    digests = {
        name: hashlib.sha256(content).hexdigest() if isinstance(content, bytes) else sha256(content)
        for name, content in files.items()
    }
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))


def folder_sha256(sums: str) -> str:
    """One hash for a whole folder: that of its `SHA256SUMS`."""
    return hashlib.sha256(sums.encode()).hexdigest()


def verify(folder: Path) -> str:
    """Reads every file of a model folder again.

    Returns:
        The folder's one hash.

    Raises:
        OfframpError: A file is missing, differs or is not listed, or there is no list; names the file.
    """
    try:
        text = (folder / SUMS).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as fault:
        raise OfframpError(
            f"{folder} has no list of hashes ({fault}); make it again with `offramp archive`."
        ) from fault
    lines = [_LINE.fullmatch(line) for line in text.splitlines()]
    listed = {line["name"]: line["digest"] for line in lines if line is not None}
    if not listed or len(listed) < len(lines):
        raise OfframpError(f"{folder / SUMS} is not a list of hashes; make the folder again with `offramp archive`.")
    # Listed names are only compared with what lies here, so none can lead out of the folder.
    present = {name: folder / name for name in _names(folder)}
    for name in sorted(listed.keys() | present.keys()):
        if name not in listed:
            fault = f"{name} is not one of its files"
        elif name not in present:
            fault = f"{name} is missing"
        elif sha256(present[name]) != listed[name]:
            fault = f"{name} has changed"
        else:
            continue
        raise OfframpError(f"{folder} is not what was archived: {fault}; make it again with `offramp archive`.")
    return folder_sha256(text)


def _names(folder: Path) -> set[str]:
    found = set[str]()
    for where, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != _BYTE_CODE]
        found.update((Path(where) / name).relative_to(folder).as_posix() for name in files)
    return found - {SUMS.as_posix()}
