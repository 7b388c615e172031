"""References, scores and how sure their ratio is."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from helpers.tiny import tiny_tokenizer
from offramp.common.errors import OfframpError
from offramp.serve.bench.quality import Answers, Quality, ratio_of_means, read_references, rouge_l


def test_references_and_what_they_say(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    file = tmp_path / "references.jsonl"
    file.write_text('{"prompt": "ab", "references": ["a", "b"]}\n\n{"prompt": "c", "references": "d"}\n')
    found = read_references(file, tokenizer)
    assert [tokenizer.decode(ids) for ids in found.prompts] == ["ab", "c"]
    assert found.texts == [["a", "b"], ["d"]]
    for wrong in ('{"prompt": "ab"}', '{"prompt": "ab", "references": []}', "[]", "{"):
        file.write_text(wrong, encoding="utf-8")
        with pytest.raises(OfframpError, match="line 1"):
            read_references(file, tokenizer)
    file.write_text('{"prompt": "\\ud800", "references": "a"}', encoding="utf-8")
    with pytest.raises(OfframpError, match="line 1: the prompt is not Unicode"):
        read_references(file, tokenizer)
    file.write_text("", encoding="utf-8")
    with pytest.raises(OfframpError, match="no references"):
        read_references(file, tokenizer)

    # Longest common subsequence "the sat": precision 2/3, recall 2/4.
    assert rouge_l(["the cat sat"], [["the dog here sat"]]) == [pytest.approx(2 * (2 / 3) * (1 / 2) / (2 / 3 + 1 / 2))]
    assert rouge_l(["the cat sat", "x"], [["nothing", "The cat sat."], ["y"]]) == [1.0, 0.0]


def test_the_ratio_has_an_interval() -> None:
    base = [0.2, 0.4, 0.6, 0.8] * 25
    assert ratio_of_means(base, base) == (pytest.approx(1.0), pytest.approx(1.0), pytest.approx(1.0))
    mine = [score if index % 10 else 0.0 for index, score in enumerate(base)]
    ratio, low, high = ratio_of_means(mine, base)
    assert ratio == pytest.approx(sum(mine) / sum(base))
    assert low < ratio < high <= 1.0
    # The normal approximation of a paired ratio, for a sample of this size: within a tenth of the width.
    error = [a - ratio * b for a, b in zip(mine, base, strict=True)]
    width = 2 * 1.96 * (sum(e * e for e in error) / len(error)) ** 0.5 / len(error) ** 0.5 / (sum(base) / len(base))
    assert high - low == pytest.approx(width, rel=0.1)
    assert all(value != value for value in ratio_of_means([0.0, 0.0], [0.0, 0.0]))

    full = Answers(["a", "b"], [0.5, 0.5], Counter({4: 2}))
    early = Answers(["a", "x"], [0.5, 0.25], Counter({2: 1, 4: 1}))
    quality = Quality.of(early, full)
    assert (quality.rouge_l, quality.ratio, quality.same_texts) == (0.375, 0.75, 0.5)
