"""What the contestants are asked: random tokens, stretches of a text, or prompts from a file. The same for all."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from offramp.common.errors import OfframpError
from offramp.common.tokenizer import encode_text


class Prompts(Protocol):
    """Draws prompts."""

    def draw(self, count: int, length: int) -> list[list[int]]:
        """`count` prompts of `length` tokens (or at most that many, where prompts have a length of their own).

        The same call gives the same prompts.
        """
        ...


class RandomTokens:
    """Tokens drawn evenly from the vocabulary: right for speed at full depth, and no measure of early exits."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def draw(self, count: int, length: int) -> list[list[int]]:
        """See `Prompts`."""
        source = random.Random(count)
        return [source.choices(range(self._vocab_size), k=length) for _ in range(count)]


class TextStretches:
    """Stretches of one long text, each of exactly the length that is asked for."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids

    def draw(self, count: int, length: int) -> list[list[int]]:
        """See `Prompts`."""
        last = len(self._token_ids) - length
        if last < 0:
            raise OfframpError(
                f"the text has {len(self._token_ids)} tokens and prompts of {length} are asked for; give a longer text."
            )
        source = random.Random(count)
        starts = [source.randint(0, last) for _ in range(count)]
        return [self._token_ids[start : start + length] for start in starts]


class PromptLines:
    """Prompts as they are, in the file's order and from the start again; longer ones lose their beginning."""

    def __init__(self, prompts: list[list[int]]) -> None:
        self._prompts = prompts

    def draw(self, count: int, length: int) -> list[list[int]]:
        """See `Prompts`."""
        return [self._prompts[index % len(self._prompts)][-length:] for index in range(count)]


def read_text(path: Path) -> str:
    """A file as text.

    Raises:
        OfframpError: it cannot be read as such.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise OfframpError(f"{path} cannot be read as text: {fault}.") from None


def json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Where each line is, for messages, and its JSON; None for a line that is none. Blank lines are passed over.

    Raises:
        OfframpError: the file cannot be read.
    """
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            yield f"{path}, line {number}", row


def encode_at(where: str, tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Token ids of the prompt at a place in a file.

    Raises:
        OfframpError: it cannot be encoded.
    """
    try:
        return encode_text(tokenizer, prompt)
    except OfframpError as fault:
        raise OfframpError(f"{where}: {fault}") from None


def read_prompts(path: Path, tokenizer: PreTrainedTokenizerBase) -> Prompts:
    """Prompts from a file: lines of JSON with a `prompt` each (`.jsonl`), or any other file as one text.

    Raises:
        OfframpError: the file cannot be read or holds no prompt.
    """
    if path.suffix != ".jsonl":
        return TextStretches(encode_text(tokenizer, read_text(path)))
    prompts: list[list[int]] = []
    for where, row in json_lines(path):
        prompt = row.get("prompt") if isinstance(row, dict) else row
        if not isinstance(prompt, str) or not prompt:
            raise OfframpError(f'{where}, is neither a string nor an object with "prompt"; mend it.')
        prompts.append(encode_at(where, tokenizer, prompt))
    if not prompts:
        raise OfframpError(f"{path} holds no prompt; give at least one line.")
    return PromptLines(prompts)
