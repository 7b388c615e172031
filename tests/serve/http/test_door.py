"""Keys, limits, the access log, times, and the end: doors with settings of their own."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import ssl
import threading
from pathlib import Path

import httpx2
import pytest

from helpers.door import Opened, ScriptedBackend, engine_backend, open_door, post
from helpers.openai_service import Engine
from helpers.sinks import eventually
from offramp.common.errors import OfframpError
from offramp.serve.http.keys import add_key, remove_key
from offramp.serve.http.server import Server
from offramp.serve.http.settings import DoorSettings, read_settings
from offramp.serve.protocol.errors import ApiError

SECRET = "a prompt that must not be logged"


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    return [json.loads(record.getMessage()) for record in caplog.records if record.name == "offramp.access"]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_nobody_passes_without_a_key(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "offramp.access")
    secret = add_key(keys, "alice")
    other = add_key(keys, "bob")
    engine = Engine()
    with open_door(engine_backend(engine), engine, keys=str(keys)) as opened:
        warm = len(engine.seen)
        for wrong in (
            {},
            {"authorization": secret},
            {"authorization": "Bearer"},
            {"authorization": "Bearer "},
            {"authorization": f"Basic {secret}"},
            {"authorization": f"Bearer {secret}x"},
            {"authorization": f"Bearer {secret},"},
            {"authorization": "Bearer é"},
            {"x-api-key": secret},
            {"cookie": f"authorization=Bearer {secret}"},
        ):
            status, headers, answer = opened.complete(wrong, max_tokens=1)
            assert (status, headers["www-authenticate"]) == (401, "Bearer")
            assert answer["error"]["code"] == "invalid_api_key"
            assert secret not in json.dumps(answer)
        assert opened.ask("GET", "/v1/models")[0] == 401
        assert opened.ask("GET", "/openapi.json")[0] == 401
        assert opened.ask("GET", "/health/ready")[0] == 200
        assert len(engine.seen) == warm, "no engine has heard of any of them"
        for good in (secret, other):
            assert opened.complete({"authorization": f"bearer {good}"}, prompt=SECRET, max_tokens=1)[0] == 200
        remove_key(keys, "alice")
        eventually(lambda: opened.complete({"authorization": f"Bearer {secret}"}, max_tokens=1)[0] == 401)
        assert opened.complete({"authorization": f"Bearer {other}"}, max_tokens=1)[0] == 200
        keys.write_text("oops")
        keys.write_text("still no JSON")
        assert opened.complete({"authorization": f"Bearer {other}"}, max_tokens=1)[0] == 200, "a slip locks nobody out"
    assert secret not in keys.read_text() + caplog.text
    assert SECRET not in caplog.text
    assert {line.get("key") for line in lines(caplog)} == {None, "alice", "bob"}


def test_metrics_have_keys_of_their_own(keys: Path) -> None:
    asking = {"authorization": f"Bearer {add_key(keys, 'alice')}"}
    watching = {"authorization": f"Bearer {add_key(keys, 'prometheus', use='metrics')}"}
    engine = Engine()
    with open_door(engine_backend(engine), engine, keys=str(keys)) as opened:
        assert opened.complete(asking, max_tokens=3)[0] == 200
        assert opened.ask("GET", "/metrics")[0] == 401
        for path, key in (("/metrics", asking), ("/v1/models", watching), ("/openapi.json", watching)):
            status, _, body = opened.ask("GET", path, headers=key)
            assert (status, json.loads(body)["error"]["code"]) == (403, "wrong_api_key")
        assert opened.complete(watching, max_tokens=3)[0] == 403
        status, headers, body = opened.ask("GET", "/metrics", headers=watching)
        assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert b'offramp_request_seconds_count{model_name="m",model_version="1.0"} 2.0' in body
        assert b"alice" not in body
    with open_door(engine_backend(engine), engine) as opened:  # nobody needs one on this machine
        assert opened.ask("GET", "/metrics")[0] == 200


def test_a_key_is_good_for_so_much(keys: Path) -> None:
    few = {"authorization": f"Bearer {add_key(keys, 'few', requests_per_minute=2)}"}
    one = {"authorization": f"Bearer {add_key(keys, 'one', max_concurrent=1)}"}
    engine = Engine()
    with open_door(engine_backend(engine), engine, keys=str(keys), max_concurrent=3) as opened:
        assert [opened.complete(few, max_tokens=1)[0] for _ in range(2)] == [200, 200]
        status, headers, answer = opened.complete(few, max_tokens=1)
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 1 <= int(headers["retry-after"]) <= 30
        long = post(headers=f"authorization: {one['authorization']}\r\n", max_tokens=50_000, stream=True)
        with opened.connect(long) as connection:
            connection.recv(100)
            assert opened.complete(one, max_tokens=1)[0] == 429
        eventually(lambda: opened.complete(one, max_tokens=1)[0] == 200)


def test_all_keys_together_are_good_for_so_much() -> None:
    engine = Engine()
    with open_door(engine_backend(engine), engine, max_concurrent=1) as opened:
        with opened.connect(post(max_tokens=50_000, stream=True)) as connection:
            connection.recv(100)
            status, headers, _ = opened.complete(max_tokens=1)
            assert (status, headers["retry-after"]) == (429, "1")
            assert opened.ask("GET", "/health/live")[0] == 200
        eventually(lambda: opened.complete(max_tokens=1)[0] == 200)


def test_small_pieces_are_not_held_back() -> None:
    with open_door(ScriptedBackend(), Engine()) as opened, socket.create_connection(("127.0.0.1", opened.port)):
        connections = opened.server.server_state.connections
        eventually(lambda: len(connections) == 1)
        [connection] = connections
        theirs = connection.transport.get_extra_info("socket")
        assert theirs.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_connections_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    with open_door(ScriptedBackend(), Engine(), max_connections=3) as opened, contextlib.ExitStack() as stack:
        held = [stack.enter_context(opened.connect(b"GET")) for _ in range(3)]
        for _ in range(5):
            with opened.connect(b"") as connection, contextlib.suppress(ConnectionError):
                connection.settimeout(5)  # the head of a request would have 10 s
                assert connection.recv(1) == b""
        held[0].close()
        eventually(lambda: opened.knock(b"GET /health/live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")[0] == 200)
    assert caplog.text.count("There are 3 connections") == 1, "said once, however many come"


def test_the_access_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "offramp.access")
    engine = Engine()
    with open_door(engine_backend(engine), engine) as opened:
        _, headers, _ = opened.complete({"x-client-request-id": "mine-1"}, prompt=SECRET, max_tokens=3)
        opened.complete({"x-client-request-id": 'no"id'}, prompt=SECRET, temperature=9)
        opened.ask("GET", f"/v1/models/{'x' * 5000}?{SECRET.replace(' ', '+')}")
        with opened.connect(post(max_tokens=50_000, stream=True)) as connection:
            connection.recv(100)
        eventually(lambda: len(lines(caplog)) == 4)
    good, bad, unknown, gone = lines(caplog)
    assert good["request_id"] == headers["x-request-id"]
    assert (good["client_request_id"], good["model"], good["status"]) == ("mine-1", "m@1.0", 200)
    assert "client_request_id" not in bad
    assert (bad["status"], unknown["status"], gone["status"]) == (400, 404, 499)
    assert SECRET.split()[1] not in caplog.text
    assert max(len(record.getMessage()) for record in caplog.records) < 600


def test_an_engine_that_dies_says_so_everywhere() -> None:
    engine = Engine()
    with open_door(engine_backend(engine), engine) as opened:
        engine.fail["cmpl-x"] = "never asked for"

        def die() -> None:
            raise RuntimeError("broken on purpose")

        engine.on_step = die
        status, _, answer = opened.complete(max_tokens=5)
        assert (status, answer["error"]["code"]) == (503, "engine_dead")
        assert opened.complete(max_tokens=5)[0] == 503
        status, headers, body = opened.ask("GET", "/health/ready")
        assert (status, headers["retry-after"]) == (503, "1")
        assert "broken" not in body.decode(), "health is told to everybody, the cause is not"
        assert opened.ask("GET", "/health/live")[0] == 200


def test_a_stream_that_breaks_ends_with_an_error() -> None:
    error = ApiError(503, "Gone.", type="server_error", code="gone")
    backend = ScriptedBackend([b"data: 1\n\n"], error=error)
    with open_door(backend, Engine()) as opened:
        status, _, body = opened.complete(stream=True)
        assert status == 200
        first, last, done, nothing = body.split(b"\n\n")
        assert (first, done, nothing) == (b"data: 1", b"data: [DONE]", b"")
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "gone"
        backend.error = ValueError(SECRET)
        _, _, body = opened.complete(stream=True)
        assert b"internal_error" in body
        assert SECRET.encode() not in body


def test_an_answer_has_its_time() -> None:
    engine = Engine()
    with open_door(engine_backend(engine), engine, answer_timeout_s=0.3) as opened:
        status, _, answer = opened.complete(max_tokens=50_000)
        assert (status, answer["error"]["code"]) == (504, "timeout")
        status, _, body = opened.complete(max_tokens=50_000, stream=True)
        assert status == 200
        assert b'"code":"timeout"' in body.split(b"\n\n")[-3]
        eventually(lambda: len(engine.cancelled) == 2)
        assert opened.complete(max_tokens=2)[0] == 200


def test_a_client_that_does_not_read_is_left() -> None:
    backend = ScriptedBackend([b"data: " + b"x" * 1_000_000 + b"\n\n"], endless=True)
    opening = open_door(backend, Engine(), write_timeout_s=0.3)
    with opening as opened, opened.connect(post(stream=True)) as connection:
        eventually(lambda: backend.left == 1)
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(1 << 20):
                pass


def test_other_origins_are_let_in_by_name_only() -> None:
    engine = Engine()
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    with open_door(engine_backend(engine), engine, cors_origins=["https://a.example"]) as opened:
        status, headers, _ = opened.ask("OPTIONS", "/v1/completions", None, asked)
        assert (status, headers["access-control-allow-origin"]) == (200, "https://a.example")
        assert opened.ask("OPTIONS", "/v1/completions", None, {**asked, "origin": "https://b.example"})[0] == 400
        _, headers, _ = opened.complete({"origin": "https://a.example"}, max_tokens=1)
        assert headers["access-control-allow-origin"] == "https://a.example"


def test_what_is_under_way_is_answered_before_the_end() -> None:
    engine = Engine()
    opening = open_door(engine_backend(engine), engine)
    with opening as opened, opened.connect(post(max_tokens=400, stream=True)) as connection:
        said = connection.recv(65_536)
        stopping = threading.Thread(target=opened.stop)
        stopping.start()
        eventually(lambda: refuses(opened))
        while piece := connection.recv(65_536):
            said += piece
        stopping.join()
    assert said.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert said.count(b"data: ") == 401


def refuses(opened: Opened) -> bool:
    try:
        socket.create_connection(("127.0.0.1", opened.port), timeout=5).close()
    except ConnectionRefusedError:
        return True
    return False


def test_tls(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    tls = {"certificate": str(certificate), "key": str(key)}
    engine = Engine()
    with open_door(engine_backend(engine), engine, tls=tls) as opened:
        assert opened.server.url.startswith("https://")
        context = ssl.create_default_context(cafile=str(certificate))
        with httpx2.Client(verify=context, trust_env=False) as client:
            assert client.get(f"https://localhost:{opened.port}/v1/models").json()["object"] == "list"
        assert opened.knock(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")[0] == 0
    with pytest.raises(OfframpError, match="give PEM files"):
        Server(
            lambda *_: None,  # pyright: ignore[reportArgumentType]
            DoorSettings.model_validate({"tls": {"certificate": key, "key": key}}),
        )


def self_signed(folder: Path) -> tuple[Path, Path]:
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.timezone.utc)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(private, hashes.SHA256())
    )
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    key.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return certificate, key


def test_a_port_that_is_taken_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OfframpError, match=f"port {port} of 127.0.0.1 cannot be used"):
            Server(lambda *_: None, DoorSettings(port=port))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "there is no setting 'prot'"),
        ("port: '80'", "'port' should be a valid integer, not '80'"),
        ("port: 70000", "'port' should be less than or equal to 65535, not '70000'"),
        (
            "host: 0.0.0.0",
            "'host' '0.0.0.0' can be reached from other machines, so 'keys' must name a file of API",
        ),
        ("body_timeout_s: 0", "'body_timeout_s' should be greater than 0, not '0'"),
        ("tls: {certificate: a}", "'tls.key' is missing"),
        ("cors_origins: ['example.org']", "'cors_origins.0' String should match pattern"),
        ("[", "is not YAML"),
        ("- 1", "should be a valid dictionary"),
    ],
)
def test_settings_are_checked_in_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "door.yaml"
    file.write_text(text)
    with pytest.raises(OfframpError) as caught:
        read_settings(file, DoorSettings)
    said = str(caught.value)
    assert message in said
    assert said.startswith(str(file))
    assert said.endswith(".")
    assert "\n" not in said


def test_paths_begin_where_the_settings_lie(tmp_path: Path) -> None:
    file = tmp_path / "door.yaml"
    file.write_text("host: 0.0.0.0\nkeys: keys.json\naccess_log: /var/log/x\n")
    settings = read_settings(file, DoorSettings)
    assert (settings.keys, settings.access_log) == (tmp_path / "keys.json", Path("/var/log/x"))
