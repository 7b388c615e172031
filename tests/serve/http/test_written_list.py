"""The list of docs/gateway.md, "What the door refuses": octets on a socket, against both servers that have the door.

Each case comes with a good key, so that it is refused for what it is. Nothing of it may get behind the door, no log may
have the key or an error of ours, and the next request is answered.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from helpers.door import Opened, engine_backend, open_door
from helpers.fake_torchserve import FakeTorchServe, open_gateway
from helpers.openai_service import Engine
from helpers.sinks import eventually
from offramp.serve.http.endpoints import ENDPOINTS, METRICS, Endpoint
from offramp.serve.http.keys import add_key

PROMPT = "a prompt that nobody may log"
BODY = json.dumps({"model": "m", "prompt": PROMPT, "max_tokens": 1}).encode()
LENGTH = f"content-length: {len(BODY)}\r\n"
CLOSE = "connection: close\r\n"
CHUNKED = "transfer-encoding: chunked\r\n"
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
LIMITS = {
    "max_body_bytes": 50_000,
    "header_timeout_s": 0.4,
    "body_timeout_s": 0.4,
    "keep_alive_s": 0.2,
}


@dataclass
class Guarded:
    """A door that asks for a key.

    Attributes:
        opened: It.
        key: A good one.
        torchserve: Behind it, if that is what is behind it.
        may_reach: Whether something may get behind it in this test.
    """

    opened: Opened
    key: str
    torchserve: FakeTorchServe | None
    may_reach: bool = False

    @property
    def reached(self) -> int:
        """How much has got behind the door."""
        asked = [] if self.torchserve is None else [one for one in self.torchserve.asked if one[0] != "GET"]
        return len(self.opened.engine.seen) + len(asked)

    def say(self, octets: bytes, *, trickle_s: float | None = None) -> list[int]:
        """Sends octets, one by one if they are to trickle; the status codes that come until the connection ends."""
        heard = self.hear(octets, trickle_s=trickle_s)
        return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", heard) if status != b"100"]

    def hear(self, octets: bytes, *, trickle_s: float | None = None) -> bytes:
        with socket.create_connection(("127.0.0.1", self.opened.port), timeout=30) as connection:
            said = b""
            with contextlib.suppress(ConnectionError):
                if trickle_s is None:
                    connection.sendall(octets)
                else:
                    for octet in octets:
                        connection.sendall(bytes([octet]))
                        time.sleep(trickle_s)
                while piece := connection.recv(65_536):
                    said += piece
            return said

    def post(self, headers: str = "", body: bytes = b"", *, line: str = "POST /v1/completions HTTP/1.1") -> bytes:
        head = f"{line}\r\nhost: x\r\nauthorization: Bearer {self.key}\r\ncontent-type: application/json\r\n{headers}"
        return f"{head}\r\n".encode("latin-1") + body

    def ask(self, target: str, method: str = "GET", headers: str = "") -> bytes:
        head = f"{method} {target} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {self.key}\r\n{headers}\r\n"
        return head.encode("latin-1")


@pytest.fixture(scope="module", params=["engine", "torchserve"])
def guarded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    keys = tmp_path_factory.mktemp("keys") / "keys.json"
    key = add_key(keys, "alice")
    if request.param == "engine":
        engine = Engine()
        with open_door(engine_backend(engine), engine, keys=str(keys), **LIMITS) as opened:
            yield Guarded(opened, key, None)
        return
    with FakeTorchServe().running() as torchserve:
        models = {"m": {"url": torchserve.url, "management": torchserve.url}}
        with open_gateway(models, torchserve.engine, poll_s=1, keys=str(keys), **LIMITS) as opened:
            eventually(lambda: opened.ask("GET", "/health/ready")[0] == 200)
            yield Guarded(opened, key, torchserve)


@pytest.fixture(autouse=True)
def nothing_gets_further(guarded: Guarded, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO)
    reached, guarded.may_reach = guarded.reached, False
    yield
    assert guarded.may_reach or guarded.reached == reached
    assert guarded.key not in caplog.text
    assert PROMPT not in caplog.text
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert guarded.say(guarded.post(LENGTH + CLOSE, BODY)) == [200]


@pytest.mark.parametrize(
    "target",
    [
        *("/", "/v1", "/v1/", "/v1/models/", "//v1/models", "/v1//models", "//v1/..", "/./v1/models", "/v1/./models"),
        *("/v1/models/..", "/v1/models/../../models", "/v1/models/../../models/m?customized=true", "/../v1/models"),
        *("/v1/models/%2e%2e", "/v1/models/%2e%2e/%2e%2e/models", "/v1%2fmodels", "/v1/models/m%2f..%2f..%2fmodels"),
        *("/v1/models/%252e%252e", "/v1/%256dodels", "/%76%31/models", "/v1/models/%c0%ae%c0%ae", "/v1/models/m%00"),
        *("/v1/models/m%0d%0aset-cookie:a", "/v1/models;a=b", "/v1/models/m;customized=true", "/v1;/completions"),
        *("/v1\\models", "/v1/models\\..\\..\\models", "\\v1\\models", "/V1/models", "/v1/Models", "/V1/COMPLETIONS"),
        *("/v1/models.", "/v1./models", "/v1/completions.", "/v1/completions/", "/v1/models#a", "/v1/models/m/"),
        *("/v1/models/.m", "/v1/models/m/versions", "/v1/completions%20", "/v1/completions%3fa", "v1/models"),
        *("http://x/v1/models", "http://127.0.0.1:8081/models", "https://x/v1/completions", "file:///etc/passwd"),
        *(
            "127.0.0.1:8081",
            "x:443",
            "*",
            "@127.0.0.1:8081/models",
            "/@127.0.0.1:8081",
            "/http://127.0.0.1:8081/models",
        ),
        *(
            "/models",
            "/models/m",
            "/models/m?customized=true",
            "/models/x?customized=true",
            "/models/m/1.0/set-default",
        ),
        *("/predictions/m", "/predictions/m/1.0/v1/completions", "/predictions/m/1.0/health", "/explanations/m"),
        *(
            "/metrics/",
            "/metrics/..",
            "/METRICS",
            "/ping",
            "/api-description",
            "/workflows",
            "/wfpredict/m",
            "/token?type=inference",
        ),
        *("/docs", "/redoc", "/favicon.ico", "/.env", "/health", "/health/", "/health/live/", "/v1/embeddings"),
        *("/v1/models/" + "a" * 20_000 + "/", "/" + "../" * 5_000 + "models", "/v1/models/" + "%2e" * 9_000),
    ],
    ids=lambda target: target[:40],
)
def test_paths(guarded: Guarded, target: str) -> None:
    assert guarded.say(guarded.ask(target, headers=CLOSE)) == [404]
    assert guarded.say(guarded.post(LENGTH + CLOSE, BODY, line=f"POST {target} HTTP/1.1")) == [404]


@pytest.mark.parametrize(
    "line",
    [
        *("GET /v1/models", "GET /v1/models HTTP/1.1 x", "GET  /v1/models HTTP/1.1", "GET\t/v1/models\tHTTP/1.1"),
        *(
            "GET /v1/models\0 HTTP/1.1",
            "GET /v1/mod\xe9ls HTTP/1.1",
            "GET /v1/models HTTP/x",
            "GET /v1/models http/1.1",
        ),
        *(" GET /v1/models HTTP/1.1", "G\xe9T /v1/models HTTP/1.1", "GET /v1/a b HTTP/1.1", "\x16\x03\x01\x00\xa5\x01"),
        *("GET /" + "a" * 100_000 + " HTTP/1.1", "G" * 100_000 + " / HTTP/1.1", "\r\nGET /v1/models HTTP/1.1"),
        "GET /v1/models HTTP/1.1\rx: y",
    ],
    ids=lambda line: line[:40],
)
def test_request_lines(guarded: Guarded, line: str) -> None:
    said = guarded.say(f"{line}\r\nhost: x\r\nauthorization: Bearer {guarded.key}\r\n\r\n".encode("latin-1"))
    assert said == ([431] if len(line) > 90_000 else [400])


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        # Two ends of one body.
        (LENGTH + CHUNKED, CHUNKS, 400),
        (CHUNKED + LENGTH, CHUNKS, 400),
        (CHUNKED + "content-length: 0\r\n", CHUNKS, 400),
        (LENGTH + LENGTH, BODY, 400),
        (LENGTH + "Content-Length: 5\r\n", BODY, 400),
        (f"content-length: {len(BODY)}, {len(BODY)}\r\n", BODY, 400),
        (f"content-length: +{len(BODY)}\r\n", BODY, 400),
        ("content-length: -1\r\n", BODY, 400),
        ("content-length: 0x10\r\n", BODY, 400),
        ("content-length: 1_0\r\n", BODY, 400),
        ("content-length: 1e1\r\n", BODY, 400),
        ("content-length: \xb2\r\n", BODY, 400),
        ("content-length:\r\n", BODY, 400),
        ("content-length : 5\r\n", BODY, 400),
        ("content-length\t: 5\r\n", BODY, 400),
        (" content-length: 5\r\n", BODY, 400),
        ("content-length: 99999999999999999999\r\n", BODY, 413),
        ("content_length: 5\r\n" + CHUNKED + "transfer_encoding: x\r\n", b"5\r\nabcdeZZ\r\n", 400),
        ("transfer-encoding: chunked, identity\r\n", CHUNKS, 400),
        ("transfer-encoding: identity, chunked\r\n", CHUNKS, 400),
        ("transfer-encoding: gzip, chunked\r\n", CHUNKS, 400),
        ("transfer-encoding: xchunked\r\n", CHUNKS, 400),
        ('transfer-encoding: "chunked"\r\n', CHUNKS, 400),
        ("transfer-encoding:\x0bchunked\r\n", CHUNKS, 400),
        ("transfer-encoding : chunked\r\n", CHUNKS, 400),
        (CHUNKED + CHUNKED, CHUNKS, 400),
        (CHUNKED + "transfer-encoding: x\r\n", CHUNKS, 400),
        # Lines that not everybody ends in the same place.
        (LENGTH + "x: a\r\n b\r\n", BODY, 400),
        ("transfer-encoding:\r\n chunked\r\n", CHUNKS, 400),
        ("transfer-encoding: chunked\r\n\t, identity\r\n", CHUNKS, 400),
        (LENGTH + "x: a\n", BODY, 400),
        (LENGTH + "x: a\ntransfer-encoding: chunked\r\n", BODY, 400),
        (LENGTH + "x: a\rtransfer-encoding: chunked\r\n", BODY, 400),
        (LENGTH + "x: a\r\r\n", BODY, 400),
        (LENGTH + "x: a\0b\r\n", BODY, 400),
        (LENGTH + "x\0: a\r\n", BODY, 400),
        (LENGTH + "x y: a\r\n", BODY, 400),
        (LENGTH + ": a\r\n", BODY, 400),
        (LENGTH + "no colon\r\n", BODY, 400),
        (LENGTH + "x\xe9: a\r\n", BODY, 400),
        # Chunks.
        (CHUNKED, b"-1\r\n" + BODY, 400),
        (CHUNKED, b"0x5\r\nabcde\r\n0\r\n\r\n", 400),
        (CHUNKED, b"g\r\n" + BODY, 400),
        (CHUNKED, b" 5\r\nabcde\r\n0\r\n\r\n", 400),
        (CHUNKED, b"5\r\nabcdeXX0\r\n\r\n", 400),
        (CHUNKED, b"5;a\nb\r\nabcde\r\n0\r\n\r\n", 400),
        (CHUNKED, b"f" * 21 + b"\r\n" + BODY, 400),
        (CHUNKED, b"f" * 16 + b"\r\n" + b"x" * 60_000, 413),
        (CHUNKED, b"fffffff\r\n" + BODY, 408),
        (CHUNKED, b"5\nabcde\n0\n\n", 400),
        (CHUNKED, b"5;" + b"a" * 40_000, 400),
        (CHUNKED, b"0\r\n" + b"a: b\r\n" * 20_000, 400),
        # What is said twice.
        (LENGTH + "host: y\r\n", BODY, 400),
        (LENGTH + "authorization: Bearer b\r\n", BODY, 400),
        (LENGTH + "content-type: text/plain\r\n", BODY, 400),
        # What is not spoken here.
        (LENGTH + "expect: 200-ok\r\n", BODY, 417),
        (LENGTH + "expect: 100-continue, x\r\n", BODY, 417),
        (LENGTH + "content-encoding: gzip\r\n", BODY, 415),
        (LENGTH + "content-encoding: identity, br\r\n", BODY, 415),
        ("content-length: 50001\r\n", BODY, 413),
        ("content-length: 50001\r\nexpect: 100-continue\r\n", b"", 413),
        ("content-length: 5000\r\n", b"{", 408),
    ],
)
def test_framing(guarded: Guarded, headers: str, body: bytes, status: int) -> None:
    smuggled = guarded.ask("/v1/models")
    assert guarded.say(guarded.post(headers, body + smuggled)) == [status]


@pytest.mark.parametrize("extra", ["", "x: 1\r\n" * 8_000, f"x: {'a' * 100_000}\r\n", f"{'a' * 100_000}: x\r\n"])
def test_heads_without_a_host_or_too_long(guarded: Guarded, extra: str) -> None:
    head = "GET /v1/models HTTP/1.1\r\n" + (f"host: x\r\n{extra}" if extra else "")
    said = guarded.say(f"{head}authorization: Bearer {guarded.key}\r\n\r\n".encode())
    assert said == ([431] if extra else [400])


@pytest.mark.parametrize("version", ["HTTP/1.0", "HTTP/1.1"])
def test_a_body_where_none_belongs(guarded: Guarded, version: str) -> None:
    smuggled = guarded.ask("/v1/models")
    asked = guarded.post(f"content-length: {len(smuggled)}\r\n", smuggled, line=f"GET /v1/models {version}")
    assert guarded.say(asked) == [400]
    assert guarded.say(guarded.post(CHUNKED, CHUNKS, line="POST /v1/completions HTTP/1.0")) == [400]


@pytest.mark.parametrize(
    "authorization",
    [
        *(
            "",
            "authorization:\r\n",
            "authorization: Bearer\r\n",
            "authorization: Bearer \r\n",
            "authorization: KEY\r\n",
        ),
        *("authorization: Bearer KEYx\r\n", "authorization: Bearer xKEY\r\n", "authorization: Bearer KEY,\r\n"),
        *("authorization: Bearer KEY KEY\r\n", "authorization: Bearer KEY, Bearer KEY\r\n"),
        *('authorization: Bearer "KEY"\r\n', "authorization: Bearer token=KEY\r\n", "authorization: BearerKEY\r\n"),
        *("authorization: Basic KEY\r\n", "authorization: Token KEY\r\n", "authorization: Bearer\tKEY\r\n"),
        *("authorization: Bearer \xa0KEY\r\n", "authorization: Bearer KEY\x85\r\n", "authorization: Bearer \xe9\r\n"),
        *(
            "authorization: Bearer lower(KEY)\r\n",
            "authorization: Bearer sha256(KEY)\r\n",
            "authorization: Bearer *\r\n",
        ),
        *(f"authorization: Bearer {'a' * 30_000}\r\n", "proxy-authorization: Bearer KEY\r\n", "x-api-key: KEY\r\n"),
        *("cookie: authorization=Bearer KEY\r\n", "x-forwarded-authorization: Bearer KEY\r\n", "api-key: KEY\r\n"),
        *("x-authorization: Bearer KEY\r\n", "authorization_: Bearer KEY\r\n", "Authorization: Bearer null\r\n"),
        "connection: authorization\r\nx-forwarded-for: 127.0.0.1\r\nx-real-ip: 127.0.0.1\r\n",
    ],
    ids=lambda header: header[:40].strip(),
)
def test_keys(guarded: Guarded, authorization: str) -> None:
    import hashlib

    given = authorization.replace("lower(KEY)", guarded.key.lower())
    given = given.replace("sha256(KEY)", hashlib.sha256(guarded.key.encode()).hexdigest()).replace("KEY", guarded.key)
    head = "host: x\r\nconnection: close\r\ncontent-type: application/json\r\n" + given
    target = f"/v1/completions?key={guarded.key}&api_key={guarded.key}&access_token={guarded.key}"
    said = guarded.hear(f"POST {target} HTTP/1.1\r\n{head}{LENGTH}\r\n".encode("latin-1") + BODY)
    assert said.startswith(b"HTTP/1.1 401 ")
    assert guarded.key.encode() not in said


@pytest.mark.parametrize("endpoint", [*ENDPOINTS, METRICS], ids=lambda endpoint: endpoint.label)
def test_no_endpoint_answers_without_a_key(guarded: Guarded, endpoint: Endpoint) -> None:
    path = endpoint.label.replace("NAME", "m")
    for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "CONNECT", "X"):
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\n{CLOSE}"
        if method == "POST":
            head += f"content-type: application/json\r\n{LENGTH}"
        said = guarded.hear(f"{head}\r\n".encode() + (BODY if method == "POST" else b""))
        if endpoint is METRICS and guarded.torchserve is not None:
            assert said.startswith(b"HTTP/1.1 404 "), "TorchServe has an address of its own for them"
            continue
        expected = 405 if method != endpoint.method else 200 if endpoint.public else 401
        assert said.startswith(b"HTTP/1.1 %d " % expected), method
        if expected == 200:
            assert path in ("/health/live", "/health/ready")
            assert json.loads(said.partition(b"\r\n\r\n")[2]) == {"status": "ok"}, "all that strangers are told"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"\xff\xfe{}", 400),
        (b"\xef\xbb\xbf" + BODY, 400),
        (BODY[:-1], 400),
        (BODY + BODY, 400),
        (BODY[:-1] + b', "model": "m"}', 400),
        (b'{"model": "m", "prompt": "\xff"}', 400),
        (b'{"model": "m", "prompt": "\\ud800"}', 400),
        (b'{"model": "m", "prompt": "\\udc00\\ud800"}', 400),
        (b'{"model": "m", "prompt": "a", "temperature": NaN}', 400),
        (b'{"model": "m", "prompt": "a", "temperature": 1e400}', 400),
        (b'{"model": "m", "prompt": "a", "temperature": -Infinity}', 400),
        (b'{"model": "m", "prompt": "a", "max_tokens": ' + b"9" * 5_000 + b"}", 400),
        (b'{"model": "m", "prompt": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", 400),
        (b'{"model":' * 4_000 + b"1" + b"}" * 4_000, 400),
        (b"[" * 40_000, 400),
        (b'{"model": "m", "model\\u0000": 1, "prompt": "a"}', 400),
        (b"model=m&prompt=a", 400),
        (b" " * 50_000, 400),
        (b" " * 50_001, 413),
    ],
    ids=lambda body: body[:30] if isinstance(body, bytes) else None,
)
def test_bodies(guarded: Guarded, body: bytes, status: int) -> None:
    # TorchServe answers for itself what only it can find; nothing of it reaches an engine.
    seen = len(guarded.opened.engine.seen)
    close = "connection: close\r\n"
    assert guarded.say(guarded.post(f"content-length: {len(body)}\r\n{close}", body)) == [status]
    assert len(guarded.opened.engine.seen) == seen
    guarded.may_reach = True


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "*/*"]
)
def test_other_types(guarded: Guarded, content_type: str) -> None:
    octets = guarded.post(LENGTH + CLOSE, BODY).replace(b"application/json", content_type.encode())
    assert guarded.say(octets) == [415]


@pytest.mark.parametrize("part", ["line", "head", "body", "chunks"])
def test_what_trickles_has_its_time(guarded: Guarded, part: str) -> None:
    slow = {
        "line": guarded.ask("/v1/models/" + "a" * 500),
        "head": b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + b"x: 1\r\n" * 100,
        "body": b" " * 500,
        "chunks": b"1\r\n \r\n" * 100,
    }[part]
    framing = {"body": "content-length: 500\r\n", "chunks": CHUNKED}
    began = time.monotonic()
    if part in framing:
        with socket.create_connection(("127.0.0.1", guarded.opened.port), timeout=30) as connection:
            connection.sendall(guarded.post(framing[part]))
            said = b""
            with contextlib.suppress(ConnectionError):
                for octet in slow:
                    connection.sendall(bytes([octet]))
                    time.sleep(0.01)
            with contextlib.suppress(ConnectionError):
                said = connection.recv(65_536)
        assert said == b"" or said.startswith(b"HTTP/1.1 408 ")
    else:
        assert guarded.say(slow, trickle_s=0.01) == []
    assert 0.3 < time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        (CHUNKED, CHUNKS),
        ("Transfer-Encoding: Chunked\r\n", CHUNKS),
        (CHUNKED, b"%x;name=value\r\n%b\r\n0;last\r\n\r\n" % (len(BODY), BODY)),
        (CHUNKED, b"%x\r\n%b\r\n0\r\nauthorization: Bearer x\r\ncontent-length: 5\r\n\r\n" % (len(BODY), BODY)),
        (f"content-length: 000{len(BODY)}\r\n", BODY),
        (f"content-length: {len(BODY)} \r\n", BODY),
        (LENGTH + "expect: 100-continue\r\n", BODY),
        (LENGTH + "connection: authorization, content-length\r\n", BODY),
        (LENGTH + "keep-alive: timeout=9\r\nte: trailers\r\nupgrade: h2c\r\nconnection: upgrade\r\n", BODY),
        (LENGTH + "x-http-method-override: DELETE\r\nx-method-override: PUT\r\n", BODY),
        (LENGTH + "x-original-url: /models\r\nx-rewrite-url: /models/m?customized=true\r\n", BODY),
        (LENGTH + "x-forwarded-host: a\r\nx-forwarded-prefix: /models\r\nforwarded: for=1\r\nvia: x\r\n", BODY),
        (LENGTH + "url_path: ../../models\r\nts_stream_next: true\r\nx-request-id: a%0d%0aset-cookie:b\r\n", BODY),
        (LENGTH + "x-client-request-id: a b\r\nofframp-request-id: mine\r\ncookie: a=b\r\n", BODY),
        (LENGTH + "content-encoding: identity\r\naccept-encoding: gzip, br\r\nrange: bytes=0-1\r\n", BODY),
    ],
)
def test_what_is_taken_stays_at_the_door(guarded: Guarded, headers: str, body: bytes) -> None:
    if guarded.torchserve is not None:
        guarded.torchserve.asked.clear()
    guarded.may_reach = True
    said = b""
    with guarded.opened.connect(guarded.post(headers, body)) as connection:
        while not said.endswith(b"}}"):  # the end of a completion
            piece = connection.recv(65_536)
            assert piece, said
            said += piece
    assert said.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").startswith(b"HTTP/1.1 200 "), said
    for word in (b"set-cookie", b"a%0d", b"mine", b"content-encoding", b"upgrade"):
        assert word not in said.lower()
    if guarded.torchserve is not None:
        [came] = [asked for asked in guarded.torchserve.asked if asked[0] == "POST"]
        assert came[1] == "/predictions/m/1.0/v1/completions"
        assert came[2]["content-length"] == str(len(BODY))
        assert set(came[2]) == {
            *("host", "accept", "accept-encoding", "user-agent"),
            *("content-type", "content-length", "offramp-request-id"),
        }


@pytest.mark.parametrize("rest", [b"\r\n", b"\0\0", b"GET /v1/models HTTP/1.1\r\n", b"x" * 1_000_000])
@pytest.mark.parametrize("headers", ["", "connection: close\r\n"])
def test_who_leaves_is_noticed_whatever_else_was_said(guarded: Guarded, headers: str, rest: bytes) -> None:
    engine, guarded.may_reach = guarded.opened.engine, True
    seen, cancelled = len(engine.seen), len(engine.cancelled)
    body = json.dumps({"model": "m", "prompt": [4], "max_tokens": 50_000}).encode()
    with guarded.opened.connect(guarded.post(f"content-length: {len(body)}\r\n{headers}", body)) as connection:
        eventually(lambda: len(engine.seen) > seen)
        with contextlib.suppress(ConnectionError):
            connection.sendall(rest)
    eventually(lambda: len(engine.cancelled) > cancelled, 10)


def test_a_line_break_too_many_is_no_fault(guarded: Guarded) -> None:
    guarded.may_reach = True
    for connection in ("close", "keep-alive"):
        asked = guarded.post(f"{LENGTH}connection: {connection}\r\n", BODY + b"\r\n")
        assert guarded.say(asked)[0] == 200
