from __future__ import annotations

from typing import Any

import pytest

from offramp.serve.protocol.errors import ApiError
from offramp.serve.protocol.requests import ChatBody, CompletionBody, parse_body
from offramp.serve.request.constraint import Constraint

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
        {"max_tokens": -1},
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


@pytest.mark.parametrize(("field", "refused_value"), [("suffix", "end")])
def test_what_offramp_lacks_is_accepted_only_where_it_changes_nothing(field: str, refused_value: object) -> None:
    parse_body(CompletionBody, PROMPT | {field: ""})
    error = refused(CompletionBody, PROMPT | {field: refused_value})
    assert error.param == field
    assert "leave it out or set it to" in error.message


def test_chat_features_that_would_change_the_answer_are_refused() -> None:
    parse_body(ChatBody, CHAT | {"tools": [], "tool_choice": "none"})
    assert refused(ChatBody, CHAT | {"tools": [{"type": "function"}]}).param == "tools"


def test_sampling_that_openai_lacks_is_spelled_as_vllm_spells_it() -> None:
    fields = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 3, "ignore_eos": True}
    for kind, base in ((CompletionBody, PROMPT), (ChatBody, CHAT)):
        body = parse_body(kind, base | fields | {"stop_token_ids": [7]})
        assert {name: getattr(body, name) for name in fields} == fields
        assert body.stop_token_ids == [7]
    assert parse_body(CompletionBody, PROMPT | {"top_k": -1}).top_k is None, "vLLM's word for all tokens"


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"five": 1}}, "logit_bias.five"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "a", "schema": {}}}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        ({"offramp": {"kv_policy": "forget"}}, "offramp.kv_policy"),
        ({"offramp": {"max_pending": 0}}, "offramp.max_pending"),
        ({"offramp": {"thresholds": {"two": 0.5}}}, "offramp.thresholds.two"),
        ({"offramp": {"priority": 0.5}}, "offramp.priority"),
    ],
)
def test_faults_are_called_by_their_place(field: dict[str, Any], param: str) -> None:
    for kind, base in ((CompletionBody, PROMPT), (ChatBody, CHAT)):
        assert refused(kind, base | field).param == param


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": False}, "max_tokens"),
        ({"stream_options": {}}, "stream_options"),
    ],
)
def test_completion_fields_that_exclude_each_other(field: dict[str, Any], param: str) -> None:
    assert refused(CompletionBody, PROMPT | field).param == param


def test_what_belongs_to_the_other_endpoint_is_unknown() -> None:
    for field in ({"echo": True}, {"best_of": 2}):
        assert refused(ChatBody, CHAT | field).code == "unknown_parameter"
    assert refused(CompletionBody, PROMPT | {"top_logprobs": 2}).code == "unknown_parameter"


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Constraint("json")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
            Constraint("json_schema", '{"type": "object"}'),
        ),
        ({"structured_outputs": {"regex": "[ab]+"}}, Constraint("regex", "[ab]+")),
    ],
)
def test_the_language_of_the_answer(fields: dict[str, Any], constraint: Constraint | None) -> None:
    assert parse_body(ChatBody, CHAT | fields).constraint == constraint


def test_two_languages_at_once_are_refused() -> None:
    fields = {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}
    with pytest.raises(ApiError) as caught:
        _ = parse_body(ChatBody, CHAT | fields).constraint
    assert (caught.value.status, caught.value.param) == (400, "structured_outputs")


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
