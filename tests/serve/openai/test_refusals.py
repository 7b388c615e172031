"""What the service refuses, and in which words."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from helpers.openai_service import CHAT, COMPLETIONS, Engine, answer, body, card, chat_body, collect, events, refusal
from helpers.tiny import tiny_tokenizer
from offramp.common.exits.config import ExitConfig
from offramp.serve.engine_thread import EngineThread
from offramp.serve.execution.kv_policy import check_exits
from offramp.serve.protocol import prompts
from offramp.serve.protocol.replies import Complete, Generation
from offramp.serve.protocol.service import OpenAIService
from offramp.serve.request.request import Request


@pytest.mark.parametrize("path", ["", "v1", "v1/embeddings", "v1/completions/x", "../v1/completions"])
def test_unknown_endpoints_are_404(service: OpenAIService, path: str) -> None:
    assert COMPLETIONS in refusal(service.open(path, b"{}", "1"), 404)["message"]


def test_a_measure_that_the_model_cannot_take_is_named(thread: EngineThread) -> None:
    def check(request: Request) -> None:
        check_exits(request.exits, None, ExitConfig((1, 2)), 300)

    service = OpenAIService(thread, tiny_tokenizer(), card(), check=check)
    asked = {"measure": "classifier", "threshold": 0.5}
    error = refusal(service.open(COMPLETIONS, body(prompt=[4], offramp=asked), "1"), 400)
    assert error["param"] == "offramp.measure"
    assert "this model has none" in error["message"]


def test_an_unknown_model_is_404_and_names_what_is_served(service: OpenAIService) -> None:
    error = refusal(service.open(COMPLETIONS, json.dumps({"model": "gpt", "prompt": "a"}).encode(), "1"), 404)
    assert error["code"] == "model_not_found"
    assert "'m'" in error["message"]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{",
        b"\xff\xfe{}",
        b'{"model": "m", "prompt": "\\ud800"}',
        b'{"model": "m", "prompt": [1], "\\udfff": 1}',
        b'{"model": "m", "prompt": "a", "temperature": NaN}',
        b'{"model": "m", "prompt": "a", "temperature": 1e999}',
        b"[" * 100_000,
        b'"text"',
        b'{"model": "m", "prompt": ' + b"9" * 5000 + b"}",
        b'{"model": "m", "prompt": [4], "model": "m"}',
        b'{"model": "m", "prompt": [4], "offramp": {"priority": 1, "priority": 1}}',
    ],
)
def test_malformed_bodies_are_400(service: OpenAIService, payload: bytes) -> None:
    refusal(service.open(COMPLETIONS, payload, "1"), 400)


@pytest.mark.parametrize(
    "fields",
    [
        b'"max_tokens":' + b"1" * 5000,
        b'"temperature":' + b"1" * 5000,
        b'"logit_bias":{"' + b"1" * 5000 + b'":1}',
        b'"offramp":{"thresholds":{"' + b"1" * 5000 + b'":1}}',
        b'"seed":-' + b"1" * 51,
        b'"seed":' + b"1" * 50,
    ],
)
def test_numbers_of_thousands_of_digits_are_400_in_few_words(service: OpenAIService, fields: bytes) -> None:
    error = refusal(service.open(COMPLETIONS, b'{"model":"m","prompt":[4],' + fields + b"}", "1"), 400)
    assert len(error["message"]) < 300
    assert "sys." not in error["message"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, b'"messages":[' + b"1," * 1_000_000 + b"1]"),
        (CHAT, b'"messages":[' + b'{"a":1},' * 400_000 + b'{"a":1}]'),
        (COMPLETIONS, b'"prompt":[' + b'"a",' * 800_000 + b'"a"]'),
        (COMPLETIONS, b'"prompt":[' + b"[4]," * 800_000 + b"[4]]"),
        (COMPLETIONS, b'"prompt":[4],"stop_token_ids":[' + b'"a",' * 800_000 + b'"a"]'),
        (COMPLETIONS, b'"prompt":[4],"stop":[' + b"1," * 1_000_000 + b"1]"),
        (COMPLETIONS, b'"prompt":[4],' + b",".join(b'"f%d":1' % i for i in range(300_000))),
        (COMPLETIONS, b'"prompt":[4],"logit_bias":{' + b",".join(b'"a%d":1' % i for i in range(300_000)) + b"}"),
    ],
)
def test_millions_of_faults_are_refused_at_the_first(service: OpenAIService, path: str, fields: bytes) -> None:
    began = time.thread_time()
    error = refusal(service.open(path, b'{"model":"m",' + fields + b"}", "1"), 400)
    assert time.thread_time() - began < 4  # 10 s and 2 GB, with all of them collected
    assert len(error["message"]) < 300


def test_prompts_are_counted_before_any_is_read(thread: EngineThread) -> None:
    class Unread:
        def __call__(self, *arguments: Any, **options: Any) -> Any:
            raise AssertionError

    service = OpenAIService(thread, Unread(), card())  # pyright: ignore[reportArgumentType]
    assert "9000 prompts" in refusal(service.open(COMPLETIONS, body(prompt=["a"] * 9000), "1"), 400)["message"]


def test_a_prompt_longer_than_the_context_names_both_lengths(service: OpenAIService) -> None:
    error = refusal(service.open(COMPLETIONS, body(prompt=[4] * 101), "1"), 400)
    assert error["code"] == "context_length_exceeded"
    assert "100 tokens" in error["message"]
    assert "101 tokens" in error["message"]
    error = refusal(service.open(COMPLETIONS, body(prompt=[4] * 10, max_tokens=91), "1"), 400)
    assert "101 together" in error["message"]
    error = refusal(service.open(COMPLETIONS, body(prompt=[4] * 100), "1"), 400)
    assert "100 tokens, which leaves none for an answer" in error["message"]
    assert refusal(service.open(CHAT, chat_body("x" * 500), "1"), 400)["param"] == "messages"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_prompt_far_too_long_is_refused_after_its_beginning(
    service: OpenAIService, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    monkeypatch.setattr(prompts, "encode_text", lambda _, text, **options: given.append(len(text)) or [4] * len(text))
    text = "x" * 100_000
    error = refusal(service.open(path, body(prompt=text) if path == COMPLETIONS else chat_body(text), "1"), 400)
    assert (error["code"], given) == ("context_length_exceeded", [640])
    assert "80 tokens are taken, but your prompt has more than 640" in error["message"]


def test_many_characters_may_be_few_tokens(service: OpenAIService, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(prompts, "encode_text", lambda _, text, **options: given.append(len(text)) or [4, 5])
    reply = service.open(COMPLETIONS, body(prompt=" " * 5000, max_tokens=1), "1")
    assert isinstance(reply, Generation)
    assert given[-1] == 5000


def test_a_request_that_can_never_fit_the_cache_is_400(service: OpenAIService) -> None:
    error = refusal(service.open(COMPLETIONS, body(prompt=[4] * 10, max_tokens=75), "1"), 400)
    assert "KV cache holds 80 tokens" in error["message"]


@pytest.mark.parametrize("prompt", ["", [[]], [300], [-1], [[4], [2**40]]])
def test_prompts_that_are_no_tokens_are_400(service: OpenAIService, prompt: object) -> None:
    assert refusal(service.open(COMPLETIONS, body(prompt=prompt), "1"), 400)["param"].startswith("prompt")


def test_a_full_queue_is_429_and_says_when_to_come_back(service: OpenAIService) -> None:
    reply = service.open(COMPLETIONS, body(prompt=[[4]] * 4, max_tokens=70), "1")
    refused = service.open(COMPLETIONS, body(prompt=[4]), "2")
    assert refusal(refused, 429)["code"] == "queue_full"
    assert isinstance(refused, Complete)
    assert refused.headers == {"Retry-After": "1"}
    assert isinstance(reply, Generation)
    service.abandon(reply)
    assert isinstance(service.open(COMPLETIONS, body(prompt=[4], max_tokens=1), "3"), Generation)


def test_an_id_that_is_under_way_is_400(service: OpenAIService, engine: Engine) -> None:
    go_on = threading.Event()
    engine.on_step = lambda: go_on.wait(30)
    first = service.open(COMPLETIONS, body(prompt=[4], max_tokens=2), "1")
    again = service.open(COMPLETIONS, body(prompt=[4], max_tokens=2), "1")
    assert "is in use" in refusal(again, 400)["message"]
    go_on.set()
    assert json.loads(collect(first))["choices"][0]["text"] == " 0 1"


def test_more_choices_than_can_ever_run_are_400(service: OpenAIService) -> None:
    assert "5 prompts" in refusal(service.open(COMPLETIONS, body(prompt=[[4]] * 5), "1"), 400)["message"]
    error = refusal(service.open(CHAT, chat_body(n=5, max_tokens=1), "1"), 400)
    assert (error["param"], "5 requests" in error["message"]) == ("n", True)


def test_without_a_chat_template_chat_is_400_and_completions_work(thread: EngineThread) -> None:
    service = OpenAIService(thread, tiny_tokenizer(chat_template=False), card())
    assert "chat_template.jinja" in refusal(service.open(CHAT, chat_body(), "1"), 400)["message"]
    assert answer(service.open(COMPLETIONS, body(prompt="a", max_tokens=1), "2"))["choices"][0]["text"] == " 0"


def test_a_template_that_refuses_is_400_with_its_own_message(thread: EngineThread) -> None:
    import copy

    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = "{{ raise_exception('Conversation roles must alternate') }}"
    service = OpenAIService(thread, tokenizer, card())
    assert "roles must alternate" in refusal(service.open(CHAT, chat_body(), "1"), 400)["message"]


def test_when_the_engine_has_died_requests_fail_with_the_cause(
    service: OpenAIService, engine: Engine, thread: EngineThread
) -> None:
    def explode() -> None:
        raise ValueError("out of blocks")

    stream = service.open(COMPLETIONS, body(prompt=[4], max_tokens=70, stream=True), "1")
    engine.on_step = explode
    assert "out of blocks" in events(stream)[-1]["error"]["message"]
    assert isinstance(stream, Generation)
    assert stream.error is not None
    assert stream.error.status == 503
    assert "out of blocks" in refusal(service.open(COMPLETIONS, body(prompt=[4]), "2"), 503)["message"]
    assert "out of blocks" in refusal(service.open("health", b"", "3"), 503)["message"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"exit_policy": "full", "threshold": 0.5}, "threshold"),
        ({"exit_policy": "early", "kv_policy": "full"}, "kv_policy"),
        ({"kv_policy": "fill", "max_pending": 4}, "max_pending"),
        ({"kv_policy": "static", "exit_layer": 3}, "exit_layer"),
        ({"thresholds": {"3": 0.5}}, "thresholds"),
        ({"operating_point": "faster"}, "operating_point"),
        ({"operating_point": "safe", "threshold": 0.5}, "threshold"),
    ],
)
def test_contradictions_about_depth_are_400_with_the_name_of_the_field(
    service: OpenAIService, options: dict[str, Any], field: str
) -> None:
    error = refusal(service.open(COMPLETIONS, body(prompt=[4], offramp=options), "1"), 400)
    assert error["param"] == f"offramp.{field}"
    assert field in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"min_tokens": 2, "response_format": {"type": "json_object"}}, "min_tokens"),
    ],
)
def test_sampling_that_cannot_be_is_400_with_the_name_of_the_field(
    service: OpenAIService, fields: dict[str, Any], param: str
) -> None:
    assert refusal(service.open(COMPLETIONS, body(prompt=[4], **fields), "1"), 400)["param"] == param
