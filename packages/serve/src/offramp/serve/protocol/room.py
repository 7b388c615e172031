"""How many tokens an answer may have, and a prompt that is cut so that it fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offramp.serve.protocol.card import ModelCard
from offramp.serve.protocol.errors import bad_request, prompt_too_long

AS_MUCH_AS_FITS = -1
"""Of `truncate_prompt_tokens`, as vLLM has it."""


@dataclass(frozen=True)
class Room:
    """What one request asks for.

    Attributes:
        card: The model and its limits.
        asked: Most new tokens; None: not said.
        default: Most new tokens where nothing is said.
        param: The field that carries the prompt.
    """

    card: ModelCard
    asked: int | None
    default: int
    param: str

    def cut(self, token_ids: Sequence[int], wanted: int | None) -> list[int]:
        """A prompt with as many tokens as are wanted, or fewer.

        Of a text that is continued its last tokens are kept, and of a source its first ones, with the token that ends
        it.

        Args:
            token_ids: The prompt.
            wanted: Most tokens of it, or `AS_MUCH_AS_FITS`; None: it stays whole.
        """
        if wanted == AS_MUCH_AS_FITS:
            wanted = self._fitting
        if wanted is None or len(token_ids) <= wanted:
            return list(token_ids)
        if self.card.max_source_len is None:
            return list(token_ids[-wanted:])
        end = list(token_ids[-1:]) if token_ids[-1] in self.card.eos_token_ids else []
        return [*token_ids[: wanted - len(end)], *end]

    def beside(self, num_tokens: int) -> int:
        """Most tokens to generate for a prompt of `num_tokens`.

        Raises:
            ApiError: 400 when the prompt, or it and what is asked for, can never fit.
        """
        card, wanted = self.card, 1 if self.asked is None else self.asked
        if card.max_source_len is not None:
            return self._beside_source(num_tokens, wanted)
        for limit, what in ((card.max_model_len, "context"), (card.cache_tokens, "cache")):
            if num_tokens + wanted > limit:
                alone = num_tokens + min(wanted, 1) > limit  # not even one more would fit
                raise prompt_too_long(num_tokens, None if alone else self.asked, limit, self.param, what)
        room = min(card.max_model_len, card.cache_tokens) - num_tokens
        return min(self.default, room) if self.asked is None else self.asked

    @property
    def _fitting(self) -> int:
        """Most tokens of a prompt, at least 1: if that does not fit either, the client is told."""
        card = self.card
        wanted = self.default if self.asked is None else self.asked
        if card.max_source_len is None:
            return max(1, min(card.max_model_len, card.cache_tokens) - wanted)
        return max(1, min(card.max_source_len, card.cache_tokens - wanted - card.block_size))

    def _beside_source(self, num_tokens: int, wanted: int) -> int:
        card = self.card
        assert card.max_source_len is not None
        if num_tokens > card.max_source_len:
            raise bad_request(
                f"This model reads at most {card.max_source_len} tokens, but your prompt has {num_tokens}; shorten it, "
                "or have it cut with truncate_prompt_tokens.",
                param=self.param,
                code="context_length_exceeded",
            )
        # The decoder begins with a token of its own.
        room = card.max_model_len - 1
        if wanted > room:
            raise bad_request(
                f"This model writes at most {room} tokens, but you asked for {wanted}; lower max_tokens.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        room = min(room, card.cache_tokens - -(-num_tokens // card.block_size) * card.block_size - 1)
        if wanted > room:
            raise prompt_too_long(num_tokens, wanted, card.cache_tokens, self.param, "cache")
        return min(self.default, room) if self.asked is None else self.asked
