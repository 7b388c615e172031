"""The OpenAI service over a real engine with a tiny model: what the fake engine cannot be wrong about."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.tiny import tiny_checkpoint
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy
from offramp.serve.config import EngineConfig
from offramp.serve.engine import Engine
from offramp.serve.engine_thread import EngineThread
from offramp.serve.protocol.card import ModelCard
from offramp.serve.protocol.replies import Complete, Generation
from offramp.serve.protocol.service import OpenAIService

COMPLETIONS, CHAT = "v1/completions", "v1/chat/completions"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    directory = tiny_checkpoint(
        tmp_path_factory.mktemp("openai") / "model", ExitConfig((1, 2), "norm"), ExitPolicy("margin", {1: 0.3, 2: 0.3})
    )
    return Engine.from_checkpoint(directory, EngineConfig(block_size=4, num_blocks=256, max_num_seqs=8))


@pytest.fixture(scope="module")
def service(engine: Engine) -> Iterator[OpenAIService]:
    thread = EngineThread(engine, max_requests=16)
    card = ModelCard.of(engine.checkpoint, name="m", version="1", max_model_len=256, cache_tokens=engine.cache_tokens)
    yield OpenAIService(thread, engine.tokenizer, card)
    thread.close()


def ask(service: OpenAIService, path: str = COMPLETIONS, **fields: Any) -> Any:
    """The answer, or the events of a stream."""
    if path == CHAT:
        fields = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    reply = service.open(path, json.dumps({"model": "m", **fields}).encode(), f"{time.monotonic_ns()}")
    assert isinstance(reply, Generation), reply
    body = b""
    deadline = time.monotonic() + 20
    last = False
    while not last:
        piece, last = reply.take(1_000_000)
        body += piece
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert not reply.failed, body
    if reply.stream:
        return [json.loads(line.removeprefix("data: ")) for line in body.decode().split("\n\n")[:-2]]
    return json.loads(body)


def texts(answer: dict[str, Any]) -> list[str]:
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in answer["choices"]]


def refusal(service: OpenAIService, **fields: Any) -> dict[str, Any]:
    reply = service.open(COMPLETIONS, json.dumps({"model": "m", "prompt": "a", **fields}).encode(), "refused")
    assert isinstance(reply, Complete), reply
    assert reply.status == 400
    return json.loads(reply.body)["error"]


def test_choices_that_share_a_seed_differ_and_come_again(service: OpenAIService) -> None:
    asked = {"prompt": ["one", "two"], "n": 3, "seed": 5, "max_tokens": 10, "temperature": 1.5, "ignore_eos": True}
    first = texts(ask(service, **asked))
    assert len(set(first)) == 6
    assert texts(ask(service, **asked)) == first
    assert texts(ask(service, **{**asked, "n": 1})) == [first[0], first[3]]
    events = ask(service, **asked, stream=True)
    pieces = [choice for event in events for choice in event["choices"]]
    assert ["".join(one["text"] for one in pieces if one["index"] == index) for index in range(6)] == first
    unseeded = [texts(ask(service, **{**asked, "seed": None, "n": 1, "prompt": "one"})) for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_the_best_of_several_is_the_likeliest_of_them(service: OpenAIService) -> None:
    asked = {"prompt": "one", "seed": 5, "max_tokens": 10, "temperature": 1.5, "ignore_eos": True}
    every = ask(service, **asked, n=4, logprobs=0)["choices"]
    means = {choice["text"]: sum(choice["logprobs"]["token_logprobs"]) / 10 for choice in every}
    best = ask(service, **asked, n=2, best_of=4)
    assert texts(best) == sorted(means, key=lambda text: -means[text])[:2]
    assert best["usage"]["completion_tokens"] == 40


def test_bias_and_penalties_change_what_is_said(service: OpenAIService) -> None:
    asked = {"prompt": "one", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    tokens = ask(service, **asked, logit_bias={"70": 100}, logprobs=0)["choices"][0]["logprobs"]["tokens"]
    assert tokens == [service._token_text(70)] * 6
    once_each = ask(service, **asked, repetition_penalty=100, logprobs=0)["choices"][0]["logprobs"]["tokens"]
    whole = [token for token in once_each if "\ufffd" not in token]  # parts of characters look alike
    assert len(set(whole)) == len(whole) >= 4


def test_an_answer_has_min_tokens_whatever_would_end_it(service: OpenAIService) -> None:
    asked = {"prompt": "one", "max_tokens": 8, "stop_token_ids": [70], "logit_bias": {"70": 100}}
    ended = ask(service, **asked)
    assert (ended["usage"]["completion_tokens"], ended["choices"][0]["finish_reason"]) == (1, "stop")
    later = ask(service, **asked, min_tokens=5, ignore_eos=True)
    assert (later["usage"]["completion_tokens"], later["choices"][0]["finish_reason"]) == (6, "stop")
