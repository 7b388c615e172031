"""Quality beside speed: what the texts of a variant are worth, measured against references and against full depth.

ROUGE-L (Lin 2004): F-measure of the longest common subsequence of words, of the best reference.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from offramp.common.errors import OfframpError
from offramp.serve.bench.contestants import Contestant
from offramp.serve.bench.prompts import encode_at, json_lines
from offramp.serve.bench.trial import Question

_RESAMPLES = 2000


@dataclass(frozen=True)
class References:
    """Prompts, and what good answers to them are.

    Attributes:
        prompts: token ids of each.
        texts: for each of them, at least one reference.
    """

    prompts: list[list[int]]
    texts: list[list[str]]


@dataclass(frozen=True)
class Answers:
    """What somebody says to the prompts, and what it is worth.

    Attributes:
        texts: one for each prompt.
        scores: ROUGE-L of each, from 0 to 1.
        exit_layers: how many tokens, beginnings apart, ran so many layers.
    """

    texts: list[str]
    scores: list[float]
    exit_layers: Counter[int]


@dataclass(frozen=True)
class Quality:
    """Answers beside those at full depth.

    Attributes:
        rouge_l: mean.
        ratio: of the mean to that at full depth.
        ratio_low: lower end of its 95% interval, by bootstrap over prompts.
        ratio_high: upper end.
        same_texts: share of the texts that are identical.
        exit_layers: see `Answers`.
        prompts: how many.
    """

    rouge_l: float
    ratio: float
    ratio_low: float
    ratio_high: float
    same_texts: float
    exit_layers: Counter[int]
    prompts: int

    @classmethod
    def of(cls, mine: Answers, full_depth: Answers) -> Quality:
        """Of answers to the same prompts, in the same order."""
        ratio, low, high = ratio_of_means(mine.scores, full_depth.scores)
        same = sum(a == b for a, b in zip(mine.texts, full_depth.texts, strict=True))
        return cls(
            float(np.mean(mine.scores)), ratio, low, high, same / len(mine.texts), mine.exit_layers, len(mine.texts)
        )


def read_references(path: Path, tokenizer: PreTrainedTokenizerBase) -> References:
    """Lines of JSON with a `prompt` and `references`, a list of texts or one text.

    Raises:
        OfframpError: the file cannot be read or holds something else.
    """
    found = References([], [])
    for where, row in json_lines(path):
        prompt, texts = (row.get("prompt"), row.get("references")) if isinstance(row, dict) else (None, None)
        good: list[Any] = [texts] if isinstance(texts, str) else texts if isinstance(texts, list) else []
        if not isinstance(prompt, str) or not prompt or not good or not all(isinstance(text, str) for text in good):
            raise OfframpError(f'{where}, is no object with "prompt" and "references"; mend it.')
        found.prompts.append(encode_at(where, tokenizer, prompt))
        found.texts.append(good)
    if not found.prompts:
        raise OfframpError(f"{path} holds no references; give at least one line.")
    return found


def check_installed() -> None:
    """Raise `OfframpError` if there is no rouge-score."""
    if importlib.util.find_spec("rouge_score") is None:
        raise OfframpError('quality needs rouge-score; pip install "offramp-serve[bench]", or leave --references out.')


def rouge_l(texts: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    """ROUGE-L of each text by its best reference, from 0 to 1."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"])
    return [scorer.score_multi(good, text)["rougeL"].fmeasure for text, good in zip(texts, references, strict=True)]


def answers(contestant: Contestant, references: References, batch: int, new_tokens: int) -> Answers:
    """Let somebody answer all prompts, `batch` at a time, each until the model ends it.

    Raises:
        OfframpError: it fails.
    """
    in_flight = min(batch, len(references.prompts))
    trial = contestant.run(Question(references.prompts, new_tokens, in_flight, until_eos=True))
    scores = rouge_l(trial.texts, references.texts)
    return Answers(list(trial.texts), scores, Counter(layers for _, layers in trial.exit_layers))


def ratio_of_means(mine: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """Mean of some scores over that of others of the same prompts, and the ends of its 95% interval.

    Percentile bootstrap (Efron 1979) over prompts, paired, with a fixed seed. NaN where the base is 0.
    """
    pair = np.array([mine, base], dtype=np.float64)
    drawn = np.random.default_rng(0).integers(0, pair.shape[1], (_RESAMPLES, pair.shape[1]))
    top, bottom = pair[0][drawn].mean(axis=1), pair[1][drawn].mean(axis=1)
    if not pair[1].any():
        return float("nan"), float("nan"), float("nan")
    ratios = top[bottom > 0] / bottom[bottom > 0]
    low, high = np.percentile(ratios, (2.5, 97.5))
    return float(pair[0].mean() / pair[1].mean()), float(low), float(high)
