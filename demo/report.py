"""What the demo shows at the end: a table, and a picture of how deep each token went."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from demo.measure import Measurement


def results_table(
    measurements: Sequence[Measurement], full: Measurement, exit_layers: Sequence[int], title: str
) -> Table:
    """One row per way of serving; texts are compared with those of `full`, which is full depth.

    Columns: completion tokens per second over HTTP; that as a multiple of full depth asked in the same manner; layers
    per token and the share of tokens that left at each exit; the share of texts that are the same as at full depth, and
    of those that are right, which is the teacher's sentence.
    """
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    exits = (f"@{layer}" for layer in exit_layers)
    for heading in ("tok/s", "speed", "layers", *exits, "same", "right"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in measurements:
        identical = one.identical(full)
        table.add_row(
            one.name,
            f"{one.tokens_per_second:.0f}",
            f"{one.tokens_per_second / one.full_tokens_per_second:.2f}x",
            f"{one.mean_layers:.1f}",
            *(f"{one.shares.get(layer, 0.0):.0%}" for layer in exit_layers),
            f"{identical:.0%}",
            f"{one.right:.0%}",
        )
    return table


def draw_exit_depths(measurement: Measurement, exit_layers: Sequence[int], path: Path, max_rows: int = 24) -> None:
    """A PNG: one row per answer, one square per token, coloured by the layer at which it left."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot as plt
    from matplotlib.colors import BoundaryNorm, ListedColormap

    rows = [answer.exit_layers for answer in measurement.answers[:max_rows]]
    width = max(map(len, rows))
    order = {layer: index for index, layer in enumerate(exit_layers)}
    grid = [[order[layer] for layer in row] + [float("nan")] * (width - len(row)) for row in rows]
    shades = [plt.get_cmap("viridis")(1 - index / max(len(exit_layers) - 1, 1)) for index in range(len(exit_layers))]
    figure, axes = plt.subplots(figsize=(max(6.0, width * 0.26), len(rows) * 0.24 + 1.4), layout="constrained")
    edges = [index - 0.5 for index in range(len(exit_layers) + 1)]
    mesh = axes.pcolormesh(
        grid, cmap=ListedColormap(shades), norm=BoundaryNorm(edges, len(exit_layers)), edgecolors="white", linewidth=1
    )
    axes.invert_yaxis()
    axes.set(xlabel="token of the answer", ylabel="answer", title=f"Layers run for each token: {measurement.name}")
    bar = figure.colorbar(mesh, ax=axes, ticks=range(len(exit_layers)), label="exit layer")
    bar.ax.set_yticklabels([str(layer) for layer in exit_layers])
    figure.savefig(path, dpi=110)
    plt.close(figure)
