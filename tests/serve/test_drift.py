"""Drift from calibration: not seen where nothing changes, seen where something does, and forgotten when it is over."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from offramp.common.exits.policy import ExitPolicy
from offramp.common.exits.profile import TokenProfile
from offramp.serve.config import EngineConfig, WatchSettings
from offramp.serve.measures.drift import ENOUGH, Drift
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.request import Request
from offramp.serve.request.sampling_params import SamplingParams
from offramp.serve.watch import Calibrated, Watch, unlike_calibration

Tokens = tuple[list[int], list[float | None]]


def tokens(count: int, early: float, seed: int, power: float = 1.0) -> Tokens:
    """Some that leave after layer 2 with a confidence of u^(1 / power), others that run all 6 layers."""
    generator = np.random.default_rng(seed)
    leaves = generator.random(count) < early
    sure = generator.random(count) ** (1 / power)
    return [2 if one else 6 for one in leaves], [
        float(value) if one else None for one, value in zip(leaves, sure, strict=True)
    ]


def test_nothing_is_said_of_few_tokens_and_no_drift_of_equal_ones() -> None:
    drift = Drift(TokenProfile.of(*tokens(5000, 0.7, seed=0)))
    drift.add(*tokens(ENOUGH - 1, 0.7, seed=1))
    assert drift.depth is None
    assert drift.confidence is None
    for seed in range(20):
        drift.add(*tokens(200, 0.7, seed=2 + seed))
    assert drift.depth is not None
    assert drift.depth < 0.02
    assert drift.confidence is not None
    assert drift.confidence < 0.02


def test_other_depths_and_other_confidences_are_told_apart_and_forgotten() -> None:
    drift = Drift(TokenProfile.of(*tokens(5000, 0.7, seed=0)), window=3000)
    drift.add(*tokens(4000, 0.3, seed=1))
    assert drift.depth is not None
    assert drift.depth > 0.25
    assert drift.confidence is not None
    assert drift.confidence < 0.05
    drift.add(*tokens(4000, 0.7, seed=2, power=3.0))
    assert drift.confidence > 0.25
    for seed in range(100):
        drift.add(*tokens(200, 0.7, seed=3 + seed))
    assert drift.depth < 0.02
    assert drift.confidence < 0.05


def test_a_depth_that_calibration_never_saw_is_drift() -> None:
    drift = Drift(TokenProfile({2: 900, 6: 100}, (), (0,)))
    drift.add([4] * 1000, [None] * 1000)
    assert drift.depth is not None
    assert drift.depth > 1


def answered(exits: ExitOptions, found: Tokens) -> Request:
    request = Request("r", (1,), SamplingParams(max_tokens=5000, temperature=0), exits)
    request.output_token_ids += [7] * len(found[0])
    request.exit_layers += found[0]
    request.confidences += found[1]
    return request


def test_only_answers_of_a_calibrated_kind_are_compared_and_the_alarm_has_its_level() -> None:
    exits = ExitOptions("fill", ExitPolicy("margin", {2: 0.5}))
    profile = TokenProfile.of(*tokens(5000, 0.7, seed=0))
    for level, alarm in ((0.25, 1.0), (1.0, 0.0)):
        watch = Watch(WatchSettings(drift_alarm=level), [Calibrated(exits, profile)])
        watch.finished(answered(ExitOptions("fill", ExitPolicy("margin", {2: 0.6})), tokens(4500, 0.3, seed=1)))
        assert watch.gauges() == {}
        watch.finished(answered(ExitOptions("fill", ExitPolicy("margin", {2: 0.5})), tokens(4500, 0.3, seed=1)))
        gauges = watch.gauges()
        assert gauges["offramp_depth_drift"] > 0.25 > gauges["offramp_confidence_drift"]
        assert gauges["offramp_drift_alarm"] == alarm


@pytest.mark.parametrize(
    ("then", "now", "difference"),
    [
        ({}, {}, None),
        ({}, {"max_num_seqs": 4, "num_threads": 1}, None),
        ({}, {"dtype": "bf16"}, "dtype fp32 and not bf16"),
        ({}, {"sync_policy": "all"}, "sync_policy regroup and not all"),
        ({"quantile": 0.5}, {}, None),
        ({"sync_policy": "quantile", "quantile": 0.5}, {"sync_policy": "quantile"}, "quantile 0.5 and not 0.75"),
        ({"sync_policy": "all"}, {"sync_policy": "all", "max_num_seqs": 4}, "max_num_seqs 32 and not 4"),
        ({"split_rule": "cost"}, {}, "split_rule cost and not always"),
    ],
)
def test_a_promise_is_about_an_engine(then: dict[str, Any], now: dict[str, Any], difference: str | None) -> None:
    said = unlike_calibration({"engine": asdict(EngineConfig(**then))}, EngineConfig(**now))
    if difference is None:
        assert said is None
    else:
        assert said is not None
        assert f"calibrated with {difference}, so" in said


def test_without_a_record_there_is_no_promise() -> None:
    assert unlike_calibration(None, EngineConfig()) is None
    assert unlike_calibration({"method": "held-out search"}, EngineConfig(dtype="bf16")) is None
