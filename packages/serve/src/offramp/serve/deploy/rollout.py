"""A new version takes over from the one before, and no request fails meanwhile.

Registered, then warmed, then the default; the version before goes on answering until then, and to its end whatever it
has begun (`retirement`). What goes wrong before the switch leaves everything as it was.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from offramp.common.errors import OfframpError
from offramp.serve.deploy.archives import Archive, ArchiveStore
from offramp.serve.deploy.client import RegisteredVersion, TorchServeClient, UnreachableError, WarmUpError


class RolledBackError(OfframpError):
    """A version could not be made the default; everything is as it was.

    Attributes:
        version: The version.
        may_pass: Whether TorchServe had gone away, so that nothing is said against the version.
    """

    def __init__(self, message: str, version: str, *, may_pass: bool) -> None:
        super().__init__(message)
        self.version = version
        self.may_pass = may_pass


@dataclass(frozen=True)
class Event:
    """One thing that has happened.

    Attributes:
        kind: One word for programs.
        model: The model's name.
        version: The version that it happened to.
        message: A line for people.
    """

    kind: str
    model: str
    version: str | None
    message: str


Report = Callable[[Event], object]


def roll_out(
    archive: Archive, client: TorchServeClient, store: ArchiveStore, report: Report, *, timeout_s: float
) -> None:
    """Makes an archive's version the default one.

    Args:
        archive: What to serve.
        client: The TorchServe that is to serve it.
        store: Its model store, in which the archive lies.
        report: Told what happens.
        timeout_s: Longest time to load and warm it.

    Raises:
        RolledBackError: It could not be loaded, or said no token; the version before still answers.
        OfframpError: TorchServe does not answer, or has other contents under the same version.
    """
    name, version = archive.name, archive.version
    before = client.default_version(name)
    known = next((one for one in client.versions(name) if one.version == version), None)
    if known is not None and known.url != archive.folder:
        raise OfframpError(
            f"{name} {version} is registered already, from {known.url} and not from {archive.folder}: the checkpoint "
            "or the settings differ; give this one another --version."
        )
    began = time.monotonic()
    try:
        if known is not None and not known.ready and (before is None or before.version != version):
            # A roll-out that was killed has left it. Whether it is still being loaded, or never will be, is not told.
            client.unregister(name, version)
            known = None
        if known is None:
            report(Event("registering", name, version, f"{version} is being loaded from {archive.folder}"))
            client.register(name, archive.folder, timeout_s)
        _warm_up(archive, client, max(timeout_s - (time.monotonic() - began), 1.0))
        if before is None or before.version != version:
            _set_default(name, version, client)
    except BaseException as fault:
        _roll_back(archive, before, client, store)
        if not isinstance(fault, OfframpError):
            raise
        stays = "no version answers" if before is None else f"{before.version} still answers"
        raise RolledBackError(
            f"{name} {version} was not put in place, {stays}: {fault}",
            version,
            may_pass=isinstance(fault, UnreachableError),
        ) from fault
    store.mark_deployed(archive)
    seconds = time.monotonic() - began
    took_over = "" if before is None or before.version == version else f", in place of {before.version}"
    report(Event("deployed", name, version, f"{version} answers after {seconds:.1f} s{took_over}"))


def _set_default(name: str, version: str, client: TorchServeClient) -> None:
    try:
        client.set_default(name, version)
    except OfframpError:
        # It may have been done, and only the answer be lost.
        with contextlib.suppress(OfframpError):
            now = client.default_version(name)
            if now is not None and now.version == version:
                return
        raise


def _warm_up(archive: Archive, client: TorchServeClient, timeout_s: float) -> None:
    client.generate(archive.name, archive.version, timeout_s)
    loaded = client.archive_sha256(archive.name, archive.version)
    if loaded != archive.sha256:
        raise WarmUpError(
            f"its worker has loaded an archive with the hash {str(loaded)[:12]} instead of {archive.sha256[:12]}; is "
            "--store the model_store of that TorchServe?"
        )


def _roll_back(
    archive: Archive, before: RegisteredVersion | None, client: TorchServeClient, store: ArchiveStore
) -> None:
    """Takes a version out again; not the one that was answering before, whatever has become of it."""
    if before is not None and before.version == archive.version:
        return
    with contextlib.suppress(OfframpError):  # the fault that led here says more
        client.unregister(archive.name, archive.version)
        store.remove(archive.name, archive.folder)
