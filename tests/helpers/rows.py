"""Synthetic rows for data tests, reachable as a generator source (`helpers.rows:counted`)."""

from __future__ import annotations

from collections.abc import Iterator


def counted(count: int = 10, words: int = 3, start: int = 0) -> Iterator[dict[str, str]]:
    """Rows with a unique text, a question and an answer; longer ones mixed with shorter ones."""
    for number in range(start, start + count):
        text = f"row {number} " + "la " * (words + number % 5)
        yield {"text": text, "question": f"what is {number}?", "answer": f"it is {number}"}
