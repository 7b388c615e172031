"""Tokens to text while they come, and the stop strings that end it. What was handed out is never taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What decoders make of bytes that are not, or not yet, UTF-8."""


class Decoder(Protocol):
    """What is needed of a tokenizer; those of transformers have it."""

    # transformers types the result as `str | list[str]`, for one sequence or several; here it is always one.
    def decode(
        self, token_ids: list[int], skip_special_tokens: bool = ..., *, clean_up_tokenization_spaces: bool = ...
    ) -> Any:
        """Text of a sequence of tokens."""
        ...


class Detokenizer:
    """Text of a growing sequence of tokens; all pieces together are the text of all tokens decoded at once.

    A piece is held back while the text ends inside a character: byte-level vocabularies cut characters into several
    tokens. Special tokens have no text.

    Vocabularies with byte fallback (Llama 2) decode a run of byte tokens all or nothing, so a run that turns out to be
    no UTF-8 after some of its characters were handed out keeps those, where decoding at once would lose them.
    """

    # Decoding at once costs the square of the length. Only the newest tokens are decoded again; in front of them some
    # older ones stay, because vocabularies that mark the beginning of words strip the first space of what they decode.
    _WINDOW = 8

    def __init__(self, tokenizer: Decoder) -> None:
        self._decode = _decoding(tokenizer)
        self._ids: list[int] = []
        self._num_context = 0  # tokens at the front of `_ids` whose text was handed out in an earlier window
        self._text = ""  # of `_ids`
        self._num_out = 0  # characters of `_text` that were handed out

    def push(self, token_id: int) -> str:
        """Text that the next token makes certain; often empty."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        is_whole = not text.endswith(UNFINISHED)
        if is_whole and text and text == self._text:
            self._ids.pop()  # a special token within a text: it says nothing, and many must not make the window long
            return ""
        self._text = text
        # Every trailing one is held, not only the last: byte fallback gives one for each byte of the character.
        stop = len(text.rstrip(UNFINISHED))
        piece = text[self._num_out : stop]
        self._num_out = max(self._num_out, stop)
        if is_whole and len(self._ids) - self._num_context >= self._WINDOW:
            self._move_window()
        return piece

    def flush(self) -> str:
        """The rest at the end of the sequence: bytes that will never become a character."""
        piece = self._text[self._num_out :]
        self._num_out = len(self._text)
        return piece

    def _move_window(self) -> None:
        ids = self._ids[self._num_context :]
        if text := self._decode(ids):  # tokens without text cannot stand in front
            self._ids, self._text = ids, text
            self._num_context, self._num_out = len(ids), len(text)


class StopStrings:
    """Ends a text before the first stop string in it, however the text is cut into pieces.

    The first is the one that is complete first; of two that are complete at the same character, the longer.

    Attributes:
        found: the stop string that ended the text; None while there was none.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The part of the text so far that is certain not to belong to a stop string."""
        if self.found is not None:
            return ""
        text = self._held + text
        hits = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            _, at, self.found = min(hits)
            self._held = ""
            return text[:at]
        num_held = self._num_possible(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """The rest, at the end of the text."""
        text, self._held = self._held, ""
        return text

    def _num_possible(self, text: str) -> int:
        """Length of the longest end of the text with which a stop string begins."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class TextStream:
    """The text of one request: detokenised, and ended by its stop strings. Give it every token but a stop token."""

    def __init__(self, tokenizer: Decoder, stop: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stop)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._stops.found is not None

    def push(self, token_id: int, may_stop: bool = True) -> str:
        """Text that the next token makes certain.

        Args:
            token_id: the token.
            may_stop: False looks for no stop string in the text of this token (`Request.may_stop`). To be given from
                the first token on if at all; a stop string counts only if all of it comes afterwards.
        """
        if self.stopped:
            return ""
        text = self._detokenizer.push(token_id)
        return self._stops.push(text) if may_stop else text

    def flush(self) -> str:
        """The rest, when the request has ended; nothing after a stop string."""
        return self._stops.push(self._detokenizer.flush()) + self._stops.flush()


def _decoding(tokenizer: Any) -> Callable[[list[int]], str]:
    """What makes text of tokens, special ones left out."""
    if hasattr(tokenizer, "backend_tokenizer"):
        from transformers import PreTrainedTokenizerFast as Fast  # has been imported, if this is one of its tokenizers

        kind: Any = type(tokenizer)
        if issubclass(kind, Fast) and kind.decode is Fast.decode and kind._decode is Fast._decode:
            # All that these do is ask the backend, and they take longer for it than the backend does.
            backend = tokenizer.backend_tokenizer
            return lambda token_ids: backend.decode(token_ids, skip_special_tokens=True)
    # Clean-up removes spaces that are already out, and is no part of the text that the model was trained on.
    return lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
