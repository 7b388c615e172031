"""Answers in the making: the engine's outputs as OpenAI's JSON objects, whole or as a stream of server-sent events."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from offramp.common.errors import OfframpError
from offramp.serve.protocol.echo import Echo
from offramp.serve.protocol.errors import ApiError, internal
from offramp.serve.request.iteration_result import TokenLogprobs
from offramp.serve.request.output import RequestOutput

JSON = "application/json"
EVENT_STREAM = "text/event-stream"

TokenText = Callable[[int], str]
"""A token's own text, for log-probabilities."""

ErrorOf = Callable[[Exception], ApiError]
"""How a client is told why its answer has ended."""


def internal_error(cause: Exception) -> ApiError:
    """500, with what the cause says."""
    return internal(str(cause) or type(cause).__name__)


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


@dataclass(frozen=True)
class Report:
    """What an answer tells beside its text.

    Attributes:
        usage: Whether a stream ends with an event that carries the usage; a whole answer always has it.
        logprobs: Log-probabilities of the tokens.
        exit_layers: How deep every token went.
        confidences: What the exit test measured for every token.
    """

    usage: bool = False
    logprobs: bool = False
    exit_layers: bool = False
    confidences: bool = False


@dataclass
class _Choice:
    """One sequence of an answer, as far as it has come."""

    index: int
    echo: Echo | None
    heard: bool = False  # whether the engine has said anything of it
    spoke: bool = False  # whether the stream has
    texts: list[str] = field(default_factory=list)
    text_length: int = 0  # characters
    exit_layers: list[int] = field(default_factory=list)
    confidences: list[float | None] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    logprob_sum: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str | None = None

    @property
    def mean_logprob(self) -> float:
        """How likely the model finds it, whatever its length."""
        return self.logprob_sum / max(self.completion_tokens, 1)


class Generation(ABC):
    """An answer that the engine is working on; the sink of its requests.

    `put` and `fail` are called in the engine's thread and only store; all formatting happens in `take`, in the thread
    of the front, so that it never holds an iteration up.

    Args:
        id: OpenAI's id of the answer.
        model: The model's name.
        request_ids: The engine's requests: all sequences of the first prompt, then those of the next, and so on.
        stream: Server-sent events, or one JSON object.
        report: What is told beside the text.
        token_text: A token's text, for log-probabilities.
        sequences: Sequences generated for each prompt.
        kept: How many of them the answer has, those with the highest mean log-probability; fewer than `sequences` only
            without a stream and with log-probabilities asked of the engine.
        echoes: For each prompt, what its choices begin with; None when they begin with the new text.
        error_of: Asked when the engine has ended a request without an answer.

    Attributes:
        request_ids: As given.
        stream: As given.
        finished: Nothing more will be formatted; `take` may still have pieces to give.
        error: What it ended with; None while it has not, or if it ended well.
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
        report: Report,
        token_text: TokenText,
        sequences: int = 1,
        kept: int = 1,
        echoes: Sequence[Echo] | None = None,
        error_of: ErrorOf = internal_error,
    ) -> None:
        assert kept == sequences or not stream, "which sequences are kept is known only at the end"
        self.request_ids = tuple(request_ids)
        self.stream = stream
        self.finished = False
        self.error: ApiError | None = None
        self._error_of = error_of
        self._head = {"id": id, "created": int(time.time()), "model": model}
        self._report = report
        self._token_text = token_text
        self._sequences, self._kept = sequences, kept
        self._choices = {
            request_id: _Choice(index, None if echoes is None else echoes[index // sequences])
            for index, request_id in enumerate(request_ids)
        }
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
            why = output.error or f"the request was {output.finish_reason}"
            self._end_with_error(OfframpError(why) if output.blame == "request" else RuntimeError(why))
            return
        text, logprobs = ("", []) if choice.heard else self._opening(choice, output)
        choice.heard = True
        choice.text_length += len(text)
        if self._report.logprobs:
            offsets = self._offsets(choice.text_length, output)
            logprobs += [self._logprob(entry, at) for entry, at in zip(output.logprobs, offsets, strict=True)]
        choice.text_length += len(output.text)
        text += output.text
        choice.logprob_sum += sum(entry.logprob for entry in output.logprobs)
        choice.prompt_tokens = output.usage.prompt_tokens
        choice.completion_tokens = output.usage.completion_tokens
        choice.exit_layers += output.exit_layers
        choice.confidences += output.confidences
        choice.finish_reason = output.finish_reason
        if self.stream:
            # Text may lag behind the tokens; an event with nothing in it is not sent.
            depth = self._depth(output.exit_layers, output.confidences, choice.exit_layers)
            if text or logprobs or output.finish_reason or (depth and output.new_token_ids):
                self._event(self._chunk(choice, text, logprobs) | depth)
                choice.spoke = True
        else:
            choice.texts.append(text)
            choice.logprobs += logprobs
        if all(one.finish_reason for one in self._choices.values()):
            self._end()

    def _end(self) -> None:
        if self.stream:
            if self._report.usage:
                self._event({"choices": [], "usage": self._usage()})
            self._ready += b"data: [DONE]\n\n"
        else:
            kept = self._best()
            choices = [
                self._choice(choice) | self._depth(choice.exit_layers, choice.confidences, choice.exit_layers)
                for choice in kept
            ]
            answer = {**self._head, "object": self.object_name, "choices": choices, "usage": self._usage()}
            layers = [layer for choice in kept for layer in choice.exit_layers]
            confidences = [confidence for choice in kept for confidence in choice.confidences]
            self._ready += encode(answer | self._depth(layers, confidences, layers))
        self.finished = True

    def _best(self) -> list[_Choice]:
        """The choices that the answer has, with their final indices."""
        choices = list(self._choices.values())
        if self._kept == self._sequences:
            return choices
        kept: list[_Choice] = []
        for start in range(0, len(choices), self._sequences):
            sequences = choices[start : start + self._sequences]
            kept += sorted(sequences, key=lambda choice: choice.mean_logprob, reverse=True)[: self._kept]
        for index, choice in enumerate(kept):
            choice.index = index
        return kept

    def _depth(
        self, layers: Sequence[int], confidences: Sequence[float | None], counted: Sequence[int]
    ) -> dict[str, Any]:
        """Our own part of an answer, a choice or an event, if it was asked for.

        Args:
            layers: exit layers to report.
            confidences: of the same tokens.
            counted: exit layers of all tokens so far, for the mean.
        """
        told: dict[str, Any] = {}
        if self._report.exit_layers:
            told["exit_layers"] = list(layers)
            told["mean_layers"] = sum(counted) / len(counted) if counted else None
        if self._report.confidences:
            told["confidences"] = list(confidences)
        return {"offramp": told} if told else {}

    def _end_with_error(self, cause: Exception) -> None:
        # Where the head with its 200 has been sent by now, the error can only be said in the body.
        self.error = self._error_of(cause)
        body = encode(self.error.body())
        self._ready += b"data: %b\n\ndata: [DONE]\n\n" % body if self.stream else body
        self.finished = True

    def _event(self, chunk: dict[str, Any]) -> None:
        usage = {"usage": None} if self._report.usage else {}
        self._ready += b"data: %b\n\n" % encode({**self._head, "object": self.chunk_name, **usage, **chunk})

    def _usage(self) -> dict[str, int]:
        choices = list(self._choices.values())
        prompt = sum(choice.prompt_tokens for choice in choices[:: self._sequences])
        completion = sum(choice.completion_tokens for choice in choices)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _opening(self, choice: _Choice, output: RequestOutput) -> tuple[str, list[dict[str, Any]]]:
        """Text that a choice begins with before any new one, and its log-probabilities; from its first output."""
        return "", []

    def _offsets(self, start: int, output: RequestOutput) -> list[int]:
        """For each new token, the character at which its text begins.

        Of several at once it is known by their own texts only, and those may say more than the answer does: no offset
        is beyond its end.
        """
        offsets = [start]
        for entry in output.logprobs[:-1]:
            offsets.append(min(offsets[-1] + len(self._token_text(entry.token_id)), start + len(output.text)))
        return offsets[: len(output.logprobs)]

    @abstractmethod
    def _logprob(self, entry: TokenLogprobs, offset: int) -> dict[str, Any]:
        """What the endpoint says of a token's log-probabilities; `offset` is where its text begins."""

    @abstractmethod
    def _choice(self, choice: _Choice) -> dict[str, Any]:
        """A choice of a whole answer."""

    @abstractmethod
    def _chunk(self, choice: _Choice, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        """An event of a stream: what is new of a choice."""


class CompletionGeneration(Generation):
    """The answer to `POST /v1/completions`."""

    def _opening(self, choice: _Choice, output: RequestOutput) -> tuple[str, list[dict[str, Any]]]:
        echo = choice.echo
        if echo is None:
            return super()._opening(choice, output)
        if not self._report.logprobs:
            return echo.text, []
        # Nothing comes before the first token, so nothing can be said of it.
        first = {"token": self._token_text(echo.token_ids[0]), "logprob": None, "top": None, "offset": echo.offsets[0]}
        others = zip(output.prompt_logprobs, echo.offsets[1:], strict=True)
        return echo.text, [first, *(self._logprob(entry, offset) for entry, offset in others)]

    def _logprob(self, entry: TokenLogprobs, offset: int) -> dict[str, Any]:
        said = self._token_text(entry.token_id)
        # As OpenAI does it, the chosen token is always among the alternatives, so `logprobs: 0` gives it alone.
        top = {said: entry.logprob}
        for token, logprob in entry.top:
            if token != entry.token_id:
                text = self._token_text(token)
                # Parts of characters have one text, all of them. None may hide another: who compares a token with the
                # best one would find it the best itself. The spelling is vLLM's.
                top[f"token_id:{token}" if text in top else text] = logprob
        return {"token": said, "logprob": entry.logprob, "top": top, "offset": offset}

    def _choice(self, choice: _Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": "".join(choice.texts),
            "logprobs": _columns(choice.logprobs),
            "finish_reason": choice.finish_reason,
        }

    def _chunk(self, choice: _Choice, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        entry = {
            "index": choice.index,
            "text": text,
            "logprobs": _columns(logprobs),
            "finish_reason": choice.finish_reason,
        }
        return {"choices": [entry]}


class ChatGeneration(Generation):
    """The answer to `POST /v1/chat/completions`."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def _logprob(self, entry: TokenLogprobs, offset: int) -> dict[str, Any]:
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

    def _chunk(self, choice: _Choice, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        role = {} if choice.spoke else {"role": "assistant"}
        entry = {
            "index": choice.index,
            "delta": {**role, "content": text},
            "logprobs": _content(logprobs),
            "finish_reason": choice.finish_reason,
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
