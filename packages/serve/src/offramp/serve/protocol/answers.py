"""What answers look like, for those who write clients: the models behind the OpenAPI document.

Answers are not made by these (`replies` writes JSON as tokens come); a test holds them against each other.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ErrorDetail(_Answer):
    """What went wrong.

    Attributes:
        message: One sentence.
        type: OpenAI's class of error.
        param: The field at fault.
        code: The reason, for programs.
    """

    message: str
    type: str
    param: str | None
    code: str | None


class Error(_Answer):
    """A refusal."""

    error: ErrorDetail


class Usage(_Answer):
    """Tokens read and generated."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Depth(_Answer):
    """How deep tokens went, if that was asked for.

    Attributes:
        exit_layers: Of each token.
        mean_layers: Their mean; null without a token.
        confidences: What the exit test measured for each token; null at the final exit.
    """

    exit_layers: list[int] = []
    mean_layers: float | None = None
    confidences: list[float | None] = []


class CompletionLogprobs(_Answer):
    """Log-probabilities: lists of equal length. Of a prompt's first token there are none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(_Answer):
    """One text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    offramp: Depth | None = None


class Completion(_Answer):
    """The answer of ``/v1/completions``, and each event of its stream; the event with the usage has no choice."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    offramp: Depth | None = None


class TopLogprob(_Answer):
    """A token that might have been said."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token that was said, and those that might have been."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Answer):
    """Log-probabilities of a message."""

    content: list[TokenLogprob]
    refusal: None


class ChatMessage(_Answer):
    """What the model says."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_Answer):
    """One message."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]
    offramp: Depth | None = None


class ChatCompletion(_Answer):
    """The answer of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    offramp: Depth | None = None


class ChatDelta(_Answer):
    """A part of a message."""

    role: Literal["assistant"] | None = None
    content: str


class ChatChunkChoice(_Answer):
    """A part of one message."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class ChatCompletionChunk(_Answer):
    """Each event of a stream of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    offramp: Depth | None = None


class ModelFacts(BaseModel):
    """What is known of a model beside OpenAI's fields."""

    version: str
    num_layers: int
    exit_layers: list[int]
    exit_policy: dict[str, object] | None
    max_model_len: int
    max_source_len: int | None
    run_id: str | None
    config_hash: str | None
    archive_sha256: str | None


class Model(_Answer):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["offramp"]
    offramp: ModelFacts


class ModelList(_Answer):
    """All models that are served."""

    object: Literal["list"]
    data: list[Model]


class Health(_Answer):
    """All is well."""

    status: Literal["ok"]
