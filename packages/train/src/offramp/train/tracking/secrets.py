"""Keeping secrets out of what is logged."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
# Whole words of a key, so that `tokenizer` and `max_tokens` are not taken for a token.
_SECRET_KEY = re.compile(
    r"(?:^|[._\-/])(?:\w*_)?(?:token|password|passwd|secret|credentials?|(?:api|access|private)_?key)$", re.I
)
_USERINFO = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.\-]*://)[^/@\s]+@", re.I)


def mask(value: Any, key: str = "") -> Any:
    """The value with secrets replaced: under keys that name one, and user and password within URIs.

    Args:
        value: plain containers and scalars.
        key: the key it lies under.
    """
    if isinstance(value, Mapping):
        return {name: mask(part, str(name)) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [mask(part, key) for part in value]
    if value is not None and value != "" and not isinstance(value, bool) and _SECRET_KEY.search(key):
        return MASK
    return _USERINFO.sub(rf"\g<scheme>{MASK}@", value) if isinstance(value, str) else value
