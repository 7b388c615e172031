"""The least confidence that agrees often enough, against known distributions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.stats import beta

from offramp.serve.measures.beta_mixture import Beta, BetaMixture


def test_moments_give_the_distribution_back() -> None:
    for a, b in ((2.0, 5.0), (0.5, 0.5), (8.0, 1.0)):
        known: Any = beta(a, b)
        fitted = Beta.fit(float(known.mean()), float(known.var()))
        assert (fitted.a, fitted.b) == pytest.approx((a, b))
        assert fitted.log_density(0.3) == pytest.approx(float(known.logpdf(0.3)))


def fed(agreeing: tuple[float, float], others: tuple[float, float], share: float, floor: float = 0.0) -> BetaMixture:
    generator = np.random.default_rng(0)
    mixture = BetaMixture(floor, window=20_000)
    for agreed in generator.random(20_000) < share:
        place = generator.beta(*(agreeing if agreed else others))
        mixture.add(floor + (1 - floor) * float(place), bool(agreed))
    return mixture


@pytest.mark.parametrize("floor", [0.0, 0.5])
def test_the_threshold_is_where_bayes_says(floor: float) -> None:
    mixture = fed((6, 2), (2, 4), share=0.8, floor=floor)
    places = np.linspace(0.001, 0.999, 999)
    good, bad = 0.8 * beta.pdf(places, 6, 2), 0.2 * beta.pdf(places, 2, 4)
    for wanted in (0.5, 0.9, 0.99):
        expected = places[np.argmax(good / (good + bad) >= wanted)]
        assert mixture.threshold(wanted) == pytest.approx(floor + expected * (1 - floor), abs=0.02)


def test_where_all_agree_or_little_is_known_the_floor_stays() -> None:
    assert BetaMixture(0.7).threshold(0.9) == 0.7
    mixture = BetaMixture(0.7)
    for index in range(500):
        mixture.add(0.7 + 0.3 * (index % 100) / 100, agreed=index % 50 > 0)  # 10 disagree
    assert mixture.threshold(0.9) == 0.7


def test_where_none_agrees_nothing_leaves() -> None:
    mixture = BetaMixture(0.7)
    for index in range(100):
        mixture.add(0.75 + index / 1000, agreed=False)
    assert mixture.threshold(0.9) == 1.0


def test_confidences_that_say_nothing_are_never_enough() -> None:
    """Half agree whatever the confidence, and nine in ten are wanted."""
    assert fed((3, 3), (3, 3), share=0.5).threshold(0.9) == pytest.approx(1.0, abs=0.05)


def test_the_past_is_forgotten() -> None:
    mixture = BetaMixture(0.5, window=200)
    for index in range(200):
        mixture.add(0.6 + 0.3 * (index % 10) / 10, agreed=index % 2 == 0)
    assert mixture.threshold(0.9) > 0.6
    for index in range(200):
        mixture.add(0.6 + 0.3 * (index % 10) / 10, agreed=True)
    assert mixture.threshold(0.9) == 0.5
