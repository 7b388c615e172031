"""What does not get through the door: paths, methods, framing, and bodies too long or too slow."""

from __future__ import annotations

import json
import time

import pytest

from helpers.door import Opened, post

GET = "GET {} HTTP/1.1\r\nhost: x\r\n\r\n"
JSON = "content-type: application/json\r\n"


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1",
        "/v1/",
        "/v1/models/",
        "//v1/models",
        "/v1//models",
        "/v1/models/..",
        "/v1/../models/m",
        "/v1/%6dodels",
        "/v1/models/%2e%2e",
        "/v1/models/m%2f..%2f..",
        "/v1/models/m%00",
        "/v1/models/m;x=1",
        "/v1/models\\m",
        "/V1/models",
        "/models",
        "/models/m?customized=true",
        "/predictions/m/1.0/v1/models",
        "/v1/models/m/../../models/m?customized=true",
        "/ping",
        "/api-description",
        "/workflows",
        "http://127.0.0.1:8081/models",
        "http://x/v1/models",
        "*",
    ],
)
def test_other_paths_are_404(opened: Opened, path: str) -> None:
    status, body = opened.knock(GET.format(path).encode())
    assert status == 404
    assert json.loads(body)["error"]["code"] == "unknown_url"


def test_a_query_changes_nothing(opened: Opened) -> None:
    assert opened.ask("GET", "/v1/models/m?customized=true")[2] == opened.ask("GET", "/v1/models/m")[2]


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS", "HEAD", "TRACE", "PATCH"])
def test_other_methods_are_405(opened: Opened, method: str) -> None:
    status, headers, _ = opened.ask(method, "/v1/completions")
    assert (status, headers["allow"]) == (405, "POST")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("content-length: 5\r\ntransfer-encoding: chunked\r\n", 400),
        ("transfer-encoding: chunked\r\ncontent-length: 0\r\n", 400),
        ("content-length: 5\r\ncontent-length: 6\r\n", 400),
        ("content-length: +5\r\n", 400),
        ("content-length: -1\r\n", 400),
        ("content-length: 5, 6\r\n", 400),
        ("content-length : 5\r\n", 400),
        ("transfer-encoding: gzip\r\n", 501),
        ("transfer-encoding: chunked, identity\r\n", 501),
        ("transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n", 501),
        ("transfer-encoding:\x0bchunked\r\n", 400),
        ("content-length: 5\r\ncontent-encoding: gzip\r\n", 415),
        ("content-length: 5\r\ncontent-type: text/plain\r\n", 400),
        ("content-length: 5\r\nhost: y\r\n", 400),
        ("content-length: 5\r\nauthorization: Bearer a\r\nauthorization: Bearer b\r\n", 400),
        ("content-length: 99999999999999999999999999999999\r\n", 413),
    ],
)
def test_doubtful_framing_is_refused(opened: Opened, head: str, status: int) -> None:
    smuggled = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    sent = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{JSON}{head}\r\n".encode() + b"0\r\n\r\n" + smuggled
    with opened.connect(sent) as connection:
        said = b""
        while piece := connection.recv(65_536):  # until the end: the connection is not kept
            said += piece
    lines = [line for line in said.split(b"\r\n") if line.startswith(b"HTTP/1.1")]
    assert [int(line.split()[1]) for line in lines] in ([status], [400]), said


def test_a_body_where_none_belongs_is_refused(opened: Opened) -> None:
    assert opened.knock(b"GET /v1/models HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nGET /")[0] == 400


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_only_json_is_read(opened: Opened, content_type: str) -> None:
    status, _, body = opened.ask("POST", "/v1/completions", b"{}", {"content-type": content_type})
    assert status == 415
    assert "application/json" in json.loads(body)["error"]["message"]


def test_a_body_that_is_announced_too_long_is_not_waited_for(opened: Opened) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{JSON}content-length: 50001\r\nexpect: 100-continue\r\n\r\n"
    status, body = opened.knock(head.encode())
    assert status == 413
    assert "50000 bytes" in json.loads(body)["error"]["message"]


def test_a_client_that_sends_on_learns_why_it_is_refused(opened: Opened) -> None:
    status, _, body = opened.ask("POST", "/v1/completions", b"x" * 12_000_000)
    assert (status, json.loads(body)["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    "head", ["content-length: 5, 6\r\n", "content-length: 2000000\r\ntransfer-encoding: chunked\r\n"]
)
def test_a_client_whose_body_follows_a_head_that_is_none_learns_it(opened: Opened, head: str) -> None:
    with opened.connect(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{JSON}{head}\r\n".encode()) as connection:
        for _ in range(4):  # with what comes after a reset the system would tell of it
            time.sleep(0.02)
            connection.sendall(b"x" * 500_000)
        assert connection.recv(65_536).startswith(b"HTTP/1.1 400 ")


def test_a_body_that_grows_too_long_is_not_read_to_the_end(opened: Opened) -> None:
    chunk = b"2710\r\n" + b" " * 10_000 + b"\r\n"
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{JSON}transfer-encoding: chunked\r\n\r\n".encode()
    assert opened.knock(head + chunk * 6)[0] == 413


def test_a_body_that_does_not_come_is_not_waited_for(opened: Opened) -> None:
    status, _ = opened.knock(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{JSON}content-length: 5\r\n\r\n{{".encode())
    assert status == 408


@pytest.mark.parametrize("sent", [b"", b"GET /v1/models HTTP/1.1\r\nhost: x\r\n", post(max_tokens=1) + b"GET /"])
def test_a_head_that_does_not_come_ends_the_connection(opened: Opened, sent: bytes) -> None:
    began = time.monotonic()
    with opened.connect(sent) as connection:
        said = b""
        try:
            while piece := connection.recv(65_536):
                said += piece
        except ConnectionResetError:
            pass
    assert 0.3 < time.monotonic() - began < 10
    assert said.count(b"HTTP/1.1") == (1 if sent.startswith(b"POST") else 0)


def test_a_head_that_is_too_long_is_refused(opened: Opened) -> None:
    assert opened.knock(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 1_000_000 + b"\r\n\r\n")[0] in (
        0,
        400,
        431,
    )
