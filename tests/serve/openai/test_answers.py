"""What the service answers, whole and in pieces."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from helpers.openai_service import CHAT, COMPLETIONS, Engine, answer, body, card, chat_body, collect, events, refusal
from helpers.tiny import BOS_ID, IM_START_ID, tiny_tokenizer
from offramp.common.exits.policy import ExitPolicy
from offramp.serve.engine_thread import EngineThread
from offramp.serve.protocol.replies import Complete, CompletionGeneration, Generation, Report
from offramp.serve.protocol.service import OpenAIService
from offramp.serve.request.constraint import Constraint
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.iteration_result import TokenLogprobs
from offramp.serve.request.output import RequestOutput, Usage
from offramp.serve.request.request import Request


def test_choices_of_one_prompt_are_checked_once(thread: EngineThread) -> None:
    checked: list[Request] = []
    service = OpenAIService(thread, tiny_tokenizer(), card(), checked.append)
    service.open(COMPLETIONS, body(prompt=["a", "b"], n=2, max_tokens=1), "x")
    assert [request.request_id for request in checked] == ["cmpl-x-0", "cmpl-x-2"]


def test_completion(service: OpenAIService) -> None:
    got = answer(service.open(COMPLETIONS, body(prompt="Hello", max_tokens=3), "1"))
    assert got["object"] == "text_completion"
    assert got["model"] == "m"
    assert got["choices"] == [{"index": 0, "text": " 0 1 2", "logprobs": None, "finish_reason": "length"}]
    prompt_tokens = len(tiny_tokenizer()("Hello")["input_ids"])
    assert got["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 3,
        "total_tokens": prompt_tokens + 3,
    }
    assert "offramp" not in got


def test_chat_completion(service: OpenAIService) -> None:
    got = answer(service.open(CHAT, chat_body(max_completion_tokens=2), "1"))
    assert got["object"] == "chat.completion"
    [choice] = got["choices"]
    assert choice["message"] == {"role": "assistant", "content": " 0 1", "refusal": None}
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(("path", "payload"), [(COMPLETIONS, body(prompt="a", stream=True)), (CHAT, b"")])
def test_a_stream_says_the_same_as_the_whole_answer(service: OpenAIService, path: str, payload: bytes) -> None:
    chat = path == CHAT
    payload = payload or chat_body(max_tokens=16, stream=True)
    chunks = events(service.open(path, payload, "1"))
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk" if chat else "text_completion"}
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    texts = [choice["delta"]["content"] if chat else choice["text"] for choice in choices]
    assert "".join(texts) == "".join(f" {token}" for token in range(16))
    assert [choice["finish_reason"] for choice in choices] == [None] * 15 + ["length"]
    assert "usage" not in chunks[-1]
    if chat:
        assert [choice["delta"].get("role") for choice in choices] == ["assistant"] + [None] * 15


def test_include_usage_adds_one_event_and_a_null_to_the_others(service: OpenAIService) -> None:
    payload = body(prompt=[5, 6, 7], max_tokens=2, stream=True, stream_options={"include_usage": True})
    *chunks, last = events(service.open(COMPLETIONS, payload, "1"))
    assert [chunk["usage"] for chunk in chunks] == [None, None]
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def test_several_prompts_are_several_choices(service: OpenAIService) -> None:
    prompts = [[5], [6, 7], [8]]
    got = answer(service.open(COMPLETIONS, body(prompt=prompts, max_tokens=2), "1"))
    assert [choice["index"] for choice in got["choices"]] == [0, 1, 2]
    assert got["usage"] == {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}
    chunks = events(service.open(COMPLETIONS, body(prompt=prompts, max_tokens=2, stream=True), "2"))
    finals = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert sorted(finals) == [0, 1, 2]


def test_several_choices_of_several_prompts(service: OpenAIService, engine: Engine) -> None:
    asked = {"prompt": [[5], [6, 7]], "n": 2, "max_tokens": 2, "seed": 3}
    got = answer(service.open(COMPLETIONS, body(**asked), "1"))
    texts = [" 0 1", " 1:0 1:1", " 0 1", " 1:0 1:1"]
    assert [(choice["index"], choice["text"]) for choice in got["choices"]] == list(enumerate(texts))
    assert got["usage"] == {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}, "each prompt once"
    asks = [(request.prompt_token_ids, request.sampling.seed, request.sampling.sequence) for request in engine.requests]
    assert asks == [((5,), 3, 0), ((5,), 3, 1), ((6, 7), 3, 0), ((6, 7), 3, 1)]

    chunks = events(service.open(COMPLETIONS, body(**asked, stream=True, stream_options={"include_usage": True}), "2"))
    assert chunks.pop()["usage"] == got["usage"]
    streamed = [choice for chunk in chunks for choice in chunk["choices"]]
    assert ["".join(one["text"] for one in streamed if one["index"] == index) for index in range(4)] == texts
    assert [one["index"] for one in streamed[:4]] == [0, 1, 2, 3], "interleaved, not one after the other"


def test_every_choice_of_a_chat_begins_with_the_role(service: OpenAIService) -> None:
    chunks = events(service.open(CHAT, chat_body(n=3, max_tokens=2, stream=True), "1"))
    said = [(one["index"], one["delta"].get("role")) for chunk in chunks for one in chunk["choices"]]
    assert said == [(0, "assistant"), (1, "assistant"), (2, "assistant"), (0, None), (1, None), (2, None)]
    got = answer(service.open(CHAT, chat_body(n=3, max_tokens=1), "2"))
    assert [choice["message"]["content"] for choice in got["choices"]] == [" 0", " 1:0", " 2:0"]


def test_the_best_of_several_have_the_highest_mean_logprob(service: OpenAIService, engine: Engine) -> None:
    asked = {"prompt": [[5]], "n": 2, "best_of": 3, "max_tokens": 2}
    got = answer(service.open(COMPLETIONS, body(**asked), "1"))
    assert [(one["index"], one["text"]) for one in got["choices"]] == [(0, " 0 1"), (1, " 2:0 2:1")]
    assert [one["logprobs"] for one in got["choices"]] == [None, None], "asked of the engine, not by the client"
    assert got["usage"]["completion_tokens"] == 6, "all that were generated"
    got = answer(service.open(COMPLETIONS, body(**asked, logprobs=1), "2"))
    assert [one["logprobs"]["token_logprobs"] for one in got["choices"]] == [[-1.0] * 2, [-2.0] * 2]


def test_an_echo_begins_with_the_prompt(service: OpenAIService) -> None:
    got = answer(service.open(COMPLETIONS, body(prompt="the cat", echo=True, max_tokens=2, n=2), "1"))
    assert [one["text"] for one in got["choices"]] == ["the cat 0 1", "the cat 1:0 1:1"]
    assert got["choices"][0]["logprobs"] is None
    ids = tiny_tokenizer()("the cat")["input_ids"]
    chunks = events(service.open(COMPLETIONS, body(prompt=ids, echo=True, max_tokens=2, stream=True), "2"))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["the cat 0", " 1"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_an_echo_with_logprobs_judges_the_prompt(service: OpenAIService, max_tokens: int, stream: bool) -> None:
    text = "the caté"
    ids = tiny_tokenizer()(text)["input_ids"]
    asked = body(prompt=text, echo=True, logprobs=1, max_tokens=max_tokens, stream=stream)
    reply = service.open(COMPLETIONS, asked, "1")
    pieces = [chunk["choices"][0] for chunk in (events(reply) if stream else [answer(reply)])]
    columns: dict[str, list[Any]] = {}
    for piece in pieces:
        for key, column in piece["logprobs"].items():
            columns.setdefault(key, []).extend(column)
    assert {len(column) for column in columns.values()} == {len(ids) + max_tokens}
    assert columns["token_logprobs"] == [None, *[-0.5] * (len(ids) - 1), *[-1.0] * max_tokens]
    assert columns["top_logprobs"][0] is None
    echoed = "".join(piece["text"] for piece in pieces)
    assert echoed == text + " 0 1"[: 2 * max_tokens]
    starts = columns["text_offset"]
    assert starts == sorted(starts)
    words = [
        text[start:stop] for start, stop in zip(starts[: len(ids)], [*starts[1 : len(ids)], len(text)], strict=True)
    ]
    whole = [(word, token) for word, token in zip(words, columns["tokens"], strict=False) if "\ufffd" not in token]
    assert all(word == token for word, token in whole)
    assert len(whole) >= 3
    assert starts[len(ids) :] == [len(text) + 2 * index for index in range(max_tokens)]
    assert pieces[-1]["finish_reason"] == "length"


def test_an_echo_without_a_new_token_and_without_logprobs(service: OpenAIService) -> None:
    got = answer(service.open(COMPLETIONS, body(prompt="the cat", echo=True, max_tokens=0), "1"))
    [choice] = got["choices"]
    assert (choice["text"], choice["logprobs"]) == ("the cat", None)
    assert got["usage"]["completion_tokens"] == 0
    full = answer(service.open(COMPLETIONS, body(prompt=[5] * 80, echo=True, max_tokens=0), "2"))
    assert full["usage"]["prompt_tokens"] == 80, "a prompt that leaves no room for a new token needs none"


def test_a_prompt_may_be_cut_from_its_beginning(service: OpenAIService, engine: Engine) -> None:
    ids = list(range(5, 125))
    for wanted, kept in ((3, ids[-3:]), (120, None), (-1, ids[-64:])):
        reply = service.open(COMPLETIONS, body(prompt=ids, truncate_prompt_tokens=wanted), "1")
        if kept is None:
            assert refusal(reply, 400)["code"] == "context_length_exceeded"
            continue
        collect(reply)
        assert engine.requests[-1].prompt_token_ids == tuple(kept)
    words = "the cat sat on the mat"
    cut = tiny_tokenizer()(words)["input_ids"][-4:]
    got = answer(service.open(COMPLETIONS, body(prompt=words, truncate_prompt_tokens=4, echo=True, max_tokens=1), "2"))
    assert got["choices"][0]["text"] == f"{tiny_tokenizer().decode(cut)} 0"
    assert got["usage"]["prompt_tokens"] == 4


def test_who_gives_an_answer_up_gives_up_all_of_its_choices_at_once(service: OpenAIService, engine: Engine) -> None:
    reply = service.open(COMPLETIONS, body(prompt=[4], n=4, max_tokens=70), "1")
    assert isinstance(reply, Generation)
    deadline = time.monotonic() + 5
    while len(engine.seen) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    before: list[int] = []
    engine.on_step = lambda: before.append(len(engine.cancelled))
    service.abandon(reply)
    while len(engine.cancelled) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert set(before) <= {0}, "an iteration ran with some of them cancelled and others not"


def test_pieces_are_capped_and_lose_nothing(service: OpenAIService) -> None:
    payload = chat_body(max_tokens=20, stream=True)
    whole = collect(service.open(CHAT, payload, "1"))
    assert collect(service.open(CHAT, payload, "1"), max_bytes=7).count(b"data: ") == whole.count(b"data: ") == 21


def test_exit_layers_are_reported_when_asked_for(service: OpenAIService) -> None:
    wanted = {"return_exit_layers": True}
    got = answer(service.open(COMPLETIONS, body(prompt=[[5], [6]], max_tokens=4, offramp=wanted), "1"))
    assert got["choices"][0]["offramp"] == {"exit_layers": [1, 2, 3, 4], "mean_layers": 2.5}
    assert got["offramp"] == {"exit_layers": [1, 2, 3, 4, 1, 2, 3, 4], "mean_layers": 2.5}
    chunks = events(service.open(CHAT, chat_body(max_tokens=4, stream=True, offramp=wanted), "2"))
    assert [layer for chunk in chunks for layer in chunk["offramp"]["exit_layers"]] == [1, 2, 3, 4]
    assert chunks[-1]["offramp"]["mean_layers"] == 2.5


def test_confidences_are_reported_when_asked_for(service: OpenAIService) -> None:
    asked = {"prompt": [5], "max_tokens": 4, "offramp": {"return_confidences": True}}
    [choice] = answer(service.open(COMPLETIONS, body(**asked), "1"))["choices"]
    assert choice["offramp"] == {"confidences": [0.0, 0.125, 0.25, None]}
    chunks = events(service.open(COMPLETIONS, body(**asked, stream=True), "2"))
    assert [chunk["offramp"]["confidences"] for chunk in chunks] == [[0.0], [0.125], [0.25], [None]]


@pytest.mark.parametrize("count", [0, 2])
def test_completion_logprobs_are_columns_of_equal_length(service: OpenAIService, count: int) -> None:
    payload = body(prompt=[9], max_tokens=3, logprobs=count)
    columns = answer(service.open(COMPLETIONS, payload, "1"))["choices"][0]["logprobs"]
    assert {len(column) for column in columns.values()} == {3}
    assert columns["tokens"][:2] == ["<|bos|>", "<|eos|>"]
    assert columns["token_logprobs"] == [-1.0] * 3
    assert columns["text_offset"] == [0, 2, 4]
    assert all(len(top) == max(count, 1) for top in columns["top_logprobs"])
    streamed = events(service.open(COMPLETIONS, body(prompt=[9], max_tokens=3, logprobs=count, stream=True), "2"))
    pieces = [choice["logprobs"] for chunk in streamed for choice in chunk["choices"]]
    assert {key: [entry for piece in pieces for entry in piece[key]] for key in columns} == columns


def test_whole_numbers_may_be_spelled_as_others(service: OpenAIService, engine: Engine) -> None:
    asked = b'{"model":"m","prompt":[9.0],"max_tokens":2.0,"n":1e0,"temperature":1.0,"seed":-0.0}'
    assert answer(service.open(COMPLETIONS, asked, "1"))["usage"]["completion_tokens"] == 2
    assert engine.requests[-1].prompt_token_ids == (9,)
    for wrong in (b"2.5", b"1e300", b"true", b'"2"'):
        refusal(service.open(COMPLETIONS, b'{"model":"m","prompt":[9],"max_tokens":' + wrong + b"}", "2"), 400)


def test_tokens_with_one_text_do_not_hide_each_other() -> None:
    report = Report(logprobs=True)
    reply = CompletionGeneration("1", "m", ["r"], stream=False, report=report, token_text=lambda token: "\ufffd")
    said = TokenLogprobs(7, -3.0, ((8, -1.0), (7, -3.0), (9, -4.0)))
    reply.put(RequestOutput("r", (7,), (4,), (said,), "x", "length", Usage(1, 1)))
    columns = answer(reply)["choices"][0]["logprobs"]
    assert columns["token_logprobs"] == [-3.0]
    assert columns["top_logprobs"] == [{"\ufffd": -3.0, "token_id:8": -1.0, "token_id:9": -4.0}]


def test_chat_logprobs(service: OpenAIService) -> None:
    payload = chat_body(max_tokens=2, logprobs=True, top_logprobs=2)
    content = answer(service.open(CHAT, payload, "1"))["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["<|bos|>", "<|eos|>"]
    assert bytes(content[0]["bytes"]).decode() == "<|bos|>"
    assert [len(entry["top_logprobs"]) for entry in content] == [2, 2]


def test_chat_is_encoded_by_the_template_without_a_second_bos(service: OpenAIService, engine: Engine) -> None:
    collect(service.open(CHAT, chat_body(max_tokens=1), "1"))
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    expected = tiny_tokenizer()(text, add_special_tokens=False)["input_ids"]
    assert list(engine.requests[0].prompt_token_ids) == expected
    assert expected[0] == IM_START_ID != BOS_ID


def test_what_is_asked_reaches_the_engine(service: OpenAIService, engine: Engine) -> None:
    fields = {"max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "seed": -7, "stop": "x", "logprobs": 1}
    collect(service.open(COMPLETIONS, body(prompt=[4, 5], **fields), "1"))
    [request] = engine.requests
    sampling = request.sampling
    assert request.prompt_token_ids == (4, 5)
    assert request.eos_token_ids == {1, 3}
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (3, 0.5, 0.9)
    assert (sampling.seed, sampling.stop, sampling.logprobs) == (-7, ("x",), 1)
    assert sampling.prompt_logprobs is None
    assert (request.client, request.priority) == ("", 0)
    fields = {
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {"7": -100, "8": 1.5},
        "top_k": 3,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
    }
    more = {"min_tokens": 2, "ignore_eos": True, "stop_token_ids": [9], "user": "ann", "offramp": {"priority": -2}}
    collect(service.open(CHAT, chat_body(max_tokens=2, **fields, **more), "2"))
    request = engine.requests[-1]
    sampling = request.sampling
    assert sampling.logit_bias == ((7, -100.0), (8, 1.5))
    plain = {name: value for name, value in fields.items() if name != "logit_bias"}
    assert {name: getattr(sampling, name) for name in plain} == plain
    assert (sampling.min_tokens, sampling.ignore_eos, sampling.stop_token_ids) == (2, True, (9,))
    assert (request.client, request.priority) == ("ann", -2)
    collect(service.open(CHAT, chat_body(max_tokens=2, response_format={"type": "json_object"}), "3"))
    assert engine.requests[-1].sampling.constraint == Constraint("json")


def test_default_lengths(service: OpenAIService, engine: Engine) -> None:
    collect(service.open(COMPLETIONS, body(prompt=[4]), "1"))
    assert engine.requests[-1].sampling.max_tokens == 16
    collect(service.open(COMPLETIONS, body(prompt=[4] * 75), "2"))
    assert engine.requests[-1].sampling.max_tokens == 5, "a default never makes a request impossible"
    reply = service.open(CHAT, chat_body(), "3")
    collect(reply)
    assert engine.requests[-1].max_total_tokens == 80, "chat: as much as fits"


def test_models_and_health(service: OpenAIService, thread: EngineThread, engine: Engine) -> None:
    reply = service.open("v1/models", b"", "1")
    assert isinstance(reply, Complete)
    [model] = json.loads(reply.body)["data"]
    assert (model["id"], model["object"]) == ("m", "model")
    assert model["offramp"]["exit_layers"] == [1, 2]
    assert (model["offramp"]["version"], model["offramp"]["run_id"], model["offramp"]["config_hash"]) == (
        "1.0",
        "abc",
        "def",
    )
    assert service.open("/v1/models/m/", b"", "1") == Complete(200, json.dumps(model, separators=(",", ":")).encode())
    assert refusal(service.open("v1/models/other", b"", "1"), 404)["code"] == "model_not_found"
    health = service.open("health", b"", "1")
    assert isinstance(health, Complete)
    assert health.status == 200


@pytest.mark.parametrize(
    ("options", "exits"),
    [
        ({}, ExitOptions()),
        ({"exit_policy": "full"}, ExitOptions("full")),
        ({"thresholds": {"2": 0.5}}, ExitOptions(policy=ExitPolicy(thresholds={2: 0.5}))),
        ({"kv_policy": "verify", "max_pending": 3}, ExitOptions("verify", max_pending=3)),
        ({"kv_policy": "static", "exit_layer": 2}, ExitOptions("static", static_layer=2)),
        ({"operating_point": "safe"}, ExitOptions("recompute", ExitPolicy(thresholds={2: 0.99}), 4)),
        ({"operating_point": "exact"}, ExitOptions("full")),
    ],
)
def test_depth_reaches_the_engine(
    service: OpenAIService, engine: Engine, options: dict[str, Any], exits: ExitOptions
) -> None:
    collect(service.open(CHAT, chat_body(max_tokens=1, offramp=options), "1"))
    assert engine.requests[-1].exits == exits


def test_many_threads_may_ask_at_once(service: OpenAIService) -> None:
    texts: list[str] = []

    def ask(i: int) -> None:
        texts.append(answer(service.open(COMPLETIONS, body(prompt=[4], max_tokens=5), f"{i}"))["choices"][0]["text"])

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert texts == [" 0 1 2 3 4"] * 4
