"""The OpenAPI document: whole, and what it says of answers is what they are."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from pydantic import BaseModel

from helpers.openai_service import CHAT, COMPLETIONS, body, chat_body, collect, events
from offramp.serve.protocol import answers
from offramp.serve.protocol.openapi import openapi_document
from offramp.serve.protocol.replies import Complete
from offramp.serve.protocol.service import OpenAIService


def test_every_reference_has_its_schema() -> None:
    document = openapi_document()
    schemas = document["components"]["schemas"]
    names = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert names <= set(schemas)
    assert {"CompletionBody", "ChatBody", "OfframpOptions", "Completion", "ChatCompletionChunk"} <= set(schemas)
    prompt = schemas["CompletionBody"]["properties"]["prompt"]
    assert {"type": "string"} in prompt["anyOf"]
    assert schemas["ChatBody"]["additionalProperties"] is False


WHOLE = [
    (COMPLETIONS, body(prompt="a", max_tokens=2, logprobs=2), answers.Completion),
    (COMPLETIONS, body(prompt=["a", "b"], max_tokens=2, echo=True, logprobs=0, n=2, best_of=2), answers.Completion),
    (
        COMPLETIONS,
        body(prompt=[4], offramp={"return_exit_layers": True, "return_confidences": True}),
        answers.Completion,
    ),
    (CHAT, chat_body(max_tokens=2), answers.ChatCompletion),
    (
        CHAT,
        chat_body(max_tokens=2, logprobs=True, top_logprobs=2, offramp={"return_exit_layers": True}),
        answers.ChatCompletion,
    ),
]


@pytest.mark.parametrize(("path", "asked", "kind"), WHOLE)
def test_whole_answers_are_what_is_said(service: OpenAIService, path: str, asked: bytes, kind: type[BaseModel]) -> None:
    kind.model_validate_json(collect(service.open(path, asked, "1")))


@pytest.mark.parametrize(("path", "asked", "kind"), WHOLE)
def test_events_are_what_is_said(service: OpenAIService, path: str, asked: bytes, kind: type[BaseModel]) -> None:
    given: dict[str, Any] = {**json.loads(asked), "stream": True, "stream_options": {"include_usage": True}}
    chunk = answers.ChatCompletionChunk if path == CHAT else kind
    said = events(service.open(path, json.dumps(given).encode(), "1"))
    assert len(said) > 2
    for event in said:
        chunk.model_validate_json(json.dumps(event))


@pytest.mark.parametrize(
    ("path", "kind"), [("v1/models", answers.ModelList), ("v1/models/m", answers.Model), ("v1/models/x", answers.Error)]
)
def test_other_answers_are_what_is_said(service: OpenAIService, path: str, kind: type[BaseModel]) -> None:
    reply = service.open(path, b"", "1")
    assert isinstance(reply, Complete)
    kind.model_validate_json(reply.body)
