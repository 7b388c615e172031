"""Operating points: what may stand in `exits.json`, and what may not."""

from __future__ import annotations

from typing import Any

import pytest

from offramp.common.errors import OfframpError
from offramp.common.exits.operating_point import OperatingPoint, OperatingPoints
from offramp.common.exits.policy import ExitPolicy

FAST = OperatingPoint("fill", ExitPolicy("margin", {2: 0.5}))


def test_every_model_has_the_exact_point() -> None:
    assert OperatingPoints().names == ("exact",)
    assert OperatingPoints({"fast": FAST}, "exact").names == ("exact", "fast")


def test_json_and_back() -> None:
    points = OperatingPoints({"fast": FAST}, "fast")
    assert OperatingPoints.from_json(points.to_json()) == points


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"by_name": {}, "default": "fast"},
        {"by_name": {"fast": {}}, "default": None},
        {"by_name": {"fast": {**FAST.to_json(), "kv_policy": "full"}}, "default": None},
        {"by_name": {"fast": {**FAST.to_json(), "max_pending": "8"}}, "default": None},
        {"by_name": {"Fast!": FAST.to_json()}, "default": None},
        {"by_name": {"exact": FAST.to_json()}, "default": None},
        {"by_name": [], "default": None},
    ],
)
def test_what_is_none_is_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(OfframpError, match=r"point|belongs to full depth"):
        OperatingPoints.from_json(broken)


def test_a_point_fits_its_model() -> None:
    points = OperatingPoints({"fast": FAST})
    points.check((1, 2), 100, has_classifiers=False)
    with pytest.raises(OfframpError, match=r"thresholds name layers \[2\]"):
        points.check((1, 3), 100, has_classifiers=False)
    classified = OperatingPoints({"fast": OperatingPoint("fill", ExitPolicy("classifier", {2: 0.5}))})
    with pytest.raises(OfframpError, match="this model has none"):
        classified.check((1, 2), 100, has_classifiers=False)
