"""Draws simulated steps: one row per stage, forward and backward passes of every micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from offramp.train.pipeline.simulation import Timeline

FORWARD, BACKWARD, INSERTED = "#6fa8dc", "#93c47d", "#f6b26b"


def draw(path: Path, timelines: Sequence[tuple[str, Timeline]], caption: str) -> None:
    """Write a PNG.

    Args:
        path: of the file.
        timelines: title and simulation of each panel, on one time axis.
        caption: under the panels.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    stages = len(timelines[0][1].spans)
    figure = Figure(figsize=(14, len(timelines) * (0.9 + 0.34 * stages) + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    longest = max(timeline.seconds for _, timeline in timelines)
    for axis, (title, timeline) in zip(axes, timelines, strict=True):
        for stage, (operations, spans) in enumerate(zip(timeline.schedule.operations, timeline.spans, strict=True)):
            colours = [
                INSERTED
                if not 0 <= operation.micro_batch < timeline.schedule.micro_batches
                else FORWARD
                if operation.kind == "forward"
                else BACKWARD
                for operation in operations
            ]
            bars = [(1e3 * start, 1e3 * (end - start)) for start, end in spans]
            axis.broken_barh(bars, (stage - 0.42, 0.84), facecolors=colours, edgecolors="white", linewidth=0.5)
            for operation, (start, end) in zip(operations, spans, strict=True):
                if end - start > longest / 90:
                    text = str(operation.micro_batch)
                    axis.text(500 * (start + end), stage, text, ha="center", va="center", fontsize=7)
        axis.set_title(
            f"{title}: {1e3 * timeline.seconds:,.4g} ms, {100 * timeline.bubble_share:.1f}% bubble", loc="left"
        )
        axis.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)])
        axis.set_ylim(stages - 0.5, -0.5)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("milliseconds")
    kinds = [("forward", FORWARD), ("backward", BACKWARD), ("inserted into a bubble", INSERTED)]
    figure.legend(handles=[Patch(color=c, label=name) for name, c in kinds], loc="outside lower right", ncols=3)
    figure.supxlabel(caption, fontsize=9, x=0.02, ha="left")
    figure.savefig(path, dpi=110)
