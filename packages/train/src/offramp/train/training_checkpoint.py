"""Whether a training checkpoint is whole, and how one takes its place on the disk.

A checkpoint is a Lightning file (one process, DDP), whose parts carry checksums, or a directory of
`deepspeed_pipeline`, whose record lists the size and the hash of every other file in it. Both are written beside their
place, under a hidden name, and moved there when all of it is on the disk.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from offramp.common.errors import OfframpError
from offramp.common.file_hash import sha256
from offramp.common.hf import read_json

RECORD_FILE = "offramp.json"
"""The record in a directory of `deepspeed_pipeline`, written last."""
CHECKPOINTS = "checkpoints"
"""In the directory of a run, the folder with its training checkpoints."""
FILES = "files"
"""In the record: path in the directory -> `describe` of every other file."""
_PART = ".part"
"""Ending of what is being written, or removed."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux


def damage(path: Path, *, read: bool = True) -> str | None:
    """What is wrong with a training checkpoint, or None if it is as it was written.

    Args:
        path: file or directory.
        read: read the files of a directory; otherwise only their sizes are compared.
    """
    if path.is_dir():
        if not (path / RECORD_FILE).is_file():
            return f"it has no {RECORD_FILE}"
        try:
            record = read_json(path / RECORD_FILE)
        except OfframpError as fault:
            return str(fault).rstrip(".")
        if not isinstance(files := record.get(FILES), dict):
            return f"its {RECORD_FILE} does not list its files"
        return damaged_file(path, files, read=read)
    try:
        with zipfile.ZipFile(path) as archive:
            member = archive.testzip()
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as fault:  # as flipped bits would have it
        return str(fault)
    return None if member is None else f"its part {member} is not what was written"


def newest_whole(directory: Path, *, tell: Callable[[str], None], read: bool = True) -> Path | None:
    """The newest checkpoint in a directory that is whole; None if there are no checkpoints at all.

    Args:
        directory: where a run writes its checkpoints; it need not exist.
        tell: is given a sentence about each one that is left out.
        read: see `damage`.

    Raises:
        OfframpError: there are some, and none is whole. That is no reason to go on without a word.
    """
    found = sorted(directory.glob("*.ckpt"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in found:
        reason = damage(path, read=read)
        if reason is None:
            return path
        tell(f"{path} is left out, because {reason}; the one before it is taken")
    if found:
        raise OfframpError(
            f"none of the {len(found)} checkpoints in {directory} is whole; move them away to start from the beginning."
        )
    return None


def describe(file: Path) -> dict[str, Any]:
    """Size and hash of a file."""
    return {"bytes": file.stat().st_size, "sha256": sha256(file)}


def damaged_file(directory: Path, files: Mapping[str, Mapping[str, Any]], *, read: bool = True) -> str | None:
    """The first of some files, described as by `describe`, that is gone or is not what it was, in words."""
    for name, expected in files.items():
        if not (directory / name).is_file():
            return f"{name} is missing"
        if (size := (directory / name).stat().st_size) != expected["bytes"]:
            return f"{name} has {size} bytes in place of {expected['bytes']}"
        if read and sha256(directory / name) != expected["sha256"]:
            return f"{name} is not what was written"
    return None


def scratch_of(path: Path) -> Path:
    """Where a checkpoint is written before it takes its place."""
    return path.with_name(f".{path.name}{_PART}")


def remove_leftovers(directory: Path) -> None:
    """Remove what processes that were killed left of checkpoints they were writing or removing."""
    for left in directory.glob(f".*{_PART}"):
        _remove(left)


def put_in_place(scratch: Path, path: Path) -> None:
    """Let a file or directory, whole and on the disk, take its name, and the place of an older one.

    At no time is neither of the two there.
    """
    if not path.exists():
        scratch.rename(path)
    elif not path.is_dir() and not scratch.is_dir():
        scratch.replace(path)
    elif _exchange(scratch, path):
        _remove(scratch)
    else:  # not on this system or file system; the older one is out of sight for a moment
        old = scratch_of(scratch)
        path.rename(old)
        scratch.rename(path)
        _remove(old)
    make_durable([path.parent])


def remove(path: Path) -> None:
    """Remove a checkpoint; if that is cut off, nothing is left that looks like one."""
    if path.exists():
        left = scratch_of(path)
        _remove(left)
        path.rename(left)
        _remove(left)


def make_durable(files: Iterable[Path]) -> None:
    """Wait until files, or directories, are on the disk: no power cut takes them then."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _exchange(one: Path, other: Path) -> bool:
    """Let two paths swap names at once; False if that cannot be done here."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    return rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0
