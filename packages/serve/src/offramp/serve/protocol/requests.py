"""OpenAI's request bodies, checked strictly and refused with a message that names the field.

Unknown fields are refused as OpenAI refuses them. Fields of OpenAI's that Offramp has no use for are accepted at the
value that changes nothing, so that clients which always send them work, and refused at any other: ignoring them in
silence would give answers that the client did not ask for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from offramp.serve.protocol.errors import ApiError, bad_request

MAX_STOPS = 4
MAX_COMPLETION_LOGPROBS = 5
MAX_TOP_LOGPROBS = 20

Prompts = list[str] | list[list[int]]


def _as_prompts(value: object) -> object:
    """One prompt or several, as text or as token ids, to a list of prompts."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return value
        if all(type(item) is int for item in value):
            return [value]
        if all(isinstance(item, list) and all(type(token) is int for token in item) for item in value):
            return value
    raise PydanticCustomError(
        "prompt", "must be a string, a non-empty list of strings, a list of token ids or a list of such lists"
    )


def _as_text(value: object) -> object:
    """A message's content: a string, or text parts joined without a separator."""
    if not isinstance(value, list):
        return value
    texts: list[str] = []
    for part in value:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise PydanticCustomError(
                "part", "only parts of type 'text' can be read by this model, not {kind}", {"kind": repr(kind)[:80]}
            )
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise PydanticCustomError("part", "a text part has exactly the fields 'type' and 'text', a string")
        texts.append(part["text"])
    return "".join(texts)


def _as_stops(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _as_layer(value: object) -> object:
    # The keys of a JSON object are strings.
    return int(value) if isinstance(value, str) and value.isdecimal() else value


class _Body(BaseModel):
    """Strict: no unknown field, no number in a string, no infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class OfframpOptions(_Body):
    """Offramp's own part of a request: how deep its tokens run.

    Attributes:
        exit_policy: ``early`` lets tokens leave at the checkpoint's exits; ``full`` runs every layer.
        threshold: The confidence that lets a token leave, at every exit, in place of the calibrated thresholds.
        thresholds: The same, exit by exit (``{"10": 0.9}``); an exit that is not named stays closed.
        kv_policy: Where the keys and values of skipped layers come from.
        min_exit_layer: No token leaves below this layer.
        return_exit_layers: Report the exit layer of every generated token.
    """

    exit_policy: Literal["full", "early"] | None = None
    threshold: float | None = None
    thresholds: dict[Annotated[int, BeforeValidator(_as_layer)], float] | None = None
    kv_policy: str | None = None
    min_exit_layer: int | None = Field(default=None, ge=1)
    return_exit_layers: bool = False


class StreamOptions(_Body):
    """What a stream carries beside its pieces."""

    include_usage: bool = False
    # Sent by newer clients; padding against traffic analysis, which a loopback server does not do.
    include_obfuscation: Literal[False] | None = None


class GenerationBody(_Body):
    """What both generation endpoints share."""

    model: str
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_as_stops)] = Field(
        default=[], max_length=MAX_STOPS
    )
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    offramp: OfframpOptions = OfframpOptions()

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "'stream_options' is only allowed when 'stream' is true")
        return self


class CompletionBody(GenerationBody):
    """Body of `POST /v1/completions`."""

    prompt: Annotated[Prompts, BeforeValidator(_as_prompts)]
    max_tokens: int | None = Field(default=None, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_COMPLETION_LOGPROBS)


class Message(_Body):
    """One message of a conversation.

    Attributes:
        role: Who speaks; ``developer`` is OpenAI's newer word for ``system``.
        content: Text. Nothing is the empty text.
        name: Who speaks, by name; given to the chat template.
    """

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_as_text)] = ""
    name: str | None = None


class ChatBody(GenerationBody):
    """Body of `POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)

    @field_validator("top_logprobs")
    @classmethod
    def _top_logprobs_need_logprobs(cls, value: int | None, info: Any) -> int | None:
        if value is not None and not info.data.get("logprobs"):
            raise PydanticCustomError("top_logprobs", "needs 'logprobs' to be true")
        return value

    @model_validator(mode="after")
    def _one_limit(self) -> ChatBody:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise PydanticCustomError("limit", "give 'max_completion_tokens' or 'max_tokens', not both")
        return self


BodyT = TypeVar("BodyT", bound=GenerationBody)

_NEUTRAL_EVERYWHERE: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
}
_NEUTRAL: Mapping[type[GenerationBody], Mapping[str, tuple[object, ...]]] = {
    CompletionBody: {**_NEUTRAL_EVERYWHERE, "best_of": (1,), "echo": (False,), "suffix": ("",)},
    ChatBody: {
        **_NEUTRAL_EVERYWHERE,
        "tools": ([],),
        "tool_choice": ("none",),
        "parallel_tool_calls": (False, True),
        "functions": ([],),
        "function_call": ("none",),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "store": (False,),
        "metadata": ({},),
        "service_tier": ("auto", "default"),
        "prediction": (),
        "audio": (),
        "reasoning_effort": (),
        "verbosity": (),
        "web_search_options": (),
    },
}
_NEUTRAL_IN_MESSAGE = ("refusal", "tool_calls", "function_call", "audio", "annotations")
"""Fields of an assistant's message that clients send back as they got them: nothing, or empty."""


def parse_body(kind: type[BodyT], body: object) -> BodyT:
    """Checks a decoded JSON body.

    Raises:
        ApiError: 400 that names the field, as OpenAI words it where it has words.
    """
    if not isinstance(body, dict):
        raise bad_request("The request body must be a JSON object.")
    # None means "as if left out" in OpenAI's API, for every optional field.
    given = {key: value for key, value in body.items() if value is not None}
    for key, allowed in _NEUTRAL[kind].items():
        if key in given:
            value = given.pop(key)
            if not any(value == neutral and type(value) in (type(neutral), float) for neutral in allowed):
                raise _not_supported(key, value, allowed)
    if kind is ChatBody and isinstance(given.get("messages"), list):
        given["messages"] = [_without_neutral(message) for message in given["messages"]]
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _as_api_error(error) from None


def _not_supported(key: str, value: object, allowed: tuple[object, ...]) -> ApiError:
    accepted = " or ".join([f"set it to {neutral!r}" for neutral in allowed])
    remedy = f"leave it out{' or ' + accepted if accepted else ''}"
    return bad_request(f"{key!r} is not supported at {_short(value)}: {remedy}.", param=key, code="unsupported_value")


def _without_neutral(message: object) -> object:
    if not isinstance(message, dict):
        return message
    return {
        key: value
        for key, value in message.items()
        if not (value is None or (key in _NEUTRAL_IN_MESSAGE and value in ([], "", {})))
    }


def _as_api_error(error: ValidationError) -> ApiError:
    """The first fault of a body, as OpenAI would say it; unknown fields first, because they are named together."""
    faults = error.errors(include_url=False, include_context=False)
    unknown = [_path(fault["loc"]) for fault in faults if fault["type"] == "extra_forbidden"]
    if unknown:
        plural = "s" if len(unknown) > 1 else ""
        return bad_request(
            f"Unrecognized request argument{plural} supplied: {_short(', '.join(unknown), quoted=False)}",
            param=_short(unknown[0], quoted=False),
            code="unknown_parameter",
        )
    fault = faults[0]
    where = _path(fault["loc"])
    if fault["type"] == "missing":
        return bad_request(f"Missing required parameter: '{where}'.", param=where, code="missing_required_parameter")
    message = fault["msg"].removeprefix("Input ").rstrip(".")
    if not where:
        return bad_request(f"Invalid request: {message}.")
    if isinstance(fault["input"], (str, int, float, bool)):
        message += f", not {_short(fault['input'])}"
    return bad_request(f"Invalid value for '{where}': {message}.", param=where, code="invalid_value")


def _path(location: tuple[int | str, ...]) -> str:
    """``("messages", 0, "content")`` as ``messages[0].content``; union branches are not part of the client's view."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif "[" not in part:
            path += f".{part}" if path else part
    return path


def _short(value: object, limit: int = 80, quoted: bool = True) -> str:
    """A value for a message: never a whole prompt sent back."""
    text = repr(value) if quoted else str(value)
    return text if len(text) <= limit else text[:limit] + "..."
