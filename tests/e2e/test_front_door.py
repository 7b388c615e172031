"""One door, a real engine behind it: in this process, and in a real TorchServe. What a client sees is the same."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from benchmarks.door.openai_client import OpenAIClient
from benchmarks.door.random_clients import Question, ask_beforehand, load
from benchmarks.door.servers import Door

from helpers.behind import CONFIG, Behind, torchserve_behind
from helpers.door import post
from helpers.sinks import eventually
from helpers.torchserve import CACHE_TOKENS, MAX_NUM_SEQS, MAX_WAITING, NAME, Served, make_checkpoint

pytestmark = pytest.mark.slow

END_TOKEN = 1  # of the tokenizer; the model never stops by itself
TEXTS: dict[str, str] = {}
"""What each backend has said to the same question."""


def test_the_answer_is_the_same_whatever_is_behind(behind: Behind) -> None:
    asked = {"model": NAME, "prompt": "Once", "max_tokens": 40, "temperature": 0}
    extra = {"offramp": {"return_exit_layers": True}}
    whole = behind.client.completions.create(**asked, extra_body=extra)
    chunks = list(behind.client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage
    assert whole.model_extra is not None
    TEXTS[behind.key] = whole.choices[0].text + json.dumps(whole.model_extra["offramp"])
    assert len(set(TEXTS.values())) == 1
    messages = [{"role": "user", "content": "Hi"}]
    chat = behind.client.chat.completions.create(model=f"{NAME}@1.0", messages=messages, max_tokens=5)  # pyright: ignore[reportArgumentType]
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 5
    assert behind.client.models.retrieve(NAME).id == NAME


def test_the_official_client_finds_no_fault(behind: Behind) -> None:
    url = f"{behind.opened.server.url}/v1"
    tried, faults = OpenAIClient(url, behind.key, NAME, END_TOKEN).run(together=MAX_NUM_SEQS)
    assert len(tried) > 10
    assert faults == []


def test_refusals_are_the_same_whatever_is_behind(behind: Behind) -> None:
    client = behind.client
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.BadRequestError, match="Unrecognized request argument supplied: top_q"):
        client.completions.create(model=NAME, prompt="a", extra_body={"top_q": 1})
    for model in ("gpt", f"{NAME}@9"):
        with pytest.raises(openai.NotFoundError, match="does not exist; served here"):
            client.completions.create(model=model, prompt="a")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=NAME, prompt="a", extra_body={"structured_outputs": {"regex": "("}})
    assert caught.value.param == "structured_outputs"
    with pytest.raises(openai.BadRequestError, match="tokens"):
        client.completions.create(model=NAME, prompt=[5] * 20_000)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_cancelled(behind: Behind, stream: bool) -> None:
    head = f"authorization: Bearer {behind.key}\r\n"
    connection = behind.opened.connect(post(headers=head, model=NAME, max_tokens=10_000, stream=stream))
    eventually(lambda: behind.running() == 1, 20, every_s=0.05)
    connection.close()
    # Ten thousand tokens take much longer.
    eventually(lambda: behind.running() == 0, 20, every_s=0.05)


def test_a_full_queue_is_429(behind: Behind) -> None:
    together = MAX_NUM_SEQS + MAX_WAITING
    asked = {"model": NAME, "prompt": [[5]] * together, "max_tokens": 300}
    with behind.client.completions.create(**asked, stream=True) as stream:
        next(stream)
        with pytest.raises(openai.RateLimitError, match=f"as many requests as it takes, {together}") as caught:
            behind.client.completions.create(model=NAME, prompt=[5], max_tokens=1)
        assert caught.value.response.headers["retry-after"] == "1"
        assert sum(choice.finish_reason == "length" for chunk in stream for choice in chunk.choices) == together


def test_what_stops_a_model_cannot_be_asked(behind: Behind) -> None:
    head = f"host: x\r\nauthorization: Bearer {behind.key}\r\nurl_path: v1/models\r\n\r\n"
    for path, status in (
        (f"/models/{NAME}?customized=true", 404),
        (f"/v1/models/{NAME}?customized=true", 200),
        (f"/predictions/{NAME}/1.0/health", 404),
        (f"/v1/models/{NAME}/../../../models/{NAME}?customized=true", 404),
    ):
        assert behind.opened.knock(f"GET {path} HTTP/1.1\r\n{head}".encode())[0] == status
    assert behind.client.completions.create(model=NAME, prompt=[5], max_tokens=1).choices[0].finish_reason == "length"


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> list[Question]:
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("beforehand") / "checkpoint")
    questions, cache_tokens = ask_beforehand(checkpoint, CONFIG, model=NAME, seed=0, count=20)
    assert cache_tokens == CACHE_TOKENS
    return questions


def test_random_clients_get_what_they_should_and_leave_nothing(behind: Behind, questions: list[Question]) -> None:
    door = Door(behind.opened.port, behind.key, NAME, {})
    outcome = asyncio.run(load(door, questions, seconds=5, clients=16, seed=0))
    assert outcome.faults == []
    for what in (("stream", 200), ("whole", 200), ("leave", 200), ("reset", 0)):
        assert outcome.counts[what] > 0
    eventually(lambda: behind.running() == 0, 20, every_s=0.05)
    # TorchServe's gauges are written after an iteration.
    assert behind.client.completions.create(model=NAME, prompt=[5], max_tokens=2).usage is not None
    eventually(lambda: behind.live_blocks() == 0, 20, every_s=0.05)


def test_a_dead_worker_is_said_and_a_new_one_answers(tmp_path_factory: pytest.TempPathFactory, served: Served) -> None:
    with torchserve_behind(tmp_path_factory.mktemp("door"), served) as behind:
        stream = behind.client.completions.create(model=NAME, prompt=[5], max_tokens=10_000, stream=True)
        next(iter(stream))
        children = served.process.children(recursive=True)
        [worker] = [child for child in children if any("model_service_worker" in part for part in child.cmdline())]
        worker.kill()
        with pytest.raises(openai.APIError, match="send the request again"):
            list(stream)
        eventually(lambda: behind.opened.ask("GET", "/health/ready")[0] == 503, 20, every_s=0.05)
        eventually(lambda: behind.opened.ask("GET", "/health/ready")[0] == 200, 60, every_s=0.2)
        answer = behind.client.completions.create(model=NAME, prompt=[5], max_tokens=4)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4
