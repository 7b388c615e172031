from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from offramp.common.errors import OfframpError
from offramp.common.exits.operating_point import OperatingPoint, OperatingPoints
from offramp.common.exits.policy import ExitPolicy
from offramp.serve.exit_overrides import ExitOverrideError, ExitOverrides, exit_options
from offramp.serve.request.exit_options import ExitOptions

LAYERS = (1, 2)
OWN = ExitPolicy("margin", {1: 0.9, 2: 0.8}, decay=2.0)


@pytest.mark.parametrize(
    ("overrides", "options"),
    [
        ({}, ExitOptions()),
        ({"kv_policy": "recompute"}, ExitOptions("recompute")),
        ({"kv_policy": "verify", "max_pending": 3}, ExitOptions("verify", max_pending=3)),
        ({"exit_policy": "full"}, ExitOptions("full")),
        ({"kv_policy": "full"}, ExitOptions("full")),
        ({"exit_policy": "full", "kv_policy": "full"}, ExitOptions("full")),
        ({"exit_policy": "early"}, ExitOptions(policy=OWN)),
        ({"threshold": 0.5}, ExitOptions(policy=ExitPolicy("margin", {1: 0.5, 2: 0.5}, decay=2.0))),
        ({"thresholds": {2: 0.5}}, ExitOptions(policy=ExitPolicy("margin", {2: 0.5}, decay=2.0))),
        ({"measure": "cosine", "threshold": 0}, ExitOptions(policy=ExitPolicy("cosine", {1: 0, 2: 0}, decay=2.0))),
        ({"min_exit_layer": 2}, ExitOptions(policy=ExitPolicy("margin", {1: 0.9, 2: 0.8}, 2, 2.0))),
        ({"kv_policy": "static", "exit_layer": 2}, ExitOptions("static", static_layer=2)),
        ({"kv_policy": "static", "exit_layer": 2, "exit_policy": "early"}, ExitOptions("static", static_layer=2)),
    ],
)
def test_overrides_that_go_together(overrides: dict[str, Any], options: ExitOptions) -> None:
    assert exit_options(ExitOverrides(**overrides), LAYERS, OWN) == options


SAFE = OperatingPoint("recompute", ExitPolicy("margin", {2: 0.99}), 4)


@pytest.mark.parametrize(
    ("overrides", "default", "options"),
    [
        ({}, None, ExitOptions()),
        ({}, "safe", ExitOptions("recompute", SAFE.policy, 4)),
        ({}, "exact", ExitOptions("full")),
        ({"operating_point": "safe"}, None, ExitOptions("recompute", SAFE.policy, 4)),
        ({"operating_point": "exact"}, "safe", ExitOptions("full")),
        ({"kv_policy": "verify"}, "safe", ExitOptions("verify")),
        ({"exit_policy": "full"}, "safe", ExitOptions("full")),
    ],
)
def test_operating_points(overrides: dict[str, Any], default: str | None, options: ExitOptions) -> None:
    points = OperatingPoints({"safe": SAFE}, default)
    assert exit_options(ExitOverrides(**overrides), LAYERS, OWN, points) == options


def test_a_point_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ExitOverrideError, match="'faster' is no point of this model; it has exact, safe") as caught:
        exit_options(ExitOverrides(operating_point="faster"), LAYERS, OWN, OperatingPoints({"safe": SAFE}))
    assert caught.value.field == "operating_point"
    with pytest.raises(ExitOverrideError, match="it has exact") as caught:
        exit_options(ExitOverrides(operating_point="safe"), LAYERS, OWN)


def test_tokens_of_a_shortlist_alone() -> None:
    listed = ExitPolicy("margin", {1: 0.9}, shortlist=(4, 5))
    found = exit_options(ExitOverrides(shortlist_only=True), LAYERS, listed)
    assert found == ExitOptions(policy=replace(listed, shortlist_only=True))
    assert exit_options(ExitOverrides(shortlist_only=False), LAYERS, found.policy) == ExitOptions(policy=listed)


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"exit_policy": "full", "threshold": 0.5}, "threshold"),
        ({"exit_policy": "full", "kv_policy": "fill"}, "kv_policy"),
        ({"exit_policy": "early", "kv_policy": "full"}, "kv_policy"),
        ({"kv_policy": "full", "min_exit_layer": 2}, "min_exit_layer"),
        ({"kv_policy": "full", "max_pending": 2}, "max_pending"),
        ({"kv_policy": "full", "exit_layer": 2}, "exit_layer"),
        ({"max_pending": 2}, "max_pending"),
        ({"kv_policy": "fill", "max_pending": 2}, "max_pending"),
        ({"exit_layer": 2}, "exit_layer"),
        ({"kv_policy": "verify", "exit_layer": 2}, "exit_layer"),
        ({"kv_policy": "static"}, "exit_layer"),
        ({"kv_policy": "static", "exit_layer": 3}, "exit_layer"),
        ({"kv_policy": "static", "exit_layer": 2, "threshold": 0.5}, "threshold"),
        ({"kv_policy": "static", "exit_layer": 2, "max_pending": 2}, "max_pending"),
        ({"threshold": 0.5, "thresholds": {1: 0.5}}, "threshold"),
        ({"thresholds": {}}, "thresholds"),
        ({"thresholds": {3: 0.5}}, "thresholds"),
        ({"shortlist_only": True}, "shortlist_only"),
        ({"kv_policy": "full", "shortlist_only": False}, "shortlist_only"),
        ({"measure": "cosine"}, "measure"),
        ({"measure": "cosine", "min_exit_layer": 2}, "measure"),
    ],
)
def test_overrides_that_contradict_each_other_name_the_field(overrides: dict[str, Any], field: str) -> None:
    with pytest.raises(ExitOverrideError) as caught:
        exit_options(ExitOverrides(**overrides), LAYERS, OWN, spell=lambda name: f"<{name}>")
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"exit_policy": "early"}, "exit_policy"),
        ({"threshold": 0.5}, "threshold"),
        ({"min_exit_layer": 1}, "min_exit_layer"),
        ({"kv_policy": "static", "exit_layer": 2}, "exit_layer"),
    ],
)
def test_a_model_without_exits(overrides: dict[str, Any], field: str) -> None:
    with pytest.raises(ExitOverrideError, match=f"<{field}>.*has none") as caught:
        exit_options(ExitOverrides(**overrides), (), None, spell=lambda name: f"<{name}>")
    assert caught.value.field == field
    assert exit_options(ExitOverrides(kv_policy="fill"), (), None) == ExitOptions()


@pytest.mark.parametrize("overrides", [{"exit_policy": "early"}, {"min_exit_layer": 2}, {"measure": "margin"}])
def test_exits_without_thresholds_need_some(overrides: dict[str, Any]) -> None:
    with pytest.raises(ExitOverrideError, match="no thresholds of its own; give --threshold"):
        exit_options(ExitOverrides(**overrides), LAYERS, None, spell=lambda name: f"--{name}")
    options = exit_options(ExitOverrides(**overrides, threshold=0.5), LAYERS, None)
    assert options.policy is not None
    assert options.policy.thresholds == {1: 0.5, 2: 0.5}


def test_the_engines_own_objections_are_kept() -> None:
    with pytest.raises(OfframpError, match="max_pending 0"):
        exit_options(ExitOverrides(kv_policy="verify", max_pending=0), LAYERS, OWN)
    with pytest.raises(OfframpError, match="NaN"):
        exit_options(ExitOverrides(threshold=float("nan")), LAYERS, OWN)
