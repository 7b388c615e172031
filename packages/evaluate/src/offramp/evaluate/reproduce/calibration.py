"""Thresholds, chosen on sources that nothing else is measured on.

Twice: as the paper does it (the smallest threshold whose quality is still good enough), and with a guarantee by
Learn-then-Test (CALM, section 4): the loss of an answer is what its ROUGE-L to the labels lacks of the full model's,
and candidates are tried from the safest on.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from offramp.evaluate.answering import Answerer, Setting
from offramp.evaluate.learn_then_test import fixed_sequence, p_value
from offramp.evaluate.reproduce.answers import FULL, Questions, early, engine_config, exit_rate, to_full, to_label
from offramp.evaluate.reproduce.paper import TECHNIQUES, Technique, policy

CANDIDATES: dict[Technique, tuple[float, ...]] = {
    "softmax": (0.99, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1),
    "classifier": (0.99, 0.95, 0.92, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2),
    "state": (0.999, 0.995, 0.99, 0.98, 0.97, 0.96, 0.95, 0.93, 0.9, 0.87, 0.84, 0.8),
}
"""Of each measure, from the safest on; those of the paper are among them."""
QUALITY_KEPT = 0.98
"""Share of the full model's ROUGE-L that a threshold must keep; the paper's six keep from 0.965 to 0.993."""
TOLERATED, ERROR = 0.05, 0.05
"""delta and epsilon of Learn-then-Test: tolerated mean loss of ROUGE-L, and how often that may be wrong."""
_HOPELESS = 0.85


@dataclass(frozen=True)
class Point:
    """What one threshold gives on the calibration sources.

    Attributes:
        threshold: lambda.
        to_label: mean ROUGE-L to labels.
        to_full: mean ROUGE-L to the full model's answers.
        exit_rate: share of layers skipped.
        loss: mean loss, see the module.
        p_value: of the hypothesis that the loss exceeds `TOLERATED`.
    """

    threshold: float
    to_label: float
    to_full: float
    exit_rate: float
    loss: float
    p_value: float


def calibrate(model: Path, questions: Questions, max_tokens: int, device: str) -> Any:
    """Both thresholds of every measure, and the points they were chosen from."""
    answerer, config = Answerer(model), engine_config(device)
    checkpoint = answerer.engine(config).checkpoint
    layers, num_layers = tuple(checkpoint.exits.layers), checkpoint.model.config.num_layers
    full = answerer.answer(Setting("full", FULL, config), questions.prompts, max_tokens)
    full_scores = to_label(full, questions)
    quality = fmean(full_scores)
    found: dict[str, Any] = {"full_to_label": quality, "prompts": len(questions.prompts), "techniques": {}}
    for technique in TECHNIQUES:
        points: list[Point] = []
        for threshold in CANDIDATES[technique]:
            setting = early(technique, policy(technique, threshold, layers), config)
            answers = answerer.answer(setting, questions.prompts, max_tokens)
            scores = to_label(answers, questions)
            losses = [max(0.0, best - mine) for best, mine in zip(full_scores, scores, strict=True)]
            total = math.fsum(losses)
            points.append(
                Point(
                    threshold,
                    fmean(scores),
                    fmean(to_full(answers.texts, full.texts)),
                    exit_rate(answers, num_layers),
                    total / len(losses),
                    p_value("hoeffding_bentkus", total, len(losses), TOLERATED),
                )
            )
            # What lies below only loses more: neither choice can fall there.
            if points[-1].to_label < _HOPELESS * quality and points[-1].p_value > ERROR:
                break
        found["techniques"][technique] = _chosen(points, quality)
    return found


def _chosen(points: list[Point], quality: float) -> dict[str, Any]:
    good = [point.threshold for point in points if point.to_label >= QUALITY_KEPT * quality]
    certified = fixed_sequence([point.p_value for point in points], ERROR)
    return {
        "points": [asdict(point) for point in points],
        # Nothing good enough is no reason to have no row in the table; the report shows what it keeps.
        "threshold": min(good, default=points[0].threshold),
        "good_enough": bool(good),
        "certified": points[certified - 1].threshold if certified else None,
    }
