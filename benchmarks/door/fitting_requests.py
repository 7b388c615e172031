"""Hardly a request made by chance is one that a model could answer; these are nearer to it.

What is right stays right and what is wrong stays wrong: only numbers that the document allows, and that no small model
takes, become smaller ones, and every model is the one that is served.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

_MOST: Mapping[str, tuple[int, float]] = {
    "n": (2, 128),
    "best_of": (2, 128),
    "min_tokens": (4, math.inf),
    "max_tokens": (8, math.inf),
    "max_completion_tokens": (8, math.inf),
}
"""The most that is asked, and the most that the document allows: above that a request is wrong, and stays so."""
_DIGITS = re.compile("[0-9]{1,50}")


def fitting(body: Any, *, model: str, vocabulary: int) -> Any:
    """The same request, nearer to one that can be answered; neither wrong where it was right, nor the other way round.

    Args:
        body: Decoded.
        model: Which is served.
        vocabulary: How many tokens it has.
    """
    if not isinstance(body, dict):
        return body
    body = dict(body)
    if isinstance(body.get("model"), str):
        body["model"] = model
    for name, (most, allowed) in _MOST.items():
        if _whole(body.get(name)) and most < body[name] <= allowed:
            body[name] = most
    for name in ("prompt", "stop_token_ids"):
        if name in body:
            body[name] = _in_vocabulary(body[name], vocabulary)
    bias = body.get("logit_bias")
    if isinstance(bias, dict) and all(_DIGITS.fullmatch(token) for token in bias):
        body["logit_bias"] = {str(int(token) % vocabulary): value for token, value in bias.items()}
    return body


def _whole(value: object) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer())


def _in_vocabulary(value: Any, vocabulary: int) -> Any:
    if isinstance(value, list):
        return [_in_vocabulary(item, vocabulary) for item in value]
    return int(value) % vocabulary if _whole(value) and vocabulary <= value < 2**63 else value
