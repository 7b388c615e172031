"""Figures of the experiment, drawn once, for the page and as files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from offramp.evaluate.page import SERIES
from offramp.evaluate.reproduce.conclusions import at_figure_batch
from offramp.evaluate.reproduce.paper import FIGURES, TECHNIQUES, TITLES

_COMPARED = ("full", *TECHNIQUES)
_KINDS = ("exact", "filled", "masked")


def draw_all(results: Mapping[str, Any]) -> Iterator[tuple[str, Figure, str]]:
    """(name of a file, figure, caption) of each; make them in `page.colours()` or as they are."""
    like, batch = results["like"], results["speed"]["figure_batch"]
    yield (
        "figure_1",
        _beside_paper(results, "tokens_per_second", "tokens/s", 1.0),
        f"Figure 1: throughput. Left the paper (T5-v1.1-{like}, RTX 4090), right here ({batch} sequences at once; bars "
        "are medians over rounds, whiskers the range). Light: rows leave on their own (regroup).",
    )
    yield (
        "figure_2",
        _beside_paper(results, "latency_s", "inner-token latency (ms)", 1e3),
        "Figure 2: inner-token latency, likewise.",
    )
    yield "batch_sizes", _batch_sizes(results), "Throughput against sequences at once; full lines: all leave together."
    yield (
        "positions",
        _positions(results),
        "ROUGE-L of beginnings of answers to the full model's, by their length in tokens, with keys and values of "
        "skipped layers exact, filled and masked; bands are 95% intervals.",
    )
    yield "parts", _parts(results), "Where the engine's time goes, in microseconds for each token."


def _beside_paper(results: Mapping[str, Any], figure: str, unit: str, scale: float) -> Figure:
    drawing = Figure(figsize=(8.0, 3.2), layout="constrained")
    paper_axis, axis = drawing.subplots(1, 2)
    paper = FIGURES[results["like"]]
    names = [_title(name) for name in _COMPARED]
    paper_axis.bar(names, [scale * getattr(paper[name], figure) for name in _COMPARED], color=SERIES[: len(names)])
    paper_axis.set_title("paper")
    ours = at_figure_batch(results)
    shown = [*_COMPARED, *(f"{t}, regroup" for t in TECHNIQUES), "static half", "shallow model"]
    for place, name in enumerate(shown):
        spread = ours[name][figure]
        base = name.removesuffix(", regroup")
        colour = SERIES[_COMPARED.index(base)] if base in _COMPARED else SERIES[-1]
        middle = scale * spread["value"]
        error = [[middle - scale * spread["low"]], [scale * spread["high"] - middle]]
        axis.bar(place, middle, yerr=error, color=colour, alpha=0.55 if base != name else 1.0, capsize=2)
    axis.set_xticks(range(len(shown)), [_title(name) for name in shown], rotation=40, ha="right", fontsize=8)
    axis.set_title("here")
    paper_axis.tick_params(axis="x", labelrotation=40, labelsize=8)
    for one in (paper_axis, axis):
        one.set_ylabel(unit)
    return drawing


def _batch_sizes(results: Mapping[str, Any]) -> Figure:
    drawing = Figure(figsize=(7.0, 4.0), layout="constrained")
    axis = drawing.subplots()
    batches: Mapping[str, Any] = results["speed"]["batches"]
    sizes = [int(batch) for batch in batches]
    shown = [*_COMPARED, *(f"{t}, regroup" for t in TECHNIQUES), "static half", "shallow model"]
    others = {"static half": SERIES[-1], "shallow model": SERIES[-2]}
    for name in shown:
        base = name.removesuffix(", regroup")
        rates = [one["contestants"][name]["tokens_per_second"]["value"] for one in batches.values()]
        colour = others.get(name) or SERIES[_COMPARED.index(base)]
        axis.plot(sizes, rates, "--" if base != name else "-", marker="o", ms=3, color=colour, label=_title(name))
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.set_xlabel("sequences at once")
    axis.set_ylabel("tokens/s")
    axis.legend(fontsize=7)
    return drawing


def _positions(results: Mapping[str, Any]) -> Figure:
    positions = results["positions"]
    drawing = Figure(figsize=(9.0, 3.0), layout="constrained")
    axes: Sequence[Any] = drawing.subplots(1, len(TECHNIQUES), sharey=True)
    for axis, technique in zip(axes, TECHNIQUES, strict=True):
        for colour, kind in zip(SERIES, _KINDS, strict=False):
            points = positions["techniques"][technique][kind]["to_full"]
            axis.plot(positions["lengths"], [p["value"] for p in points], marker="o", ms=3, color=colour, label=kind)
            low, high = [p["low"] for p in points], [p["high"] for p in points]
            axis.fill_between(positions["lengths"], low, high, color=colour, alpha=0.12, lw=0)
        axis.set_title(TITLES[technique])
        axis.set_xlabel("tokens from the start")
    axes[0].set_ylabel("ROUGE-L to full")
    axes[0].legend(fontsize=8)
    return drawing


def _parts(results: Mapping[str, Any]) -> Figure:
    contestants = at_figure_batch(results)
    drawing = Figure(figsize=(8.0, 3.6), layout="constrained")
    axis = drawing.subplots()
    bottoms = [0.0] * len(contestants)
    parts = list(next(iter(contestants.values()))["parts_us_per_token"])
    for index, part in enumerate(parts):
        values = [one["parts_us_per_token"][part] for one in contestants.values()]
        hatch = "//" if index >= len(SERIES) else None
        names = [_title(name) for name in contestants]
        axis.bar(names, values, bottom=bottoms, color=SERIES[index % len(SERIES)], hatch=hatch, label=part)
        bottoms = [bottom + value for bottom, value in zip(bottoms, values, strict=True)]
    axis.set_ylabel("us per token")
    axis.tick_params(axis="x", labelrotation=40, labelsize=8)
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return drawing


def _title(name: str) -> str:
    base, comma, rest = name.partition(", ")
    titles: Mapping[str, str] = {**TITLES}
    return f"{titles.get(base, base)}{comma}{rest}"
