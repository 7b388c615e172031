"""Scores, against published scripts, published values and what a hand can count."""

from __future__ import annotations

import math
from decimal import Decimal

import pytest

from offramp.evaluate.scores import (
    Choice,
    Surprise,
    calibration_error,
    exact_match,
    last_number,
    likeliest,
    marked_number,
    normalised,
    number_match,
    token_f1,
)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("The Eiffel Tower!", "eiffel tower"),
        ("an apple a day", "apple day"),
        ("U.S.", "us"),
        ("don't", "dont"),
        ("theory of another", "theory of another"),  # articles are whole words
        ("  two\n\twords ", "two words"),
        ("$5-10", "510"),  # as SQuAD's script has it
        ("«Ça» — oui…", "ça oui"),
        ("東京、日本。", "東京日本"),
        ("e\u0301", "\u00e9"),
        ("The", ""),
    ],
)
def test_normalisation(text: str, wanted: str) -> None:
    assert normalised(text) == wanted


@pytest.mark.parametrize(
    ("answer", "references", "match", "f1"),
    [
        ("the Panthers.", ["Carolina Panthers", "panthers"], 1, 1),
        ("Carolina Panthers", ["Denver Broncos"], 0, 0),
        # Two of three words said are among the four wanted: 2 * (2/3) * (2/4) / (2/3 + 2/4) = 4/7.
        ("gave up 308", ["308 points gave everything"], 0, 4 / 7),
        # A word said twice counts as often as it is wanted: one of two, one of one.
        ("no no", ["no"], 0, 2 / 3),
        ("", ["something"], 0, 0),
        ("the", ["a"], 1, 1),
        ("東京は", ["東京"], 0, 0.8),
        ("Ελλάδα", ["Ελλάδα"], 1, 1),
    ],
)
def test_squad(answer: str, references: list[str], match: float, f1: float) -> None:
    assert exact_match(answer, references) == match
    assert token_f1(answer, references) == pytest.approx(f1)


@pytest.mark.parametrize(
    ("text", "marked", "last"),
    [
        ("She makes 9 * 2 = $<<9*2=18>>18.\n#### 18", "18", "18"),
        ("#### 1,234,567", "1234567", "1234567"),
        ("#### 70,000.50 dollars", "70000.5", "70000.5"),
        ("#### -3", "-3", "-3"),
        ("#### \u22123", "-3", "-3"),
        ("#### -$3.25", "-3.25", "-3.25"),
        ("#### $.5", "0.5", "0.5"),
        ("#### 18.", "18", "18"),
        ("#### 3\nQuestion: what is 5 + 6?\n#### 11", "11", "11"),  # of whoever goes on the last counts
        ("There are 12 of them, at 3:00", None, "0"),
        ("5-3", None, "-3"),
        ("####", None, None),
        ("none at all", None, None),
        ("1,2 and 3,456", None, "3456"),
        ("12,34", None, "34"),
    ],
)
def test_final_numbers(text: str, marked: str | None, last: str | None) -> None:
    assert marked_number(text) == (None if marked is None else Decimal(marked))
    assert last_number(text) == (None if last is None else Decimal(last))


def test_numbers_are_compared_by_value() -> None:
    assert number_match(Decimal("18.00"), Decimal(18)) == 1
    assert number_match(Decimal("18.01"), Decimal(18)) == 0
    assert number_match(None, None) == 0


def test_likeliest() -> None:
    # -4 over 2 characters is -2 a character; -6 over 4 is -1.5.
    assert likeliest([-4.0, -6.0], ["no", "yeah"]) == Choice(raw=0, per_character=1)
    assert likeliest([-1.0, -1.0], ["a", "b"]) == Choice(0, 0)
    assert likeliest([-1.0, -0.5], ["a", ""]) == Choice(1, 1)


def test_perplexity() -> None:
    # Every token one of four, equally likely: perplexity 4; two bytes each: one bit a byte.
    surprise = Surprise(10 * math.log(4), 10, 20)
    assert surprise.per_token == pytest.approx(4)
    assert surprise.per_byte == pytest.approx(2)
    assert surprise.bits_per_byte == pytest.approx(1)
    assert Surprise(1e6, 1, 1).per_token == math.inf
    assert math.isnan(Surprise(0, 0, 0).per_token)


@pytest.mark.parametrize(
    ("confidences", "hits", "wanted"),
    [
        ([0.0], [True], 1.0),  # (lo, hi] would drop it
        ([1.0], [True], 0.0),
        ([0.9, 0.9, 0.9, 0.9], [True, True, True, False], 0.15),
        # One bin (0.6, 0.667] of (0.61 + 0.66) / 2 against 1/2, one of 0.2 against 0: (2 * 0.135 + 0.2) / 3.
        ([0.61, 0.66, 0.2], [True, False, False], 0.47 / 3),
        ([0.2, 0.2], [False, True], 0.3),
    ],
)
def test_calibration_error(confidences: list[float], hits: list[bool], wanted: float) -> None:
    assert calibration_error(confidences, hits) == pytest.approx(wanted)


def test_bins_end_with_their_upper_edge() -> None:
    # 0.5 belongs to (0, 0.5] and 0.51 does not: apart |0.5 - 1| and |0.51 - 0|; together |1.01 - 1| / 2.
    assert calibration_error([0.5, 0.51], [True, False], bins=2) == pytest.approx((0.5 + 0.51) / 2)


def test_what_has_no_calibration_error() -> None:
    assert math.isnan(calibration_error([], []))
    for wrong in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="no probability"):
            calibration_error([wrong], [True])
