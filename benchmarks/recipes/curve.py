"""The curve of one variant: generate at every threshold, with filled and with exact keys and values."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.recipes.settings import Settings
from benchmarks.recipes.speed import Decoding, LayerCost, Speed
from benchmarks.texts.outcome import Outcome, outcome
from benchmarks.texts.progress import Report

from offramp.common.exits.kv_policy import KVPolicy
from offramp.common.exits.policy import ExitPolicy
from offramp.serve.bench.quality import ratio_of_means
from offramp.serve.engine import Engine
from offramp.serve.request.exit_options import ExitOptions

KV_POLICIES: tuple[KVPolicy, ...] = ("recompute", "fill")
"""Exact, and filled. `recompute` shows what the exits decide; `fill` adds what the upper layers make of the rest."""

TARGET = 0.98
"""ROUGE-L as a share of full depth's."""

GOAL = 1.6
"""Speed-up that is asked for at the target."""


_Way = tuple[str, float]
"""KV policy and threshold."""


@dataclass(frozen=True)
class Point:
    """One way of generating with a variant.

    Attributes:
        row: quality and depth, as in the table.
        kv: KV policy; `full` at full depth.
        decoding: name of a timing -> its iterations.
    """

    row: dict[str, Any]
    kv: str
    decoding: Mapping[str, Decoding]

    def to_json(self) -> dict[str, Any]:
        """Plain containers."""
        decoding = {name: found.to_json() for name, found in self.decoding.items()}
        return {"row": self.row, "kv": self.kv, "decoding": decoding}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Point:
        """Inverse of `to_json`."""
        decoding = {name: Decoding.from_json(found) for name, found in data["decoding"].items()}
        return cls(data["row"], data["kv"], decoding)


def measure(
    settings: Settings, model: Path, rows: Sequence[dict[str, Any]], start: Sequence[float], report: Report
) -> list[Point]:
    """All points of a variant, full depth first.

    Args:
        settings: thresholds, and the engine.
        model: checkpoint of the variant.
        rows: with `prompt` and `references`.
        start: [rows] ROUGE-L of the model before it had exits.
        report: told the name of a way, how many texts are done, and of how many.
    """
    texts: dict[_Way, Outcome] = {}
    decoding: defaultdict[_Way, dict[str, Decoding]] = defaultdict(dict)
    for timing in settings.timings:
        config = replace(settings.engine, max_num_seqs=timing.seats, deep_quorum=timing.deep_quorum)
        engine = Engine.from_checkpoint(model, config)
        for way, exits in _ways(settings, engine):
            name = f"{timing.name} {way[0]} {way[1]}"
            found, decoding[way][timing.name] = _generate(
                engine, name, rows[: timing.prompts], exits, settings.max_tokens, report
            )
            texts.setdefault(way, found)
    full = next(iter(texts.values()))
    points: list[Point] = []
    for way, found in texts.items():
        cost, low, high = ratio_of_means(found.scores, start)
        row = {"threshold": way[1], **found.row(full), "over_start": round(cost, 4)}
        row |= {"over_start_low": round(low, 4), "over_start_high": round(high, 4)}
        points.append(Point(row, way[0], decoding[way]))
    return points


def _ways(settings: Settings, engine: Engine) -> Iterator[tuple[_Way, ExitOptions]]:
    yield ("full", 1.0), ExitOptions("full")
    template = engine.checkpoint.policy or ExitPolicy()
    for kv_policy in KV_POLICIES:
        for level in settings.thresholds:
            policy = template.with_threshold(level, engine.checkpoint.exits.layers)
            yield (kv_policy, level), ExitOptions(kv_policy, policy)


def _generate(
    engine: Engine, name: str, rows: Sequence[dict[str, Any]], exits: ExitOptions, max_tokens: int, report: Report
) -> tuple[Outcome, Decoding]:
    before = engine.metrics.totals.iterations
    found = outcome(name, engine, rows, exits, max_tokens, report)
    return found, Decoding.of(record for record in engine.metrics.records if record.iteration >= before)


def write_points(path: Path, points: Sequence[Point]) -> None:
    """Points as JSON."""
    path.write_text(json.dumps([point.to_json() for point in points]), encoding="utf-8")


def read_points(path: Path) -> list[Point]:
    """Inverse of `write_points`."""
    return [Point.from_json(item) for item in json.loads(path.read_text(encoding="utf-8"))]


def table(variants: Mapping[str, Sequence[Point]]) -> list[dict[str, Any]]:
    """A row for each point of each variant, with estimated speed; layers take the same time in all of them."""
    cost = LayerCost([found for points in variants.values() for point in points for found in point.decoding.values()])
    return [
        {
            "variant": variant,
            "kv": point.kv,
            **{name: value for name, value in point.row.items() if name != "name"},
            **_speeds(point, points[0], cost),
        }
        for variant, points in variants.items()
        for point in points
    ]


def _speeds(point: Point, full: Point, cost: LayerCost) -> dict[str, float]:
    columns: dict[str, float] = {}
    for name, mine in point.decoding.items():
        speed = Speed.between(mine, full.decoding[name], cost)
        columns |= {f"{name}_ideal": round(speed.ideal, 3), f"{name}_speedup": round(speed.whole, 3)}
        columns |= {f"{name}_us_{part}": round(value, 1) for part, value in speed.us.items()}
    return columns


def curve(rows: Sequence[Mapping[str, Any]], variant: str, kv: str) -> list[Mapping[str, Any]]:
    """Rows of one curve: full depth, then from strict to loose."""
    mine = [row for row in rows if row["variant"] == variant and row["kv"] in ("full", kv)]
    return sorted(mine, key=lambda row: -row["threshold"])


def at_ratio(line: Sequence[Mapping[str, Any]], column: str, target: float = TARGET) -> float:
    """A column where a curve first falls below a ratio, on straight lines between its points.

    A curve that never does gives the value at its end.
    """
    for before, after in pairwise(line):
        if after["ratio"] < target:
            share = (before["ratio"] - target) / (before["ratio"] - after["ratio"])
            return before[column] + share * (after[column] - before[column])
    return line[-1][column]


def at_speed(line: Sequence[Mapping[str, Any]], column: str, goal: float = GOAL) -> float | None:
    """The ratio where a curve first reaches a speed-up, likewise; None if it never does."""
    for before, after in pairwise(line):
        if before[column] < goal <= after[column]:
            share = (goal - before[column]) / (after[column] - before[column])
            return before["ratio"] + share * (after["ratio"] - before["ratio"])
    return None


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each curve: depth and speed-up at the target, and the ratio at the speed-up that is asked for."""
    found: list[dict[str, Any]] = []
    speeds = speed_columns(rows)
    for variant in dict.fromkeys(row["variant"] for row in rows):
        for kv in KV_POLICIES:
            line = curve(rows, variant, kv)
            found.append(
                {
                    "variant": variant,
                    "kv": kv,
                    "over_start": line[0]["over_start"],
                    "stays_above": all(row["ratio"] >= TARGET for row in line),
                    "layers": round(at_ratio(line, "layers"), 3),
                    **{name: round(at_ratio(line, name), 3) for name in speeds},
                    **{f"ratio_at_{name}": _rounded(at_speed(line, name)) for name in speeds if "ideal" not in name},
                }
            )
    return found


def speed_columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of each timing: speed-up if leaving were free, and with everything."""
    return [name for name in rows[0] if name.endswith(("_ideal", "_speedup"))]


def _rounded(value: float | None) -> float | str:
    return "" if value is None else round(value, 3)
