"""What requests can say already and the engine cannot do yet: refused by name, never ignored."""

from __future__ import annotations

from offramp.common.errors import OfframpError
from offramp.serve.request import Request, SamplingParams

_DEFAULTS = SamplingParams()
_SAMPLING = ("prompt_logprobs", "constraint")
_KV_POLICIES = ("full", "fill")


def check_supported(request: Request) -> None:
    """Raise `OfframpError` for a request that asks for what this engine lacks."""
    exits = request.exits
    for name in _SAMPLING:
        if getattr(request.sampling, name) != getattr(_DEFAULTS, name):
            raise OfframpError(f"{name} is not supported by this engine yet; leave it out.")
    if exits.kv_policy not in _KV_POLICIES:
        raise OfframpError(
            f"kv_policy {exits.kv_policy!r} is not supported by this engine yet; choose one of "
            f"{', '.join(_KV_POLICIES)}."
        )
