"""The API as an OpenAPI document, made of the models that requests are checked by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from offramp.serve.protocol import answers
from offramp.serve.protocol.errors import PHRASES
from offramp.serve.protocol.replies import EVENT_STREAM, JSON
from offramp.serve.protocol.requests import (
    NEUTRAL,
    NEUTRAL_IN_MESSAGE,
    ChatBody,
    CompletionBody,
    GenerationBody,
    Message,
)

_HELLO = [{"role": "user", "content": "Hello"}]
_WITH_USAGE = {"include_usage": True}
_REF = "#/components/schemas/{model}"
_READING: tuple[type[GenerationBody], ...] = (CompletionBody, ChatBody)
_WRITING: tuple[type[BaseModel], ...] = (
    answers.Completion,
    answers.ChatCompletion,
    answers.ChatCompletionChunk,
    answers.Model,
    answers.ModelList,
    answers.Error,
    answers.Health,
)
_EXAMPLES: Mapping[type[BaseModel], Mapping[str, Mapping[str, Any]]] = {
    CompletionBody: {
        "text": {"prompt": "Once upon a time", "max_tokens": 8},
        "stream": {"prompt": ["Once", "Twice"], "max_tokens": 8, "stream": True, "stream_options": _WITH_USAGE},
        "likelihood": {"prompt": "Once upon a time", "max_tokens": 0, "echo": True, "logprobs": 1},
        "depth": {"prompt": [5, 6], "max_tokens": 8, "offramp": {"threshold": 0.5, "return_exit_layers": True}},
    },
    ChatBody: {
        "message": {"messages": _HELLO, "max_completion_tokens": 8},
        "stream": {"messages": _HELLO, "max_completion_tokens": 8, "stream": True, "stream_options": _WITH_USAGE},
        "likelihood": {"messages": _HELLO, "max_completion_tokens": 8, "logprobs": True, "top_logprobs": 2},
        "choice": {"messages": _HELLO, "max_completion_tokens": 8, "structured_outputs": {"regex": "(yes|no)"}},
    },
}
_ALWAYS = (429, 431, 500, 503)
_WITH_BODY = (400, 404, 408, 413, 415, 417, 504)


def openapi_document(models: Sequence[str] = (), *, keys: bool = True) -> dict[str, Any]:
    """The document, of OpenAPI 3.1.

    Args:
        models: The names that are served, for those who want to try it.
        keys: Whether an API key is asked for.
    """
    _, definitions = models_json_schema(
        [*((model, "validation") for model in _READING), *((model, "validation") for model in _WRITING)],
        ref_template=_REF,
    )
    schemas = definitions["$defs"]
    for body in _READING:
        schema = schemas[body.__name__]
        _say_nothing_is_allowed(schema)
        schema["properties"]["model"] = _model_schema(models)
        for name, values in NEUTRAL[body].items():
            schema["properties"][name] = {"enum": [*values, None], "description": "Without effect."}
    _say_nothing_is_allowed(schemas[Message.__name__])
    for name in NEUTRAL_IN_MESSAGE:
        schemas[Message.__name__]["properties"][name] = {"enum": [None, "", [], {}], "description": "Without effect."}
    refused = (401, *_ALWAYS) if keys else _ALWAYS
    name = {"name": "model", "in": "path", "required": True, "schema": _model_schema(models)}
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "Offramp",
            "version": "1",
            "description": "OpenAI's API for early-exit language models. Unknown fields are refused.",
        },
        "paths": {
            "/v1/completions": {
                "post": _generation(
                    "Continues texts.", CompletionBody, answers.Completion, answers.Completion, models, refused
                )
            },
            "/v1/chat/completions": {
                "post": _generation(
                    "Answers in a conversation.",
                    ChatBody,
                    answers.ChatCompletion,
                    answers.ChatCompletionChunk,
                    models,
                    refused,
                )
            },
            "/v1/models": {"get": _look("Lists what is served.", answers.ModelList, *refused)},
            "/v1/models/{model}": {
                "get": {**_look("Tells of a model.", answers.Model, 404, *refused), "parameters": [name]}
            },
            "/health/live": {"get": {**_look("Whether the process answers.", answers.Health), "security": []}},
            "/health/ready": {
                "get": {**_look("Whether requests could be answered now.", answers.Health, 503), "security": []}
            },
        },
        "components": {"schemas": schemas},
    }
    if keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _model_schema(models: Sequence[str]) -> dict[str, Any]:
    """As OpenAI's own document has it: any name, and those that are known, because new ones come at any time."""
    known = [{"enum": list(models)}] if models else []
    return {"type": "string", "anyOf": [*known, {"type": "string"}]}


def _say_nothing_is_allowed(schema: dict[str, Any]) -> None:
    """What need not be given may be null."""
    for name, field in schema["properties"].items():
        if name in schema["required"] or "default" not in field:
            continue
        if "type" in field:
            field["type"] = [field["type"], "null"]
        elif "anyOf" not in field:
            field["anyOf"] = [{"$ref": field.pop("$ref")}, {"type": "null"}]
        elif {"type": "null"} not in field["anyOf"]:
            field["anyOf"].append({"type": "null"})


def _generation(
    summary: str,
    body: type[BaseModel],
    answer: type[BaseModel],
    chunk: type[BaseModel],
    models: Sequence[str],
    refused: Sequence[int],
) -> dict[str, Any]:
    model = models[0] if models else "NAME"
    examples = {name: {"value": {"model": model, **asked}} for name, asked in _EXAMPLES[body].items()}
    given = {
        "description": "The answer.",
        "content": {JSON: _schema(answer), EVENT_STREAM: {"schema": _event_schema(chunk)}},
    }
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {JSON: {**_schema(body), "examples": examples}}},
        "responses": {"200": given, **_refusals(*_WITH_BODY, *refused)},
    }


def _event_schema(chunk: type[BaseModel]) -> dict[str, Any]:
    """Of each event of a stream: a piece or what went wrong, and the word that ends it."""
    said = {"anyOf": [_schema(chunk)["schema"], _schema(answers.Error)["schema"]]}
    piece = {"type": "string", "contentMediaType": JSON, "contentSchema": said}
    data = {"anyOf": [{"const": "[DONE]"}, piece], "description": f"A {chunk.__name__}; `[DONE]` is the last."}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _look(summary: str, answer: type[BaseModel], *refused: int) -> dict[str, Any]:
    given = {"description": "The answer.", "content": {JSON: _schema(answer)}}
    return {"summary": summary, "responses": {"200": given, **_refusals(400, *refused)}}


def _refusals(*statuses: int) -> dict[str, Any]:
    content = {JSON: _schema(answers.Error)}
    return {str(status): {"description": PHRASES[status], "content": content} for status in sorted(set(statuses))}


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    return {"schema": {"$ref": _REF.format(model=model.__name__)}}
