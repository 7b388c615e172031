"""Results as one self-contained HTML page: sections of text, commands, tables and figures, and nothing from elsewhere.

A page is data; whoever has results describes them and writes the page:

    page = Page(
        "Quality against cost",
        [
            Section(
                "Depth",
                text=("Layers run for each token, with 95% intervals.",),
                tables=(Table(("setting", "layers"), [("full depth", "30.0"), ("fill > 0.9", "14.2")]),),
                figures=(picture(figure, "Share of tokens by exit layer"),),
            ),
            Section("How it was made", commands=("offramp evaluate model --task qa",)),
        ],
    )
    write(page, Path("report.html"))

`picture` takes a matplotlib figure made in `colours()`, whose axes and words then have the colour of the page's text,
in light and in dark. Everything is escaped, also what stands in cells and captions, and the page's own policy forbids
scripts and whatever would have to be loaded.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, StrictUndefined

from offramp.common.errors import OfframpError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SERIES = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#888888")
"""Colours of curves: told apart with any eyes (Tol's bright scheme), and seen on white and on black."""

_INK = "#010203"  # nobody draws with it by chance, so what has it is what follows the page


@dataclass(frozen=True)
class Table:
    """Rows of text under headings; all columns but the first are aligned right, as numbers are.

    Attributes:
        columns: headings.
        rows: as many cells each.
        title: above it.
        note: below it: units, intervals, what was compared with what.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row of {len(row)} cells under {len(self.columns)} headings: {row}")


@dataclass(frozen=True)
class Picture:
    """A drawing within the page; see `picture`.

    Attributes:
        svg: an <svg> element, trusted as it is.
        caption: below it, and what it is called where it cannot be seen.
    """

    svg: str
    caption: str


@dataclass(frozen=True)
class Section:
    """Part of a page, in this order.

    Attributes:
        title: heading.
        text: paragraphs.
        commands: as they were typed.
        tables: see `Table`.
        figures: see `picture`.
    """

    title: str
    text: Sequence[str] = ()
    commands: Sequence[str] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Picture] = ()


@dataclass(frozen=True)
class Page:
    """A page.

    Attributes:
        title: heading, and name of the window.
        sections: in order; of two or more there is a table of contents.
        summary: paragraphs before all sections.
    """

    title: str
    sections: Sequence[Section]
    summary: Sequence[str] = ()


def render(page: Page) -> str:
    """The page as HTML."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files(__package__ or "").joinpath("page.html").read_text(encoding="utf-8"))
    return template.render(page=page)


def write(page: Page, path: Path) -> None:
    """Write the page to a file, and make its folder.

    Raises:
        OfframpError: that cannot be.
    """
    text = render(page)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as fault:
        raise OfframpError(f"{path} cannot be written: {fault.strerror}.") from fault


@contextmanager
def colours() -> Iterator[None]:
    """While it lasts, matplotlib makes figures that `picture` can fit to the page."""
    import matplotlib as mpl

    ink = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
    settings = {
        **dict.fromkeys(ink, _INK),
        "axes.prop_cycle": f"cycler('color', {list(SERIES)})",
        "axes.facecolor": "none",
        "figure.facecolor": "none",
        "savefig.facecolor": "none",
        "legend.frameon": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.hashsalt": "offramp",  # equal figures are equal files
    }
    with mpl.rc_context(settings):  # pyright: ignore[reportArgumentType] - names of settings are literals there
        yield


def picture(figure: Figure, caption: str) -> Picture:
    """A matplotlib figure as a drawing within the page.

    Args:
        figure: made by `matplotlib.figure.Figure`, not by pyplot, which would keep it.
        caption: what it shows, with units.
    """
    file = io.StringIO()
    figure.savefig(file, format="svg", bbox_inches="tight", transparent=True, metadata={"Date": None, "Creator": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    return Picture(svg.replace(_INK, "currentColor"), caption)
