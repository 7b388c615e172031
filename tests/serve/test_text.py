from __future__ import annotations

import pytest

from helpers.tokenizers import byte_fallback, byte_level, ids_of
from offramp.serve.text import Detokenizer, StopStrings, TextStream


class Pieces:
    """A tokenizer whose token n is the n-th piece; counts the tokens it decodes."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces
        self.num_decoded = 0

    def decode(
        self, token_ids: list[int], skip_special_tokens: bool = False, *, clean_up_tokenization_spaces: bool = True
    ) -> str:
        assert skip_special_tokens
        assert not clean_up_tokenization_spaces
        self.num_decoded += len(token_ids)
        return "".join(self.pieces[token] for token in token_ids)


def stream(pieces: tuple[str, ...], stop: tuple[str, ...]) -> tuple[list[str], bool]:
    """What comes out for each piece, then at the end; and whether a stop string ended it."""
    text = TextStream(Pieces(*pieces), stop)
    out = [text.push(token) for token in range(len(pieces))]
    return [*out, text.flush()], text.stopped


@pytest.mark.parametrize(
    ("pieces", "stop", "out"),
    [
        (("DEF", "G", "HI", "J", "k"), "DEFGHIJ", ["", "", "", "", "", ""]),
        (("The capital is", " Paris", "."), "Pari", ["The capital is", " ", "", ""]),
        (("Hi", "\nUser", ":", " x"), "\nUser:", ["Hi", "", "", "", ""]),
        (("ab", "c"), "abc", ["", "", ""]),
        (("aa", "ab"), "aab", ["", "a", ""]),
    ],
)
def test_nothing_of_a_stop_string_comes_out(pieces: tuple[str, ...], stop: str, out: list[str]) -> None:
    assert stream(pieces, (stop,)) == (out, True)


def test_what_only_looked_like_a_stop_string_comes_out_in_the_end() -> None:
    assert stream(("a", "\nUs", "er", " x", "\nU"), ("\nUser:",)) == (["a", "", "", "\nUser x", "", "\nU"], False)


def test_the_stop_string_that_is_complete_first_ends_the_text() -> None:
    for pieces in (("xabcd",), ("x", "a", "b", "c", "d"), ("xa", "bcd")):
        out, stopped = stream(pieces, ("abcd", "bc"))
        assert ("".join(out), stopped) == ("xa", True)
    stops = StopStrings(("bc", "abc"))
    assert stops.push("xabc") == "x"
    assert stops.found == "abc"


def test_no_stop_string_is_looked_for_while_the_request_may_not_stop() -> None:
    text = TextStream(Pieces("a", "END", "b", "EN", "D"), ("END",))
    assert [text.push(0, may_stop=False), text.push(1, may_stop=False), text.push(2)] == ["a", "END", "b"]
    assert [text.push(3), text.push(4), text.stopped] == ["", "", True]


def test_characters_are_never_cut() -> None:
    tokenizer = byte_level()
    ids = ids_of(tokenizer, "ð", "Ł", "ĺ", "Ģ", "Ã", "©", "x")
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(token) for token in ids] == ["", "", "", "😀", "", "é", "x"]
    assert detokenizer.flush() == ""


def test_an_unfinished_character_comes_out_at_the_end_as_it_does_at_once() -> None:
    tokenizer = byte_level()
    ids = ids_of(tokenizer, "x", "ð", "Ł")
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(token) for token in ids] == ["x", "", ""]
    assert "x" + detokenizer.flush() == tokenizer.decode(ids) == "x�"


def test_special_tokens_are_not_shown_and_remove_nothing() -> None:
    for tokenizer, words in ((byte_level(), ("Ġthe", "Ġa")), (byte_fallback(), ("▁the", "▁a"))):
        (end,) = ids_of(tokenizer, str(tokenizer.eos_token))
        first, second = ids_of(tokenizer, *words)
        text = TextStream(tokenizer, ("<|end|>", "</s>"))
        ids = [end, end, first, end, second, *[end] * 20, second, end]
        whole = "".join(text.push(token) for token in ids) + text.flush()
        assert whole == tokenizer.decode(ids, skip_special_tokens=True)
        assert whole.split() == ["the", "a", "a"]
        assert not text.stopped


def test_many_special_tokens_before_the_first_word_do_not_change_its_spaces() -> None:
    tokenizer = byte_fallback()
    for pieces in (["</s>"] * 20, ["▁", *["</s>"] * 20], ["</s>"] * 20 + ["▁"]):
        ids = ids_of(tokenizer, *pieces, "▁the", "▁a")
        text = TextStream(tokenizer)
        assert "".join(text.push(token) for token in ids) == tokenizer.decode(ids, skip_special_tokens=True)


def test_the_end_keeps_what_both_sides_held_in_order_and_still_looks_for_stop_strings() -> None:
    tokenizer = byte_level()
    for stop, whole in (("ab", "xa\N{REPLACEMENT CHARACTER}"), ("a\N{REPLACEMENT CHARACTER}", "x")):
        text = TextStream(tokenizer, (stop,))
        assert [text.push(token) for token in ids_of(tokenizer, "x", "a", "ð")] == ["x", "", ""]
        assert "x" + text.flush() == whole
        assert text.stopped == (whole == "x")


def test_a_newline_in_bytes_is_not_held_back() -> None:
    tokenizer = byte_fallback()
    ids = ids_of(tokenizer, "▁a", "<0x0A>")
    text = TextStream(tokenizer, ("\n",))
    assert [text.push(token) for token in ids] == ["a", ""]
    assert text.stopped


def test_bytes_that_are_no_text_after_all_take_nothing_back() -> None:
    tokenizer = byte_fallback()
    ids = ids_of(tokenizer, "▁a", "<0xE2>", "<0x82>", "<0xAC>", "<0xE2>", "b")
    detokenizer = Detokenizer(tokenizer)
    out = [detokenizer.push(token) for token in ids]
    assert out[:5] == ["a", "", "", "€", ""]
    assert "".join(out) + detokenizer.flush() == "a€���b"


def test_the_work_does_not_grow_with_the_text() -> None:
    for piece in ("word ", ""):
        tokenizer = Pieces("word ", piece)
        text = TextStream(tokenizer)
        for token in [0] + [1] * 1000:
            text.push(token)
        assert tokenizer.num_decoded < 1000 * 20
