"""The tokenizer of a checkpoint directory."""

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
