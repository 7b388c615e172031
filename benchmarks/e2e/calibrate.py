"""Thresholds for a promised share of full-depth ROUGE-L, by generating with them: what is promised is what is measured.

A search in two passes, which costs two dozen generations of the calibration texts. First one threshold for all exits,
from strict to loose. Then, around what was found, a looser or stricter threshold for the exits after the first: what
comes that far was not sure, and may deserve another rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.texts.outcome import Outcome, outcome

from offramp.common.exits.kv_policy import KVPolicy
from offramp.common.exits.policy import ExitPolicy
from offramp.serve.engine import Engine
from offramp.serve.request.exit_options import ExitOptions

LEVELS = (0.995, 0.98, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
"""Thresholds tried, strict first."""

SPARE = 0.01
"""ROUGE-L ratio given up at most between the loosest promise and the last threshold tried."""


@dataclass(frozen=True)
class Candidate:
    """Thresholds, and what generating with them gave.

    Attributes:
        thresholds: exit layer -> threshold.
        ratio: ROUGE-L as a share of full depth's.
        identical: share of texts equal to full depth's.
        layers: per token.
    """

    thresholds: dict[int, float]
    ratio: float
    identical: float
    layers: float

    def to_json(self) -> dict[str, Any]:
        """Plain containers."""
        return {
            "thresholds": {str(layer): value for layer, value in self.thresholds.items()},
            "ratio": round(self.ratio, 4),
            "identical": round(self.identical, 4),
            "layers": round(self.layers, 2),
        }


def calibrate(
    engine: Engine,
    rows: Sequence[dict[str, Any]],
    template: ExitPolicy,
    targets: Mapping[str, float],
    kv_policy: KVPolicy,
    max_tokens: int,
    on_progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> tuple[dict[str, ExitPolicy], dict[str, Any]]:
    """For each target, the thresholds with the fewest layers per token that keep it on the calibration texts.

    Args:
        engine: serves the model.
        rows: calibration prompts and references.
        template: measure and shortlist.
        targets: name -> least ROUGE-L ratio.
        kv_policy: what upper layers see of tokens that left.
        max_tokens: most tokens of a text.
        on_progress: see `outcome`.

    Returns:
        Policies by name (without thresholds where nothing keeps the promise), and a record of everything tried.
    """
    early = engine.checkpoint.exits.layers
    full = outcome("full depth", engine, rows, ExitOptions("full"), max_tokens, on_progress)
    tried: dict[tuple[float, ...], Candidate] = {}

    def try_out(levels: tuple[float, ...]) -> Candidate:
        if levels not in tried:
            thresholds = dict(zip(early, levels, strict=True))
            exits = ExitOptions(kv_policy, replace(template, thresholds=thresholds))
            found = outcome(f"thresholds {levels}", engine, rows, exits, max_tokens, on_progress)
            tried[levels] = _candidate(thresholds, found, full)
        return tried[levels]

    for level in LEVELS:
        if try_out((level,) * len(early)).ratio < min(targets.values()) - SPARE:
            break  # looser ones only get worse
    if len(early) > 1:
        for target in targets.values():
            if (best := _best(tried.values(), target)) is None:
                continue
            first = best.thresholds[early[0]]
            place = LEVELS.index(first)
            for level in LEVELS[max(place - 1, 0) : place + 2]:
                for later in (0.0, 0.3, 0.6, 0.9):
                    try_out((level, *[later] * (len(early) - 1)))
    points = {}
    for name, target in targets.items():
        best = _best(tried.values(), target)
        points[name] = replace(template, thresholds={} if best is None else best.thresholds)
    record = {
        "method": "search on held-out texts, no statistical guarantee",
        "prompts": len(rows),
        "kv_policy": kv_policy,
        "targets": dict(targets),
        "candidates": [candidate.to_json() for candidate in tried.values()],
        "points": {name: policy.to_json()["thresholds"] for name, policy in points.items()},
    }
    return points, record


def _candidate(thresholds: dict[int, float], found: Outcome, full: Outcome) -> Candidate:
    return Candidate(thresholds, found.ratio(full), found.identical(full), found.mean_layers)


def _best(tried: Sequence[Candidate] | Any, target: float) -> Candidate | None:
    kept = [candidate for candidate in tried if candidate.ratio >= target]
    return min(kept, key=lambda candidate: candidate.layers, default=None)
