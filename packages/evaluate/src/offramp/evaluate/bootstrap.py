"""How far a mean, or what is made of several means, may be off: percentile bootstrap over rows (Efron, 1979)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_RESAMPLES = 2000
_CHUNK = 1 << 22  # draws at a time


class Interval(NamedTuple):
    """A value and the ends of its 95% confidence interval; NaN where there is no value."""

    value: float
    low: float
    high: float


def mean(values: Sequence[float]) -> Interval:
    """Of values of independent rows; NaN without any."""
    if not len(values):
        return _NOTHING
    given = np.asarray(values, dtype=np.float64)
    return _interval(float(given.mean()), _means(given[None])[0])


def ratio(top: Sequence[float], bottom: Sequence[float]) -> Interval:
    """Mean of some values over the mean of others of the same rows, drawn in pairs; NaN where the latter is 0."""
    pair = np.array([top, bottom], dtype=np.float64)
    if not pair.shape[1] or not pair[1].any():
        return _NOTHING
    tops, bottoms = _means(pair)
    drawn = tops[bottoms != 0] / bottoms[bottoms != 0]
    return _interval(float(pair[0].mean() / pair[1].mean()), drawn)


def difference(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Mean of some values less the mean of others of the same rows, drawn in pairs."""
    return mean((np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)).tolist())


def of_means(function: Callable[..., Any], *columns: Sequence[float]) -> Interval:
    """What a function makes of the means of several values of the same rows, drawn together; NaN without rows.

    Args:
        function: of as many arguments as there are columns, numbers or arrays of them; where it gives no finite number
            for a resample, that one does not count.
        columns: values, each of them one for every row.
    """
    given = np.array(columns, dtype=np.float64)
    if not given.shape[1]:
        return _NOTHING
    with np.errstate(all="ignore"):
        value = float(function(*given.mean(axis=1)))
        drawn = np.asarray(function(*_means(given)), dtype=np.float64)
    drawn = drawn[np.isfinite(drawn)]
    return _interval(value, drawn) if drawn.size and math.isfinite(value) else Interval(value, math.nan, math.nan)


_NOTHING = Interval(float("nan"), float("nan"), float("nan"))


def _means(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """[K, R] means of K rows of values over the same resamples, with a fixed seed."""
    generator, n = np.random.default_rng(0), values.shape[1]
    at_once = max(1, _CHUNK // n)
    chunks: list[npt.NDArray[np.float64]] = []
    for start in range(0, _RESAMPLES, at_once):
        drawn = generator.integers(0, n, (min(at_once, _RESAMPLES - start), n))
        chunks.append(values[:, drawn].mean(axis=-1))
    return np.concatenate(chunks, axis=1)


def _interval(value: float, drawn: npt.NDArray[np.float64]) -> Interval:
    low, high = np.percentile(drawn, (2.5, 97.5))
    return Interval(value, float(low), float(high))
