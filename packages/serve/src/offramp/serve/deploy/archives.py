"""The model store as a store of archives: each model folder once, named by what it holds, whole or not there."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from offramp.common.errors import OfframpError
from offramp.serve.torchserve.archive import BUILDING, Contents, contents, read_manifest, write
from offramp.serve.torchserve.checksums import SUMS, verify

_DIGITS = 12
_BUILD_TIMEOUT_S = 600.0
_DEPLOY_WAIT_S = 5.0
"""Longer than a look at versions that are to go."""


class BusyError(OfframpError):
    """Somebody else is at work on the same."""


@dataclass(frozen=True)
class Archive:
    """A model folder in the store.

    Attributes:
        name: The model's name.
        version: Its version.
        folder: Name of the folder in the store, which TorchServe registers it by.
        sha256: Hash of all that it holds.
    """

    name: str
    version: str
    folder: str
    sha256: str


class ArchiveStore:
    """TorchServe's model store.

    Args:
        path: The directory; it is made when it is missing.

    Raises:
        OfframpError: It cannot be.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as fault:
            raise OfframpError(f"the model store {path} cannot be made: {fault}; choose another place.") from fault

    def place(
        self,
        checkpoint: Path,
        *,
        name: str,
        version: str | None,
        engine: dict[str, Any],
        watch: dict[str, Any] | None = None,
    ) -> Archive:
        """Finds the archive of a checkpoint with these settings, or makes it.

        What is found is hashed before it is taken, and made again if it has changed.

        Args:
            checkpoint: A checkpoint directory.
            name: The model's name.
            version: Its version; None takes one from a hash of checkpoint and settings.
            engine: `EngineConfig` fields that differ from their defaults.
            watch: `WatchSettings` fields that do.

        Raises:
            OfframpError: The checkpoint is none, or the store cannot be written.
        """
        if version is None:
            unversioned = contents(checkpoint, name=name, engine=engine, watch=watch)
            version = unversioned.unnamed_sha256[:_DIGITS]
        made = contents(checkpoint, name=name, version=version, engine=engine, watch=watch)
        archive = Archive(name, version, f"{name}-{version}-{made.sha256[:_DIGITS]}", made.sha256)
        # A plus, which no model's name has: a model may well be called "store".
        with self._lock("+store", "the archives", _BUILD_TIMEOUT_S):
            self._sweep()
            if not self._holds(archive):
                self._write(made, archive)
        return archive

    @contextmanager
    def deploying(self, name: str) -> Iterator[None]:
        """Keeps everybody else away who would change the versions of a model.

        Raises:
            BusyError: A roll-out is under way.
        """
        with self._lock(name, name, _DEPLOY_WAIT_S):
            yield

    def deployed_at(self, folder: str) -> float:
        """When an archive was last made the default, in Unix seconds; 0 for one that is not here."""
        try:
            return (self.path / folder).stat().st_mtime if _is_plain(folder) else 0.0
        except OSError:
            return 0.0

    def mark_deployed(self, archive: Archive) -> None:
        """Notes that an archive has become the default just now, which tells later what to keep."""
        with contextlib.suppress(OSError):
            os.utime(self.path / archive.folder)

    def of_model(self, name: str) -> set[str]:
        """Folders of all archives of a model that roll-outs have put here."""
        found: set[str] = set()
        for path in self.path.glob(f"{name}-*"):
            with contextlib.suppress(OfframpError):
                if self._is_ours(path, name) and read_manifest(path)[0] == name:
                    found.add(path.name)
        return found

    def remove(self, name: str, folder: str) -> bool:
        """Removes an archive that a roll-out has put here, and nothing else; whether it did."""
        path = self.path / folder
        if not _is_plain(folder) or not self._is_ours(path, name):
            return False
        gone = self.path / f"{BUILDING}{uuid.uuid4().hex}"
        try:
            path.rename(gone)
        except OSError:
            return False
        shutil.rmtree(gone, ignore_errors=True)
        return True

    @staticmethod
    def _is_ours(path: Path, name: str) -> bool:
        return path.name.startswith(f"{name}-") and not path.is_symlink() and (path / SUMS).is_file()

    def _holds(self, archive: Archive) -> bool:
        folder = self.path / archive.folder
        if not folder.is_dir():
            return False
        try:
            return verify(folder) == archive.sha256
        except OfframpError:
            return False

    def _write(self, made: Contents, archive: Archive) -> None:
        folder = write(made, self.path / archive.folder)
        if (found := verify(folder)) != archive.sha256:
            raise OfframpError(
                f"{folder} has the hash {found[:_DIGITS]} instead of {archive.sha256[:_DIGITS]}: the checkpoint was "
                "written to meanwhile; deploy it again when it is whole."
            )

    def _sweep(self) -> None:
        """Removes what a build that was killed has left; under the lock there is no other."""
        for path in self.path.glob(f"{BUILDING}*"):
            shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def _lock(self, file: str, what: str, timeout_s: float) -> Iterator[None]:
        try:
            with FileLock(self.path / f".{file}.lock", timeout=timeout_s):
                yield
        except Timeout:
            raise BusyError(
                f"another `offramp deploy` is at work on {what} in {self.path}; wait until it has ended."
            ) from None
        except OSError as fault:
            raise OfframpError(f"the model store {self.path} cannot be written: {fault}.") from fault


def _is_plain(folder: str) -> bool:
    return bool(folder) and Path(folder).name == folder
