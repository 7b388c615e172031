"""ROUGE: rouge-score's values for English, and one for equal texts in any script."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from offramp.evaluate.rouge import KINDS, Words, rouge


def test_published_values() -> None:
    # The example of rouge-score's own documentation.
    target, text = "The quick brown fox jumps over the lazy dog", "The quick brown dog jumps on the log."
    scores = rouge([text], [[target]], ["rouge1", "rougeL"])
    assert scores["rouge1"] == [pytest.approx(2 * 0.75 * 0.6666666 / (0.75 + 0.6666666), abs=1e-6)]
    assert scores["rougeL"] == [pytest.approx(2 * 0.625 * 0.5555555 / (0.625 + 0.5555555), abs=1e-6)]


def test_stemming_is_of_words() -> None:
    pair = (["p14 activate prb"], [["p14 activates prb"]])
    assert rouge(*pair)["rougeL"] == [pytest.approx(0.6667, abs=1e-4)]
    assert rouge(*pair, stem=True)["rougeL"] == [1.0]


def test_lines_are_sentences_for_lsum_alone() -> None:
    scores = rouge(["b b\na a"], [["a a\nb b"]], ["rougeL", "rougeLsum"])
    assert scores["rougeL"] == [0.5]
    assert scores["rougeLsum"] == [1.0]


@given(st.text(st.characters(max_codepoint=127)), st.text(st.characters(max_codepoint=127)), st.booleans())
def test_ascii_is_scored_as_rouge_score_does(text: str, target: str, stem: bool) -> None:
    theirs = RougeScorer(list(KINDS), use_stemmer=stem).score(target, text)
    ours = rouge([text], [[target]], KINDS, stem=stem)
    for kind in KINDS:
        if text != target:
            assert ours[kind] == [theirs[kind].fmeasure]


@pytest.mark.parametrize(
    "text",
    [
        "Το φως",
        "Привет, мир",
        "你好，世界",
        "こんにちは",
        "안녕하세요",
        "مرحبا",
        "שלום",
        "สวัสดี",
        "नमस्ते",
        "ẞtraße",
        "é",
        "😀!",
    ],
)
def test_equal_texts_score_one_in_any_script(text: str) -> None:
    for kind, scores in rouge([text, text], [[text], ["x", text]], ("rouge1", "rougeL", "rougeLsum")).items():
        assert scores == [1.0, 1.0], kind


def test_half_of_a_text_without_spaces_scores_less_than_one() -> None:
    assert rouge(["你好"], [["你好世界"]], ["rouge1"])["rouge1"] == [pytest.approx(2 / 3)]
    assert Words().tokenize("Tokyo東京2020, नमस्ते") == ["tokyo", "東", "京", "2020", "नमस्ते"]


def test_texts_without_words_count_as_nothing() -> None:
    assert rouge(["", "", "a", "!"], [[""], ["a"], [""], ["?"]])["rougeL"] == [0.0, 0.0, 0.0, 0.0]
