"""ROUGE-L (Lin, 2004) against several references, and how sure a ratio of two means of it is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from rouge_score.rouge_scorer import RougeScorer

Scores = npt.NDArray[np.float64]
"""[texts] F1 against the best reference of each, in [0, 1]."""


def rouge_l(texts: Sequence[str], references: Sequence[Sequence[str]]) -> Scores:
    """F1 of the longest common subsequence of words with the reference that fits best, text by text."""
    scorer = RougeScorer(["rougeL"])
    best = [scorer.score_multi(wanted, text)["rougeL"].fmeasure for text, wanted in zip(texts, references, strict=True)]
    return np.array(best)


def ratio(ours: Scores, theirs: Scores) -> float:
    """Mean over mean."""
    return float(ours.mean() / theirs.mean())


def ratio_interval(
    ours: Scores, theirs: Scores, level: float = 0.95, draws: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Bootstrap interval of `ratio`, drawing texts in pairs (percentile method).

    Args:
        ours: [texts].
        theirs: [texts] of the same prompts.
        level: of confidence.
        draws: resamples.
        seed: of the draws.
    """
    picks = np.random.default_rng(seed).integers(0, len(ours), (draws, len(ours)))
    ratios = ours[picks].mean(axis=1) / theirs[picks].mean(axis=1)
    low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
