"""Errors as OpenAI's API says them: a true status code and one error object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PHRASES: Mapping[int, str] = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    413: "Content Too Large",
    415: "Unsupported Media Type",
    417: "Expectation Failed",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}
"""The reason phrase of every status code that the service uses."""


@dataclass
class ApiError(Exception):
    """A request that cannot be answered, and why.

    Attributes:
        status: HTTP status code, one of `PHRASES`.
        message: One sentence for the client.
        type: OpenAI's class of error, such as ``invalid_request_error``.
        param: The request's field at fault.
        code: OpenAI's machine-readable reason, such as ``context_length_exceeded``.
        headers: Further response headers, such as ``Retry-After``.
    """

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        """The JSON body: ``{"error": {...}}``."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request itself is at fault."""
    return ApiError(400, message, param=param, code=code)


def prompt_too_long(num_tokens: int, max_tokens: int | None, limit: int, param: str, what: str = "context") -> ApiError:
    """400: the prompt, or the prompt with the completion asked for, can never fit.

    Args:
        num_tokens: Length of the prompt in tokens.
        max_tokens: Length of the completion asked for in tokens; None when the prompt alone is too long.
        limit: The most tokens of prompt and completion together.
        param: The field that carries the prompt.
        what: ``context`` when the model's context is the limit, ``cache`` when the server's KV cache is.
    """
    subject = "This model's maximum context length is" if what == "context" else "This server's KV cache holds"
    asked = f"your prompt has {num_tokens} tokens"
    if max_tokens is None and num_tokens == limit:
        asked += ", which leaves none for an answer"
    if max_tokens is not None:
        asked += f" and you asked for {max_tokens} more, {num_tokens + max_tokens} together"
    remedy = "shorten the prompt" if max_tokens is None else "shorten the prompt or lower max_tokens"
    return bad_request(
        f"{subject} {limit} tokens, but {asked}; {remedy}.",
        param=param,
        code="context_length_exceeded",
    )


def prompt_far_too_long(num_tokens: int, limit: int, param: str) -> ApiError:
    """400: the same, found before all of the prompt had been looked at.

    Args:
        num_tokens: Length in tokens of what has been looked at.
        limit: The most that there may be.
        param: The field that carries the prompt.
    """
    return bad_request(
        f"At most {limit} tokens are taken, but your prompt has more than {num_tokens}; shorten it.",
        param=param,
        code="context_length_exceeded",
    )


def unknown_model(name: str, served: str) -> ApiError:
    """404: a model that is not served here."""
    return ApiError(404, f"The model {name!r} does not exist; served here: {served!r}.", code="model_not_found")


def unknown_endpoint(path: str, known: str) -> ApiError:
    """404: a path that is no endpoint."""
    return ApiError(404, f"Unknown endpoint {path!r}; known here: {known}.", code="unknown_url")


def too_large(limit: int) -> ApiError:
    """413: the body has more bytes than are read."""
    return ApiError(413, f"The request body is longer than {limit} bytes; send less.", code="request_too_large")


def queue_full(limit: int) -> ApiError:
    """429: as many requests as the engine takes are running or waiting."""
    return busy(f"The server holds as many requests as it takes, {limit}; try again later.")


def busy(message: str) -> ApiError:
    """429: too many others are served; the same request may be answered later."""
    return ApiError(429, message, type="rate_limit_error", code="queue_full", headers={"Retry-After": "1"})


def engine_dead(cause: str) -> ApiError:
    """503: the engine stopped on an error and answers nothing any more."""
    return ApiError(503, f"The engine has stopped: {cause}", type="server_error", code="engine_dead")


def status_of(error: Mapping[str, Any]) -> int:
    """The status that an error of ours should have had, where it was found too late for one.

    Args:
        error: The object under ``error``.
    """
    by_code = {"engine_dead": 503, "internal_error": 500, "queue_full": 429, "model_not_found": 404}
    return by_code.get(str(error.get("code")), 500 if error.get("type") == "server_error" else 400)


def internal(cause: str) -> ApiError:
    """500: our fault."""
    return ApiError(500, f"The server failed on this request: {cause}", type="server_error", code="internal_error")
