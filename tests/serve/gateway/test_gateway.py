"""The gateway in front of something that speaks as TorchServe does; what the door itself does is tested beside it."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from starlette.responses import JSONResponse, StreamingResponse

from helpers.door import Opened, open_door, post
from helpers.fake_torchserve import FakeTorchServe, open_gateway, own_words
from helpers.openai_service import Engine
from helpers.sinks import eventually
from offramp.common.errors import OfframpError
from offramp.serve.gateway.settings import GatewaySettings
from offramp.serve.gateway.torchserve_backend import TorchServeBackend
from offramp.serve.http.keys import add_key
from offramp.serve.http.settings import make_settings, read_settings


@pytest.fixture(scope="module")
def torchserve() -> Iterator[FakeTorchServe]:
    with FakeTorchServe().running() as running:
        yield running


@pytest.fixture(scope="module")
def gateway(torchserve: FakeTorchServe) -> Iterator[Opened]:
    with open_gateway({"m": {"url": torchserve.url, "management": torchserve.url}}, torchserve.engine) as opened:
        yield opened


def late(kind: str, code: str | None) -> JSONResponse:
    return JSONResponse({"error": {"message": "m", "type": kind, "param": None, "code": code}})


def ready(opened: Opened) -> bool:
    return opened.ask("GET", "/health/ready")[0] == 200


def test_models_are_known_without_asking(gateway: Opened, torchserve: FakeTorchServe) -> None:
    eventually(lambda: ready(gateway))
    _, _, listed = gateway.ask("GET", "/v1/models")
    assert [model["id"] for model in json.loads(listed)["data"]] == ["m"]
    status, _, card = gateway.ask("GET", "/v1/models/m")
    assert (status, json.loads(card)["offramp"]["version"]) == (200, "1.0")
    assert gateway.ask("GET", "/v1/models/other")[0] == 404
    assert gateway.complete()[2]["model"] == "m"


def test_nothing_of_a_client_gets_behind(gateway: Opened, torchserve: FakeTorchServe) -> None:
    eventually(lambda: ready(gateway))
    torchserve.asked.clear()
    headers = {
        "authorization": "Bearer secret",
        "cookie": "a=b",
        "url_path": "v1/models",
        "x-forwarded-for": "1.2.3.4",
        "accept-encoding": "gzip",
        "connection": "keep-alive, x-hop",
        "x-hop": "1",
        "offramp-request-id": "mine",
    }
    body = b'{"model": "m", "prompt": [4], "max_tokens": 2}'
    status, told, _ = gateway.ask("POST", "/v1/completions?customized=true", body, headers)
    assert status == 200
    [(method, path, came)] = [asked for asked in torchserve.asked if asked[0] == "POST"]
    assert (method, path) == ("POST", "/predictions/m/1.0/v1/completions")
    assert came["offramp-request-id"] == told["x-request-id"]
    assert set(came) == {
        *("host", "accept", "accept-encoding", "user-agent"),
        *("content-type", "content-length", "offramp-request-id"),
    }
    assert not any("?" in path for _, path, _ in torchserve.asked)
    assert "ts_stream_next" not in told
    assert told["x-request-id"] != "of-torchserve"
    assert told["offramp-version"] == "1.0"


@pytest.mark.parametrize("name", ["m/1.0/../..", "m@..", "m@1.0/x", "m@", "m@1.0?customized=true", "", "gpt", "M"])
def test_a_model_is_a_name_and_no_path(gateway: Opened, torchserve: FakeTorchServe, name: str) -> None:
    eventually(lambda: ready(gateway))
    status, _, answer = gateway.complete(model=name)
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"prompt": "a"}', "Missing required parameter: 'model'"),
        (b'{"model": 3}', "Invalid value for 'model'"),
        (b'{"model": null}', "Missing required parameter: 'model'"),
        (b"[]", "must be a JSON object"),
        (b"{", "cannot be read as JSON"),
        (b"", "has no body"),
    ],
)
def test_a_body_without_a_model_goes_nowhere(gateway: Opened, body: bytes, message: str) -> None:
    status, _, answer = gateway.ask("POST", "/v1/completions", body)
    assert status == 400
    assert message in json.loads(answer)["error"]["message"]


def test_streams_are_passed_on_as_they_come(gateway: Opened, torchserve: FakeTorchServe) -> None:
    eventually(lambda: ready(gateway))
    steps = torchserve.engine.iterations
    with gateway.connect(post(max_tokens=300, stream=True)) as connection:
        while b"data: " not in connection.recv(65_536):
            pass
        assert torchserve.engine.iterations - steps < 290
        while b"[DONE]" not in connection.recv(65_536):
            pass


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_cancelled_behind(gateway: Opened, torchserve: FakeTorchServe, stream: bool) -> None:
    eventually(lambda: ready(gateway))
    engine = torchserve.engine
    seen, cancelled = len(engine.seen), len(engine.cancelled)
    connection = gateway.connect(post(max_tokens=50_000, stream=stream))
    eventually(lambda: len(engine.seen) > seen)
    connection.close()
    eventually(lambda: len(engine.cancelled) > cancelled, 5)


def test_refusals_behind_keep_their_words(gateway: Opened) -> None:
    eventually(lambda: ready(gateway))
    status, _, answer = gateway.complete(temperature=9)
    assert (status, answer["error"]["param"]) == (400, "temperature")


@pytest.mark.parametrize(
    ("said", "status", "code"),
    [
        (own_words(503, 'Model "m" Version 1.0" has no worker to serve inference request.'), 429, "queue_full"),
        (own_words(500, "Worker died."), 503, "server_gone"),
        (own_words(507, "Out of resources"), 503, "server_gone"),
        (own_words(413, "Request Entity Too Large"), 413, "request_too_large"),
        # Found after the status was out: the body is the error that the status should have said.
        (
            JSONResponse({"error": {"message": "m", "type": "server_error", "param": None, "code": "engine_dead"}}),
            503,
            "engine_dead",
        ),
        (
            JSONResponse({"error": {"message": "m", "type": "rate_limit_error", "param": None, "code": "queue_full"}}),
            429,
            "queue_full",
        ),
        (
            JSONResponse({"error": {"message": "m", "type": "invalid_request_error", "param": None, "code": None}}),
            400,
            None,
        ),
    ],
)
def test_what_torchserve_says_is_said_in_the_words_of_the_api(
    gateway: Opened, torchserve: FakeTorchServe, said: JSONResponse, status: int, code: str | None
) -> None:
    eventually(lambda: ready(gateway))
    torchserve.saying = [said]
    found, headers, answer = gateway.complete()
    assert (found, answer["error"]["code"]) == (status, code)
    assert ("retry-after" in headers) == (status in (429, 503) and said.status_code != 200)


async def breaking() -> AsyncIterator[bytes]:
    yield b"data: 1\n\n"
    raise RuntimeError("broken on purpose")


def test_a_stream_that_is_cut_behind_ends_with_an_error(gateway: Opened, torchserve: FakeTorchServe) -> None:
    eventually(lambda: ready(gateway))
    torchserve.saying = [StreamingResponse(breaking(), media_type="text/event-stream")]
    status, _, body = gateway.complete(stream=True)
    assert status == 200
    first, last, done, _ = body.split(b"\n\n")
    assert (first, done) == (b"data: 1", b"data: [DONE]")
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "server_gone"


def test_a_whole_answer_that_is_cut_behind_is_an_error(gateway: Opened, torchserve: FakeTorchServe) -> None:
    eventually(lambda: ready(gateway))
    torchserve.saying = [StreamingResponse(breaking(), media_type="application/json")]
    status, _, answer = gateway.complete()
    assert (status, answer["error"]["code"]) == (503, "server_gone")


def test_a_version_by_its_name_and_a_switch_of_the_default(
    gateway: Opened, torchserve: FakeTorchServe, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    eventually(lambda: ready(gateway))

    def asked(version: str) -> bool:
        return any(path.startswith(f"/predictions/m/{version}/") for _, path, _ in torchserve.asked)

    torchserve.versions = {"1.0", "2.0"}
    gateway.complete(model="m@2.0")
    assert asked("2.0")
    assert gateway.complete(model="m@3.0")[0] == 404
    torchserve.asked.clear()
    torchserve.default = "2.0"

    def told_of_the_new_one() -> bool:
        # It is never gone from the list meanwhile.
        assert json.loads(gateway.ask("GET", "/v1/models/m")[2])["id"] == "m"
        return asked("2.0")

    eventually(told_of_the_new_one)
    eventually(lambda: "Model m: version 2.0 answers" in caplog.text)
    eventually(lambda: ready(gateway))
    # Gone before the gateway has looked again: it looks, and asks the new one.
    torchserve.default, torchserve.versions = "1.0", {"1.0"}
    assert gateway.complete()[0] == 200


def test_readiness_tells_the_truth(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine = Engine()
    with FakeTorchServe(engine).running() as torchserve:
        models = {"m": {"url": torchserve.url, "version": "1.0"}}
        with open_gateway(models, engine) as opened:
            eventually(lambda: ready(opened))
            torchserve.versions = set()
            eventually(lambda: not ready(opened))
            torchserve.versions = {"1.0"}
            eventually(lambda: ready(opened))
    # Nothing listens there any more.
    with open_gateway(models, engine) as opened:
        status, headers, answer = opened.complete()
        assert (status, answer["error"]["code"], headers["retry-after"]) == (503, "server_gone", "2")
        assert opened.ask("GET", "/health/live")[0] == 200
        status, _, said = opened.ask("GET", "/health/ready")
        assert status == 503
        assert "Not ready: model m: it does not answer." in said.decode(), "and not where it was asked for"
        assert "Model m: version 1.0 answers" in caplog.text
        assert (
            f"Model m: it does not answer: ClientConnectorError Cannot connect to host {torchserve.url[7:]}"
            in caplog.text
        )
        assert opened.ask("GET", "/v1/models/m")[0] == 503


def test_keys_of_torchserve_are_read_and_renewed(tmp_path: Path) -> None:
    engine = Engine()
    with FakeTorchServe(engine).running() as torchserve:
        torchserve.key_file = tmp_path / "key_file.json"
        torchserve.write_keys(expired=True)
        key_file = str(torchserve.key_file)
        models = {"m": {"url": torchserve.url, "management": torchserve.url, "key_file": key_file}}
        with open_gateway(models, engine) as opened:
            eventually(lambda: ready(opened))
            assert opened.complete(max_tokens=1)[0] == 200
            torchserve.write_keys(expired=False)  # renewed by somebody else
            assert opened.complete(max_tokens=1)[0] == 200
            torchserve.write_keys(expired=True)
            assert opened.complete(max_tokens=1)[0] == 200
            # Started again, with its keys elsewhere.
            torchserve.key_file.write_text("{}")
            torchserve.key_file = tmp_path / "elsewhere.json"
            torchserve.write_keys(expired=False)
            eventually(lambda: not ready(opened))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": None}, "'keys'"),
        ({"models": {}}, "'models' Dictionary should have at least 1 item"),
        ({"models": {"a/b": {"url": "http://h:1", "version": "1"}}}, "'models.a/b.[key]'"),
        ({"models": {"m": {"url": "http://h:1"}}}, "'models.m' either 'version' or 'management'"),
        (
            {"models": {"m": {"url": "http://h:1", "version": "1", "key_file": "k"}}},
            "'models.m' 'key_file' needs 'management'",
        ),
        ({"models": {"m": {"url": "http://h:1/x?y", "version": "1"}}}, "'models.m.url'"),
        ({"models": {"m": {"url": "http://u:p@h:1", "version": "1"}}}, "'models.m.url'"),
        ({"models": {"m": {"url": "http://h:1", "version": "1/../2"}}}, "'models.m.version'"),
    ],
)
def test_settings_are_checked_in_one_sentence(change: dict[str, object], message: str) -> None:
    given = {"keys": "keys.json", "models": {"m": {"url": "http://127.0.0.1:1", "version": "1"}}}
    with pytest.raises(OfframpError) as caught:
        make_settings(GatewaySettings, {**given, **change}, where="gateway.yaml")
    assert str(caught.value).startswith(f"gateway.yaml: {message}")


def test_keys_are_asked_for_at_the_gateway(tmp_path: Path, torchserve: FakeTorchServe) -> None:
    secret = add_key(tmp_path / "keys.json", "alice")
    file = tmp_path / "gateway.yaml"
    file.write_text(f"keys: keys.json\nport: 0\nmodels: {{m: {{url: '{torchserve.url}', version: '1.0'}}}}\n")
    settings = read_settings(file, GatewaySettings)
    with open_door(TorchServeBackend(settings), torchserve.engine, keys=str(settings.keys)) as opened:
        torchserve.asked.clear()
        assert opened.complete()[0] == 401
        assert not any(method == "POST" for method, _, _ in torchserve.asked)
        assert opened.complete({"authorization": f"Bearer {secret}"}, max_tokens=1)[0] == 200
    assert secret not in json.dumps(torchserve.asked)
