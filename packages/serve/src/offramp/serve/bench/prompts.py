"""What the contestants are asked: random tokens, stretches of a text, or prompts from a file. The same for all."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Protocol

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


def read_prompts(path: Path, tokenizer: PreTrainedTokenizerBase) -> Prompts:
    """Prompts from a file: lines of JSON with a `prompt` each (`.jsonl`), or any other file as one text.

    Raises:
        OfframpError: the file cannot be read or holds no prompt.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise OfframpError(f"{path} cannot be read as text: {fault}.") from None
    if path.suffix != ".jsonl":
        return TextStretches(encode_text(tokenizer, text))
    prompts: list[list[int]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        prompt = row.get("prompt") if isinstance(row, dict) else row
        if not isinstance(prompt, str) or not prompt:
            raise OfframpError(f'{path}, line {number}, is neither a string nor an object with "prompt"; mend it.')
        try:
            prompts.append(encode_text(tokenizer, prompt))
        except OfframpError as fault:
            raise OfframpError(f"{path}, line {number}: {fault}") from None
    if not prompts:
        raise OfframpError(f"{path} holds no prompt; give at least one line.")
    return PromptLines(prompts)
