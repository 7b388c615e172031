"""Which prompts a model was trained on, in a few kilobytes: enough to see whether other data are among them.

The sketch keeps the least hashes of all prompts (bottom-k, Cohen and Kaplan, 2007), which is a random sample of them. A
prompt whose hash is not above the largest one kept was trained on exactly if its hash is there; of one above nothing is
known. With fewer prompts than the sketch has room for, everything is known.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from offramp.common.errors import OfframpError

ROOM = 4096
_DIGITS = 16


@dataclass(frozen=True)
class Overlap:
    """What is known of some prompts beside a sketch.

    Attributes:
        asked: prompts, each once.
        known: those of which it is known whether they were trained on.
        found: those that were.
    """

    asked: int
    known: int
    found: int


@dataclass(frozen=True)
class PromptSketch:
    """A sketch.

    Attributes:
        total: prompts, each once.
        hashes: the least of theirs, at most `ROOM`, ascending.
    """

    total: int
    hashes: tuple[int, ...]

    @classmethod
    def of(cls, prompts: Iterable[str]) -> PromptSketch:
        """Of prompts, in any order."""
        every = {_hash(prompt) for prompt in prompts}
        return cls(len(every), tuple(heapq.nsmallest(ROOM, every)))

    def compare(self, prompts: Iterable[str]) -> Overlap:
        """What is known of some prompts."""
        asked = {_hash(prompt) for prompt in prompts}
        whole = self.total == len(self.hashes)
        known = {value for value in asked if whole or value <= self.hashes[-1]}
        return Overlap(len(asked), len(known), len(known.intersection(self.hashes)))

    def to_json(self) -> dict[str, Any]:
        """Plain containers."""
        return {"total": self.total, "hashes": "".join(f"{value:0{_DIGITS}x}" for value in self.hashes)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PromptSketch:
        """Inverse of `to_json`.

        Raises:
            OfframpError: it is none.
        """
        try:
            digits = data["hashes"]
            starts = range(0, len(digits), _DIGITS)
            return cls(int(data["total"]), tuple(int(digits[start : start + _DIGITS], 16) for start in starts))
        except (TypeError, KeyError, ValueError) as fault:
            raise OfframpError(f"exits.json: a sketch of prompts is not understood: {fault}.") from None


def _hash(prompt: str) -> int:
    """Blank ends apart: templates differ in them."""
    return int.from_bytes(hashlib.sha256(prompt.strip().encode()).digest()[: _DIGITS // 2], "big")
