"""The tokenizer of a checkpoint directory, and text to token ids."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offramp.common.errors import OfframpError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(path: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """Load the tokenizer that lies in a checkpoint directory; never asks the network, never runs code from it."""
    from transformers import AutoTokenizer  # takes seconds to import

    directory = Path(path)
    if not directory.is_dir():
        raise OfframpError(f"{directory} is not a directory; give a checkpoint directory.")
    if not any(directory.glob("tokenizer*")) and not (directory / "vocab.json").is_file():
        raise OfframpError(f"{directory} holds no tokenizer; copy tokenizer.json and tokenizer_config.json into it.")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as fault:
        raise OfframpError(f"the tokenizer in {directory} cannot be loaded: {fault}") from None
    return tokenizer


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text.

    Args:
        tokenizer: of the model.
        text: any text, of any length.
        add_special_tokens: as for plain text, by the tokenizer's own rule for BOS; False where a chat template has
            written the special tokens itself.

    Raises:
        OfframpError: the text holds half a character, which no tokenizer takes.
    """
    try:
        text.encode()
    except UnicodeEncodeError as fault:
        raise OfframpError(
            f"the prompt is not Unicode text: character {fault.start} is {text[fault.start]!r}; give it in UTF-8."
        ) from None
    # verbose=False: the tokenizer's warning about length would be a second, less exact opinion.
    encoding: Any = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
    return list(encoding["input_ids"])
