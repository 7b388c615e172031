"""Roll-out, retirement, following and keys, against TorchServe's APIs in memory."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path

import httpx2 as httpx
import pytest
from filelock import FileLock

from helpers.fake_management import INFERENCE, MANAGEMENT, FakeTorchServe, FakeVersion, write_checkpoint_files
from offramp.common.errors import OfframpError
from offramp.serve.cli.deploy import main as deploy_main
from offramp.serve.deploy import archives
from offramp.serve.deploy.archives import Archive, ArchiveStore
from offramp.serve.deploy.client import RefusedError, TorchServeClient, UnreachableError
from offramp.serve.deploy.keys import KeyFile
from offramp.serve.deploy.retirement import Retirement
from offramp.serve.deploy.rollout import Event, RolledBackError, roll_out
from offramp.serve.deploy.watch import Wanted, Watch
from offramp.serve.model_source import model_name


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint_files(tmp_path / "checkpoint")


@pytest.fixture
def store(tmp_path: Path) -> ArchiveStore:
    return ArchiveStore(tmp_path / "store")


@pytest.fixture
def server(store: ArchiveStore) -> FakeTorchServe:
    return FakeTorchServe(store.path)


@pytest.fixture
def client(server: FakeTorchServe) -> TorchServeClient:
    return TorchServeClient(MANAGEMENT, INFERENCE, transport=server.transport)


def folders(store: ArchiveStore) -> list[str]:
    return sorted(path.name for path in store.path.iterdir() if not path.name.endswith(".lock"))


def place(store: ArchiveStore, checkpoint: Path, version: str | None) -> Archive:
    return store.place(checkpoint, name="m", version=version, engine={})


def put(version: str, checkpoint: Path, store: ArchiveStore, client: TorchServeClient) -> Archive:
    archive = place(store, checkpoint, version)
    roll_out(archive, client, store, lambda event: None, timeout_s=5)
    return archive


def test_an_archive_is_found_again_and_made_again_when_damaged(checkpoint: Path, store: ArchiveStore) -> None:
    first = place(store, checkpoint, "1")
    folder = store.path / first.folder
    inode = folder.stat().st_ino
    assert place(store, checkpoint, "1") == first
    assert folder.stat().st_ino == inode, "it was found, not made"
    (folder / "handler.py").write_text("another")
    assert place(store, checkpoint, "1") == first
    assert "another" not in (folder / "handler.py").read_text()
    (store.path / ".building-of-one-that-was-killed").mkdir()
    other = store.place(checkpoint, name="m", version="1", engine={"dtype": "bf16"})
    assert folders(store) == sorted([first.folder, other.folder])


def test_a_directory_gets_its_version_from_what_it_holds(checkpoint: Path, store: ArchiveStore) -> None:
    first = place(store, checkpoint, None)
    assert place(store, checkpoint, None) == first
    (checkpoint / "config.json").unlink()  # or the linked file of the first archive would change as well
    (checkpoint / "config.json").write_text("{}")
    assert place(store, checkpoint, None).version != first.version


def test_nothing_but_archives_is_removed(checkpoint: Path, store: ArchiveStore, tmp_path: Path) -> None:
    archive = place(store, checkpoint, "1")
    (store.path / "m-mine").mkdir()
    (store.path / "m-link").symlink_to(store.path / archive.folder)
    for foreign in ("m-mine", "m-link", "../checkpoint", "..", "", "m-nowhere"):
        assert not store.remove("m", foreign)
    assert not store.remove("other", archive.folder)
    assert store.remove("m", archive.folder)
    assert folders(store) == ["m-link", "m-mine"]
    assert sorted(path.name for path in checkpoint.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_a_version_is_warmed_before_it_becomes_the_default(
    checkpoint: Path, store: ArchiveStore, server: FakeTorchServe, client: TorchServeClient
) -> None:
    put("1", checkpoint, store, client)
    server.seen.clear()
    events: list[Event] = []
    roll_out(place(store, checkpoint, "2"), client, store, events.append, timeout_s=5)
    order = [one for one in server.seen if not one.startswith("GET /models")]
    assert order == [
        "POST /models",
        "POST /predictions/m/2/v1/completions",
        "GET /predictions/m/2/v1/models/m",
        "PUT /models/m/2/set-default",
    ]
    assert (server.default, list(server.versions)) == ("2", ["1", "2"])
    assert [event.kind for event in events] == ["registering", "deployed"]
    put("2", checkpoint, store, client)  # it is there already: only a token is wanted
    assert list(server.versions) == ["1", "2"]
    put("1", checkpoint, store, client)
    assert server.default == "1"


@pytest.mark.parametrize("fault", ["load", "token", "log-probability", "archive", "switch"])
def test_what_goes_wrong_before_the_switch_is_undone(
    checkpoint: Path, store: ArchiveStore, server: FakeTorchServe, client: TorchServeClient, fault: str
) -> None:
    first = put("1", checkpoint, store, client)

    def fail(request: httpx.Request) -> httpx.Response | None:
        path = request.url.path
        if fault == "token" and path.endswith("completions"):
            return httpx.Response(200, json={"error": {"message": "out of blocks"}})
        if fault == "archive" and "/v1/models/" in path:
            return httpx.Response(200, json={"offramp": {"archive_sha256": first.sha256}})
        if fault == "switch" and path.endswith("set-default"):
            return httpx.Response(500, json={"message": "no"})
        return None

    server.on_request = fail
    server.broken = {"2"} if fault == "load" else set()
    server.logprob = None if fault == "log-probability" else -0.5
    with pytest.raises(RolledBackError, match="2 was not put in place, 1 still answers"):
        put("2", checkpoint, store, client)
    assert (server.default, list(server.versions)) == ("1", ["1"])
    assert folders(store) == [first.folder]


def test_a_first_version_that_fails_leaves_nothing(
    checkpoint: Path, store: ArchiveStore, server: FakeTorchServe, client: TorchServeClient
) -> None:
    server.broken = {"1"}
    with pytest.raises(RolledBackError, match="no version answers"):
        put("1", checkpoint, store, client)
    assert (server.default, server.versions, folders(store)) == (None, {}, [])


def test_the_same_version_with_other_contents_is_refused(
    checkpoint: Path, store: ArchiveStore, server: FakeTorchServe, client: TorchServeClient
) -> None:
    put("1", checkpoint, store, client)
    other = store.place(checkpoint, name="m", version="1", engine={"dtype": "bf16"})
    with pytest.raises(OfframpError, match=r"registered already, .*another --version"):
        roll_out(other, client, store, lambda event: None, timeout_s=5)
    assert list(server.versions) == ["1"]


def test_versions_before_go_when_drained_and_not_earlier(
    checkpoint: Path, store: ArchiveStore, server: FakeTorchServe, client: TorchServeClient
) -> None:
    for version in ("1", "2", "3"):
        put(version, checkpoint, store, client)
    server.versions = {"0.9": FakeVersion("not-of-ours"), **server.versions}
    now = [0.0]
    retirement = Retirement("m", client, store, lambda event: None, keep=1, grace_s=5, clock=lambda: now[0])

    def look(at: float) -> tuple[list[str], list[str]]:
        now[0] = at
        return retirement.look(), list(server.versions)

    store.mark_deployed(place(store, checkpoint, "2"))  # the one that stays
    server.versions["1"].running = 1
    assert look(0) == (["1", "0.9"], ["0.9", "1", "2", "3"])
    assert look(6) == (["1"], ["1", "2", "3"])
    server.versions["1"].running = 0
    assert look(7)[0] == ["1"]
    server.versions["1"].pending = 1  # somebody who knew the old default: the wait begins anew
    assert look(13)[0] == ["1"]
    server.versions["1"].pending = 0
    assert look(14)[0] == ["1"]
    assert look(18)[0] == ["1"]
    assert look(19) == ([], ["2", "3"])
    assert len(folders(store)) == 2
    server.versions["2"].running = 1
    everything = Retirement("m", client, store, lambda event: None, keep=0, grace_s=0.1)
    with pytest.raises(OfframpError, match=r"m 2 still has requests after 0.2 s and stays"):
        everything.finish(0.2, interval_s=0.05)
    server.versions["2"].ready = False  # its worker died; nobody is answered
    everything.finish(5, interval_s=0.05)
    assert (server.default, list(server.versions)) == ("3", ["3"])


def test_following_survives_what_is_away_and_says_each_thing_once(
    checkpoint: Path, store: ArchiveStore, server: FakeTorchServe, client: TorchServeClient
) -> None:
    events: list[str] = []
    alias: list[str | OfframpError] = ["1"]

    def look_up() -> Wanted:
        if isinstance(alias[0], OfframpError):
            raise alias[0]
        return Wanted(alias[0], alias[0])

    def report(event: Event) -> None:
        events.append(f"{event.kind} {event.version}" if event.version else event.kind)

    retirement = Retirement("m", client, store, report, keep=0, grace_s=1e-9)
    watch = Watch(
        "m",
        look_up,
        lambda wanted: roll_out(place(store, checkpoint, wanted.version), client, store, report, timeout_s=5),
        retirement.look,
        client,
        report,
    )

    def look(times: int = 3) -> list[str]:
        events.clear()
        for _ in range(times):
            watch.look()
        return events

    assert look() == ["registering 1", "deployed 1"]
    assert look() == []
    alias[0] = OfframpError("the registry does not answer")
    assert look() == ["waiting"]
    alias[0] = "2"
    server.away = True
    assert look() == ["waiting"]
    server.away = False
    assert look() == ["registering 2", "deployed 2", "resumed", "removed 1"]
    server.broken = {"3"}
    alias[0] = "3"
    assert look() == ["registering 3", "rolled_back 3"]
    server.versions, server.default = {}, None  # started anew, and it knows nothing
    assert look() == ["registering 2", "deployed 2"]
    server.broken = set()
    assert look() == [], "a version that failed is not tried again"
    alias[0] = "2"
    assert look() == []
    alias[0] = "3"
    assert look() == ["registering 3", "deployed 3", "removed 2"]
    server.on_request = lambda request: _vanish() if request.url.path.endswith("completions") else None
    alias[0] = "4"
    assert look(1) == ["registering 4", "rolled_back 4"]
    server.on_request = lambda request: None
    assert look() == ["registering 4", "deployed 4", "removed 3"], "nothing is said against a version by an outage"


def _vanish() -> httpx.Response:
    raise httpx.ConnectError("gone")


class Locked(FakeTorchServe):
    """Wants keys, and writes them into a file."""

    keys: Path

    def write(self, key: str, ends: str = "2030-01-01T00:00:00.123456789Z") -> None:
        kinds = {kind: {"key": f"{kind}-{key}", "expiration time": ends} for kind in ("management", "inference")}
        self.keys.write_text(json.dumps({**kinds, "API": {"key": "api-key"}}))
        self.key = key

    def check(self, request: httpx.Request) -> httpx.Response | None:
        given = request.headers.get("authorization", "")
        if request.url.path == "/token":
            assert given == "Bearer api-key"
            self.write("renewed")
            return httpx.Response(200)
        kind = "management" if request.url.port == 8081 else "inference"
        wrong = {"code": 400, "type": "InvalidKeyException", "message": "Token Authorization failed."}
        return None if given == f"Bearer {kind}-{self.key}" else httpx.Response(400, json=wrong)


@pytest.fixture
def locked(store: ArchiveStore, tmp_path: Path) -> Locked:
    server = Locked(store.path, {"1": FakeVersion("m-1")}, "1")
    server.keys = tmp_path / "key_file.json"
    server.write("first")
    server.on_request = server.check
    return server


def test_keys_are_read_from_the_file_and_renewed_when_too_old(locked: Locked) -> None:
    now = datetime(2029, 1, 1, tzinfo=timezone.utc)
    client = TorchServeClient(MANAGEMENT, INFERENCE, KeyFile(locked.keys, lambda: now), transport=locked.transport)
    assert [one.version for one in client.versions("m")] == ["1"]
    locked.write("second")  # somebody has renewed them
    client.generate("m", "1", 5)
    locked.write("third", ends="2028-12-31T23:59:59.999999999Z")
    locked.key = "nobody knows it"
    client.generate("m", "1", 5)
    assert locked.key == "renewed"
    locked.key = "again nobody knows it"  # but the file says that its own is good for years
    with pytest.raises(RefusedError, match=r"does not take the management key of .*key_file.json") as refused:
        client.versions("m")
    assert "renewed" not in str(refused.value)


def test_faults_with_keys_are_one_sentence_without_them(locked: Locked, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"wants a key; give its key_file.json with --key-file"):
        TorchServeClient(MANAGEMENT, INFERENCE, transport=locked.transport).versions("m")
    with pytest.raises(OfframpError, match=r"nowhere.json cannot be read: No such file"):
        KeyFile(tmp_path / "nowhere.json").header("management")
    with pytest.raises(OfframpError, match="must not hold user and password") as refused:
        TorchServeClient("http://me:secret@localhost:8081", INFERENCE)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            httpx.Response(405, json={"code": 405, "message": "Requested method is not allowed"}),
            "enable_model_api=true",
        ),
        (httpx.Response(404, json={"code": 404, "message": "Model not found at: x"}), "--store the model_store"),
        (httpx.Response(502, text="<html>"), "answers POST /models with 502: Bad Gateway"),
    ],
)
def test_a_refusal_says_what_to_do(answer: httpx.Response, words: str) -> None:
    client = TorchServeClient(MANAGEMENT, INFERENCE, transport=httpx.MockTransport(lambda request: answer))
    with pytest.raises(RefusedError, match=words):
        client.register("m", "x", 5)


def test_another_kind_of_server_and_none_at_all_are_told_apart() -> None:
    other = httpx.MockTransport(lambda request: httpx.Response(200, text="hello"))
    with pytest.raises(RefusedError, match="does not describe models as TorchServe"):
        TorchServeClient(MANAGEMENT, INFERENCE, transport=other).versions("m")
    with pytest.raises(UnreachableError, match=r"TorchServe at http://127.0.0.1:9 does not answer: .*refused"):
        TorchServeClient("http://127.0.0.1:9", INFERENCE).versions("m")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--keep", "-1"], "--keep -1"),
        (["--interval", "nan"], "--interval nan"),
        (["--watch"], "names none; write models:/NAME@ALIAS"),
        (["--to", "localhost"], "'localhost' is no address"),
        (["--to", "http://localhost"], "names no port; give the inference address"),
        (["--name", "a/b"], "cannot stand in a URL"),
    ],
)
def test_options_that_cannot_be_are_one_sentence(
    checkpoint: Path, tmp_path: Path, options: list[str], words: str
) -> None:
    command = [str(checkpoint), "--to", "http://127.0.0.1:9", "--store", str(tmp_path / "store"), *options]
    with pytest.raises(OfframpError, match=words):
        deploy_main(command)


def test_two_roll_outs_of_a_model_do_not_cross(
    checkpoint: Path,
    store: ArchiveStore,
    server: FakeTorchServe,
    client: TorchServeClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(archives, "_DEPLOY_WAIT_S", 0.05)
    put("1", checkpoint, store, client)
    server.versions["2"] = FakeVersion("m-2")  # somebody has registered it, and warms it
    retirement = Retirement("m", client, store, lambda event: None, keep=0, grace_s=1e-9)
    with FileLock(store.path / ".m.lock"):
        with pytest.raises(OfframpError, match="another `offramp deploy` is at work on m"):
            deploy_main([str(checkpoint), "--name", "m", "--to", "http://127.0.0.1:9", "--store", str(store.path)])
        retirement.finish(5)
        assert list(server.versions) == ["1", "2"]
    retirement.finish(5, interval_s=0.01)
    assert list(server.versions) == ["1"]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("models:/a b@champion", "a-b"),
        ("models:/tiny/3", "tiny"),
        ("models/smollm2/", "smollm2"),
        (".hidden", "hidden"),
    ],
)
def test_the_name_in_the_url(source: str, name: str) -> None:
    assert model_name(source) == name
