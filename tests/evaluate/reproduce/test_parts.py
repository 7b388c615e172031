"""Parts of a data set have no source in common, and say so where there is nothing to read."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from helpers.restaurants import write_restaurants
from offramp.common.errors import OfframpError
from offramp.evaluate.reproduce.tasks import cnn_dailymail, e2e_nlg, find_task, read_parts


def test_no_source_is_in_two_parts(tmp_path: Path) -> None:
    write_restaurants(tmp_path)
    with (tmp_path / "devset.csv").open("a", newline="", encoding="utf-8") as file:
        test = list(csv.reader((tmp_path / "testset_w_refs.csv").open(encoding="utf-8")))
        csv.writer(file).writerow(test[1])  # a source of the test, to train on
    parts = read_parts(e2e_nlg(tmp_path), tmp_path / "cache")
    sources = [source for part in parts for source in part]
    assert len(sources) == len(set(sources))
    assert test[1][0] in parts.test or test[1][0] in parts.calibration
    assert all(len(references) == 2 for references in parts.test.values())


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(OfframpError, match=r"is no directory; give the one with devset\.csv, or cnn_dailymail"):
        find_task(str(tmp_path / "none"), "small")
    with pytest.raises(OfframpError, match=r"must hold devset\.csv and testset_w_refs\.csv"):
        find_task(str(tmp_path), "small")


def test_articles_are_the_papers() -> None:
    task = cnn_dailymail()
    assert (task.max_source_tokens, task.source_tokens) == (1023, 512)
    assert task.pretrained["base"] == "google/t5-v1_1-base"
