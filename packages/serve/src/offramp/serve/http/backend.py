"""What stands behind the door: something that answers requests which the door has let in."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from offramp.serve.protocol.replies import JSON


@dataclass(frozen=True)
class Asked:
    """A request that has been let in.

    Attributes:
        path: Of the API, such as ``v1/completions``.
        body: Whole; empty where the path takes none.
        request_id: Unique, and not chosen by the client.
    """

    path: str
    body: bytes
    request_id: str


@dataclass(frozen=True)
class Answer:
    """An answer whose status is known.

    Attributes:
        status: HTTP status code.
        body: Whole, or server-sent events as they come; these may end with an `ApiError`.
        content_type: Of the body.
        headers: Further response headers.
        model: Which model gave it, as name and version, if one did; for the access log.
        upstream_id: What another server calls this request, if one answers it; for the access log.
    """

    status: int
    body: bytes | AsyncIterator[bytes]
    content_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None
    upstream_id: str | None = None


class Backend(Protocol):
    """Answers requests."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """Is entered before the first request, and left after the last."""
        ...

    def open(self, asked: Asked) -> AbstractAsyncContextManager[Answer]:
        """The answer to a request; leaving the context, also by cancellation, ends what is left of it.

        Raises:
            ApiError: There is no answer.
        """
        ...

    def metrics(self) -> bytes | None:
        """What Prometheus is told, in the content type of `http.prometheus`; None where another server tells it."""
        ...

    def model_names(self) -> tuple[str, ...]:
        """What requests may call the models that are served."""
        ...

    def unready(self) -> str | None:
        """Why no request would be answered now, in words for anybody; None when one would."""
        ...
