"""OpenAI's request bodies, checked strictly and refused with a message that names the field.

Unknown fields are refused as OpenAI refuses them. Fields of OpenAI's that Offramp has no use for are accepted at the
value that changes nothing, so that clients which always send them work, and refused at any other: ignoring them in
silence would give answers that the client did not ask for. Sampling that OpenAI lacks is spelled as vLLM spells it
(`top_k`, `min_p`, ...), because there are clients that send it; what only Offramp has is under `offramp`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from offramp.common.exits.kv_policy import KVPolicy
from offramp.common.exits.policy import Measure
from offramp.serve.exit_overrides import ExitOverrides
from offramp.serve.protocol.errors import ApiError, bad_request
from offramp.serve.request.constraint import Constraint

MAX_CHOICES = 128
MAX_STOPS = 4
MAX_COMPLETION_LOGPROBS = 5
MAX_TOP_LOGPROBS = 20
MAX_DIGITS = 50
"""Of a whole number. No field takes so many, and Python neither reads nor writes thousands of them."""
MAX_PROMPTS = 10_000
"""Of one request; no server takes as many, and a million of them take seconds to look at."""

Prompts = list[str] | list[list[int]]
_TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
GivenPrompts = (
    str | Annotated[list[str], Field(min_length=1)] | _TokenIds | Annotated[list[_TokenIds], Field(min_length=1)]
)
"""What a prompt may be; for the OpenAPI document, as all that is called given here."""


def _as_prompts(value: object) -> object:
    """One prompt or several, as text or as token ids, to a list of prompts."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(type(item) is int for item in value):
            return [value]
        if len(value) > MAX_PROMPTS:
            raise PydanticCustomError(
                "prompt", "must hold at most {most} prompts, not {given}", {"most": MAX_PROMPTS, "given": len(value)}
            )
        if all(isinstance(item, str) for item in value):
            return value
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


_Stop = Annotated[str, Field(min_length=1)]
GivenStops = _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS)]
Stops = Annotated[list[_Stop], BeforeValidator(_as_stops, json_schema_input_type=GivenStops)]


def _as_key(value: object) -> object:
    # The keys of a JSON object are strings.
    if isinstance(value, str) and len(value) <= MAX_DIGITS and value.isascii() and value.isdecimal():
        return int(value)
    return value


Key = Annotated[int, BeforeValidator(_as_key)]
_GivenTopK = Annotated[int, Field(ge=-1)] | None
_SAYS_KEYS: JsonDict = {"propertyNames": {"pattern": f"^[0-9]{{1,{MAX_DIGITS}}}$"}}


def _as_top_k(value: object) -> object:
    # vLLM's clients send these for "all tokens".
    return None if type(value) is int and value in (-1, 0) else value


def _rule(field: str, given: dict[str, Any], needed: str) -> dict[str, Any]:
    """In words of JSON schema: where `field` is as `given`, `needed` must be true."""
    return {
        "if": {"properties": {field: given}, "required": [field]},
        "then": {"properties": {needed: {"const": True}}, "required": [needed]},
    }


_NO_OPTIONS_WITHOUT_A_STREAM = _rule("stream_options", {"type": "object"}, "stream")


class _Body(BaseModel):
    """Strict: no unknown field, no number in a string, no infinity.

    Lists are given up at their first fault (`FailFast`): a million faults would take gigabytes, and one is told.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class OfframpOptions(_Body):
    """Offramp's own part of a request: how deep its tokens run, and what the answer tells of that.

    Attributes:
        operating_point: See `ExitOverrides`, as for all fields up to `exit_layer`.
        return_exit_layers: Report the exit layer of every generated token.
        return_confidences: Report what the exit test measured for every generated token.
        priority: Requests with a smaller number go first.
    """

    operating_point: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")] | None = None
    exit_policy: Literal["full", "early"] | None = None
    measure: Measure | None = None
    threshold: float | None = None
    thresholds: Annotated[dict[Key, float], Field(json_schema_extra=_SAYS_KEYS)] | None = None
    min_exit_layer: int | None = Field(default=None, ge=1)
    shortlist_only: bool | None = None
    kv_policy: KVPolicy | None = None
    max_pending: int | None = Field(default=None, ge=1)
    exit_layer: int | None = Field(default=None, ge=1)
    return_exit_layers: bool = False
    return_confidences: bool = False
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)

    @property
    def overrides(self) -> ExitOverrides:
        """The part about depth."""
        return ExitOverrides(**{field.name: getattr(self, field.name) for field in dataclasses.fields(ExitOverrides)})


class StreamOptions(_Body):
    """What a stream carries beside its pieces."""

    include_usage: bool = False
    # Sent by newer clients; padding against traffic analysis, which a loopback server does not do.
    include_obfuscation: Literal[False] | None = None


class JsonSchema(_Body):
    """The schema of an answer, with its name, as OpenAI wraps it.

    Attributes:
        name: For the client's own use.
        description: For the client's own use; no model reads it here.
        grammar: The JSON schema.
        strict: The answer follows the schema in any case.
    """

    name: str = Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_-]+$")
    description: str | None = None
    grammar: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Body):
    """The language that the answer must be in."""

    model_config = ConfigDict(
        json_schema_extra={
            "if": {"properties": {"type": {"const": "json_schema"}}},
            "then": {"properties": {"json_schema": {"type": "object"}}, "required": ["json_schema"]},
            "else": {"properties": {"json_schema": {"type": "null"}}},
        }
    )

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_and_type_belong_together(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError("schema", "type 'json_schema' and the field 'json_schema' belong together")
        return self


class StructuredOutputs(_Body):
    """vLLM's way to ask for a regular expression; JSON is asked for as OpenAI does it."""

    regex: str = Field(min_length=1)


class _Named(_Body):
    """What says who is asked."""

    model: str


class GenerationBody(_Named):
    """What both generation endpoints share."""

    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    logit_bias: dict[Key, Annotated[float, Field(ge=-100, le=100)]] = Field(default={}, json_schema_extra=_SAYS_KEYS)
    stop: Stops = Field(default=[], max_length=MAX_STOPS)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    response_format: ResponseFormat | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str = ""
    top_k: Annotated[
        Annotated[int, Field(ge=1)] | None,
        BeforeValidator(_as_top_k, json_schema_input_type=_GivenTopK),
    ] = None
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=100)
    min_tokens: int = Field(default=0, ge=0)
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=2**63)]], FailFast()] = []
    ignore_eos: bool = False
    structured_outputs: StructuredOutputs | None = None
    offramp: OfframpOptions = OfframpOptions()

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "'stream_options' is only allowed when 'stream' is true")
        return self

    @property
    def constraint(self) -> Constraint | None:
        """The language that the answer must be in.

        Raises:
            ApiError: 400 when two were asked for.
        """
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return None if self.structured_outputs is None else Constraint("regex", self.structured_outputs.regex)
        if self.structured_outputs is not None:
            raise bad_request("Give 'response_format' or 'structured_outputs', not both.", param="structured_outputs")
        if wanted.json_schema is None:
            return Constraint("json")
        return Constraint("json_schema", json.dumps(wanted.json_schema.grammar))


class CompletionBody(GenerationBody):
    """Body of `POST /v1/completions`."""

    model_config = ConfigDict(
        json_schema_extra={"allOf": [_NO_OPTIONS_WITHOUT_A_STREAM, _rule("max_tokens", {"const": 0}, "echo")]}
    )

    prompt: Annotated[Prompts, BeforeValidator(_as_prompts, json_schema_input_type=GivenPrompts)]
    max_tokens: int | None = Field(default=None, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_COMPLETION_LOGPROBS)
    echo: bool = False
    best_of: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, json_schema_extra={"not": {"const": 0}})

    @field_validator("best_of")
    @classmethod
    def _best_of_is_at_least_n(cls, value: int | None, info: Any) -> int | None:
        if value is not None and value < info.data.get("n", 1):
            raise PydanticCustomError("best_of", "must be at least 'n'")
        return value

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _something_is_left_of_the_prompt(cls, value: int | None) -> int | None:
        if value == 0:
            raise PydanticCustomError("truncate_prompt_tokens", "must be at least 1, or -1 for as many as fit")
        return value

    @model_validator(mode="after")
    def _best_of_needs_whole_answers(self) -> CompletionBody:
        if self.stream and self.best_of is not None and self.best_of > self.n:
            raise PydanticCustomError("best_of", "'best_of' above 'n' cannot be streamed")
        return self

    @model_validator(mode="after")
    def _no_new_token_needs_an_echo(self) -> CompletionBody:
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError("max_tokens", "'max_tokens' 0 gives no text unless 'echo' is true")
        return self


class TextPart(_Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(_Body):
    """One message of a conversation.

    Attributes:
        role: Who speaks; ``developer`` is OpenAI's newer word for ``system``.
        content: Text. Nothing is the empty text.
        name: Who speaks, by name; given to the chat template.
    """

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_as_text, json_schema_input_type=str | list[TextPart])] = ""
    name: str | None = None


class ChatBody(GenerationBody):
    """Body of `POST /v1/chat/completions`."""

    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [_NO_OPTIONS_WITHOUT_A_STREAM, _rule("top_logprobs", {"type": "integer"}, "logprobs")]
        }
    )

    messages: Annotated[list[Message], FailFast()] = Field(min_length=1)
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
            raise PydanticCustomError("max_tokens", "give 'max_completion_tokens' or 'max_tokens', not both")
        return self


BodyT = TypeVar("BodyT", bound=GenerationBody)

NEUTRAL: Mapping[type[GenerationBody], Mapping[str, tuple[object, ...]]] = {
    CompletionBody: {"suffix": ("",)},
    ChatBody: {
        "tools": ([],),
        "tool_choice": ("none",),
        "parallel_tool_calls": (False, True),
        "functions": ([],),
        "function_call": ("none",),
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
"""Fields of OpenAI's that are of no use here, and the values that change nothing. Nothing (`null`) is always one."""

NEUTRAL_IN_MESSAGE = ("refusal", "tool_calls", "function_call", "audio", "annotations")
"""Fields of an assistant's message that clients send back as they got them: nothing, or empty."""


def parse_body(kind: type[BodyT], body: object) -> BodyT:
    """Checks a decoded JSON body.

    Raises:
        ApiError: 400 that names the field, as OpenAI words it where it has words.
    """
    if not isinstance(body, dict):
        raise _no_object()
    # None means "as if left out" in OpenAI's API, for every optional field.
    given = {key: value for key, value in body.items() if value is not None}
    for key, allowed in NEUTRAL[kind].items():
        if key in given:
            value = given.pop(key)
            if not any(value == neutral and type(value) in (type(neutral), float) for neutral in allowed):
                raise _not_supported(key, value, allowed)
    if kind is ChatBody and isinstance(given.get("messages"), list):
        given["messages"] = [_without_neutral(message) for message in given["messages"]]
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _as_api_error(error, kind) from None


def model_of(body: object) -> str:
    """The model that a decoded JSON body asks for; nothing else of it is looked at.

    Raises:
        ApiError: 400 as `parse_body` says it.
    """
    if not isinstance(body, dict):
        raise _no_object()
    try:
        return _Named.model_validate({"model": body["model"]} if body.get("model") is not None else {}).model
    except ValidationError as error:
        raise _as_api_error(error, GenerationBody) from None


def _no_object() -> ApiError:
    return bad_request("The request body must be a JSON object.")


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
        if not (value is None or (key in NEUTRAL_IN_MESSAGE and value in ([], "", {})))
    }


def _as_api_error(error: ValidationError, kind: type[GenerationBody]) -> ApiError:
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
    where = _short(_path(fault["loc"]), quoted=False)
    if fault["type"] == "missing":
        return bad_request(f"Missing required parameter: '{where}'.", param=where, code="missing_required_parameter")
    message = fault["msg"].removeprefix("Input ").rstrip(".")
    if not where:  # fields that exclude each other: the fault is called after the one to change
        param = fault["type"] if fault["type"] in kind.model_fields else None
        return bad_request(f"Invalid request: {message}.", param=param)
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
