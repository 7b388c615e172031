"""Requests whose end two servers might see in different places are refused: that is how one is smuggled in another.

The HTTP library refuses what is malformed by itself; it also takes what is only doubtful, and that is refused here.
Nothing of a client's headers is ever passed on, so all others are harmless.
"""

from __future__ import annotations

from starlette.datastructures import Headers

from offramp.serve.protocol.errors import ApiError, bad_request

_ONCE = ("authorization", "content-length", "content-type", "host", "transfer-encoding")


def check_framing(headers: Headers, version: str, *, takes_body: bool) -> None:
    """Raises `ApiError` for headers that contradict each other, the protocol or the endpoint.

    Args:
        headers: Of the request.
        version: Of HTTP.
        takes_body: Whether a request of this kind has a body.
    """
    for name in _ONCE:
        if len(headers.getlist(name)) > 1:
            raise _refused(f"The header {name} was sent more than once; send it once.")
    if "expect" in headers and headers["expect"].strip().lower() != "100-continue":
        raise ApiError(417, "Nothing but '100-continue' can be expected here.", code="expectation_failed")
    if "transfer-encoding" in headers:
        if version == "1.0":
            raise _refused("HTTP/1.0 has no transfer-encoding.")
        if "content-length" in headers:
            raise _refused("The request has content-length and transfer-encoding; send one of them.")
        if headers["transfer-encoding"].strip().lower() != "chunked":
            raise _refused("The request has a transfer-encoding other than 'chunked'.")
    if not takes_body:
        if has_body(headers):
            raise _refused("This endpoint takes no body; leave it out.")
        return
    if "content-encoding" in headers and headers["content-encoding"].strip().lower() != "identity":
        raise ApiError(415, "Compressed bodies are not read; send JSON as it is.", code="unsupported_media_type")
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        # Also what keeps web pages of others from posting forms: they cannot send this type unasked.
        raise ApiError(
            415,
            "The body must be JSON, with the header content-type: application/json.",
            code="unsupported_media_type",
        )


def has_body(headers: Headers) -> bool:
    """Whether a body follows; if none of it is read, where the next request begins is not known."""
    return "transfer-encoding" in headers or headers.get("content-length", "0").strip("0") != ""


def _refused(message: str) -> ApiError:
    return bad_request(message, code="invalid_framing")
