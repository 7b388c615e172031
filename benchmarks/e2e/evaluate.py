"""The test: every way of generating on MRs that nothing was chosen on, as a table and two pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.texts.outcome import Outcome, outcome

from offramp.common.exits.policy import ExitPolicy
from offramp.serve.engine import Engine
from offramp.serve.request.exit_options import ExitOptions

SWEEP = (0.98, 0.9, 0.8, 0.6, 0.4, 0.2)
"""One threshold for all exits, for the curve of quality against depth."""


def ways(engine: Engine, points: Mapping[str, ExitPolicy], template: ExitPolicy) -> Iterator[tuple[str, ExitOptions]]:
    """Name and options of everything that is compared; full depth comes first."""
    yield "full depth", ExitOptions("full")
    early = engine.checkpoint.exits.layers
    for layer in early:
        yield f"static {layer}", ExitOptions("static", static_layer=layer)
    # `recompute` ends with an exact cache, so it shows what the exits decide; `fill` adds what a filled cache does.
    for kv_policy in ("fill", "recompute"):
        for name, policy in points.items():
            if policy.thresholds:
                yield f"{name}, {kv_policy}", ExitOptions(kv_policy, policy)
        for level in SWEEP:
            thresholds = dict.fromkeys(early, level)
            yield f"threshold {level}, {kv_policy}", ExitOptions(kv_policy, replace(template, thresholds=thresholds))


def evaluate(
    engine: Engine,
    rows: Sequence[dict[str, Any]],
    points: Mapping[str, ExitPolicy],
    template: ExitPolicy,
    max_tokens: int,
    on_progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> list[Outcome]:
    """Generate in every way of `ways`, full depth first."""
    return [
        outcome(name, engine, rows, exits, max_tokens, on_progress) for name, exits in ways(engine, points, template)
    ]


def draw_curve(path: Path, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """A PNG: quality against depth, with bootstrap intervals, one line for each KV policy."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.8), layout="constrained")
    for label, colour in (("fill", "tab:orange"), ("recompute", "tab:blue"), ("static", "tab:grey")):
        mine = [row for row in rows if label in str(row["name"])]
        mine.sort(key=lambda row: row["layers"])
        if not mine:
            continue
        depth, quality = [row["layers"] for row in mine], [row["ratio"] for row in mine]
        spread = [
            [row["ratio"] - row["ratio_low"] for row in mine],
            [row["ratio_high"] - row["ratio"] for row in mine],
        ]
        axes.errorbar(depth, quality, yerr=spread, fmt="o-", color=colour, capsize=2, markersize=4, label=label)
    axes.axhline(0.98, color="black", linewidth=0.8, linestyle=":")
    axes.set(xlabel="layers per token", ylabel="ROUGE-L as a share of full depth's", title=title)
    axes.legend(title="KV policy")
    figure.savefig(path, dpi=120)
    plt.close(figure)
