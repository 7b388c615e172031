"""Lets contestants take turns, and adds up.

Machines are noisy and drift, so nothing is measured alone: every repetition runs all contestants one after the other,
each time beginning with another one, and a speed-up is the median of ratios within a repetition.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from offramp.common.errors import OfframpError
from offramp.serve.bench.contestants import Contestant, Peer, Trial
from offramp.serve.bench.plan import Variant, Workload
from offramp.serve.bench.prompts import Prompts
from offramp.serve.measures.iteration_clock import PARTS, Part
from offramp.serve.measures.records import Totals

REST_S = 0.25
"""Before every run if other processes take part: longer than their idle threads spin."""


@dataclass(frozen=True)
class Spread:
    """A figure over repetitions.

    Attributes:
        median: of them.
        low: the least.
        high: the greatest.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """The spread of some figures; None if there are none."""
        found = list(values)
        return cls(statistics.median(found), min(found), max(found)) if found else None


@dataclass(frozen=True)
class Note:
    """Why somebody is missing.

    Attributes:
        name: who.
        reason: one sentence.
    """

    name: str
    reason: str


@dataclass
class Measured:
    """All repetitions of one contestant on one workload.

    Attributes:
        experiment: which.
        name: the contestant's.
        dtype: of weights and states.
        variant: of the engine; None for others.
        kernels: what computed the engine's layers; None for others.
        workload: what was asked.
        decode: tokens per second while all sequences decode, of each repetition.
        prefill: prompt tokens per second, of each repetition, in a run that ends with the first tokens.
        whole: tokens per second from arrival to the last token, prefill included, of each repetition.
        first_token_s: median time to the first token, of each repetition.
        gaps: seconds between neighbouring tokens, of all repetitions.
        exit_layers: how many of the tokens of decoding ran so many layers.
        decoding: sums over the engine's iterations of decoding, of each repetition.
        segments: (layers before, layers after, rows) -> seconds of each run.
        full_depth: the same engine at full depth in the same repetitions; None for others, and for itself.
    """

    experiment: str
    name: str
    dtype: str
    variant: Variant | None
    kernels: str | None
    workload: Workload
    decode: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    exit_layers: Counter[int] = field(default_factory=Counter)
    decoding: list[Totals] = field(default_factory=list)
    segments: dict[tuple[int, int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    full_depth: Measured | None = None

    def add(self, prefill: Trial, trial: Trial, num_prompt_tokens: int) -> None:
        """Take a repetition in.

        Args:
            prefill: a run of one token for each sequence.
            trial: a run of all tokens.
            num_prompt_tokens: of all sequences together.
        """
        self.prefill.append(num_prompt_tokens / prefill.total_s)
        self.whole.append(trial.num_tokens / trial.total_s)
        self.first_token_s.append(statistics.median(times[0] for times in trial.token_times))
        if trial.decode_rate is not None:
            self.decode.append(trial.decode_rate)
        self.gaps += trial.gaps
        self.exit_layers.update(trial.exit_layers)
        if trial.iterations:
            self.decoding.append(Totals.of(trial.iterations))
        for record in trial.iterations:
            for run in record.segments:
                self.segments[run.start, run.stop, run.rows].append(run.seconds)

    @property
    def mean_layers(self) -> float | None:
        """Layers run per token of decoding; None if that is not known."""
        count = self.exit_layers.total()
        return sum(layer * n for layer, n in self.exit_layers.items()) / count if count else None

    @property
    def part_us(self) -> dict[Part, float]:
        """Microseconds per token of decoding by part, over all repetitions; empty if that is not known."""
        tokens = sum(totals.new_tokens for totals in self.decoding)
        if not tokens:
            return {}
        return {part: 1e6 * sum(totals.parts[part] for totals in self.decoding) / tokens for part in PARTS}

    @property
    def speedup(self) -> Spread | None:
        """Decode speed over that at full depth, repetition by repetition."""
        if self.full_depth is None:
            return None
        return Spread.of(mine / base for mine, base in zip(self.decode, self.full_depth.decode, strict=False))

    @property
    def ideal(self) -> Spread | None:
        """The speed-up if leaving itself were free, repetition by repetition.

        The layers take what they took in these very runs, on the rows that were there; all the rest (head, sampling,
        scheduling) takes what it took at full depth. What the realised speed-up lacks of it went into exit tests,
        fills, regrouping and their bookkeeping.
        """
        return Spread.of(self._speedup_with(base, _layers_s(mine)) for mine, base in self._pairs())

    @property
    def proportional(self) -> Spread | None:
        """The speed-up if a token's time in the layers were in proportion to the layers it ran, likewise.

        What `ideal` lacks of it went into smaller batches, which run less well, and under `recompute` and `verify`
        into carrying early tokens on to the end.
        """
        if self.full_depth is None or self.mean_layers is None or self.full_depth.mean_layers is None:
            return None
        share = self.mean_layers / self.full_depth.mean_layers
        return Spread.of(self._speedup_with(base, share * _layers_s(base)) for _, base in self._pairs())

    @property
    def realised(self) -> Spread | None:
        """The share of the ideal speed-up that was reached, repetition by repetition."""
        return Spread.of(
            _seconds(base) / _seconds(mine) / self._speedup_with(base, _layers_s(mine)) for mine, base in self._pairs()
        )

    def to_json(self) -> dict[str, Any]:
        """Plain containers, for one line of JSON."""
        rates = {
            "decode_tokens_per_s": Spread.of(self.decode),
            "prefill_tokens_per_s": Spread.of(self.prefill),
            "total_tokens_per_s": Spread.of(self.whole),
            "first_token_ms": Spread.of(1e3 * seconds for seconds in self.first_token_s),
            "speedup": self.speedup,
            "ideal_speedup": self.ideal,
            "proportional_speedup": self.proportional,
            "realised_share": self.realised,
        }
        variant = self.variant
        row: dict[str, Any] = {
            "experiment": self.experiment,
            "contestant": self.name,
            "dtype": self.dtype,
            "kernels": self.kernels,
            "kv_policy": None if variant is None else variant.kv_policy,
            "sync_policy": None if variant is None else variant.sync_policy,
            "threshold": None if variant is None else variant.threshold,
            "exit_layer": None if variant is None else variant.exit_layer,
            "batch": self.workload.batch,
            "prompt_tokens": self.workload.prompt_tokens,
            "new_tokens": self.workload.new_tokens,
            "hard_share": self.workload.hard_share,
            "repetitions": len(self.whole),
        }
        for name, spread in rates.items():
            row[name] = None if spread is None else _figure(spread.median)
            row[f"{name}_lowest"] = None if spread is None else _figure(spread.low)
            row[f"{name}_highest"] = None if spread is None else _figure(spread.high)
        row["inter_token_ms_p50"] = _quantile_ms(self.gaps, 0.50)
        row["inter_token_ms_p99"] = _quantile_ms(self.gaps, 0.99)
        row["mean_layers"] = None if self.mean_layers is None else _figure(self.mean_layers)
        part_us = self.part_us
        for part in PARTS:
            row[f"{part}_us_per_token"] = _figure(part_us[part]) if part_us else None
        row["exit_layers"] = {str(layer): self.exit_layers[layer] for layer in sorted(self.exit_layers)}
        row["segments"] = [
            {
                "start": start,
                "stop": stop,
                "rows": rows,
                "runs": len(times),
                "us": _figure(1e6 * statistics.median(times)),
            }
            for (start, stop, rows), times in sorted(self.segments.items())
        ]
        return row

    def _pairs(self) -> Iterator[tuple[Totals, Totals]]:
        """Iterations of decoding of mine and at full depth, repetition by repetition."""
        if self.full_depth is not None:
            yield from zip(self.decoding, self.full_depth.decoding, strict=False)

    @staticmethod
    def _speedup_with(base: Totals, layers_s: float) -> float:
        """Over `base`, if the layers took `layers_s` seconds per token and all the rest what it took there."""
        return _seconds(base) / (_seconds(base) - _layers_s(base) + layers_s)


def compare(
    experiment: str,
    contestants: Sequence[Contestant],
    workload: Workload,
    prompts: Prompts,
    repetitions: int,
) -> Iterator[Measured | Note]:
    """Measure contestants on one workload, in turn."""
    asked = prompts.draw(workload.batch, workload.prompt_tokens)
    num_hard = round(workload.hard_share * workload.batch)
    num_prompt_tokens = sum(map(len, asked))
    measured: dict[int, Measured] = {}
    notes: list[Note] = []
    present: list[Contestant] = []
    for one in contestants:
        if one.max_batch is not None and workload.batch > one.max_batch:
            notes.append(Note(one.name, f"takes at most {one.max_batch} sequence(s) at once"))
        else:
            present.append(one)
            measured[id(one)] = Measured(experiment, one.name, one.dtype, one.variant, one.kernels, workload)

    rest_s = REST_S if any(isinstance(one, Peer) for one in present) else 0.0

    def attempt(one: Contestant, new_tokens: int) -> Trial | None:
        time.sleep(rest_s)
        try:
            return one.run(asked, new_tokens, num_hard)
        except OfframpError as fault:
            notes.append(Note(one.name, str(fault)))
            present.remove(one)
            return None

    for one in list(present):
        attempt(one, 2)  # the first calls at a batch size choose kernels and fault memory in
    for repetition in range(repetitions):
        turn = repetition % max(len(present), 1)
        for one in present[turn:] + present[:turn]:
            first = attempt(one, 1)
            trial = None if first is None else attempt(one, workload.new_tokens)
            if first is not None and trial is not None:
                measured[id(one)].add(first, trial, num_prompt_tokens)
    found = [measured[id(one)] for one in present]
    bases = {one.variant: one for one in found if one.variant is not None}
    for one in found:
        if one.variant is not None and one.variant != one.variant.baseline:
            one.full_depth = bases.get(one.variant.baseline)
    yield from itertools.chain(found, notes)


def _seconds(totals: Totals) -> float:
    """Per token."""
    return totals.seconds / totals.new_tokens


def _layers_s(totals: Totals) -> float:
    """Seconds per token in the layers."""
    return totals.parts["layers"] / totals.new_tokens


def _quantile_ms(seconds: Sequence[float], share: float) -> float | None:
    if not seconds:
        return None
    ordered = sorted(seconds)
    return _figure(1e3 * ordered[min(int(share * len(ordered)), len(ordered) - 1)])


def _figure(value: float) -> float:
    """Five digits, so that a line of results can be read."""
    return float(f"{value:.5g}")
