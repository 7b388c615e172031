"""Drawings of results for a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from offramp.evaluate.page import SERIES, Picture, colours, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH, _HEIGHT = 7.0, 4.0  # inches


def evaluation_pictures(results: Mapping[str, Any]) -> list[Picture]:
    """Quality beside cost, and the depths of tokens."""
    task = results["task"]
    main, settings = task["main"], results["settings"]
    pictures = [_scatter(settings, "layers_per_token", main, "layers per token", main)]
    if task["kind"] == "write":
        pictures += [
            _scatter(
                settings, "layers_per_token", "same_tokens", "layers per token", "same tokens as full depth (share)"
            ),
            _scatter(settings, "tokens_per_second", main, "tokens/s", main),
        ]
    return [*pictures, _depths(settings)]


def curve_picture(curves: Mapping[str, Any]) -> Picture:
    """Curves of a study, with their intervals where they have any.

    Args:
        curves: `title`; `x` and `y`, what the axes are called; `log`, which of them are logarithmic ("", "x", "y" or
            "xy"); and `series` of `name`, `x`, `y`, and `low` and `high` or None.
    """
    from matplotlib.figure import Figure

    with colours():
        drawing = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        axis = drawing.subplots()
        for index, one in enumerate(curves["series"]):
            colour = SERIES[index % len(SERIES)]
            points = list(zip(one["x"], one["y"], _ends(one, "low"), _ends(one, "high"), strict=True))
            known = [row for row in points if row[1] is not None]
            style = "-" if index < len(SERIES) else "--"
            axis.plot(
                [row[0] for row in known],
                [row[1] for row in known],
                style,
                marker="o",
                ms=3,
                color=colour,
                label=one["name"],
            )
            sure = [row for row in known if row[2] is not None and row[3] is not None]
            if sure:
                axis.fill_between(
                    [row[0] for row in sure],
                    [row[2] for row in sure],
                    [row[3] for row in sure],
                    color=colour,
                    alpha=0.2,
                )
        _finish(axis, curves["x"], curves["y"], curves.get("log", ""))
        return picture(drawing, curves["title"])


def _ends(one: Mapping[str, Any], name: str) -> Sequence[float | None]:
    return one.get(name) or [None] * len(one["x"])


def _scatter(settings: Sequence[Mapping[str, Any]], x: str, y: str, x_label: str, y_label: str) -> Picture:
    from matplotlib.figure import Figure

    with colours():
        drawing = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        axis = drawing.subplots()
        for index, setting in enumerate(settings):
            across, up = setting["figures"].get(x), setting["figures"].get(y)
            if across is None or up is None or across["value"] is None or up["value"] is None:
                continue
            axis.errorbar(
                across["value"],
                up["value"],
                xerr=_error(across),
                yerr=_error(up),
                fmt="os^Dv"[index // len(SERIES) % 5],
                color=SERIES[index % len(SERIES)],
                elinewidth=0.8,
                label=setting["name"],
            )
        _finish(axis, x_label, y_label)
        return picture(drawing, f"{y_label} against {x_label}, with 95% intervals")


def _error(figure: Mapping[str, Any]) -> list[list[float]] | None:
    if figure["low"] is None or figure["high"] is None:
        return None
    # A percentile interval need not hold the value itself.
    return [[max(0.0, figure["value"] - figure["low"])], [max(0.0, figure["high"] - figure["value"])]]


def _depths(settings: Sequence[Mapping[str, Any]]) -> Picture:
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    layers = sorted({int(layer) for setting in settings for layer in setting["depths"]})
    names = [setting["name"] for setting in settings]
    with colours():
        drawing = Figure(figsize=(_WIDTH, 1.2 + 0.3 * len(settings)), layout="constrained")
        axis = drawing.subplots()
        left = [0.0] * len(settings)
        for index, layer in enumerate(layers):
            shares = [one["depths"].get(str(layer), 0) / (sum(one["depths"].values()) or 1) for one in settings]
            colour = colormaps["viridis"](0.15 + 0.75 * index / max(len(layers) - 1, 1))
            axis.barh(names, shares, left=left, color=colour, label=str(layer))
            left = [a + b for a, b in zip(left, shares, strict=True)]
        axis.invert_yaxis()
        axis.set_xlim(0, 1)
        axis.set_xlabel("share of tokens")
        axis.legend(title="layers", bbox_to_anchor=(1.0, 1.0), loc="upper left")
        return picture(drawing, "Tokens by layers run")


def _finish(axis: Axes, x_label: str, y_label: str, log: str = "") -> None:
    axis.set_xlabel(x_label)
    axis.set_ylabel(y_label)
    if "x" in log:
        axis.set_xscale("log")
    if "y" in log:
        axis.set_yscale("log")
    axis.grid(alpha=0.2)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8, bbox_to_anchor=(1.0, 1.0), loc="upper left")
