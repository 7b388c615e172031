"""One request and its response, as the access log tells of them: never what was said, and no secret."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from starlette.types import Scope

CLIENT_GONE = 499
"""What the log calls a request whose client has left before its end; nginx's number for it."""

log = logging.getLogger("offramp.access")

# Others are words that a client may choose.
_METHODS = frozenset({"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"})
_CLIENT_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass
class Exchange:
    """What becomes known of a request on its way.

    Attributes:
        method: Of the request; None where it was none.
        client: Its address.
        request_id: Ours, sent back as ``x-request-id``.
        client_request_id: What the client calls it (``x-client-request-id``), if that is an id.
        endpoint: Label of the endpoint; None where it is none.
        key: Name of the API key.
        model: Who answered.
        upstream_id: What the server behind the gateway calls it.
        status: HTTP status code that was sent, or `CLIENT_GONE`.
        first_byte_s: Seconds until the status was sent.
        sent_bytes: Of the response's body.
        fault: Code of the error that a client was told, in the status or in the stream.
    """

    method: str | None
    client: str | None
    client_request_id: str | None
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    endpoint: str | None = None
    key: str | None = None
    model: str | None = None
    upstream_id: str | None = None
    status: int | None = None
    first_byte_s: float | None = None
    sent_bytes: int = 0
    fault: str | None = None
    _began: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, scope: Scope) -> Exchange:
        """The exchange that begins with an ASGI scope."""
        address = scope.get("client")
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"x-client-request-id"]
        client_id = given[0] if given and _CLIENT_ID.fullmatch(given[0]) else None
        method = scope["method"] if scope["method"] in _METHODS else "OTHER"
        return cls(method, address[0] if address else None, client_id)

    @property
    def elapsed_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    def write(self) -> None:
        """Writes its line of the access log: JSON, and only what is known."""
        fields: dict[str, Any] = {
            "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            "request_id": self.request_id,
            "client_request_id": self.client_request_id,
            "client": self.client,
            "key": self.key,
            "method": self.method,
            "endpoint": self.endpoint,
            "model": self.model,
            "upstream_id": self.upstream_id,
            "status": self.status,
            "fault": self.fault,
            "first_byte_s": None if self.first_byte_s is None else round(self.first_byte_s, 4),
            "seconds": round(self.elapsed_s, 4),
            "sent_bytes": self.sent_bytes,
        }
        log.info("%s", json.dumps({name: value for name, value in fields.items() if value is not None}))
