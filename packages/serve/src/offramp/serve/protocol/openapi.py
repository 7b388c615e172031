"""The API as an OpenAPI document, made of the models that requests are checked by."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from offramp.serve.protocol import answers
from offramp.serve.protocol.errors import PHRASES
from offramp.serve.protocol.replies import EVENT_STREAM, JSON
from offramp.serve.protocol.requests import ChatBody, CompletionBody

_REF = "#/components/schemas/{model}"
_READING: tuple[type[BaseModel], ...] = (CompletionBody, ChatBody)
_WRITING: tuple[type[BaseModel], ...] = (
    answers.Completion,
    answers.ChatCompletion,
    answers.ChatCompletionChunk,
    answers.Model,
    answers.ModelList,
    answers.Error,
    answers.Health,
)
_ALWAYS = (401, 429, 500, 503)
_WITH_BODY = (400, 404, 408, 413, 415, 504)


def openapi_document() -> dict[str, Any]:
    """The document, of OpenAPI 3.1."""
    _, definitions = models_json_schema(
        [*((model, "validation") for model in _READING), *((model, "validation") for model in _WRITING)],
        ref_template=_REF,
    )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Offramp",
            "version": "1",
            "description": "OpenAI's API for early-exit language models. Unknown fields are refused.",
        },
        "paths": {
            "/v1/completions": {
                "post": _generation("Continues texts.", CompletionBody, answers.Completion, answers.Completion)
            },
            "/v1/chat/completions": {
                "post": _generation(
                    "Answers in a conversation.", ChatBody, answers.ChatCompletion, answers.ChatCompletionChunk
                )
            },
            "/v1/models": {"get": _look("Lists what is served.", answers.ModelList)},
            "/v1/models/{model}": {
                "get": {
                    **_look("Tells of a model.", answers.Model, 404),
                    "parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}],
                }
            },
            "/health/live": {"get": {**_look("Whether the process answers.", answers.Health), "security": []}},
            "/health/ready": {
                "get": {**_look("Whether requests could be answered now.", answers.Health, 503), "security": []}
            },
        },
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _generation(summary: str, body: type[BaseModel], answer: type[BaseModel], chunk: type[BaseModel]) -> dict[str, Any]:
    stream = {"schema": {"type": "string", "description": f"Events `data: {chunk.__name__}`, then `data: [DONE]`."}}
    given = {"description": "The answer.", "content": {JSON: _schema(answer), EVENT_STREAM: stream}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {JSON: _schema(body)}},
        "responses": {"200": given, **_refusals(*_WITH_BODY, *_ALWAYS)},
    }


def _look(summary: str, answer: type[BaseModel], *refusals: int) -> dict[str, Any]:
    given = {"description": "The answer.", "content": {JSON: _schema(answer)}}
    return {"summary": summary, "responses": {"200": given, **_refusals(400, *refusals, *_ALWAYS)}}


def _refusals(*statuses: int) -> dict[str, Any]:
    content = {JSON: _schema(answers.Error)}
    return {str(status): {"description": PHRASES[status], "content": content} for status in sorted(set(statuses))}


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    return {"schema": {"$ref": _REF.format(model=model.__name__)}}
