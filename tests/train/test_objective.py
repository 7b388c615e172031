"""What a recipe says of its objective, step by step."""

from __future__ import annotations

import math
from typing import Any

import pytest

from offramp.common.errors import OfframpError
from offramp.train.depth_spread import DepthSpread
from offramp.train.exit_weights import Curriculum, ExitWeights, WeightSchedule
from offramp.train.linear_cross_entropy import TokenLoss
from offramp.train.objective import ObjectiveConfig, RunObjective

EARLY = (2, 4, 6)
LAYERS = 8


def weights(step: int, *, objective: ObjectiveConfig | None = None, **settings: Any) -> list[float]:
    run = RunObjective(
        objective or ObjectiveConfig(),
        settings.get("exit_weights"),
        settings.get("final_weight"),
        settings.get("early", EARLY),
        LAYERS,
    )
    at = run.at(step).weights
    assert list(at) == [*settings.get("early", EARLY), LAYERS]
    return list(at.values())


def test_weights_are_constant_without_a_schedule() -> None:
    assert weights(0) == weights(10**6) == [0.3, 0.3, 0.3, 1.0]
    assert weights(3, exit_weights=[0.1, 0.2, 0.4], final_weight=0.5) == [0.1, 0.2, 0.4, 0.5]


def test_rules_by_hand() -> None:
    assert weights(0, exit_weights="uniform") == [0.25] * 4
    assert weights(0, exit_weights="calm") == pytest.approx([2 / 20, 4 / 20, 6 / 20, 8 / 20])
    assert weights(0, exit_weights="geometric") == pytest.approx([1 / 15, 2 / 15, 4 / 15, 8 / 15])
    # e(l) = 0.5 * (0 + .. + l) with l = 1, 3, 5; the last one, l = 7, gets 7 + 0.5 * (0 + .. + 6).
    parts = [0.5, 3.0, 7.5, 17.5]
    expected = [part / sum(parts) for part in parts]
    assert weights(0, exit_weights="layerskip", objective=ObjectiveConfig(exit_scale=0.5)) == pytest.approx(expected)


def test_weights_go_from_the_first_to_those_aimed_at() -> None:
    linear = ObjectiveConfig(schedule=WeightSchedule(steps=10, initial=[0.0, 1.0, 0.4]))
    aim = [0.5, 0.5, 0.4]
    assert weights(0, exit_weights=aim, objective=linear) == [0.0, 1.0, 0.4, 1.0]
    assert weights(4, exit_weights=aim, objective=linear) == pytest.approx([0.2, 0.8, 0.4, 1.0])
    assert weights(10, exit_weights=aim, objective=linear) == weights(99, exit_weights=aim, objective=linear)
    assert weights(10, exit_weights=aim, objective=linear) == [*aim, 1.0]
    cosine = ObjectiveConfig(schedule=WeightSchedule(steps=10, shape="cosine"))
    for step in range(11):
        # EE-LLM writes the same with cos(pi (p + 1)).
        share = 0.5 * (math.cos(math.pi * (step / 10 + 1)) + 1)
        assert weights(step, exit_weights=aim, objective=cosine)[:3] == pytest.approx([share * aim_e for aim_e in aim])
    constant = ObjectiveConfig(schedule=WeightSchedule(steps=10, shape="constant", initial=[1.0, 1.0, 1.0]))
    assert weights(0, exit_weights=aim, objective=constant) == [*aim, 1.0]


def test_a_rotational_curriculum_takes_turns() -> None:
    objective = ObjectiveConfig(curriculum=Curriculum("rotational", interval=2))
    assert weights(0, objective=objective) == [0.3, 0.0, 0.3, 1.0]
    assert weights(1, objective=objective) == [0.0, 0.3, 0.0, 1.0]
    assert weights(2, objective=objective) == weights(0, objective=objective)
    # A rule's weights add up to one over the exits of the step.
    assert weights(1, exit_weights="calm", objective=objective) == pytest.approx([0, 4 / 12, 0, 8 / 12])
    rare = ObjectiveConfig(curriculum=Curriculum("rotational", interval=5))
    assert [sum(weight > 0 for weight in weights(step, objective=rare)) for step in range(5)] == [2, 2, 2, 1, 1]


def test_a_gradual_curriculum_adds_the_deepest_first() -> None:
    objective = ObjectiveConfig(curriculum=Curriculum("gradual", steps=30))
    on = [[weight > 0 for weight in weights(step, objective=objective)] for step in range(32)]
    assert on[0] == on[9] == [False, False, False, True]
    assert on[10] == on[19] == [False, False, True, True]
    assert on[20] == on[29] == [False, True, True, True]
    assert on[30] == on[31] == [True] * 4


def test_evaluation_weighs_all_exits_as_aimed_at() -> None:
    config = ObjectiveConfig(schedule=WeightSchedule(steps=10), curriculum=Curriculum("rotational", 3))
    run = RunObjective(config, [0.1, 0.2, 0.3], None, EARLY, LAYERS)
    assert run.evaluated.weights == {2: 0.1, 4: 0.2, 6: 0.3, 8: 1.0}
    assert run.at(5).weights == {2: 0.0, 4: 0.0, 6: 0.15, 8: 1.0}


def test_token_losses_of_each_exit() -> None:
    assert ObjectiveConfig().token_losses(EARLY, LAYERS) == {}
    confident = ObjectiveConfig(token_weights="confidence", label_smoothing={4: 0.1, 8: 0.2}, temperature=2.0)
    assert confident.token_losses(EARLY, LAYERS) == {
        2: TokenLoss(2.0, 0.0, True),
        4: TokenLoss(2.0, 0.1, True),
        6: TokenLoss(2.0, 0.0, True),
        8: TokenLoss(1.0, 0.2, False),
    }


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WeightSchedule(steps=0), r"schedule\.steps is 0"),
        (lambda: WeightSchedule(5, "wavy"), "'wavy'; choose one of constant, linear, cosine"),  # pyright: ignore
        (lambda: WeightSchedule(5, initial=[-1.0]), r"schedule\.initial \[-1\.0\] must not be negative"),
        (lambda: Curriculum("spiral"), "'spiral'; choose one of rotational, gradual"),  # pyright: ignore
        (lambda: Curriculum("rotational"), r"curriculum\.interval is None"),
        (lambda: Curriculum("gradual", steps=0), r"curriculum\.steps is 0"),
        (lambda: Curriculum("gradual", interval=2, steps=3), r"curriculum\.interval means nothing"),
        (lambda: ExitWeights(EARLY, LAYERS, [1.0]), r"exit_weights has 1 values, but .* 3 early exits"),
        (lambda: ExitWeights(EARLY, LAYERS, [1.0, -1.0, 1.0]), "must not be negative"),
        (lambda: ExitWeights(EARLY, LAYERS, [1.0, math.nan, 1.0]), "must not be negative"),
        (lambda: ExitWeights(EARLY, LAYERS, "deep"), "'deep'; choose one of uniform, calm, geometric, layerskip"),  # pyright: ignore
        (lambda: ExitWeights(EARLY, LAYERS, "calm", 1.0), r"leave final_weight 1\.0 out"),
        (lambda: ExitWeights(EARLY, LAYERS, "calm", schedule=WeightSchedule(5)), "a schedule needs a list"),
        (lambda: ExitWeights(EARLY, LAYERS, "layerskip", exit_scale=0.0), r"exit_scale is 0\.0"),
        (lambda: ExitWeights(EARLY, LAYERS, schedule=WeightSchedule(5, initial=[1.0])), r"schedule\.initial has 1"),
        (lambda: ExitWeights(EARLY, LAYERS, None, 0.0, schedule=WeightSchedule(5)), "nothing to train"),
        (lambda: ObjectiveConfig(token_weights="odd"), "'odd'; choose one of uniform, confidence"),  # pyright: ignore
        (lambda: ObjectiveConfig(temperature={2: 0.0}), "temperature is .*above 0"),
        (lambda: ObjectiveConfig(label_smoothing=1.0), r"label_smoothing is 1\.0"),
        (lambda: ObjectiveConfig(distill=1.5), r"distill is 1\.5"),
        (lambda: ObjectiveConfig(distill_temperature=-1.0), r"distill_temperature is -1\.0"),
        (lambda: ObjectiveConfig(temperature={3: 2.0}).token_losses(EARLY, LAYERS), r"temperature names layers \[3\]"),
        (lambda: weights(0, early=(), objective=ObjectiveConfig(depth_spread=DepthSpread(1.0))), "needs early exits"),
        (lambda: DepthSpread(-1.0), r"depth_spread\.weight is -1\.0"),
        (lambda: DepthSpread(1.0, threshold=2.0), r"depth_spread\.threshold is 2\.0"),
    ],
)
def test_settings_that_cannot_work_are_refused(make: Any, message: str) -> None:
    with pytest.raises(OfframpError, match=message):
        make()
