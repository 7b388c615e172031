"""What an answer is worth, by the rules of the data sets it comes from, and what probabilities are worth.

For text in ASCII `exact_match` and `token_f1` are SQuAD's (Rajpurkar et al., 2016, its evaluation script). That script
drops punctuation of ASCII only and takes a sentence without spaces for one word; here punctuation is what Unicode says,
and where a script writes no spaces between words each character is one, as MLQA does (Lewis et al., 2020).
"""

from __future__ import annotations

import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import NamedTuple

import numpy as np

from offramp.evaluate.rouge import stands_alone

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = frozenset(string.punctuation)
# A sign, digits in groups or not, a fraction or not; or a fraction alone.
_NUMBER = re.compile(r"[-\u2212]?\s?[$£€]?\s?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|[-\u2212]?[$£€]?\.\d+")
_ANSWER_MARK = "####"


def normalised(text: str) -> str:
    """Lower-case, without punctuation and English articles, one space between words (SQuAD's `normalize_answer`)."""
    text = unicodedata.normalize("NFKC", text).lower()
    kept = (letter for letter in text if letter not in _PUNCTUATION and unicodedata.category(letter)[0] != "P")
    return " ".join(_ARTICLES.sub(" ", "".join(kept)).split())


def exact_match(answer: str, references: Sequence[str]) -> float:
    """1 if the answer is one of the references, normalised; else 0."""
    said = normalised(answer)
    return float(any(said == normalised(reference) for reference in references))


def token_f1(answer: str, references: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of the answer's words, by the reference that fits it best.

    Where the answer or the reference has no words, it is 1 if neither has any, and 0 otherwise (SQuAD 2.0).
    """
    return max((_f1(_words(answer), _words(reference)) for reference in references), default=0.0)


def _words(text: str) -> list[str]:
    spaced = "".join(f" {letter} " if stands_alone(letter) else letter for letter in normalised(text))
    return spaced.split()


def _f1(said: list[str], wanted: list[str]) -> float:
    if not said or not wanted:
        return float(said == wanted)
    common = (Counter(said) & Counter(wanted)).total()
    if not common:
        return 0.0
    precision, recall = common / len(said), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def marked_number(text: str) -> Decimal | None:
    """The number after the last `####`, which is how GSM8K's answers end; None if there is none."""
    _, mark, rest = text.rpartition(_ANSWER_MARK)
    found = _NUMBER.search(rest) if mark else None
    return None if found is None else _number(found[0])


def last_number(text: str) -> Decimal | None:
    """The last number anywhere in a text: for models that know nothing of `####`."""
    found = _NUMBER.findall(text)
    return _number(found[-1]) if found else None


def _number(text: str) -> Decimal | None:
    plain = re.sub(r"[,$£€\s]", "", text.replace("\u2212", "-"))
    try:
        return Decimal(plain)
    except InvalidOperation:
        return None


def number_match(answer: Decimal | None, reference: Decimal | None) -> float:
    """1 if there is an answer and it is the reference, in value and not in digits; else 0."""
    return float(answer is not None and answer == reference)


class Choice(NamedTuple):
    """Which of several answers a model finds likeliest.

    Attributes:
        raw: by the log-probability of the whole answer.
        per_character: by that divided by its characters, so that long answers have a chance (lm-eval's `acc_norm`).
    """

    raw: int
    per_character: int


def likeliest(logprobs: Sequence[float], choices: Sequence[str]) -> Choice:
    """The index of the likeliest answer; the first of several that are equally likely.

    Args:
        logprobs: of each answer after the question, in nats.
        choices: the answers.
    """
    lengths = [max(1, len(choice)) for choice in choices]
    scaled = [logprob / length for logprob, length in zip(logprobs, lengths, strict=True)]
    return Choice(int(np.argmax(logprobs)), int(np.argmax(scaled)))


class Surprise(NamedTuple):
    """How surprising texts are to a model; sums, so that texts can be added up.

    Attributes:
        nats: negative log-likelihood.
        tokens: that were predicted.
        bytes: of UTF-8 that they stand for, which do not depend on the tokenizer.
    """

    nats: float
    tokens: int
    bytes: int

    @property
    def per_token(self) -> float:
        """Perplexity; infinity where it is beyond floating point, NaN without tokens."""
        return _exp(self.nats / self.tokens) if self.tokens else math.nan

    @property
    def per_byte(self) -> float:
        """Perplexity of a byte."""
        return _exp(self.nats / self.bytes) if self.bytes else math.nan

    @property
    def bits_per_byte(self) -> float:
        """The same in bits."""
        return self.nats / math.log(2) / self.bytes if self.bytes else math.nan


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def calibration_error(confidences: Sequence[float], hits: Sequence[bool], bins: int = 15) -> float:
    """Expected calibration error: |confidence - accuracy|, averaged over bins by how many fall into each.

    Guo et al. (2017), eq. 3, with the mean confidence of a bin, not its centre. Bins are (low, high], and the first has
    0 too: a confidence of exactly 0 counts.

    Args:
        confidences: from 0 to 1.
        hits: whether each of them was right.
        bins: of equal width.

    Returns:
        From 0 to 1; NaN without any.

    Raises:
        ValueError: a confidence is no probability.
    """
    return sum(map(abs, calibration_gaps(confidences, hits, bins))) / len(hits) if len(hits) else math.nan


def calibration_gaps(confidences: Sequence[float], hits: Sequence[bool], bins: int = 15) -> list[float]:
    """Sum of the confidences less the number of hits, bin by bin: what `calibration_error` is made of, and adds up."""
    given = np.asarray(confidences, dtype=np.float64)
    right = np.asarray(hits, dtype=np.float64)
    if given.shape != right.shape:
        raise ValueError(f"{given.size} confidences of {right.size} hits")
    if not ((given >= 0) & (given <= 1)).all():
        raise ValueError("a confidence is not from 0 to 1, so it is no probability")
    index = np.searchsorted(np.linspace(0, 1, bins + 1)[1:-1], given, side="left")
    return np.bincount(index, given - right, bins).tolist()
