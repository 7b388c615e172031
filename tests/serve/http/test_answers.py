"""What comes through the door, with a real client on a real socket."""

from __future__ import annotations

import json

import openai
import pytest

from helpers.door import MAX_REQUESTS, Opened, post
from helpers.sinks import eventually


@pytest.fixture
def client(either: Opened) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{either.server.url}/v1", api_key="none", max_retries=0, timeout=20)


def test_an_openai_client_is_served(client: openai.OpenAI) -> None:
    asked = {"model": "m", "prompt": "a", "max_tokens": 4}
    whole = client.completions.create(**asked)
    assert whole.choices[0].text == " 0 1 2 3"
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == " 0 1 2 3"
    assert chunks[-1].usage == whole.usage
    messages = [{"role": "user", "content": "Hi"}]
    chat = client.chat.completions.create(model="m@1.0", messages=messages, max_tokens=2)  # pyright: ignore[reportArgumentType]
    assert chat.choices[0].message.content == " 0 1"
    assert [model.id for model in client.models.list().data] == ["m"]
    assert client.models.retrieve("m").id == "m"


def test_an_openai_client_is_refused_in_its_own_words(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="Unrecognized request argument supplied: top_q"):
        client.completions.create(model="m", prompt="a", extra_body={"top_q": 1})
    for model in ("gpt", "m@2.0"):
        with pytest.raises(openai.NotFoundError, match="does not exist; served here: 'm'"):
            client.completions.create(model=model, prompt="a")
    with pytest.raises(openai.NotFoundError, match="Unknown endpoint"):
        client.embeddings.create(model="m", input="a")


def test_headers_of_an_answer(either: Opened) -> None:
    _, headers, answer = either.complete(max_tokens=1)
    assert (headers["offramp-version"], headers["content-type"]) == ("1.0", "application/json")
    assert answer["id"] == f"cmpl-{headers['x-request-id']}"
    assert "server" not in headers
    assert not any(name.startswith("access-control") for name in headers), "cross-origin use is off"
    _, headers, _ = either.complete(max_tokens=1, stream=True)
    assert (headers["content-type"], headers["transfer-encoding"]) == ("text/event-stream", "chunked")


def test_events_are_sent_as_they_come(either: Opened) -> None:
    steps = either.engine.iterations
    with either.connect(post(max_tokens=300, stream=True)) as connection:
        while b"data: " not in connection.recv(65_536):
            pass
        assert either.engine.iterations - steps < 290
        while b"[DONE]" not in connection.recv(65_536):
            pass


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_cancelled(either: Opened, stream: bool) -> None:
    seen, cancelled = len(either.engine.seen), len(either.engine.cancelled)
    connection = either.connect(post(max_tokens=50_000, stream=stream))
    eventually(lambda: len(either.engine.seen) > seen)
    connection.close()
    eventually(lambda: len(either.engine.cancelled) > cancelled, 5)
    assert either.engine.cancelled[-1] == either.engine.seen[-1]


def test_too_many_requests_wait_for_nobody(either: Opened) -> None:
    seen = len(either.engine.seen)
    with either.connect(post(prompt=[[4]] * MAX_REQUESTS, max_tokens=50_000, stream=True)):
        eventually(lambda: len(either.engine.seen) == seen + MAX_REQUESTS)
        status, headers, answer = either.complete(max_tokens=1)
    assert (status, headers["retry-after"], answer["error"]["code"]) == (429, "1", "queue_full")
    eventually(lambda: either.complete(max_tokens=1)[0] == 200)


def test_health(either: Opened) -> None:
    for path in ("/health/live", "/health/ready"):
        status, _, body = either.ask("GET", path)
        assert (status, json.loads(body)) == (200, {"status": "ok"})


def test_the_api_is_described(either: Opened) -> None:
    status, _, body = either.ask("GET", "/openapi.json")
    document = json.loads(body)
    assert (status, document["openapi"]) == (200, "3.1.0")
    assert "security" not in document, "this door asks for no key"
    assert document["components"]["schemas"]["ChatBody"]["properties"]["model"]["anyOf"][0] == {"enum": ["m"]}


def test_connections_are_kept(either: Opened) -> None:
    second = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    with either.connect(post(max_tokens=1) + second) as both:
        said = b""
        while piece := both.recv(65_536):
            said += piece
    assert said.count(b"HTTP/1.1 200") == 2
