"""Answers in the making: the engine's outputs as OpenAI's JSON objects, whole or as a stream of server-sent events."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from offramp.serve.protocol.errors import ApiError, internal
from offramp.serve.request import RequestOutput, TokenLogprobs

JSON = "application/json"
EVENT_STREAM = "text/event-stream"

TokenText = Callable[[int], str]
"""A token's own text, for log-probabilities."""


def encode(value: object) -> bytes:
    """JSON in UTF-8. A lone surrogate, which a message may quote from a request, becomes a question mark."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


@dataclass(frozen=True)
class Complete:
    """An answer that is known at once.

    Attributes:
        status: HTTP status code.
        body: JSON.
        headers: Further response headers.
    """

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of_error(cls, error: ApiError) -> Complete:
        """The answer that says `error`."""
        return cls(error.status, encode(error.body()), dict(error.headers))


@dataclass
class _Choice:
    """One sequence of an answer, as far as it has come."""

    index: int
    texts: list[str] = field(default_factory=list)
    text_length: int = 0  # characters
    exit_layers: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str | None = None


class Generation(ABC):
    """An answer that the engine is working on; the sink of its requests.

    `put` and `fail` are called in the engine's thread and only store; all formatting happens in `take`, in the thread
    of the front, so that it never holds an iteration up.

    Args:
        id: OpenAI's id of the answer.
        model: The model's name.
        request_ids: The engine's requests, in the order of the choices.
        stream: Server-sent events, or one JSON object.
        include_usage: Whether a stream ends with an event that carries the usage.
        exit_layers: Whether the answer reports exit layers.
        token_text: A token's text, for log-probabilities.

    Attributes:
        request_ids: As given.
        stream: As given.
        finished: Nothing more will be formatted; `take` may still have pieces to give.
        failed: It ended with an error.
    """

    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(
        self,
        id: str,
        model: str,
        request_ids: Sequence[str],
        *,
        stream: bool,
        include_usage: bool,
        exit_layers: bool,
        token_text: TokenText,
    ) -> None:
        self.request_ids = tuple(request_ids)
        self.stream = stream
        self.finished = False
        self.failed = False
        self._head = {"id": id, "created": int(time.time()), "model": model}
        self._include_usage = include_usage
        self._report_exits = exit_layers
        self._token_text = token_text
        self._choices = {request_id: _Choice(index) for index, request_id in enumerate(request_ids)}
        self._inbox: deque[RequestOutput | Exception] = deque()  # appends and pops are atomic
        self._ready = bytearray()

    @property
    def content_type(self) -> str:
        """Of the whole answer."""
        return EVENT_STREAM if self.stream else JSON

    def put(self, output: RequestOutput) -> None:
        """Takes the engine's newest output for one of the requests."""
        self._inbox.append(output)

    def fail(self, request_id: str, cause: Exception) -> None:
        """Ends the answer with an error."""
        self._inbox.append(cause)

    def take(self, max_bytes: int) -> tuple[bytes, bool]:
        """The next piece of the answer, empty while there is nothing new.

        Args:
            max_bytes: Longest piece; what is left over comes with the next call.

        Returns:
            The piece, and whether it is the last.
        """
        while self._inbox and not self.finished:
            item = self._inbox.popleft()
            if isinstance(item, RequestOutput):
                self._advance(self._choices[item.request_id], item)
            else:
                self._end_with_error(item)
        piece = bytes(self._ready[:max_bytes])
        del self._ready[:max_bytes]
        return piece, self.finished and not self._ready

    def _advance(self, choice: _Choice, output: RequestOutput) -> None:
        if output.finish_reason not in (None, "stop", "length"):
            self._end_with_error(RuntimeError(output.error or f"the request was {output.finish_reason}"))
            return
        logprobs = [self._logprob(choice, entry) for entry in output.logprobs]
        first = choice.completion_tokens == 0
        choice.prompt_tokens = output.usage.prompt_tokens
        choice.completion_tokens = output.usage.completion_tokens
        choice.text_length += len(output.text)
        choice.exit_layers += output.exit_layers
        choice.finish_reason = output.finish_reason
        if self.stream:
            # Text may lag behind the tokens; an event with nothing in it is not sent.
            if output.text or logprobs or output.finish_reason or (self._report_exits and output.exit_layers):
                chunk = self._chunk(choice, output, logprobs, first=first)
                if self._report_exits:
                    chunk["offramp"] = _exits(output.exit_layers, choice.exit_layers)
                self._event(chunk)
        else:
            choice.texts.append(output.text)
            choice.logprobs += logprobs
        if all(one.finish_reason for one in self._choices.values()):
            self._end()

    def _end(self) -> None:
        if self.stream:
            if self._include_usage:
                self._event({"choices": [], "usage": self._usage()})
            self._ready += b"data: [DONE]\n\n"
        else:
            choices = [self._choice(choice) for choice in self._choices.values()]
            answer = {**self._head, "object": self.object_name, "choices": choices, "usage": self._usage()}
            if self._report_exits:
                for entry, choice in zip(choices, self._choices.values(), strict=True):
                    entry["offramp"] = _exits(choice.exit_layers, choice.exit_layers)
                layers = [layer for choice in self._choices.values() for layer in choice.exit_layers]
                answer["offramp"] = _exits(layers, layers)
            self._ready += encode(answer)
        self.finished = True

    def _end_with_error(self, cause: Exception) -> None:
        # The head with its 200 has been sent by now, so the error can only be said in the body.
        error = internal(str(cause) or type(cause).__name__)
        body = encode(error.body())
        self._ready += b"data: %b\n\ndata: [DONE]\n\n" % body if self.stream else body
        self.finished = self.failed = True

    def _event(self, chunk: dict[str, Any]) -> None:
        usage = {"usage": None} if self._include_usage else {}
        self._ready += b"data: %b\n\n" % encode({**self._head, "object": self.chunk_name, **usage, **chunk})

    def _usage(self) -> dict[str, int]:
        prompt = sum(choice.prompt_tokens for choice in self._choices.values())
        completion = sum(choice.completion_tokens for choice in self._choices.values())
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    @abstractmethod
    def _logprob(self, choice: _Choice, entry: TokenLogprobs) -> dict[str, Any]:
        """What the endpoint says of a token's log-probabilities."""

    @abstractmethod
    def _choice(self, choice: _Choice) -> dict[str, Any]:
        """A choice of a whole answer."""

    @abstractmethod
    def _chunk(
        self, choice: _Choice, output: RequestOutput, logprobs: list[dict[str, Any]], *, first: bool
    ) -> dict[str, Any]:
        """An event of a stream: what is new of a choice; `first` is its first event."""


class CompletionGeneration(Generation):
    """The answer to `POST /v1/completions`."""

    def _logprob(self, choice: _Choice, entry: TokenLogprobs) -> dict[str, Any]:
        # As OpenAI does it, the chosen token is always among the alternatives, so `logprobs: 0` gives it alone.
        top = {self._token_text(token): logprob for token, logprob in entry.top}
        token = self._token_text(entry.token_id)
        return {
            "token": token,
            "logprob": entry.logprob,
            "top": {**top, token: entry.logprob},
            "offset": choice.text_length,
        }

    def _choice(self, choice: _Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": "".join(choice.texts),
            "logprobs": _columns(choice.logprobs),
            "finish_reason": choice.finish_reason,
        }

    def _chunk(
        self, choice: _Choice, output: RequestOutput, logprobs: list[dict[str, Any]], *, first: bool
    ) -> dict[str, Any]:
        entry = {
            "index": choice.index,
            "text": output.text,
            "logprobs": _columns(logprobs),
            "finish_reason": output.finish_reason,
        }
        return {"choices": [entry]}


class ChatGeneration(Generation):
    """The answer to `POST /v1/chat/completions`."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def _logprob(self, choice: _Choice, entry: TokenLogprobs) -> dict[str, Any]:
        top = [self._token(token, logprob) for token, logprob in entry.top]
        return {**self._token(entry.token_id, entry.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._token_text(token)
        # A token may be part of a character: its text is then no text, and its bytes are not known.
        octets = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": octets}

    def _choice(self, choice: _Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": "".join(choice.texts), "refusal": None},
            "logprobs": _content(choice.logprobs),
            "finish_reason": choice.finish_reason,
        }

    def _chunk(
        self, choice: _Choice, output: RequestOutput, logprobs: list[dict[str, Any]], *, first: bool
    ) -> dict[str, Any]:
        role = {"role": "assistant"} if first else {}
        entry = {
            "index": choice.index,
            "delta": {**role, "content": output.text},
            "logprobs": _content(logprobs),
            "finish_reason": output.finish_reason,
        }
        return {"choices": [entry]}


def _columns(entries: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The completions endpoint's log-probabilities: lists of equal length."""
    if not entries:
        return None
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [entry["top"] for entry in entries],
        "text_offset": [entry["offset"] for entry in entries],
    }


def _content(entries: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The chat endpoint's log-probabilities: a list of tokens."""
    return {"content": entries, "refusal": None} if entries else None


def _exits(layers: Sequence[int], counted: Sequence[int]) -> dict[str, Any]:
    """Exit layers to report, and the mean number of layers of all tokens so far."""
    return {"exit_layers": list(layers), "mean_layers": sum(counted) / len(counted) if counted else None}
