"""Estimated speed of decoding, from what the engine's iterations did and what their parts took.

What happened (which layers ran, on how many rows) is exact and repeats; times on a busy machine are not. So the two are
taken apart: a layer on so many rows takes the median time of all such runs in the whole benchmark, and of every other
part of an iteration the slowest tenth is left out.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from offramp.serve.measures.iteration_clock import PARTS
from offramp.serve.measures.records import IterationRecord

_FEWEST_RUNS = 5
"""A median of fewer says little."""

_KEPT_SHARE = 0.9


@dataclass(frozen=True)
class Decoding:
    """What counts of one generation: its iterations without prompt rows, while requests waited for a seat.

    Attributes:
        tokens: that they gave.
        layer_calls: rows -> how often a layer ran on so many.
        parts: part, but for the layers -> seconds in all of these iterations.
        layer_seconds: rows -> seconds of a layer in each run on so many, also while seats were empty.
    """

    tokens: int
    layer_calls: Mapping[int, int]
    parts: Mapping[str, float]
    layer_seconds: Mapping[int, list[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Iterable[IterationRecord]) -> Decoding:
        """Of all iterations of a generation, whose prompts were all in the queue before the first."""
        decoding = [record for record in records if not record.prefill_rows]
        full = [record for record in decoding if record.after.waiting] or decoding
        calls: Counter[int] = Counter()
        for record in full:
            for run in record.segments:
                calls[run.rows] += run.stop - run.start
        seconds: defaultdict[int, list[float]] = defaultdict(list)
        for record in decoding:
            for run in record.segments:
                seconds[run.rows].append(run.seconds / (run.stop - run.start))
        parts: dict[str, float] = {
            part: _trimmed([record.parts[part] for record in full]) for part in PARTS if part != "layers"
        }
        return cls(sum(record.new_tokens for record in full), calls, parts, seconds)

    def to_json(self) -> dict[str, Any]:
        """Plain containers."""
        return {
            "tokens": self.tokens,
            "layer_calls": {str(rows): calls for rows, calls in self.layer_calls.items()},
            "parts": dict(self.parts),
            "layer_seconds": {str(rows): seconds for rows, seconds in self.layer_seconds.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Decoding:
        """Inverse of `to_json`."""
        calls, seconds = (
            {int(rows): value for rows, value in data[name].items()} for name in ("layer_calls", "layer_seconds")
        )
        return cls(data["tokens"], calls, data["parts"], seconds)


class LayerCost:
    """Seconds of one layer on so many rows: medians, and straight lines between them."""

    def __init__(self, found: Iterable[Decoding]) -> None:
        """Take the times of all generations together.

        Args:
            found: at least one of them ran layers.
        """
        seconds: defaultdict[int, list[float]] = defaultdict(list)
        for one in found:
            for rows, times in one.layer_seconds.items():
                seconds[rows] += times
        known = {rows: times for rows, times in seconds.items() if len(times) >= _FEWEST_RUNS} or seconds
        self.rows: Sequence[int] = sorted(known)
        self.seconds = [statistics.median(known[rows]) for rows in self.rows]

    def of(self, rows: int) -> float:
        """Seconds of a layer on `rows` rows."""
        return float(np.interp(rows, self.rows, self.seconds))


@dataclass(frozen=True)
class Speed:
    """Beside full depth of the same model.

    Attributes:
        ideal: speed-up if leaving were free: layers and head take what they take on the rows that are there, all the
            rest what it takes at full depth.
        whole: speed-up with everything, exit tests, fills and regrouping included.
        us: part -> microseconds per token.
    """

    ideal: float
    whole: float
    us: Mapping[str, float]

    @classmethod
    def between(cls, mine: Decoding, full: Decoding, cost: LayerCost) -> Speed:
        """Of a generation beside one at full depth; both gave tokens that count."""
        us, base = _us(mine, cost), _us(full, cost)
        before = sum(base.values())
        saved = sum(base[part] - us[part] for part in ("layers", "head"))
        return cls(before / (before - saved), before / sum(us.values()), us)


def _us(one: Decoding, cost: LayerCost) -> dict[str, float]:
    layers = sum(calls * cost.of(rows) for rows, calls in one.layer_calls.items())
    return {part: 1e6 * seconds / one.tokens for part, seconds in {"layers": layers, **one.parts}.items()}


def _trimmed(seconds: Sequence[float]) -> float:
    """Sum, where the slowest take what the others do on average."""
    kept = sorted(seconds)[: max(1, round(_KEPT_SHARE * len(seconds)))]
    return statistics.fmean(kept) * len(seconds) if kept else 0.0
