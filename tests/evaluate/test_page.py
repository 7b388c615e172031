"""Pages: nothing on them comes from elsewhere, and nothing that was measured can write on them."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from offramp.common.errors import OfframpError
from offramp.evaluate.page import Page, Picture, Section, Table, colours, picture, render, write

EVIL = '<script>alert("&")</script>'


def drawing() -> Picture:
    with colours():
        figure = Figure(figsize=(4, 3), layout="constrained")
        axis = figure.subplots()
        axis.plot([1, 2, 3], [3, 1, 2], label=f"{EVIL} -->")
        axis.set_title(EVIL)
        axis.legend()
        return picture(figure, EVIL)


def page() -> Page:
    everything = Section(
        EVIL,
        text=(EVIL,),
        commands=(EVIL,),
        tables=(Table((EVIL, "b"), [(EVIL, "1")], title=EVIL, note=EVIL),),
        figures=(drawing(),),
    )
    return Page(EVIL, [everything, Section("Empty")], summary=(EVIL,))


class Elements(HTMLParser):
    """What elements a page has, and their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_everything_is_escaped_and_nothing_is_loaded() -> None:
    elements = Elements(render(page()))
    assert "script" not in {tag for tag, _ in elements.found}
    for tag, attributes in elements.found:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("href", "xlink:href", "src"):
                assert (value or "").startswith("#"), (tag, value)
    # As often as it was written: title twice, summary, heading twice, and one for each part of the section.
    assert sum(EVIL in words for words in elements.words) == 12
    assert not re.search(r"url\((?!#)", render(page()))


def test_a_drawing_has_the_colour_of_the_text() -> None:
    svg = drawing().svg
    assert set(re.findall(r"(?:fill|stroke): ([^;\"]+)", svg)) == {"none", "currentColor", "#4477aa"}
    assert drawing().svg == svg  # no date, no random names
    assert "<script" not in svg


def test_rows_fit_their_headings() -> None:
    with pytest.raises(ValueError, match="3 cells under 2 headings"):
        Table(("a", "b"), [("1", "2", "3")])


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    write(page(), tmp_path / "new" / "report.html")
    assert (tmp_path / "new" / "report.html").read_text(encoding="utf-8") == render(page())
    with pytest.raises(OfframpError, match="cannot be written"):
        write(page(), tmp_path / "new" / "report.html" / "below.html")
