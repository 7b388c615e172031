"""What the paper reports: Table 1, Figures 1 and 2 (arXiv 2407.20272, section 5)."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from offramp.common.exits.policy import ExitPolicy, Measure

Technique = Literal["softmax", "classifier", "state"]
TECHNIQUES: tuple[Technique, ...] = get_args(Technique)
MEASURES: dict[Technique, Measure] = {"softmax": "margin", "classifier": "classifier", "state": "cosine"}
TITLES: dict[Technique, str] = {"softmax": "softmax margin", "classifier": "classifier", "state": "state similarity"}
DECAY = 4.0
"""tau: thresholds decay as 0.9 lambda + 0.1 exp(-tau t / N)."""


class Row(NamedTuple):
    """Table 1: ROUGE-L to the labels and to the full model's answers, and the share of decoder layers skipped."""

    to_label: float
    to_full: float | None
    exit_rate: float | None
    threshold: float | None = None


class Speed(NamedTuple):
    """Figures 1 and 2: generated tokens per second, and inner-token latency in seconds."""

    tokens_per_second: float
    latency_s: float


TABLE_1: dict[str, dict[str, Row]] = {
    "small": {
        "full": Row(0.3524, None, None),
        "static half": Row(0.3437, None, 0.5),
        "softmax": Row(0.3500, 0.7670, 0.5382, 0.85),
        "classifier": Row(0.3432, 0.6731, 0.6650, 0.9),
        "state": Row(0.3400, 0.6284, 0.5653, 0.95),
    },
    "base": {
        "full": Row(0.3603, None, None),
        "static half": Row(0.3551, None, 0.5),
        "softmax": Row(0.3557, 0.7493, 0.5309, 0.85),
        "classifier": Row(0.3514, 0.6868, 0.5906, 0.92),
        "state": Row(0.3516, 0.6130, 0.5726, 0.96),
    },
}
FIGURES: dict[str, dict[str, Speed]] = {
    "small": {
        "full": Speed(1046.47, 0.234),
        "softmax": Speed(1081.04, 0.075),
        "classifier": Speed(1065.13, 0.079),
        "state": Speed(1165.73, 0.069),
    },
    # The text names no measure with 1777.96; the other two are said to be state's and softmax's, so it is the
    # classifier's. The abstract's 1.25 times is the state's.
    "base": {
        "full": Speed(1117.96, 0.176),
        "softmax": Speed(1191.98, 0.076),
        "classifier": Speed(1777.96, 0.078),
        "state": Speed(1402.78, 0.066),
    },
}


def policy(technique: Technique, threshold: float, layers: tuple[int, ...]) -> ExitPolicy:
    """One threshold at all exits, decaying over the answer."""
    return ExitPolicy(MEASURES[technique], dict.fromkeys(layers, threshold), decay=DECAY)
