"""The picture: quality against depth and against estimated speed-up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.recipes.curve import GOAL, KV_POLICIES, TARGET, curve

_COLOURS = ("tab:grey", "tab:blue", "tab:orange", "tab:green")
_STYLES = {"recompute": "-", "fill": "--"}
_LABELS = {"recompute": "exact KV", "fill": "filled KV"}


def draw(path: Path, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """A PNG: one colour for each variant, solid lines for exact keys and values and dashed ones for filled."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot as plt

    panels = (
        ("layers", "layers per token"),
        ("regroup_speedup", "speed-up of 32 seats"),
        ("quorum_speedup", "speed-up of 32 seats with a quorum"),
        ("alone_speedup", "speed-up of one request alone"),
    )
    figure, axes = plt.subplots(1, len(panels), figsize=(16, 4.4), sharey=True, layout="constrained")
    for axis, (column, label) in zip(axes, panels, strict=True):
        for variant, colour in zip(dict.fromkeys(row["variant"] for row in rows), _COLOURS, strict=False):
            for kv in KV_POLICIES:
                line = curve(rows, variant, kv)
                axis.plot(
                    [row[column] for row in line],
                    [row["ratio"] for row in line],
                    _STYLES[kv],
                    color=colour,
                    marker="o",
                    markersize=3.5,
                    label=f"{variant}, {_LABELS[kv]}",
                )
        axis.axhline(TARGET, color="black", linewidth=0.8, linestyle=":")
        if column != "layers":
            axis.axvline(GOAL, color="black", linewidth=0.8, linestyle=":")
        axis.set_xlabel(label)
    # Where texts fall apart it does not matter how far.
    axes[0].set(ylabel="ROUGE-L as a share of full depth's", ylim=(0.7, 1.05))
    axes[0].invert_xaxis()
    axes[0].legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=100)
    plt.close(figure)
