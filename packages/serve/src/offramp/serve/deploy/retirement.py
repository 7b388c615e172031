"""Versions that are no longer the default answer what they have begun, and then go."""

from __future__ import annotations

import time
from collections.abc import Callable

from offramp.common.errors import OfframpError
from offramp.serve.deploy.archives import ArchiveStore, BusyError
from offramp.serve.deploy.client import RegisteredVersion, TorchServeClient
from offramp.serve.deploy.rollout import Event, Report

ORPHAN_S = 600.0
"""Longer than a TorchServe takes to load again what it had registered."""


class Retirement:
    """Removes the versions of one model that nobody needs.

    A version counts as drained when it was found without a request at every look for a while: whoever has asked which
    version is the default may send to the one before for a moment longer.

    Args:
        name: The model.
        client: The TorchServe that serves it.
        store: Its model store.
        report: Told what happens.
        keep: How many versions stay beside the default, those that were the default last.
        grace_s: How long a version must have been idle.
        clock: Seconds, for tests.

    Archives that no registered version was made from are removed as well, when that has been so for `ORPHAN_S`: a
    roll-out that was killed has left them, or a TorchServe that was started anew has forgotten them.
    """

    def __init__(
        self,
        name: str,
        client: TorchServeClient,
        store: ArchiveStore,
        report: Report,
        *,
        keep: int,
        grace_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._client = client
        self._store = store
        self._report = report
        self._keep = keep
        self._grace_s = grace_s
        self._clock = clock
        self._idle_since: dict[str, float] = {}
        self._orphan_since: dict[str, float] = {}

    def look(self) -> list[str]:
        """Looks once at all that should go, and removes what has been idle for long enough.

        Returns:
            The versions that still have to go.

        Raises:
            BusyError: A roll-out is under way, whose version is not the default yet.
            OfframpError: TorchServe does not answer.
        """
        with self._store.deploying(self._name):
            return self._look()

    def finish(self, timeout_s: float, interval_s: float = 0.5) -> None:
        """Looks until nothing is left to go, or another roll-out has begun, which then sees to it.

        Raises:
            OfframpError: A version still has requests after `timeout_s`; it stays.
        """
        deadline = self._clock() + timeout_s
        while remaining := self._look_unless_busy():
            if self._clock() > deadline:
                raise OfframpError(
                    f"{self._name} {', '.join(remaining)} still has requests after {timeout_s:g} s and stays; the new "
                    "version answers, and the same command removes the old one later."
                )
            time.sleep(interval_s)

    def _look_unless_busy(self) -> list[str]:
        try:
            return self.look()
        except BusyError:
            return []

    def _look(self) -> list[str]:
        default = self._client.default_version(self._name)
        versions = [] if default is None else self._client.versions(self._name)
        if default is not None:
            self._remove_orphans({one.url for one in versions})
        others = [one for one in versions if default is not None and one.version != default.version]
        others.sort(key=lambda one: self._store.deployed_at(one.url), reverse=True)
        leaving = others[self._keep :]
        still = {one.version for one in leaving}
        self._idle_since = {version: since for version, since in self._idle_since.items() if version in still}
        remaining: list[str] = []
        for one in leaving:
            if not self._is_drained(one):
                remaining.append(one.version)
                continue
            self._client.unregister(self._name, one.version)
            self._store.remove(self._name, one.url)
            del self._idle_since[one.version]
            self._report(Event("removed", self._name, one.version, f"{one.version} has drained and is removed"))
        return remaining

    def _remove_orphans(self, registered: set[str]) -> None:
        now, orphans = self._clock(), self._store.of_model(self._name) - registered
        self._orphan_since = {folder: self._orphan_since.get(folder, now) for folder in orphans}
        for folder, since in self._orphan_since.items():
            if now - since >= ORPHAN_S and self._store.remove(self._name, folder):
                self._report(Event("removed", self._name, None, f"{folder}, which nobody serves, is removed"))

    def _is_drained(self, version: RegisteredVersion) -> bool:
        now = self._clock()
        if not self._is_idle(version):
            self._idle_since.pop(version.version, None)
            return False
        return now - self._idle_since.setdefault(version.version, now) >= self._grace_s

    def _is_idle(self, version: RegisteredVersion) -> bool:
        if version.pending:
            return False
        if not version.ready:
            return True  # nobody is being answered, and TorchServe refuses who comes
        try:
            return self._client.load(self._name, version.version) == 0
        except OfframpError:
            return False  # it does not say
