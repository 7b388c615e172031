"""Confidence intervals: known ones, and that they hold as often as they say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from offramp.evaluate import bootstrap


def test_the_interval_is_that_of_a_normal_mean() -> None:
    values = np.random.default_rng(3).normal(5.0, 2.0, 1000)
    found = bootstrap.mean(values.tolist())
    assert found.value == pytest.approx(values.mean())
    half = 1.96 * values.std() / math.sqrt(1000)
    assert (found.low, found.high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.02)


def test_intervals_hold_about_as_often_as_they_say() -> None:
    generator = np.random.default_rng(5)
    hits = 0
    for _ in range(200):
        low, high = bootstrap.mean(generator.random(60).tolist())[1:]
        hits += low <= 0.5 <= high
    assert 180 <= hits <= 199  # 190 are expected, and percentile intervals of few rows are a little short


def test_pairs_stay_together() -> None:
    base = np.random.default_rng(1).random(50)
    assert bootstrap.ratio((base * 0.9).tolist(), base.tolist()) == pytest.approx((0.9, 0.9, 0.9))
    assert bootstrap.difference((base - 0.1).tolist(), base.tolist()) == pytest.approx((-0.1, -0.1, -0.1))


def test_nothing_has_no_interval() -> None:
    assert all(math.isnan(one) for one in bootstrap.mean([]))
    assert all(math.isnan(one) for one in bootstrap.ratio([1.0], [0.0]))


def test_equal_values_and_many_rows() -> None:
    assert bootstrap.mean([0.25] * 5000) == (0.25, 0.25, 0.25)


def test_of_means() -> None:
    generator = np.random.default_rng(1)
    top, bottom = generator.normal(6, 1, 400).tolist(), generator.normal(3, 1, 400).tolist()
    found = bootstrap.of_means(lambda a, b: a / b, top, bottom)
    assert found == bootstrap.ratio(top, bottom)
    assert bootstrap.of_means(lambda a: a, top) == bootstrap.mean(top)
    assert math.isnan(bootstrap.of_means(lambda a: a, []).value)
    assert math.isnan(bootstrap.of_means(lambda a, b: a / b, [1.0, 2.0], [0.0, 0.0]).low)
