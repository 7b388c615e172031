"""The demo's task: say in English when a cron expression fires.

The data is synthetic and says so: expressions are drawn at random by the grammar below (five fields; the common shapes
more often than the rare ones), and the English is what the library `cron-descriptor` writes, in 24-hour time. Its
sentences are the definition of right here, quirks included.

A row belongs to one split by a hash of its *sentence*, so the splits share neither a prompt nor an answer, whatever the
seed and the number of rows: `0 9 * * 1` and `0 9 * * MON` read the same and always lie in the same split.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from typing import Literal, TypedDict

from cron_descriptor import Options, get_description

Split = Literal["train", "calibration", "test"]

DAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")


class Row(TypedDict):
    """A prompt and the completion wanted for it; the completion starts with its space and carries no end marker."""

    prompt: str
    completion: str


def prompt_for(expression: str) -> str:
    """What the model is asked, in training as in serving."""
    return f"Cron: {expression}\nMeaning:"


def describe(expression: str) -> str:
    """The teacher's sentence."""
    options = Options()
    options.use_24hour_time_format = True
    return get_description(expression, options)


def split_of(sentence: str) -> Split:
    """The split a sentence belongs to: of 20 equal parts, one for calibration, one for test."""
    part = int.from_bytes(hashlib.sha256(sentence.encode()).digest()[:8], "big") % 20
    return "calibration" if part == 0 else "test" if part == 1 else "train"


def cron_rows(split: Split, count: int, seed: int = 0) -> Iterator[Row]:
    """Yield `count` rows of a split, no prompt twice: always the same ones, and a larger count only adds to them."""
    # A str seed is hashed by its text, not by Python's salted hash; each split draws from a stream of its own.
    draw = random.Random(f"{seed}/{split}")
    seen: set[str] = set()
    while len(seen) < count:
        expression = random_expression(draw)
        if expression in seen:
            continue
        sentence = describe(expression)
        if split_of(sentence) == split:
            seen.add(expression)
            yield {"prompt": prompt_for(expression), "completion": f" {sentence}"}


def random_expression(draw: random.Random) -> str:
    """One five-field expression: minute, hour, day of month, month, day of week."""
    month = MONTHS.__getitem__ if draw.random() < 0.6 else (lambda index: str(index + 1))
    day = DAYS.__getitem__ if draw.random() < 0.6 else str
    fields = (
        _pick(draw, {
            lambda: str(draw.choice((0, 0, 15, 30, 45, draw.randrange(60)))): 7,
            lambda: f"*/{draw.choice((2, 3, 5, 10, 12, 15, 20, 30))}": 3,
            lambda: _list(draw, 0, 59): 0.5,
            lambda: _range(draw, 0, 59): 0.2,
            lambda: "*": 0.5,
        }),
        _pick(draw, {
            lambda: str(draw.randrange(24)): 6,
            lambda: _range(draw, 0, 23): 2,
            lambda: f"*/{draw.choice((2, 3, 4, 6, 8, 12))}": 1.5,
            lambda: "*": 1.5,
            lambda: _list(draw, 0, 23): 0.7,
        }),
        _pick(draw, {
            lambda: "*": 10,
            lambda: str(draw.randint(1, 31)): 2,
            lambda: _list(draw, 1, 31): 0.5,
            lambda: "L": 0.6,
            lambda: _range(draw, 1, 31): 0.3,
            lambda: f"*/{draw.choice((2, 3, 5, 7, 10))}": 0.3,
        }),
        _pick(draw, {
            lambda: "*": 12,
            lambda: month(draw.randrange(12)): 1.5,
            lambda: _list(draw, 0, 11, month): 0.5,
            lambda: _range(draw, 0, 11, month): 0.7,
            lambda: f"*/{draw.choice((2, 3, 4, 6))}": 0.3,
        }),
        _pick(draw, {
            lambda: "*": 5,
            lambda: day(draw.randrange(7)): 2,
            lambda: f"{day(1)}-{day(5)}": 2.5,
            lambda: _list(draw, 0, 6, day): 1,
            lambda: _range(draw, 1, 5, day): 0.5,
            lambda: f"{day(draw.randrange(7))}#{draw.randint(1, 4)}": 0.4,
        }),
    )  # fmt: skip
    return " ".join(fields)


def _pick(draw: random.Random, shapes: dict[Callable[[], str], float]) -> str:
    return draw.choices(list(shapes), list(shapes.values()))[0]()


def _range(draw: random.Random, low: int, high: int, name: Callable[[int], str] = str) -> str:
    first, last = sorted(draw.sample(range(low, high + 1), 2))
    return f"{name(first)}-{name(last)}"


def _list(draw: random.Random, low: int, high: int, name: Callable[[int], str] = str) -> str:
    return ",".join(map(name, sorted(draw.sample(range(low, high + 1), draw.choice((2, 2, 3))))))
