"""P-values against their formulas in exact arithmetic, and the guarantee against a risk that is known."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offramp.common.errors import OfframpError
from offramp.evaluate.learn_then_test import binomial, bonferroni, fixed_sequence, hoeffding_bentkus, p_value


def tail(k: int, n: int, delta: Fraction) -> Fraction:
    """P(Bin(n, delta) <= k), exactly."""
    return sum((math.comb(n, i) * delta**i * (1 - delta) ** (n - i) for i in range(k + 1)), Fraction(0))


def expected(total: Fraction, n: int, delta: Fraction) -> float:
    """Hoeffding-Bentkus from the paper's formula, with exact binomial tails."""
    a, b = min(total / n, delta), delta
    entropy = (float(a) * math.log(a / b) if a else 0.0) + float(1 - a) * math.log((1 - a) / (1 - b))
    return min(1.0, math.exp(-n * entropy), math.e * float(tail(math.ceil(total), n, delta)))


@pytest.mark.parametrize(
    ("total", "n", "delta"),
    [
        (Fraction(0), 100, Fraction(1, 20)),
        (Fraction(3), 100, Fraction(1, 10)),
        (Fraction(17, 4), 100, Fraction(1, 10)),
        (Fraction(1, 3), 7, Fraction(1, 2)),
        (Fraction(49), 1000, Fraction(1, 10)),
        (Fraction(10), 100, Fraction(1, 10)),
        (Fraction(100), 100, Fraction(1, 10)),
    ],
)
def test_p_values_are_those_of_the_formula(total: Fraction, n: int, delta: Fraction) -> None:
    assert p_value("hoeffding_bentkus", float(total), n, float(delta)) == pytest.approx(
        expected(total, n, delta), rel=1e-9
    )


def test_known_values() -> None:
    # No loss at all: the tight bound of Hoeffding is (1 - delta)^n.
    assert p_value("hoeffding_bentkus", 0, 59, 0.05) == pytest.approx(0.95**59)
    assert p_value("binomial", 0, 59, 0.05) == pytest.approx(0.95**59)
    assert p_value("hoeffding", 0, 100, 0.1) == pytest.approx(math.exp(-2))
    assert p_value("hoeffding", 20, 100, 0.1) == 1.0


def test_a_sum_that_floating_point_puts_above_a_count_is_that_count() -> None:
    n, delta = 100, 0.1
    mean = 0.07
    assert math.ceil(n * mean) == 8, "the trap: 100 * 0.07 is 7.000000000000001"
    assert hoeffding_bentkus(n * mean, n, delta) == hoeffding_bentkus(7, n, delta)
    assert binomial(n * mean, n, delta) == binomial(7, n, delta) == pytest.approx(float(tail(7, n, Fraction(1, 10))))
    assert hoeffding_bentkus(7, n, delta) < hoeffding_bentkus(7.01, n, delta)


def test_nothing_measured_certifies_nothing() -> None:
    assert p_value("hoeffding_bentkus", 0, 0, 0.1) == 1.0


@given(st.integers(1, 300), st.floats(0, 1), st.floats(0.01, 0.99), st.sampled_from(["hoeffding_bentkus", "hoeffding"]))
def test_p_values_are_probabilities_that_rise_with_the_losses(n: int, share: float, delta: float, bound: str) -> None:
    low, high = (p_value(bound, total, n, delta) for total in (share * n * 0.5, share * n))  # type: ignore[arg-type]
    assert 0 <= low <= high * (1 + 1e-12) <= 1 + 1e-12


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(OfframpError, match="bound 'exact' is unknown; choose one of hoeffding_bentkus"):
        p_value("exact", 1, 2, 0.1)  # type: ignore[arg-type]
    for delta in (0, 1, -0.1, float("nan"), True):
        with pytest.raises(OfframpError, match=r"delta .* must be a number above 0 and below 1"):
            p_value("hoeffding", 1, 2, delta)
    for total in (-1, 3, float("nan")):
        with pytest.raises(ValueError, match="is not the sum of 2 losses"):
            p_value("hoeffding", total, 2, 0.1)
    with pytest.raises(ValueError, match="no count"):
        p_value("binomial", 0.5, 2, 0.1)


def test_a_sequence_ends_at_the_first_that_is_not_certified() -> None:
    assert fixed_sequence([0.01, 0.05, 0.06, 0.0], 0.05) == 2
    assert fixed_sequence([0.06, 0.0], 0.05) == 0, "the smallest p-value is no way out"
    assert fixed_sequence([], 0.05) == 0
    assert fixed_sequence([float("nan")], 0.05) == 0
    assert bonferroni([[0.01, 0.03], [0.025, 0.02, 0.05]], 0.05) == [1, 2]


LADDER = np.array([0.02, 0.05, 0.08, 0.101, 0.15])
"""Risks of five candidates, the safest first; at delta 0.1 the last two are wrong to certify."""


@pytest.mark.parametrize("graded", [False, True])
def test_wrong_candidates_are_certified_at_most_as_often_as_promised(graded: bool) -> None:
    """1,000 calibrations of 400 rows at epsilon 0.1.

    The count of wrong ones is Bin(1000, p) with p at most 0.1, which exceeds 137 with probability below 1e-4. Had the
    guarantee not held, with p = 0.17, the test would have seen it with probability 0.997.
    """
    generator, repetitions, rows, delta, epsilon = np.random.default_rng(7), 1000, 400, 0.1, 0.1
    wrong = useful = 0
    for _ in range(repetitions):
        losses = generator.random((rows, 1)) < LADDER if not graded else generator.beta(LADDER, 1 - LADDER, (rows, 5))
        p_values = [p_value("hoeffding_bentkus", math.fsum(one), rows, delta) for one in losses.T]
        certified = fixed_sequence(p_values, epsilon)
        wrong += certified > 3
        useful += certified >= 2
    assert wrong <= 137
    assert useful > 900, "a test that certifies nothing is never wrong"


def test_the_best_p_value_of_many_is_wrong_more_often_than_promised() -> None:
    """Why there is an order: choosing among 20 candidates that are all just too risky by their p-values alone."""
    generator, delta, epsilon = np.random.default_rng(7), 0.1, 0.1
    counts = generator.binomial(400, 0.101, (300, 20))
    p_values = [[p_value("binomial", int(count), 400, delta) for count in row] for row in counts]
    assert sum(min(row) <= epsilon for row in p_values) / 300 > 0.5
    assert sum(max(bonferroni([[p] for p in row], epsilon)) for row in p_values) / 300 < 0.15
