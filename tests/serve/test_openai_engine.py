"""The OpenAI service over a real engine with a tiny model: what the fake engine cannot be wrong about."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.tiny import tiny_checkpoint
from offramp.common.checkpoint import load_checkpoint
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy
from offramp.serve.config import EngineConfig
from offramp.serve.engine import Engine
from offramp.serve.engine_thread import EngineThread
from offramp.serve.protocol.card import ModelCard
from offramp.serve.protocol.replies import Complete, Generation
from offramp.serve.protocol.service import OpenAIService
from offramp.serve.request.output import RequestOutput

COMPLETIONS, CHAT = "v1/completions", "v1/chat/completions"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("openai") / "model"
    return tiny_checkpoint(path, ExitConfig((1, 2), "norm"), ExitPolicy("margin", {1: 0.3, 2: 0.3}))


@pytest.fixture(scope="module")
def engine(directory: Path) -> Engine:
    return Engine.from_checkpoint(
        directory, EngineConfig(block_size=4, num_blocks=256, max_num_seqs=8, max_tokens_per_iteration=32)
    )


@pytest.fixture(scope="module")
def service(engine: Engine) -> Iterator[OpenAIService]:
    thread = EngineThread(engine, max_requests=16)
    card = ModelCard.of(engine.checkpoint, name="m", version="1", max_model_len=256, cache_tokens=engine.cache_tokens)
    yield OpenAIService(thread, engine.tokenizer, card, engine.check)
    thread.close()


def ask(service: OpenAIService, path: str = COMPLETIONS, **fields: Any) -> Any:
    """The answer, or the events of a stream."""
    return ask_together(service, [fields], path)[0]


def ask_together(service: OpenAIService, wishes: list[dict[str, Any]], path: str = COMPLETIONS) -> list[Any]:
    """What `ask` gives for each of several that run side by side."""
    replies: list[Generation] = []
    for fields in wishes:
        if path == CHAT:
            fields = {"messages": [{"role": "user", "content": "Hi"}], **fields}
        reply = service.open(path, json.dumps({"model": "m", **fields}).encode(), f"{time.monotonic_ns()}")
        assert isinstance(reply, Generation), reply
        replies.append(reply)
    bodies, open_replies = [b"" for _ in replies], dict(enumerate(replies))
    deadline = time.monotonic() + 20
    while open_replies:
        for index, reply in list(open_replies.items()):
            piece, last = reply.take(1_000_000)
            bodies[index] += piece
            if last:
                del open_replies[index]
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert [reply.error for reply in replies] == [None] * len(replies), bodies
    return [
        [json.loads(line.removeprefix("data: ")) for line in body.decode().split("\n\n")[:-2]]
        if reply.stream
        else json.loads(body)
        for body, reply in zip(bodies, replies, strict=True)
    ]


def texts(answer: dict[str, Any]) -> list[str]:
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in answer["choices"]]


def refusal(service: OpenAIService, **fields: Any) -> dict[str, Any]:
    reply = service.open(COMPLETIONS, json.dumps({"model": "m", "prompt": "a"} | fields).encode(), "refused")
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


def test_confidences_are_above_the_thresholds(service: OpenAIService) -> None:
    told = ask(
        service,
        prompt="one",
        max_tokens=32,
        temperature=0,
        ignore_eos=True,
        offramp={"return_exit_layers": True, "return_confidences": True},
    )["choices"][0]["offramp"]
    pairs = list(zip(told["exit_layers"], told["confidences"], strict=True))
    assert {layer for layer, _ in pairs} > {4}, "some tokens leave early and some do not"
    assert all(confidence is None if layer == 4 else confidence > 0.3 for layer, confidence in pairs)


def test_an_echo_judges_the_prompt_as_the_model_does(service: OpenAIService, directory: Path) -> None:
    prompt = [5, 80, 81, 200, 77, 9]
    model = load_checkpoint(directory).model
    with torch.inference_mode():
        logprobs = model(torch.tensor([prompt])).logits[4][0].log_softmax(dim=-1)
    expected = [logprobs[index, token].item() for index, token in enumerate(prompt[1:])]
    for max_tokens in (0, 1):
        asked = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": max_tokens, "temperature": 0}
        for answer in (ask(service, **asked)["choices"], [e["choices"][0] for e in ask(service, **asked, stream=True)]):
            columns = answer[0]["logprobs"]
            assert columns["token_logprobs"][0] is columns["top_logprobs"][0] is None
            assert columns["token_logprobs"][1:6] == pytest.approx(expected, abs=1e-4)
            assert [max(top.values()) for top in columns["top_logprobs"][1:6]] == pytest.approx(
                logprobs[:5].amax(dim=-1).tolist(), abs=1e-4
            )
            assert sum(len(choice["logprobs"]["tokens"]) for choice in answer if choice["logprobs"]) == 6 + max_tokens
            assert answer[-1]["finish_reason"] == "length"


def test_an_echo_does_not_depend_on_what_the_cache_knows(service: OpenAIService) -> None:
    asked = {"prompt": [5, 80, 81, 200, 77, 9] * 4, "max_tokens": 0, "echo": True, "logprobs": 0}
    first, second = (ask(service, **asked)["choices"][0]["logprobs"] for _ in range(2))
    assert first == second
    assert len(first["tokens"]) == 24


def test_the_answer_is_in_the_language_that_was_asked_for(service: OpenAIService) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}}, "required": ["a"]}
    wrapped = {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": {**schema, "additionalProperties": False}},
    }
    answer = ask(service, CHAT, n=4, seed=1, max_tokens=100, temperature=1.5, response_format=wrapped)
    for choice, text in zip(answer["choices"], texts(answer), strict=True):
        assert json.loads(text)["a"] in ("yes", "no")
        assert choice["finish_reason"] == "stop"
    answer = ask(service, prompt="a", n=4, seed=1, max_tokens=20, structured_outputs={"regex": "[abc]{3}x"})
    assert all(re.fullmatch("[abc]{3}x", text) for text in texts(answer))
    text = texts(ask(service, CHAT, seed=1, max_tokens=100, response_format={"type": "json_object"}))[0]
    assert text.startswith("{")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"offramp": {"kv_policy": "recompute", "max_pending": 40}, "max_tokens": 100}, "offramp.max_pending"),
        ({"max_tokens": 100, "n": 2, "prompt": [5] * 200}, "prompt"),
    ],
)
def test_what_the_engine_can_never_do_is_400_at_once(
    service: OpenAIService, fields: dict[str, Any], param: str
) -> None:
    assert refusal(service, **fields)["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "colour"}}}},
            "response_format",
        ),
        ({"structured_outputs": {"regex": "a"}, "stop_token_ids": list(range(300))}, "structured_outputs"),
    ],
)
def test_a_language_that_nothing_can_be_said_in_is_400_as_soon_as_that_is_known(
    service: OpenAIService, fields: dict[str, Any], param: str
) -> None:
    reply = service.open(COMPLETIONS, json.dumps({"model": "m", "prompt": "one", **fields}).encode(), "compiled")
    assert isinstance(reply, Generation)
    deadline = time.monotonic() + 20
    while not reply.take(1000)[1]:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert reply.error is not None
    assert (reply.error.status, reply.error.param) == (400, param)


def test_kv_policies_keep_what_they_promise(service: OpenAIService) -> None:
    asked = {"prompt": "one", "max_tokens": 24, "temperature": 0, "ignore_eos": True}

    def run(**options: Any) -> dict[str, Any]:
        return ask(service, **asked, offramp={"return_exit_layers": True, **options})["choices"][0]

    full, verify, static = run(kv_policy="full"), run(kv_policy="verify"), run(kv_policy="static", exit_layer=2)
    assert full["offramp"]["mean_layers"] == 4
    assert verify["text"] == full["text"], "the full model's answer"
    assert verify["offramp"]["mean_layers"] < 4, "though exits said some of it"
    assert static["offramp"]["exit_layers"] == [4] + [2] * 23
    pending = run(kv_policy="recompute", threshold=-1.0, max_pending=3)
    assert pending["offramp"]["exit_layers"] == [4, *[1, 1, 1, 4] * 5, 1, 1, 1]


@pytest.mark.parametrize(
    "exits",
    [
        {"kv_policy": "full"},
        {"kv_policy": "fill"},
        {"kv_policy": "recompute", "max_pending": 3},
        {"kv_policy": "verify", "max_pending": 3},
        {"kv_policy": "static", "exit_layer": 2},
    ],
    ids=lambda exits: exits["kv_policy"],
)
def test_a_streams_pieces_are_the_answer_of_the_request_alone(
    service: OpenAIService, exits: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    token_ids: dict[str, list[int]] = {}
    put = Generation.put

    def spy(self: Generation, output: RequestOutput) -> None:
        token_ids.setdefault(output.request_id, []).extend(output.new_token_ids)
        put(self, output)

    monkeypatch.setattr(Generation, "put", spy)
    common = {"max_tokens": 24, "logprobs": 2, "offramp": {**exits, "return_exit_layers": True}}
    asked: list[dict[str, Any]] = [
        {**common, "prompt": "one", "temperature": 0, "ignore_eos": True},
        {**common, "prompt": "another one", "seed": 3, "temperature": 1.2, "top_p": 0.9},
        {**common, "prompt": "and two", "seed": 4, "structured_outputs": {"regex": "[a-c]{2}(x|yz){2}"}},
    ]
    text = texts(ask(service, **asked[0]))[0]
    at = next(index for index in range(4, len(text)) if text[index].isascii())
    asked.append({**asked[0], "stop": [text[at : at + 2]]})  # found in pieces, and held back until it is
    token_ids.clear()
    alone = [ask(service, **fields) for fields in asked]
    streams = ask_together(
        service, [{**one, "stream": True, "stream_options": {"include_usage": True}} for one in asked]
    )
    ids = [token_ids[request_id] for request_id in sorted(token_ids)]  # as they were asked
    assert ids[: len(asked)] == ids[len(asked) :]
    assert {answer["choices"][0]["finish_reason"] for answer in alone} == {"stop", "length"}
    for answer, events, tokens in zip(alone, streams, ids[: len(asked)], strict=True):
        (choice,) = answer["choices"]
        pieces = [one for event in events for one in event["choices"]]
        assert len(pieces) > 3, "it came in pieces"
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + [choice["finish_reason"]]
        assert [event["usage"] for event in events] == [None] * len(pieces) + [answer["usage"]]
        assert answer["usage"]["completion_tokens"] == len(tokens)
        layers = [layer for event in events[:-1] for layer in event["offramp"]["exit_layers"]]
        assert layers == choice["offramp"]["exit_layers"]
        told = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
        joined = {name: [value for columns in told for value in columns[name]] for name in choice["logprobs"]}
        assert joined["tokens"] == choice["logprobs"]["tokens"] == [service._token_text(token) for token in tokens]
        assert joined["text_offset"] == choice["logprobs"]["text_offset"]
        assert joined["token_logprobs"] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
        for ours, theirs in zip(joined["top_logprobs"], choice["logprobs"]["top_logprobs"], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)


def test_a_client_that_goes_away_leaves_nothing_of_its_choices(service: OpenAIService, engine: Engine) -> None:
    asked = {
        "model": "m",
        "prompt": [5],
        "n": 4,
        "max_tokens": 200,
        "ignore_eos": True,
        "offramp": {"kv_policy": "verify"},
    }
    reply = service.open(COMPLETIONS, json.dumps(asked).encode(), "gone")
    assert isinstance(reply, Generation)
    deadline = time.monotonic() + 20
    while engine.num_running < 4:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    service.abandon(reply)
    while engine.num_running + engine.num_waiting + engine.num_kept_tokens > 0:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert engine.num_free_blocks == 256
    assert reply.take(10_000_000)[1] is False, "it was given up, not answered"
