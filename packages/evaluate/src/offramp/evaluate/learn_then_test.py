"""Learn-then-Test: settings whose risk is at most delta, except with probability epsilon (Angelopoulos et al., 2021).

Each candidate j has the null hypothesis H_j "its risk exceeds delta" and a p-value from the losses that it made on
calibration data. Rejecting H_j certifies j. What keeps the error of all rejections together at epsilon is either the
order of the candidates (fixed-sequence testing: from the safest on, until one is not rejected) or dividing epsilon
among several such sequences (Bonferroni), which is what a grid over several exits needs.

Losses are in [0, 1]. All p-values take the sum of the losses, not their mean: n times a mean is not a whole number in
floating point, and one unit more in the binomial tail is another p-value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from scipy.stats import binom

from offramp.common.errors import OfframpError

Bound = Literal["hoeffding_bentkus", "hoeffding", "binomial"]
"""Which p-value: `hoeffding_bentkus` for any losses in [0, 1]; `hoeffding`, looser; `binomial`, exact, for losses that
are 0 or 1."""

_SNAP = 1e-9
"""A sum of losses this near a whole number, per loss, is that number: 1/3 + 1/3 + 1/3 is one."""


def p_value(bound: Bound, total: float, n: int, delta: float) -> float:
    """Probability of losses as small as these if the risk were `delta`; below epsilon it certifies.

    Args:
        bound: see `Bound`.
        total: sum of the losses, `math.fsum` of them or a count.
        n: how many there are; without any nothing is known, and the p-value is 1.
        delta: tolerated risk, above 0 and below 1.

    Raises:
        OfframpError: `bound` or `delta` is none.
        ValueError: the sum is not that of `n` losses in [0, 1], or not a count where the bound needs one.
    """
    if bound not in get_args(Bound):
        raise OfframpError(f"bound {bound!r} is unknown; choose one of {', '.join(get_args(Bound))}.")
    check_probability("delta", delta)
    if n < 0 or not -_SNAP <= total <= n * (1 + _SNAP):  # a NaN is neither
        raise ValueError(f"{total} is not the sum of {n} losses from 0 to 1")
    if n == 0:
        return 1.0
    return _BOUNDS[bound](total, n, delta)


def hoeffding(total: float, n: int, delta: float) -> float:
    """exp(-2 n (delta - r)^2) for the mean loss r (Hoeffding, 1963); 1 where r is not below delta."""
    gap = max(0.0, delta - total / n)
    return math.exp(-2 * n * gap * gap)


def hoeffding_bentkus(total: float, n: int, delta: float) -> float:
    """The smaller of Hoeffding's bound in its tight form and Bentkus' bound (Bates et al., 2021, theorem 3).

    min(exp(-n h(min(r, delta), delta)), e P(Bin(n, delta) <= ceil(n r))), where h is the relative entropy of two coins.
    """
    risk = min(total / n, delta)
    tight = math.exp(-n * _relative_entropy(risk, delta))
    bentkus = math.e * float(binom.cdf(_ceil(total, n), n, delta))
    return min(1.0, tight, bentkus)


def binomial(total: float, n: int, delta: float) -> float:
    """P(Bin(n, delta) <= k) for k losses of 1 among n losses of 0 or 1 (Clopper and Pearson, 1934)."""
    count = _ceil(total, n)
    if abs(count - total) > _SNAP * n:
        raise ValueError(f"a binomial test counts losses of 1, and {total} is no count")
    return float(binom.cdf(count, n, delta))


_BOUNDS: dict[Bound, Callable[[float, int, float], float]] = {
    "hoeffding_bentkus": hoeffding_bentkus,
    "hoeffding": hoeffding,
    "binomial": binomial,
}


def fixed_sequence(p_values: Sequence[float], epsilon: float) -> int:
    """How many candidates from the front are certified: all before the first whose p-value exceeds `epsilon`.

    Args:
        p_values: of candidates in an order that was chosen without looking at their losses, the safest first.
        epsilon: probability with which any of the certified may be wrong.
    """
    check_probability("epsilon", epsilon)
    for index, value in enumerate(p_values):
        if not value <= epsilon:  # nor is a NaN
            return index
    return len(p_values)


def bonferroni(sequences: Sequence[Sequence[float]], epsilon: float) -> list[int]:
    """For each of several sequences how many from its front are certified, all of them together at `epsilon`.

    Args:
        sequences: p-values; see `fixed_sequence`. Sequences of one candidate each are the plain Bonferroni test.
        epsilon: see `fixed_sequence`.
    """
    check_probability("epsilon", epsilon)
    return [fixed_sequence(p_values, epsilon / len(sequences)) for p_values in sequences]


def check_probability(name: str, value: float) -> None:
    """Raise `OfframpError` if this is no probability between 0 and 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
        raise OfframpError(f"{name} {value!r} must be a number above 0 and below 1.")


def _ceil(total: float, n: int) -> int:
    nearest = round(total)
    return nearest if abs(total - nearest) <= _SNAP * n else math.ceil(total)


def _relative_entropy(a: float, b: float) -> float:
    """KL divergence of a coin of probability a from one of probability b, for 0 <= a < 1 and 0 < b < 1."""
    heads = a * math.log(a / b) if a > 0 else 0.0
    return heads + (1 - a) * math.log((1 - a) / (1 - b))
