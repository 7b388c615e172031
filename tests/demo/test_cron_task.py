from __future__ import annotations

from itertools import islice

import pytest
from demo.cron_task import Split, cron_rows, describe, prompt_for, split_of

SPLITS: tuple[Split, ...] = ("train", "calibration", "test")


@pytest.mark.parametrize("split", SPLITS)
def test_rows_depend_on_the_seed_alone_and_a_larger_count_adds_to_them(split: Split) -> None:
    rows = list(cron_rows(split, 60, seed=3))
    assert list(cron_rows(split, 60, seed=3)) == rows
    assert list(islice(cron_rows(split, 90, seed=3), 60)) == rows
    assert list(cron_rows(split, 60, seed=4)) != rows


def test_the_first_training_row_never_changes() -> None:
    """A salted hash or another grammar would silently change every figure that was measured on this data."""
    assert next(cron_rows("train", 1)) == {
        "prompt": "Cron: 0 */4 * * *\nMeaning:",
        "completion": " Every 4 hours",
    }


def test_splits_share_neither_prompts_nor_answers_whatever_the_seed() -> None:
    drawn = {split: list(cron_rows(split, 300, seed=seed)) for seed, split in enumerate(SPLITS)}
    for key in ("prompt", "completion"):
        values = [{row[key] for row in rows} for rows in drawn.values()]
        assert not values[0] & values[1]
        assert not values[0] & values[2]
        assert not values[1] & values[2]


def test_no_prompt_comes_twice() -> None:
    prompts = [row["prompt"] for row in cron_rows("train", 2000)]
    assert len(prompts) == len(set(prompts)) == 2000


def test_two_ways_to_write_one_schedule_lie_in_the_same_split() -> None:
    assert describe("0 9 * * 1") == describe("0 9 * * MON") == "At 09:00, only on Monday"
    assert split_of(describe("0 9 * * 1")) == split_of(describe("0 9 * * MON"))


def test_a_completion_is_the_teachers_sentence_for_its_prompt() -> None:
    for row in cron_rows("test", 100):
        expression = row["prompt"].removeprefix("Cron: ").removesuffix("\nMeaning:")
        assert len(expression.split()) == 5
        assert row["prompt"] == prompt_for(expression)
        assert row["completion"] == f" {describe(expression)}"
