from __future__ import annotations

from typing import Any

import pytest

from offramp.serve.protocol.errors import ApiError
from offramp.serve.protocol.requests import ChatBody, CompletionBody, parse_body

PROMPT: dict[str, Any] = {"model": "m", "prompt": "Hi"}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


def refused(kind: type[CompletionBody] | type[ChatBody], body: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_body(kind, body)
    assert caught.value.status == 400
    assert caught.value.body()["error"]["type"] == "invalid_request_error"
    return caught.value


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("Hi", ["Hi"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ("", [""]),
    ],
)
def test_every_form_of_prompt(prompt: object, prompts: object) -> None:
    assert parse_body(CompletionBody, {"model": "m", "prompt": prompt}).prompt == prompts


@pytest.mark.parametrize("prompt", [[], [1, "a"], [[1], "a"], 3, {"text": "a"}, [True], [1.0], [[1, None]]])
def test_other_forms_of_prompt_are_refused(prompt: object) -> None:
    error = refused(CompletionBody, {"model": "m", "prompt": prompt})
    assert error.param == "prompt"
    assert "list of token ids" in error.message


def test_defaults_are_openais() -> None:
    body = parse_body(CompletionBody, PROMPT)
    assert (body.temperature, body.top_p, body.stop, body.seed, body.stream) == (1.0, 1.0, [], None, False)
    assert body.max_tokens is None


def test_null_is_as_good_as_left_out() -> None:
    fields = ("max_tokens", "temperature", "top_p", "n", "stop", "seed", "stream", "stream_options", "logprobs", "user")
    assert parse_body(CompletionBody, PROMPT | dict.fromkeys(fields)) == parse_body(CompletionBody, PROMPT)


def test_unknown_fields_are_refused_as_openai_does() -> None:
    assert refused(CompletionBody, PROMPT | {"x": 1}).message == "Unrecognized request argument supplied: x"
    error = refused(CompletionBody, PROMPT | {"x": 1, "y": 2})
    assert error.message == "Unrecognized request arguments supplied: x, y"
    assert error.param == "x"
    error = refused(CompletionBody, PROMPT | {"offramp": {"treshold": 0.5}})  # codespell:ignore
    assert error.message == "Unrecognized request argument supplied: offramp.treshold"  # codespell:ignore
    error = refused(ChatBody, {"model": "m", "messages": [{"role": "user", "content": "a", "x": 1}]})
    assert error.message == "Unrecognized request argument supplied: messages[0].x"


@pytest.mark.parametrize("missing", ["model", "prompt"])
def test_missing_fields_are_named(missing: str) -> None:
    error = refused(CompletionBody, {key: value for key, value in PROMPT.items() if key != missing})
    assert error.message == f"Missing required parameter: '{missing}'."
    assert error.param == missing


@pytest.mark.parametrize(
    "field",
    [
        {"max_tokens": 0},
        {"max_tokens": "5"},
        {"max_tokens": 1.5},
        {"max_tokens": True},
        {"temperature": -0.1},
        {"temperature": 2.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": "hot"},
        {"top_p": 0},
        {"top_p": 1.01},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"stop": ["a", "b", "c", "d", "e"]},
        {"stop": [1]},
        {"seed": 1.5},
        {"seed": 2**63},
        {"stream": "yes"},
        {"stream": 1},
        {"logprobs": 6},
        {"logprobs": -1},
        {"logprobs": True},
        {"user": 3},
        {"offramp": {"exit_policy": "sometimes"}},
        {"offramp": {"min_exit_layer": 0}},
        {"offramp": {"threshold": float("nan")}},
        {"offramp": []},
    ],
)
def test_values_out_of_range_are_refused_by_name(field: dict[str, Any]) -> None:
    error = refused(CompletionBody, PROMPT | field)
    name = next(iter(field))
    assert name in error.message
    assert (error.param or "").startswith(name)


@pytest.mark.parametrize(
    "field",
    [
        {"n": 1},
        {"presence_penalty": 0},
        {"presence_penalty": 0.0},
        {"frequency_penalty": 0.0},
        {"logit_bias": {}},
        {"best_of": 1},
        {"echo": False},
        {"suffix": ""},
    ],
)
def test_what_offramp_lacks_is_accepted_where_it_changes_nothing(field: dict[str, Any]) -> None:
    parse_body(CompletionBody, PROMPT | field)


@pytest.mark.parametrize(
    "field",
    [
        {"n": 2},
        {"n": 0},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -1},
        {"logit_bias": {"50256": -100}},
        {"best_of": 2},
        {"echo": True},
        {"suffix": "end"},
    ],
)
def test_what_offramp_lacks_is_refused_where_it_would_change_something(field: dict[str, Any]) -> None:
    error = refused(CompletionBody, PROMPT | field)
    assert error.param == next(iter(field))
    assert "leave it out or set it to" in error.message


@pytest.mark.parametrize("field", [{"tools": [{"type": "function"}]}, {"response_format": {"type": "json_object"}}])
def test_chat_features_that_would_change_the_answer_are_refused(field: dict[str, Any]) -> None:
    assert refused(ChatBody, CHAT | field).param == next(iter(field))


@pytest.mark.parametrize("body", [None, [], "text", 3])
def test_a_body_that_is_no_object_is_refused(body: object) -> None:
    assert "JSON object" in refused(CompletionBody, body).message


def test_stream_options_need_a_stream() -> None:
    options = {"stream_options": {"include_usage": True}}
    assert "stream" in refused(CompletionBody, PROMPT | options).message
    parsed = parse_body(CompletionBody, PROMPT | options | {"stream": True})
    assert parsed.stream_options is not None
    assert parsed.stream_options.include_usage


def test_text_parts_are_joined_and_other_parts_refused() -> None:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "world"}]
    body = parse_body(ChatBody, {"model": "m", "messages": [{"role": "user", "content": parts}]})
    assert body.messages[0].content == "Hello, world"
    image = {"type": "image_url", "image_url": {"url": "data:..."}}
    error = refused(ChatBody, {"model": "m", "messages": [{"role": "user", "content": [*parts, image]}]})
    assert error.param == "messages[0].content"
    assert "image_url" in error.message


def test_an_answer_can_be_sent_back_as_a_message() -> None:
    answer = {
        "role": "assistant",
        "content": "Hi",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    body = parse_body(ChatBody, {"model": "m", "messages": [*CHAT["messages"], answer, *CHAT["messages"]]})
    assert [message.role for message in body.messages] == ["user", "assistant", "user"]


@pytest.mark.parametrize("messages", [[], [{"content": "a"}], [{"role": "tool", "content": "a"}], "Hi", ["Hi"]])
def test_bad_messages_are_refused(messages: object) -> None:
    assert (refused(ChatBody, {"model": "m", "messages": messages}).param or "").startswith("messages")


def test_chat_logprobs() -> None:
    assert refused(ChatBody, CHAT | {"top_logprobs": 2}).param == "top_logprobs"
    assert refused(ChatBody, CHAT | {"logprobs": True, "top_logprobs": 21}).param == "top_logprobs"
    assert parse_body(ChatBody, CHAT | {"logprobs": True, "top_logprobs": 2}).top_logprobs == 2


def test_two_limits_that_differ_are_refused() -> None:
    assert "not both" in refused(ChatBody, CHAT | {"max_tokens": 3, "max_completion_tokens": 4}).message


def test_a_refusal_does_not_send_the_prompt_back() -> None:
    error = refused(CompletionBody, PROMPT | {"user": ["x" * 1000], "stop": [1], "x" * 1000: 1})
    assert len(error.message) < 300
