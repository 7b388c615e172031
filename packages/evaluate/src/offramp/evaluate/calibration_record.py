"""What a calibration leaves behind: operating points in the checkpoint directory, and a record that can be checked."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from typing import Any

from offramp.common.checkpoint import AnyCheckpoint
from offramp.common.errors import OfframpError
from offramp.common.exits.operating_point import EXACT, OperatingPoints, check_name
from offramp.common.exits.policy import ExitPolicy
from offramp.evaluate.calibration import Calibration
from offramp.evaluate.learn_then_test import Bound
from offramp.evaluate.risks import Risk


@dataclass(frozen=True)
class Promise:
    """What was asked for.

    Attributes:
        points: name -> delta, the tolerated risk.
        epsilon: probability that a promise may be wrong.
        risk: see `Risk`.
        bound: see `Bound`.
        default: the point of requests that say nothing about depth; None: the certified one of the least delta.
    """

    points: Mapping[str, float]
    epsilon: float
    risk: Risk
    bound: Bound
    default: str | None = None

    def __post_init__(self) -> None:
        if not self.points:
            raise OfframpError("there is no operating point to calibrate; give --point NAME=DELTA.")
        for name in self.points:
            check_name(name)
        if self.default is not None and self.default not in (EXACT, *self.points):
            known = ", ".join((EXACT, *self.points))
            raise OfframpError(f"the default {self.default!r} is no point to calibrate; choose one of {known}.")


@dataclass(frozen=True)
class Asked:
    """On what a promise was tested.

    Attributes:
        task: its name.
        data: path of its file, if it has one.
        sha256: of the examples.
        num_examples: how many.
        seed: by which they were drawn from more; None: they were not.
        training_data: what is known of them beside the training data.
        chat: whether prompts were put into the tokenizer's chat template.
        max_tokens: most tokens of an answer.
        stop: strings that end one.
    """

    task: str
    data: str | None
    sha256: str
    num_examples: int
    seed: int | None
    training_data: str
    chat: bool
    max_tokens: int
    stop: Sequence[str]


def operating_points(calibration: Calibration, promise: Promise) -> OperatingPoints:
    """The certified points by name; the default is full depth where nothing is."""
    chosen = {name: calibration.chosen[delta] for name, delta in promise.points.items()}
    points = {
        name: replace(tried.candidate, profile=tried.profile) for name, tried in chosen.items() if tried is not None
    }
    safest = min(points, key=lambda name: promise.points[name], default=EXACT)
    default = safest if promise.default is None else promise.default
    return OperatingPoints(points, default if default in points else EXACT)


def record(calibration: Calibration, promise: Promise, asked: Asked) -> dict[str, Any]:
    """All that was tried, as plain containers: enough to compute every p-value again."""
    return {
        "method": "learn then test",
        "risk": promise.risk,
        "bound": promise.bound,
        "epsilon": promise.epsilon,
        "deltas": dict(promise.points),
        "made_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "offramp_version": importlib.metadata.version("offramp-evaluate"),
        **asdict(asked),
        "engine": asdict(calibration.engine),
        "full_depth": {
            "layers": calibration.full.layers_per_token,
            "tokens_per_second": calibration.full.tokens_per_second,
        },
        "chains": [
            {
                "name": chain.name,
                "sync_policy": chain.sync_policy,
                "epsilon": promise.epsilon / len(calibration.chains),
                "tried": [one.to_json() for one in tried],
                "not_tried": len(chain.candidates) - len(tried),
            }
            for chain, tried in calibration.chains
        ],
        "chosen": {
            name: None if (tried := calibration.chosen[delta]) is None else tried.to_json()
            for name, delta in promise.points.items()
        },
    }


def put_into(checkpoint: AnyCheckpoint, points: OperatingPoints, found: dict[str, Any], template: ExitPolicy) -> None:
    """Give a checkpoint its points, and a policy of its own that is the default point's."""
    checkpoint.points, checkpoint.calibration = points, found
    default = points.by_name.get(points.default or EXACT)
    checkpoint.policy = replace(template, thresholds={}) if default is None else default.policy
