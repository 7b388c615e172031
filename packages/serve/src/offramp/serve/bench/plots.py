"""Pictures of results. Needs matplotlib, which serving does not: `pip install "offramp-serve[bench]"`."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from offramp.common.errors import OfframpError
from offramp.serve.bench.measure import Measured, Spread
from offramp.serve.bench.plan import Axis, Experiment
from offramp.serve.measures.iteration_clock import PARTS

_AXES: dict[Axis, str] = {
    "batch": "sequences in the batch",
    "prompt_tokens": "tokens of a prompt",
    "new_tokens": "tokens generated for a prompt",
    "hard_share": "share of sequences at full depth",
    "threshold": "exit threshold",
}
_UNITS: dict[Axis, str] = {"batch": "sequences", "prompt_tokens": "prompt", "new_tokens": "new"}
_COLOURS = {
    "layers": "#4477aa",
    "head": "#228833",
    "exit_test": "#ccbb44",
    "fill": "#ee6677",
    "sampling": "#aa3377",
    "scheduling": "#777777",
    "detokenising": "#aaaaaa",
    "other": "#dddddd",
}


def check_installed() -> None:
    """Raise `OfframpError` if there is no matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise OfframpError('plots need matplotlib; pip install "offramp-serve[bench]", or leave --plots out.')


def draw(directory: Path, experiment: Experiment, results: Sequence[Measured]) -> list[Path]:
    """Draw what an experiment has to show.

    Args:
        directory: where the files go.
        experiment: names them.
        results: its results.

    Returns:
        The PNG files: decode and prefill speed, the gaps between tokens, and for the engine where its time goes and
        how much of the ideal speed-up is realised.
    """
    import matplotlib as mpl

    mpl.use("agg")
    speed = _Figure(experiment, results)
    drawn = [
        speed.curves("decode", "tokens/s while decoding", lambda one: Spread.of(one.decode)),
        speed.curves("prefill", "prompt tokens/s", lambda one: Spread.of(one.prefill)),
        speed.curves("latency", "ms between tokens (median)", lambda one: _milliseconds(one.gaps)),
        speed.breakdown(),
        speed.speedups(),
    ]
    files: list[Path] = []
    for drawing in drawn:
        if drawing is not None:
            name, figure = drawing
            files.append(directory / f"{experiment.name}-{name}.png")
            figure.savefig(files[-1], dpi=120, bbox_inches="tight")
    return files


class _Figure:
    """The pictures of one experiment; each is a name and a figure, or None if there is nothing to see."""

    def __init__(self, experiment: Experiment, results: Sequence[Measured]) -> None:
        self._axis: Axis = experiment.axis
        self._results = results
        self._xs = sorted({x for one in results if (x := self._x(one)) is not None})

    def curves(self, name: str, label: str, value: Callable[[Measured], Spread | None]) -> tuple[str, Any] | None:
        """One curve for each contestant, with the range over repetitions; those who stand still are level lines."""
        figure, axes = self._canvas(label)
        count = 0
        for who, group in self._groups(self._results):
            found = [(self._x(one), value(one)) for one in group]
            points = [(x, spread) for x, spread in found if spread is not None]
            if not points:
                continue
            count += 1
            if points[0][0] is None:
                axes.axhline(points[0][1].median, linestyle=":", color=f"C{count}", label=who)
                continue
            axes.errorbar(
                [x for x, _ in points],
                [spread.median for _, spread in points],
                yerr=[
                    [spread.median - spread.low for _, spread in points],
                    [spread.high - spread.median for _, spread in points],
                ],
                marker="o",
                capsize=2,
                label=who,
            )
        if not count:
            return None
        if self._axis != "threshold" and self._axis != "hard_share":
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(self._xs, [f"{x:g}" for x in self._xs])
        axes.legend(fontsize=7)
        return name, figure

    def breakdown(self) -> tuple[str, Any] | None:
        """Time per token by part, a bar for each engine variant and workload."""
        shown = [one for one in self._results if one.part_us]
        if not shown:
            return None
        figure, axes = self._canvas("", width=8.0, height=1.2 + 0.28 * len(shown))
        names = [f"{self._who(one)}, {self._x(one):g}" if self._x(one) is not None else self._who(one) for one in shown]
        # As shares, because a token of a large batch takes a twentieth of one alone.
        left = [0.0] * len(shown)
        for part in PARTS:
            widths = [one.part_us[part] / sum(one.part_us.values()) for one in shown]
            if any(width > 0 for width in widths):
                axes.barh(range(len(shown)), widths, left=left, color=_COLOURS[part], label=part)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        for place, one in enumerate(shown):
            axes.text(1.01, place, f"{sum(one.part_us.values()):.0f} us", va="center", fontsize=7)
        axes.set_yticks(range(len(shown)), names, fontsize=7)
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        axes.set_xlabel("share of the time per token")
        axes.legend(fontsize=7, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0))
        return "breakdown", figure

    def speedups(self) -> tuple[str, Any] | None:
        """Realised speed-up beside the ideal one and the one in proportion to layers."""
        shown = [one for one in self._results if one.speedup and one.ideal and one.proportional]
        if not shown:
            return None
        figure, axes = self._canvas("decode speed over full depth")
        for index, (who, group) in enumerate(self._groups(shown)):
            placed = [(x, one) for one in group if (x := self._x(one)) is not None]
            kinds: dict[str, list[tuple[float, Spread | None]]] = {
                "-": [(x, one.speedup) for x, one in placed],
                "--": [(x, one.ideal) for x, one in placed],
                ":": [(x, one.proportional) for x, one in placed],
            }
            for style, points in kinds.items():
                found = [(x, spread.median) for x, spread in points if spread is not None]
                solid = {"marker": "o", "label": who} if style == "-" else {}
                axes.plot([x for x, _ in found], [y for _, y in found], style, color=f"C{index}", **solid)
        axes.axhline(1.0, color="black", linewidth=0.5)
        axes.set_title("solid: realised; dashed: if leaving were free; dotted: by layers run", fontsize=8)
        axes.legend(fontsize=7)
        return "speedup", figure

    def _canvas(self, label: str, width: float = 6.4, height: float = 4.4) -> tuple[Any, Any]:
        # Not pyplot: its figures live until somebody closes them.
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width, height))
        axes = figure.add_subplot()
        axes.set_xlabel(_AXES[self._axis])
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        return figure, axes

    def _groups(self, results: Iterable[Measured]) -> list[tuple[str, list[Measured]]]:
        """Results by who they are, in the order of x."""
        ordered = sorted(results, key=lambda one: (self._who(one), self._x(one) or 0.0))
        return [(who, list(group)) for who, group in itertools.groupby(ordered, self._who)]

    def _x(self, one: Measured) -> float | None:
        if self._axis == "threshold":
            return None if one.variant is None else one.variant.threshold
        return float(getattr(one.workload, self._axis))

    def _who(self, one: Measured) -> str:
        """The contestant, and whatever distinguishes its results beside x."""
        name = one.name
        if self._axis == "threshold" and one.variant is not None and one.variant.threshold is not None:
            name = f"{one.variant.kv_policy}, {one.variant.sync_policy}"
        if len({result.dtype for result in self._results}) > 1:
            name += f", {one.dtype}"
        kernels = {result.variant.kernels for result in self._results if result.variant is not None}
        if len(kernels) > 1 and one.variant is not None:
            name += f", {one.variant.kernels}"
        for axis, unit in _UNITS.items():
            values = {getattr(result.workload, axis) for result in self._results}
            if axis != self._axis and len(values) > 1:
                name += f", {getattr(one.workload, axis)} {unit}"
        return name


def _milliseconds(seconds: Sequence[float]) -> Spread | None:
    spread = Spread.of(seconds)
    return None if spread is None else Spread(1e3 * spread.median, 1e3 * spread.median, 1e3 * spread.median)
