"""Profiles of tokens, and the index that compares them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from offramp.common.errors import OfframpError
from offramp.common.exits.profile import TokenProfile, stability_index


def test_bins_hold_about_a_tenth_each_and_what_ran_all_layers_is_in_none() -> None:
    confidences = [index / 1000 for index in range(1000)]
    profile = TokenProfile.of([2] * 1000 + [6] * 300, [*confidences, *[None] * 300])
    assert profile.depths == {2: 1000, 6: 300}
    assert profile.confidences == (100,) * 10
    assert profile.bins([None, 0.0, 0.0999, 0.1, 5.0, -1.0]) == [3, 1, 0, 0, 0, 0, 0, 0, 0, 1]


def test_ties_make_fewer_bins_and_lose_nothing() -> None:
    profile = TokenProfile.of([1] * 100, [1.0] * 90 + [0.5] * 10)
    assert sum(profile.confidences) == 100
    assert profile.edges == (1.0,) or profile.edges == (0.5, 1.0)
    assert TokenProfile.of([4, 4], [None, None]) == TokenProfile({4: 2}, (), (0,))
    assert TokenProfile.of([], []) == TokenProfile({}, (), (0,))


def test_json_and_back() -> None:
    profile = TokenProfile.of([2, 4, 4], [0.25, 0.5, None])
    assert TokenProfile.from_json(profile.to_json()) == profile
    for broken in ({}, {"depths": {}, "edges": [0.1], "confidences": [1]}, {**profile.to_json(), "edges": [2, 1]}, []):
        with pytest.raises(OfframpError, match="profile of tokens"):
            TokenProfile.from_json(broken)  # type: ignore[arg-type]


def test_the_index_is_that_of_its_formula() -> None:
    expected, found = [99.5, 299.5], [249.5, 149.5]  # 100 : 300 and 250 : 150 with the half tokens
    p, q = np.array([0.25, 0.75]), np.array([0.625, 0.375])
    assert stability_index(expected, found) == pytest.approx(float(((q - p) * np.log(q / p)).sum()))
    assert stability_index([10, 20], [10, 20]) == 0
    assert math.isfinite(stability_index([0, 10], [10, 0]))


def test_without_a_change_the_index_is_as_small_as_chance_makes_it() -> None:
    generator, bins, n, m = np.random.default_rng(0), 10, 4000, 2000
    found = [
        stability_index(*(generator.multinomial(size, [1 / bins] * bins).tolist() for size in (n, m)))
        for _ in range(200)
    ]
    assert np.mean(found) == pytest.approx((bins - 1) * (1 / n + 1 / m), rel=0.1)
