"""What an early answer may cost: losses from 0 to 1, whose expectation is the risk that calibration bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from offramp.evaluate.rouge import rouge

Risk = Literal["consistency", "quality"]
"""`consistency`: CALM's textual consistency, 1 - ROUGE-L of the early text by the full-depth one. `quality`: CALM's
risk consistency, what the early text scores less than the full-depth one by the task's own references. A text that
scores more makes up for none that scores less: so losses are from 0 to 1, and the promise is the stronger for it."""


def consistency_losses(texts: Sequence[str], full: Sequence[str]) -> list[float]:
    """1 - ROUGE-L of each text by the full-depth text; 0 for equal texts, empty ones too."""
    scores = rouge(texts, [[one] for one in full])["rougeL"]
    return [0.0 if text == other else 1 - score for text, other, score in zip(texts, full, scores, strict=True)]


def quality_losses(
    texts: Sequence[str], full: Sequence[str], score: Callable[[Sequence[str]], Sequence[float]]
) -> list[float]:
    """What each text scores less than the full-depth text, and 0 where it scores as much.

    Args:
        texts: early.
        full: of full depth.
        score: of texts for the same examples, from 0 to 1, the higher the better.
    """
    return [max(0.0, best - own) for own, best in zip(score(texts), score(full), strict=True)]
