"""`offramp deploy --watch` when what it stands on goes away, and when it is killed itself; TorchServe is in memory."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable
from pathlib import Path

import httpx2 as httpx
import pytest

from helpers.fake_management import INFERENCE, MANAGEMENT, FakeTorchServe, FakeVersion, write_checkpoint_files
from offramp.common.errors import OfframpError
from offramp.serve.deploy import archives
from offramp.serve.deploy.archives import Archive, ArchiveStore
from offramp.serve.deploy.client import TorchServeClient
from offramp.serve.deploy.retirement import ORPHAN_S, Retirement
from offramp.serve.deploy.rollout import Event, roll_out
from offramp.serve.deploy.watch import Wanted, Watch
from offramp.serve.torchserve import archive as archiving


class Killed(BaseException):
    """What `kill -9` is to a process: nothing that it would still do is done."""


class Watcher:
    """One `offramp deploy --watch`, as its process; the alias and the TorchServe are everybody's.

    Attributes:
        says: What it has reported since it was last asked.
        now: Its clock.
    """

    def __init__(self, server: FakeTorchServe, checkpoint: Path, alias: list[str | Exception]) -> None:
        self._checkpoint, self._alias = checkpoint, alias
        self._store = ArchiveStore(server.store)
        self._client = TorchServeClient(MANAGEMENT, INFERENCE, transport=server.transport)
        self.events: list[str] = []
        self.now = 0.0
        retirement = Retirement(
            "m", self._client, self._store, self._report, keep=0, grace_s=1e-9, clock=lambda: self.now
        )
        self._watch = Watch("m", self._look_up, self._deploy, retirement.look, self._client, self._report)

    def look(self, times: int = 3) -> list[str]:
        self.events.clear()
        for _ in range(times):
            self.now += 1
            self._watch.look()
        return self.events

    def place(self, version: str) -> Archive:
        return self._store.place(self._checkpoint, name="m", version=version, engine={})

    def _look_up(self) -> Wanted:
        if isinstance(self._alias[0], Exception):
            raise self._alias[0]
        return Wanted(self._alias[0], self._alias[0])

    def _deploy(self, wanted: Wanted) -> None:
        with self._store.deploying("m"):
            roll_out(self.place(wanted.version), self._client, self._store, self._report, timeout_s=5)

    def _report(self, event: Event) -> None:
        self.events.append(f"{event.kind} {event.version}" if event.version else event.kind)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint_files(tmp_path / "checkpoint")


@pytest.fixture
def server(tmp_path: Path) -> FakeTorchServe:
    return FakeTorchServe(tmp_path / "store")


@pytest.fixture
def alias() -> list[str | Exception]:
    return ["1"]


@pytest.fixture
def watcher(server: FakeTorchServe, checkpoint: Path, alias: list[str | Exception]) -> Watcher:
    watcher = Watcher(server, checkpoint, alias)
    assert watcher.look() == ["registering 1", "deployed 1"]
    return watcher


@pytest.fixture
def another(server: FakeTorchServe, checkpoint: Path, alias: list[str | Exception]) -> Callable[[], Watcher]:
    return lambda: Watcher(server, checkpoint, alias)


def folders(server: FakeTorchServe) -> list[str]:
    return sorted(path.name.rpartition("-")[0] for path in server.store.iterdir() if not path.name.endswith(".lock"))


def test_an_alias_that_goes_and_points_at_good_and_bad(
    watcher: Watcher, server: FakeTorchServe, alias: list[str | Exception]
) -> None:
    alias[0] = OfframpError("there is no alias")
    assert watcher.look() == ["waiting"]
    assert server.default == "1"
    alias[0] = "2"
    server.broken = {"2"}
    assert watcher.look() == ["registering 2", "rolled_back 2", "resumed"]
    alias[0] = OSError(errno.EIO, "the registry's disk")
    assert watcher.look() == ["waiting"]
    alias[0] = "2"
    assert watcher.look() == ["resumed"]
    alias[0] = "3"
    assert watcher.look() == ["registering 3", "deployed 3", "removed 1"]
    assert (list(server.versions), folders(server)) == (["3"], ["m-3"])


def test_outages_one_within_the_other(watcher: Watcher, server: FakeTorchServe, alias: list[str | Exception]) -> None:
    alias[0] = OfframpError("the registry does not answer")
    server.away = True
    assert watcher.look() == ["waiting"]
    alias[0] = "2"
    assert watcher.look() == ["waiting"], "now it is TorchServe that does not answer"
    server.away, server.versions, server.default = False, {}, None  # it comes back and knows nothing
    assert watcher.look() == ["registering 2", "deployed 2", "resumed"]
    assert list(server.versions) == ["2"]


@pytest.mark.parametrize(
    "path", ["/models", "/predictions/m/2/v1/completions", "/predictions/m/2/v1/models/m", "/models/m/2/set-default"]
)
def test_torchserve_goes_in_the_middle_of_a_roll_out(
    watcher: Watcher, server: FakeTorchServe, alias: list[str | Exception], path: str
) -> None:
    def go(request: httpx.Request) -> None:
        if request.url.path == path and (request.method != "GET" or "/v1/models/" in path):
            server.away = True
            raise httpx.ReadError("gone")

    server.on_request = go
    alias[0] = "2"
    assert watcher.look() == ["registering 2", "rolled_back 2", "waiting"]
    server.on_request, server.away = lambda request: None, False
    assert watcher.look()[-2:] == ["resumed", "removed 1"]
    assert (server.default, list(server.versions), folders(server)) == ("2", ["2"], ["m-2"])


def test_a_switch_whose_answer_is_lost_has_been_made(
    watcher: Watcher, server: FakeTorchServe, alias: list[str | Exception]
) -> None:
    def lose(request: httpx.Request) -> None:
        if request.method == "PUT":
            server.default = "2"
            raise httpx.ReadTimeout("lost")

    server.on_request = lose
    alias[0] = "2"
    assert watcher.look() == ["registering 2", "deployed 2", "removed 1"]


def test_a_full_disk_leaves_nothing_by_halves(
    watcher: Watcher, server: FakeTorchServe, alias: list[str | Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    alias[0] = "2"
    with monkeypatch.context() as patched:
        patched.setattr(archiving, "_link_or_copy", full)
        assert watcher.look() == ["waiting"] * len(watcher.events)
        assert (server.default, list(server.versions), folders(server)) == ("1", ["1"], ["m-1"])
    assert watcher.look() == ["registering 2", "deployed 2", "resumed", "removed 1"]


def test_two_watchers_do_not_cross(
    watcher: Watcher,
    another: Callable[[], Watcher],
    server: FakeTorchServe,
    alias: list[str | Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(archives, "_DEPLOY_WAIT_S", 0.05)
    other, meanwhile = another(), list[str]()

    def look(request: httpx.Request) -> None:
        if request.url.path == "/predictions/m/2/v1/completions" and not meanwhile:
            thread = threading.Thread(target=lambda: meanwhile.extend(other.look()))
            thread.start()
            thread.join()

    server.on_request = look
    alias[0] = "2"
    assert watcher.look(1) == ["registering 2", "deployed 2"]
    assert meanwhile == ["waiting"], "said once, and nothing done"
    assert other.look(1) == ["deployed 2", "resumed"], "it is there already"
    assert sorted(watcher.look() + other.look()) == ["removed 1"], "by one of them"
    assert server.seen.count("POST /models") == 2
    assert (list(server.versions), folders(server)) == (["2"], ["m-2"])


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("at", range(12))
def test_a_watcher_that_is_killed_goes_on_where_it_was(
    watcher: Watcher,
    another: Callable[[], Watcher],
    server: FakeTorchServe,
    alias: list[str | Exception],
    at: int,
    moved: bool,
) -> None:
    left = at

    def kill(request: httpx.Request) -> None:
        nonlocal left
        left -= 1
        if left < 0:  # and whatever it would ask on its way out
            raise Killed

    server.on_request = kill
    alias[0] = "2"
    with contextlib.suppress(Killed):
        watcher.look(2)
    server.on_request = lambda request: None
    assert server.default in ("1", "2"), "somebody answers all the while"
    alias[0] = "3" if moved else "2"
    after = another()
    after.look(3)
    after.now += ORPHAN_S
    after.look(2)
    assert (server.default, list(server.versions), folders(server)) == (alias[0], [alias[0]], [f"m-{alias[0]}"])


def test_what_a_killed_roll_out_was_loading_is_loaded_anew(
    watcher: Watcher, server: FakeTorchServe, alias: list[str | Exception]
) -> None:
    server.versions["2"] = FakeVersion(watcher.place("2").folder, ready=False)
    alias[0] = "2"
    assert watcher.look() == ["registering 2", "deployed 2", "removed 1"]
    assert server.seen.count("DELETE /models/m/2") == 1


def test_archives_that_nobody_serves_have_their_time(
    watcher: Watcher, server: FakeTorchServe, alias: list[str | Exception]
) -> None:
    watcher.place("7")
    server.store.joinpath("m-of-somebody").mkdir()
    watcher.look()
    versions, server.versions = server.versions, {}  # started anew, and it loads what it had
    default, server.default = server.default, None
    alias[0] = OfframpError("away")
    watcher.now += ORPHAN_S
    watcher.look()
    server.versions, server.default, alias[0] = versions, default, "1"
    assert "removed" in watcher.look()
    assert folders(server) == ["m-1", "m-of"]


def test_a_model_may_have_any_name(server: FakeTorchServe, checkpoint: Path) -> None:
    store = ArchiveStore(server.store)
    with store.deploying("store"):
        assert store.place(checkpoint, name="store", version="1", engine={}).folder.startswith("store-1-")
