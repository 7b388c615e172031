"""The allow-list: every method and path that is answered. Nothing else gets any further.

Paths are compared as they came, before anything is decoded, so that no spelling of a path means another one behind the
door. What follows a question mark is never looked at.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from offramp.serve.http.keys import KeyUse
from offramp.serve.protocol.errors import ApiError, unknown_endpoint

MODEL_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"


@dataclass(frozen=True)
class Endpoint:
    """Something that may be asked for.

    Attributes:
        label: What the access log calls it.
        method: The one that it takes.
        path: A regular expression of the whole path.
        public: Whether it is answered without a key.
        use: What a key must be for.
    """

    label: str
    method: str
    path: str
    public: bool = False
    use: KeyUse = "api"

    @property
    def takes_body(self) -> bool:
        """Whether a request has a body."""
        return self.method == "POST"


DOCUMENT = Endpoint("/openapi.json", "GET", r"/openapi\.json")
LIVE = Endpoint("/health/live", "GET", "/health/live", public=True)
READY = Endpoint("/health/ready", "GET", "/health/ready", public=True)
METRICS = Endpoint("/metrics", "GET", "/metrics", use="metrics")
"""Where there are any: see `Backend.metrics`."""
ENDPOINTS = (
    Endpoint("/v1/completions", "POST", "/v1/completions"),
    Endpoint("/v1/chat/completions", "POST", "/v1/chat/completions"),
    Endpoint("/v1/models", "GET", "/v1/models"),
    Endpoint("/v1/models/NAME", "GET", f"/v1/models/{MODEL_NAME}"),
    DOCUMENT,
    LIVE,
    READY,
)


def find_endpoint(endpoints: Sequence[Endpoint], method: str, path: str) -> Endpoint:
    """What a request asks for.

    Args:
        endpoints: Those that there are.
        method: Of the request.
        path: As it came, nothing decoded.

    Raises:
        ApiError: 404 for another path, 405 for another method.
    """
    found = [endpoint for endpoint in endpoints if re.fullmatch(endpoint.path, path, re.ASCII)]
    if not found:
        raise unknown_endpoint(path[:80], ", ".join(endpoint.label for endpoint in endpoints))
    for endpoint in found:
        if endpoint.method == method:
            return endpoint
    allowed = ", ".join(endpoint.method for endpoint in found)
    raise ApiError(
        405,
        f"{found[0].label} takes {allowed}, not {method[:20]}.",
        code="method_not_allowed",
        headers={"Allow": allowed},
    )
