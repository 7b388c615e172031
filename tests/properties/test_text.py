from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.tokenizers import byte_fallback, byte_level, ids_of
from offramp.serve.text import StopStrings, TextStream

BYTE_LEVEL, BYTE_FALLBACK = byte_level(), byte_fallback()
byte_level_ids = st.lists(st.integers(0, len(BYTE_LEVEL) - 1), max_size=60)
# Byte tokens in runs that are whole characters: others are lost in decoding at once (see Detokenizer).
_characters = st.sampled_from("é日🙂\nx").map(lambda c: [f"<0x{byte:02X}>" for byte in c.encode()])
_pieces = st.sampled_from(["▁", "▁the", "▁a", "th", "e", "▁▁", ".", "日", "</s>"]).map(lambda piece: [piece])
byte_fallback_ids = st.lists(_characters | _pieces, max_size=40).map(
    lambda parts: ids_of(BYTE_FALLBACK, *(piece for part in parts for piece in part))
)
words = st.text("ab\n日", max_size=40)
stop_strings = st.lists(st.text("ab\n日", min_size=1, max_size=5), max_size=3)


@settings(max_examples=100, deadline=None)
@given(byte_level_ids)
def test_pieces_are_the_whole_for_any_bytes(ids: list[int]) -> None:
    text = TextStream(BYTE_LEVEL)
    out = [text.push(token) for token in ids]
    assert "".join(out) + text.flush() == BYTE_LEVEL.decode(ids, skip_special_tokens=True)
    assert not any(piece.endswith("�") for piece in out)


@settings(max_examples=100, deadline=None)
@given(byte_fallback_ids)
def test_pieces_are_the_whole_for_marked_words(ids: list[int]) -> None:
    text = TextStream(BYTE_FALLBACK)
    out = [text.push(token) for token in ids]
    assert "".join(out) + text.flush() == BYTE_FALLBACK.decode(ids, skip_special_tokens=True)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40))
def test_every_text_survives_its_tokens(words: str) -> None:
    ids = BYTE_LEVEL(words)["input_ids"]
    text = TextStream(BYTE_LEVEL)
    assert "".join(text.push(token) for token in ids) + text.flush() == words


def cut(text: str, data: st.DataObject) -> list[str]:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    return [text[start:stop] for start, stop in zip([0, *places], [*places, len(text)], strict=True)]


def ended(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text before its first stop string, found by reading it character by character."""
    for length in range(len(text) + 1):
        hits = [stop for stop in stops if text[:length].endswith(stop)]
        if hits:
            return text[: length - max(map(len, hits))], True
    return text, False


@settings(max_examples=200, deadline=None)
@given(words, stop_strings, st.data())
def test_any_cut_ends_the_text_at_the_same_place(text: str, stops: list[str], data: st.DataObject) -> None:
    strings = StopStrings(stops)
    expected = ended(text, stops)
    out = ""
    for piece in cut(text, data):
        out += strings.push(piece)
        assert expected[0].startswith(out), "a stop string leaked"
    out += strings.flush()
    assert (out, strings.found is not None) == expected


@settings(max_examples=100, deadline=None)
@given(byte_level_ids, stop_strings)
def test_stop_strings_never_leak_from_tokens(ids: list[int], stops: list[str]) -> None:
    stream = TextStream(BYTE_LEVEL, stops)
    out = "".join(stream.push(token) for token in ids) + stream.flush()
    assert (out, stream.stopped) == ended(str(BYTE_LEVEL.decode(ids, skip_special_tokens=True)), stops)
