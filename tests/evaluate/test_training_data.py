"""Calibration data must be apart from training data, wherever in a model's past it was trained."""

from __future__ import annotations

import pytest

from offramp.common.errors import OfframpError
from offramp.common.prompt_sketch import PromptSketch
from offramp.evaluate.training_data import compare_with_training

PAST = {"run_id": "b", "data": {"source": "x"}, "started_from": {"data": {"prompts": PromptSketch.of("ab").to_json()}}}


def test_prompts_that_were_trained_on_are_refused() -> None:
    with pytest.raises(OfframpError, match="trained on 1 of 2 calibration prompts that can be told"):
        compare_with_training(PAST, ["b", "c"])


def test_what_is_known_is_said() -> None:
    assert compare_with_training(PAST, ["c", "d"]) == "none of the 2 of 2 prompts that can be told was trained on"
    assert "not known" in compare_with_training({"source": "hub"}, ["c"])
