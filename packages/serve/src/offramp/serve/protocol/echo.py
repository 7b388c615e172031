"""A prompt in an answer: its text, and what the model thinks of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from offramp.serve.text import Decoder, Detokenizer


@dataclass(frozen=True)
class Echo:
    """A prompt that its answers begin with.

    Attributes:
        token_ids: the prompt.
        text: as the client gave it; of a prompt in token ids, their text without special tokens.
        tokenizer: of the model.
    """

    token_ids: tuple[int, ...]
    text: str
    tokenizer: Decoder

    @classmethod
    def of(cls, prompt: str | list[int], token_ids: list[int], tokenizer: Decoder) -> Echo:
        """The echo of a prompt that was given as text or as token ids."""
        if isinstance(prompt, str):
            return cls(tuple(token_ids), prompt, tokenizer)
        text = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return cls(tuple(token_ids), text, tokenizer)

    @cached_property
    def offsets(self) -> list[int]:
        """For each token, the character of `text` at which its own text begins.

        Where a tokenizer rewrites text before it cuts it, the two drift apart; no offset is beyond the end.
        """
        detokenizer = Detokenizer(self.tokenizer)
        offsets: list[int] = []
        length = 0
        for token in self.token_ids:
            offsets.append(min(length, len(self.text)))
            length += len(detokenizer.push(token))
        return offsets
