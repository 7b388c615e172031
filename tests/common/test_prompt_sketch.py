"""What a sketch of training prompts knows of others."""

from __future__ import annotations

import pytest

from offramp.common.errors import OfframpError
from offramp.common.prompt_sketch import ROOM, Overlap, PromptSketch


def test_of_few_prompts_everything_is_known() -> None:
    sketch = PromptSketch.of(["a", "b", " b\n", "c"])
    assert sketch.total == 3
    assert sketch.compare(["a", "d", "d ", "e"]) == Overlap(asked=3, known=3, found=1)


def test_of_many_a_fair_share_is_known_and_none_is_found_that_was_not_there() -> None:
    sketch = PromptSketch.of(f"prompt {index}" for index in range(40_000))
    assert (sketch.total, len(sketch.hashes)) == (40_000, ROOM)
    inside = sketch.compare(f"prompt {index}" for index in range(5000, 7000))
    assert inside.asked == 2000
    assert inside.found == inside.known
    assert 140 < inside.known < 270, "a tenth is expected, 205 with a deviation of 14"
    outside = sketch.compare(f"other {index}" for index in range(2000))
    assert outside.found == 0
    assert 140 < outside.known < 270


def test_json_and_back() -> None:
    sketch = PromptSketch.of(f"{index}" for index in range(100))
    assert PromptSketch.from_json(sketch.to_json()) == sketch
    assert PromptSketch.from_json(PromptSketch.of([]).to_json()).compare(["a"]) == Overlap(1, 1, 0)
    for broken in ({}, {"total": 1, "hashes": "xyz"}, {"total": None, "hashes": ""}):
        with pytest.raises(OfframpError, match="sketch of prompts"):
            PromptSketch.from_json(broken)
