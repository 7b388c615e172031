"""Thresholds that follow audits: raised where tokens agree too seldom, never below what was calibrated, tried again."""

from __future__ import annotations

import numpy as np
import pytest

from offramp.common.errors import OfframpError
from offramp.common.exits.policy import ExitPolicy
from offramp.common.exits.profile import TokenProfile
from offramp.serve.adaptation import Adaptation
from offramp.serve.config import WatchSettings
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.request import Request
from offramp.serve.request.sampling_params import SamplingParams
from offramp.serve.watch import Calibrated, Watch

CERTIFIED = ExitPolicy("margin", {2: 0.6, 4: 0.8})


def answer(policy: ExitPolicy, generator: np.random.Generator, agrees: float) -> tuple[Request, int]:
    """One of 20 tokens that leave at exit 2, with how many come before its first difference.

    A token agrees with probability `agrees` at a confidence of 0.6, and surely at 1.
    """
    request = Request("r", (1,), SamplingParams(max_tokens=20, temperature=0), ExitOptions("fill", policy))
    sure = generator.uniform(0.6, 1, 20)
    right = generator.random(20) < agrees + (1 - agrees) * (sure - 0.6) / 0.4
    leaves = sure > policy.thresholds[2]
    right |= ~leaves  # what runs all layers is the full model's
    request.output_token_ids += [7] * 20
    request.exit_layers += [6, *(2 if one else 6 for one in leaves[1:])]
    request.confidences += [
        None,
        *(float(value) if one else None for value, one in zip(sure[1:], leaves[1:], strict=True)),
    ]
    wrong = np.flatnonzero(~right[1:])
    return request, int(wrong[0]) + 1 if len(wrong) else 20


def shares(agrees: float, wanted: float, audits: int = 1500) -> tuple[float, float]:
    """The adapted threshold of exit 2, and how many of the last tokens that left agreed."""
    adaptation, generator = Adaptation(CERTIFIED, wanted), np.random.default_rng(4)
    good = bad = 0
    for number in range(audits):
        request, agreeing = answer(adaptation.policy, generator, agrees)
        adaptation.compared(request, agreeing)
        if number > audits // 2:
            left = [layer == 2 for layer in request.exit_layers[: agreeing + 1]]
            bad += agreeing < 20
            good += sum(left) - (agreeing < 20)
    return adaptation.policy.thresholds[2], good / max(1, good + bad)


def test_where_tokens_agree_the_certified_thresholds_stay() -> None:
    assert shares(agrees=0.999, wanted=0.9)[0] == 0.6


def test_where_they_do_not_thresholds_rise_until_those_that_leave_do() -> None:
    threshold, share = shares(agrees=0.5, wanted=0.9)
    assert threshold > 0.7
    assert share > 0.9


def test_other_exits_and_settings_stay_as_they_are() -> None:
    adaptation, generator = Adaptation(CERTIFIED, 0.9), np.random.default_rng(0)
    for _ in range(200):
        adaptation.compared(*answer(adaptation.policy, generator, 0.3))
    assert adaptation.greatest_raise == pytest.approx(adaptation.policy.thresholds[2] - 0.6)
    assert adaptation.greatest_raise > 0
    assert adaptation.policy.thresholds[4] == 0.8
    assert adaptation.policy.measure == "margin"


def test_an_exit_that_was_closed_is_tried_again() -> None:
    adaptation, generator = Adaptation(CERTIFIED, 0.9), np.random.default_rng(0)
    for _ in range(60):
        request, _ = answer(CERTIFIED, generator, 0.0)
        request.confidences[1] = request.confidences[1] or 0.7
        request.exit_layers[1] = 2
        adaptation.compared(request, 1)
    assert adaptation.policy.thresholds[2] == 1.0
    for _ in range(60):
        adaptation.compared(*answer(adaptation.policy, generator, 0.0))
    assert adaptation.policy.thresholds[2] == 0.6


def test_requests_carry_adapted_thresholds_and_are_still_followed() -> None:
    exits = ExitOptions("fill", CERTIFIED)
    watch = Watch(
        WatchSettings(audit_share=1.0, adapt_to=0.9), [Calibrated(exits, TokenProfile({2: 10, 6: 5}, (), (0,)))]
    )
    other = ExitOptions("recompute", CERTIFIED)
    assert watch.adapted(exits) == exits
    generator = np.random.default_rng(0)
    for _ in range(200):
        watch._compared(*answer(CERTIFIED, generator, 0.3))
    raised = watch.adapted(exits)
    assert raised.policy is not None
    assert raised.policy.thresholds[2] > 0.6
    assert watch.adapted(other) == other
    assert watch.gauges()["offramp_threshold_raise"] == pytest.approx(raised.policy.thresholds[2] - 0.6)
    request, _ = answer(raised.policy, generator, 0.3)
    assert watch._of(request) is not None
    looser, _ = answer(ExitPolicy("margin", {2: 0.5, 4: 0.8}), generator, 0.3)
    assert watch._of(looser) is None


def test_thresholds_that_decay_are_left_alone() -> None:
    exits = ExitOptions("fill", ExitPolicy("margin", {2: 0.6}, decay=4.0))
    watch = Watch(WatchSettings(audit_share=1.0, adapt_to=0.9), [Calibrated(exits, TokenProfile({2: 10}, (), (0,)))])
    assert "offramp_threshold_raise" not in watch.gauges()
    assert watch.adapted(exits) == exits


def test_there_is_nothing_to_learn_from_without_audits() -> None:
    with pytest.raises(OfframpError, match=r"adapt_to 0\.9 learns from audits, and there are none; set audit_share"):
        WatchSettings(adapt_to=0.9)
