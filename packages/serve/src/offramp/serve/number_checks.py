"""Numbers that a user gave: what they must be, and how a message shows them."""

from __future__ import annotations

import math

from offramp.common.errors import OfframpError

_MAX_DIGITS = 30


def check_whole(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raise `OfframpError` unless a value is a whole number of at least `low` and at most `high`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise OfframpError(f"{name} {value!r} must be a whole number.")
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"in {low}..{high}"
        raise OfframpError(f"{name} {spelled(value)} must be {limit}.")


def check_number(name: str, value: object) -> None:
    """Raise `OfframpError` unless a value is a number that a float can stand for."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise OfframpError(f"{name} {value!r} must be a number.")
    if isinstance(value, int) and abs(value) > 2**63:  # it may not even be a float
        raise OfframpError(f"{name} {spelled(value)} is too large; give a smaller number.")


def spelled(value: float) -> str:
    """A number for a message; of a very long one the length alone, as Python does not write thousands of digits."""
    if isinstance(value, int):
        num_digits = math.floor(value.bit_length() * math.log10(2)) + 1
        if num_digits > _MAX_DIGITS:
            return f"(a number of about {num_digits} digits)"
    return str(value)
