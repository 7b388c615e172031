"""Pictures of results. Needs matplotlib, which serving does not: `pip install "offramp-serve[bench]"`."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from offramp.common.errors import OfframpError
from offramp.serve.bench.gap import STEPS
from offramp.serve.bench.measure import Measured, Spread
from offramp.serve.bench.plan import Axis, Experiment, Workload
from offramp.serve.measures.iteration_clock import PARTS

_AXES: dict[Axis, str] = {
    "batch": "sequences in the batch",
    "prompt_tokens": "tokens of a prompt",
    "new_tokens": "tokens generated for a prompt",
    "hard_share": "share of sequences at full depth",
    "threshold": "exit threshold",
}
_UNITS: dict[Axis, str] = {"batch": "sequences", "prompt_tokens": "prompt", "new_tokens": "new"}
_STEP_COLOURS = {False: "#cc3311", True: "#228833"}
_COLOURS = {
    "layers": "#4477aa",
    "encoder": "#66ccee",
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
        The PNG files: decode and prefill speed, the gaps between tokens, and for the engine where its time goes, how
        much of the ideal speed-up is realised and what the rest went into, and quality beside speed.
    """
    import matplotlib as mpl

    mpl.use("agg")
    speed = _Figure(experiment, results)
    drawn = [
        speed.curves("decode", "tokens/s", lambda one: Spread.of(one.rates)),
        speed.curves("prefill", "prompt tokens/s", lambda one: Spread.of(one.prefill)),
        speed.curves("latency", "ms between tokens (median)", lambda one: _milliseconds(one.gaps)),
        speed.breakdown(),
        speed.waterfalls(),
        speed.speedups(),
        speed.quality(),
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
        """Microseconds per token by part, a bar for each variant of the engine, a panel for each workload."""
        shown = [one for one in self._results if sum(one.part_us.values())]
        if not shown:
            return None
        loads = list(dict.fromkeys(one.workload for one in shown))
        columns = [[one for one in shown if one.workload == load] for load in loads]
        tallest = max(map(len, columns))
        figure, panels = self._panels(1, len(loads), width=4.0, height=1.2 + 0.35 * tallest)
        for axes, load, column in zip(panels[0], loads, columns, strict=True):
            left = [0.0] * len(column)
            for part in PARTS:
                widths = [one.part_us[part] for one in column]
                axes.barh(range(len(column)), widths, left=left, color=_COLOURS[part], label=part)
                left = [start + width for start, width in zip(left, widths, strict=True)]
            axes.set_yticks(range(len(column)), [self._who(one, of_workload=False) for one in column], fontsize=7)
            axes.invert_yaxis()
            axes.set_xlabel("microseconds per token", fontsize=7)
            axes.tick_params(axis="x", labelsize=7)
            axes.set_title(self._load(load), fontsize=8)
        figure.legend(*panels[0][0].get_legend_handles_labels(), fontsize=7, ncols=8, loc="outside upper center")
        return "breakdown", figure

    def waterfalls(self) -> tuple[str, Any] | None:
        """From the time per token that the layers run suggest to the one that was measured, step by step."""
        shown = [(one, gap) for one in self._results if (gap := one.gap) is not None]
        if not shown:
            return None
        loads = list(dict.fromkeys(one.workload for one, _ in shown))
        names = list(dict.fromkeys(self._who(one, of_workload=False) for one, _ in shown))
        figure, panels = self._panels(len(names), len(loads), width=4.0, height=2.6)
        for one, gap in shown:
            axes = panels[names.index(self._who(one, of_workload=False))][loads.index(one.workload)]
            bars: list[tuple[str, float, float, str]] = [
                ("full depth", 0.0, gap.full_depth_us, "#bbbbbb"),
                ("by layers", 0.0, gap.by_layers_us, _COLOURS["layers"]),
            ]
            height = gap.by_layers_us
            for step in STEPS:
                bars.append((step.replace("_", " "), height, gap.steps[step], _STEP_COLOURS[gap.steps[step] < 0]))
                height += gap.steps[step]
            bars.append(("realised", 0.0, gap.realised_us, "#222222"))
            for place, (_, bottom, size, colour) in enumerate(bars):
                axes.bar(place, size, bottom=bottom, color=colour)
                told = f"{size:.0f}" if 0 < place < len(bars) - 1 else f"{size:.0f} us"
                axes.text(place, max(bottom, bottom + size), told, ha="center", va="bottom", fontsize=6)
            axes.set_xticks(range(len(bars)), [name for name, *_ in bars], fontsize=6, rotation=40, ha="right")
            axes.tick_params(axis="y", labelsize=6)
            axes.set_ylim(0, 1.15 * max(bottom + max(size, 0.0) for _, bottom, size, _ in bars))
            realised, ideal = gap.full_depth_us / gap.realised_us, gap.full_depth_us / gap.by_layers_us
            axes.set_title(
                f"{self._who(one, of_workload=False)}\n{self._load(one.workload)}\n"
                f"x{realised:.2f}, by layers x{ideal:.2f}",
                fontsize=7,
            )
        return "gap", figure

    def quality(self) -> tuple[str, Any] | None:
        """Quality beside speed: ROUGE-L over full depth, with its interval, against the speed-up."""
        found = [(one, one.speedup, one.quality) for one in self._results]
        points = [(one, speed, quality) for one, speed, quality in found if speed is not None and quality is not None]
        if not points:
            return None
        figure, axes = self._canvas("ROUGE-L over that of full depth")
        axes.set_xlabel("speed over full depth")
        for number, (one, speed, quality) in enumerate(points):
            axes.errorbar(
                [speed.median],
                [quality.ratio],
                xerr=[[speed.median - speed.low], [speed.high - speed.median]],
                yerr=[[quality.ratio - quality.ratio_low], [quality.ratio_high - quality.ratio]],
                marker="o",
                capsize=2,
                color=f"C{number}",
                label=f"{self._who(one, of_workload=False)}; {self._load(one.workload)}",
            )
        axes.axhline(0.98, color="black", linewidth=0.5)
        axes.axvline(1.0, color="black", linewidth=0.5)
        axes.legend(fontsize=6, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        return "quality", figure

    def speedups(self) -> tuple[str, Any] | None:
        """Realised speed-up beside the ideal one and the one in proportion to layers."""
        shown = [one for one in self._results if one.decode_speedup and one.ideal and one.proportional]
        if not shown:
            return None
        figure, axes = self._canvas("decode speed over full depth")
        for index, (who, group) in enumerate(self._groups(shown)):
            placed = [(x, one) for one in group if (x := self._x(one)) is not None]
            kinds: dict[str, list[tuple[float, Spread | None]]] = {
                "-": [(x, one.decode_speedup) for x, one in placed],
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

    def _panels(self, rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
        return figure, figure.subplots(rows, columns, squeeze=False)

    def _groups(self, results: Iterable[Measured]) -> list[tuple[str, list[Measured]]]:
        """Results by who they are, in the order of x."""
        ordered = sorted(results, key=lambda one: (self._who(one), self._x(one) or 0.0))
        return [(who, list(group)) for who, group in itertools.groupby(ordered, self._who)]

    def _x(self, one: Measured) -> float | None:
        if self._axis == "threshold":
            return None if one.who.variant is None else one.who.variant.threshold
        return float(getattr(one.workload, self._axis))

    def _who(self, one: Measured, *, of_workload: bool = True) -> str:
        """The contestant, and whatever distinguishes its results beside x."""
        variant, name = one.who.variant, one.who.name
        if self._axis == "threshold" and of_workload and variant is not None and variant.threshold is not None:
            name = replace(variant, threshold=None).name
        if len({result.who.dtype for result in self._results}) > 1:
            name += f", {one.who.dtype}"
        kernels = {other.setting("kernels") for result in self._results if (other := result.who.variant) is not None}
        if len(kernels) > 1 and variant is not None:
            name += f", {variant.setting('kernels')}"
        if of_workload:
            for axis, unit in _UNITS.items():
                values = {getattr(result.workload, axis) for result in self._results}
                if axis != self._axis and len(values) > 1:
                    name += f", {getattr(one.workload, axis)} {unit}"
        return name

    def _load(self, load: Workload) -> str:
        hard = f", {load.hard_share:.0%} hard" if load.hard_share else ""
        return f"{load.batch} sequence(s), {load.prompt_tokens} + {load.new_tokens} tokens{hard}"


def _milliseconds(seconds: Sequence[float]) -> Spread | None:
    spread = Spread.of(seconds)
    return None if spread is None else Spread(1e3 * spread.median, 1e3 * spread.median, 1e3 * spread.median)
