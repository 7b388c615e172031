from __future__ import annotations

import csv
import io
from typing import Any

import pytest
import torch

from helpers.tiny import EOS_ID, tiny_tokenizer
from offramp.common.errors import OfframpError
from offramp.train.data.batch import IGNORED_LABEL, TokenBatch
from offramp.train.tracking.exit_samples import PROMPT_TOKENS, ExitSamples, Prompt, prompts_of, table


def batch(rows: list[list[tuple[int, int, int]]]) -> TokenBatch:
    """Of (token, label, segment)."""
    return TokenBatch(*(torch.tensor([[place[part] for place in row] for row in rows]) for part in range(3)))


def test_prompts_are_what_is_not_trained_on() -> None:
    asked = [(5, IGNORED_LABEL, 0), (6, 7, 0), (7, 8, 0)]
    packed = [(20, IGNORED_LABEL, 1), (21, IGNORED_LABEL, 1), (22, 23, 1)]
    padding = [(1, IGNORED_LABEL, 2)] * 2
    rows = batch([asked + packed + padding, asked + packed + padding])
    first, second = Prompt([5, 6], [7, 8]), Prompt([20, 21, 22], [23])
    assert prompts_of(rows, 3, tokens=4) == [first, second, first]
    assert prompts_of(rows, 1, tokens=1) == [Prompt([5, 6], [7])]
    assert prompts_of(rows, 0, tokens=1) == []


def test_of_plain_text_the_first_half_is_the_prompt() -> None:
    text = [(token, token + 1, 0) for token in range(10, 18)]
    assert prompts_of(batch([text]), 1, tokens=2) == [Prompt([10, 11, 12, 13], [14, 15])]
    long = [(token, token + 1, 0) for token in range(200)]
    assert prompts_of(batch([long]), 1, tokens=2) == [Prompt(list(range(PROMPT_TOKENS)), [PROMPT_TOKENS, 33])]
    asked = [(token, IGNORED_LABEL, 0) for token in range(99)] + [(99, 100, 0)]
    assert prompts_of(batch([asked]), 1, tokens=2) == [Prompt(list(range(100 - PROMPT_TOKENS, 100)), [100])]


def test_a_table_is_csv_of_texts_up_to_their_end() -> None:
    tokenizer = tiny_tokenizer()

    def ids(text: str) -> list[int]:
        return list(tokenizer(text)["input_ids"])

    said = {2: [[*ids('a "b"\n'), EOS_ID, *ids("more")]], 4: [ids("c, d")]}
    text = table([Prompt(ids("What?"), ids("This."))], said, 4, tokenizer, [EOS_ID])
    header, line = csv.reader(io.StringIO(text, newline=""))
    assert header == ["prompt", "expected", "exit 02", "exit 04 (final)"]
    assert line == ["What?", "This.", 'a "b"\n<|eos|>', "c, d"]
    numbers = table([Prompt([3, 4], [])], {4: [[5, 6]]}, 4, None, [])
    assert numbers.splitlines()[1] == "3 4,,5 6"


def test_settings_that_make_no_sense_are_refused() -> None:
    faults: list[dict[str, Any]] = [{"count": 0}, {"tokens": -1}, {"prompts": []}]
    for settings in faults:
        with pytest.raises(OfframpError, match="count must be at least 1, and tokens: 0 switches it off"):
            ExitSamples(**settings)
