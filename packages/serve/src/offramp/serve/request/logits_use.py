"""What is asked of the logits of a row that predicts a token."""

from __future__ import annotations

from enum import IntEnum


class LogitsUse(IntEnum):
    """The later members ask for more. What is only reported changes no answer."""

    BEST = 0
    """The token of the largest, and no more: it is known without the logits ever being stored."""
    REPORT = 1
    """The same token, and log-probabilities beside it."""
    CHOICE = 2
    """A token chosen from all of them: drawn, or after they were changed."""
