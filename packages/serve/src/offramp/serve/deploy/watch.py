"""Following an alias: whatever it points to is what the endpoint answers with, sooner or later."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from offramp.common.errors import OfframpError
from offramp.serve.deploy.client import TorchServeClient
from offramp.serve.deploy.rollout import Event, Report, RolledBackError


@dataclass(frozen=True)
class Wanted:
    """What an alias points to.

    Attributes:
        version: Number of the version in the registry.
        sha256: Hash of its checkpoint directory.
    """

    version: str
    sha256: str


class Watch:
    """Compares what is wanted with what is there, and mends the difference, again and again.

    A TorchServe that comes back empty gets its model again. Faults are reported once, when they begin and when they
    end. A version that could not be put in place is not tried again before the alias has pointed elsewhere.

    Args:
        name: The model at TorchServe.
        look_up: What the alias points to now; raises `OfframpError`.
        deploy: Puts that in place; raises `OfframpError`.
        retire: Looks after the versions before; raises `OfframpError`.
        client: The TorchServe that is to answer.
        report: Told what happens.
    """

    def __init__(
        self,
        name: str,
        look_up: Callable[[], Wanted],
        deploy: Callable[[Wanted], object],
        retire: Callable[[], object],
        client: TorchServeClient,
        report: Report,
    ) -> None:
        self._name = name
        self._look_up = look_up
        self._deploy = deploy
        self._retire = retire
        self._client = client
        self._report = report
        self._fault: str | None = None
        self._failed: Wanted | None = None
        self._placed: Wanted | None = None

    def run(self, interval_s: float) -> None:
        """Follows until the process is told to end."""
        while True:
            self.look()
            time.sleep(interval_s)

    def look(self) -> None:
        """One look, and what has to be done after it."""
        try:
            self._mend()
        except RolledBackError as fault:
            self._report(Event("rolled_back", self._name, fault.version, str(fault)))
        except (OfframpError, OSError) as fault:  # a disk that is full, or a file system that has gone, comes back
            if str(fault) != self._fault:
                self._fault = str(fault)
                self._report(Event("waiting", self._name, None, f"waiting: {fault}"))
        else:
            if self._fault is not None:
                self._fault = None
                self._report(Event("resumed", self._name, None, "going on: registry and TorchServe answer"))

    def _mend(self) -> None:
        wanted = self._look_up()
        default = self._client.default_version(self._name)
        if wanted == self._failed:
            if default is None and self._placed is not None:
                self._deploy(self._placed)  # TorchServe has lost the one before, too
        else:
            self._failed = None
            if wanted != self._placed or default is None or default.version != wanted.version:
                self._put_in_place(wanted)
        if default is not None:
            self._retire()

    def _put_in_place(self, wanted: Wanted) -> None:
        try:
            self._deploy(wanted)
        except RolledBackError as fault:
            if not fault.may_pass:
                self._failed = wanted
            raise
        self._placed = wanted
