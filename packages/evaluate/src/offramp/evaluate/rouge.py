"""ROUGE of texts in any script (Lin, 2004), computed by rouge-score.

rouge-score's own tokeniser keeps a-z and 0-9 alone, so that two equal Greek texts score 0. Here a word is a run of
letters, marks and digits of any script, and where a script writes no spaces between words each character is one. For
text in ASCII the words are rouge-score's.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from functools import lru_cache

from nltk.stem.porter import PorterStemmer
from rouge_score.rouge_scorer import RougeScorer
from rouge_score.tokenizers import Tokenizer

KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")
"""`rougeL` takes a text as one sentence; `rougeLsum` takes each of its lines as one."""

_NO_SPACES = ("CJK ", "HIRAGANA", "KATAKANA", "THAI", "LAO ", "KHMER", "MYANMAR", "TIBETAN")


class Words(Tokenizer):
    """Words of a text in any script, lower-case.

    Args:
        stem: reduce words to their stem by Porter's rules, those of more than three letters, as rouge-score does.
    """

    def __init__(self, *, stem: bool = False) -> None:
        self._stemmer = PorterStemmer() if stem else None

    def tokenize(self, text: str) -> list[str]:
        """The words in order."""
        words: list[str] = []
        run = ""
        for character in unicodedata.normalize("NFKC", text).lower() + " ":
            if unicodedata.category(character)[0] not in "LNM":
                alone = ""
            elif not stands_alone(character):
                run += character
                continue
            else:
                alone = character
            words += [word for word in (run, alone) if word]
            run = ""
        if self._stemmer is None:
            return words
        return [self._stemmer.stem(word) if len(word) > 3 else word for word in words]


@lru_cache(maxsize=4096)
def stands_alone(character: str) -> bool:
    """Whether a character is a word by itself, because its script writes no spaces between words."""
    return character > "\u0300" and unicodedata.name(character, "").startswith(_NO_SPACES)


def rouge(
    texts: Sequence[str],
    references: Sequence[Sequence[str]],
    kinds: Sequence[str] = ("rougeL",),
    *,
    stem: bool = False,
) -> Mapping[str, list[float]]:
    """F-measures from 0 to 1 of each text, by the reference that fits it best.

    Texts without words score 0, also beside a reference without words, unless both are the same text.

    Args:
        texts: what is scored.
        references: for each of them, at least one good text.
        kinds: of `KINDS`.
        stem: see `Words`.
    """
    scorer = RougeScorer(list(kinds), tokenizer=Words(stem=stem))
    scores: dict[str, list[float]] = {kind: [] for kind in kinds}
    for text, good in zip(texts, references, strict=True):
        best = scorer.score_multi(list(good), text)
        for kind in kinds:
            # Texts of punctuation alone have no words to compare.
            scores[kind].append(1.0 if text.strip() and text in good else best[kind].fmeasure)
    return scores
