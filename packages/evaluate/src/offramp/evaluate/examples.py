"""What models are asked, and what good answers are: rows of files and of the documentation corpus as examples."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from offramp.common.errors import OfframpError
from offramp.serve.bench.prompts import json_lines


@dataclass(frozen=True)
class Example:
    """A prompt and what a good answer to it is.

    Attributes:
        prompt: what the model reads; the source of an encoder-decoder model.
        references: good answers, any of which will do; empty where nobody knows one.
        choices: what the model chooses among, in its own words; empty where it writes freely.
        answer: the index of the right choice.
    """

    prompt: str
    references: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    answer: int | None = None


def merged(examples: Iterable[Example]) -> list[Example]:
    """One example for each prompt, with the references of all that ask the same, in the order of their first.

    A question that is asked twice is no second draw: counted as one it would make intervals and p-values too small.
    """
    found: dict[str, Example] = {}
    for example in examples:
        other = found.get(example.prompt)
        if other is None:
            found[example.prompt] = example
        else:
            both = tuple(dict.fromkeys(other.references + example.references))
            found[example.prompt] = replace(other, references=both)
    return list(found.values())


def sampled(examples: Sequence[Example], count: int | None, seed: int | None) -> list[Example]:
    """Some of the examples, in their order.

    Args:
        examples: all of them.
        count: how many at most; None: all.
        seed: draws them at random; None takes them from the front.
    """
    if count is None or count >= len(examples):
        return list(examples)
    if seed is None:
        return list(examples[:count])
    return [examples[index] for index in sorted(random.Random(seed).sample(range(len(examples)), count))]


def sha256_of(examples: Sequence[Example]) -> str:
    """Hash of what the examples say, in their order."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(json.dumps(asdict(example), ensure_ascii=False).encode() + b"\n")
    return digest.hexdigest()


def json_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Where each row of a file of JSON Lines is, for messages, and the row.

    Raises:
        OfframpError: the file cannot be read, or a line is no object.
    """
    for where, row in json_lines(path):
        if not isinstance(row, dict):
            raise OfframpError(f"{where}, is no JSON object; write one on each line.")
        yield where, row


def column(where: str, row: Mapping[str, Any], name: str) -> str:
    """A text in a row.

    Raises:
        OfframpError: there is none of that name.
    """
    value = row.get(name)
    if not isinstance(value, str):
        raise OfframpError(
            f"{where}, has no text {name!r}, only {', '.join(map(repr, row)) or 'nothing'}; name another."
        )
    return value
