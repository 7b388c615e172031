"""Lets contestants take turns, and adds up.

Machines are noisy and drift, so nothing is measured alone: every repetition runs all contestants one after the other,
each time beginning with another one, and a speed-up is the median of ratios within a repetition.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from offramp.common.errors import OfframpError
from offramp.serve.bench.contestants import Contestant, Identity
from offramp.serve.bench.gap import STEPS, Gap
from offramp.serve.bench.plan import Workload
from offramp.serve.bench.prompts import Prompts
from offramp.serve.bench.quality import Quality
from offramp.serve.bench.trial import Question, Trial
from offramp.serve.measures.iteration_clock import PARTS, Part
from offramp.serve.measures.records import IterationRecord, Totals

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
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """The spread of the figures that are known; None if none is."""
        found = [value for value in values if value is not None]
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
    """All repetitions of one contestant on one workload. What counts is what lies in the window of `Trial`.

    Attributes:
        experiment: which.
        who: the contestant.
        workload: what was asked.
        rates: tokens per second in the window, of each repetition; None without a window.
        prefill: prompt tokens per second, of each repetition, in a run that ends with the first tokens; empty in a
            closed loop.
        whole: tokens per second from the start to the last token, of each repetition.
        request_rates: sequences that end per second, of each repetition of a closed loop.
        in_flight: mean number of sequences under way, of each repetition.
        first_token_s: median time to the first token, of each repetition.
        gaps: seconds between neighbouring tokens, of all repetitions.
        exit_layers: how many of the tokens, beginnings of sequences apart, ran so many layers.
        decoding: sums over the engine's iterations that only decode, of each repetition.
        iterations: the engine's iterations, of all repetitions.
        segments: (layers before, layers after, rows) -> seconds of each run of iterations that only decode.
        full_depth: the same engine at full depth in the same repetitions; None for others, and for itself.
        shortlist_full_depth: the same at full depth with a head of the shortlist only.
        quality: of its texts; None if nobody asked, or it makes none.
    """

    experiment: str
    who: Identity
    workload: Workload
    rates: list[float | None] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    request_rates: list[float] = field(default_factory=list)
    in_flight: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    exit_layers: Counter[int] = field(default_factory=Counter)
    decoding: list[Totals] = field(default_factory=list)
    iterations: list[IterationRecord] = field(default_factory=list)
    segments: dict[tuple[int, int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    full_depth: Measured | None = None
    shortlist_full_depth: Measured | None = None
    quality: Quality | None = None

    def add(self, trial: Trial, prefill_rate: float | None = None) -> None:
        """Take a repetition in.

        Args:
            trial: a run of all tokens.
            prefill_rate: prompt tokens per second, where they were measured.
        """
        if prefill_rate is not None:
            self.prefill.append(prefill_rate)
        self.whole.append(trial.num_tokens / trial.total_s)
        self.rates.append(trial.rate)
        for figures, figure in (
            (self.request_rates, trial.request_rate),
            (self.in_flight, trial.mean_in_flight),
            (self.first_token_s, statistics.median(trial.first_token_s) if trial.first_token_s else None),
        ):
            if figure is not None:
                figures.append(figure)
        self.gaps += trial.gaps
        self.exit_layers.update(trial.window_layers)
        records = trial.window_iterations
        self.iterations += records
        decoding = [record for record in records if not record.prefill_rows]
        self.decoding.append(Totals.of(decoding))
        for record in decoding:
            for run in record.segments:
                self.segments[run.start, run.stop, run.rows].append(run.seconds)

    @property
    def mean_layers(self) -> float | None:
        """Layers run per token; None if that is not known."""
        count = self.exit_layers.total()
        return sum(layer * n for layer, n in self.exit_layers.items()) / count if count else None

    @property
    def decoding_total(self) -> Totals:
        """Sums over the iterations of all repetitions that only decode."""
        return Totals.of(record for record in self.iterations if not record.prefill_rows)

    @property
    def part_us(self) -> dict[Part, float]:
        """Microseconds per token by part, in iterations that only decode; empty if that is not known."""
        total = self.decoding_total
        if not total.new_tokens:
            return {}
        return {part: 1e6 * total.parts[part] / total.new_tokens for part in PARTS}

    @property
    def rows_per_iteration(self) -> float | None:
        """Rows of an iteration that only decodes, on average; None if that is not known."""
        total = self.decoding_total
        return total.decode_rows / total.iterations if total.iterations else None

    @property
    def rows_per_layer(self) -> float | None:
        """Rows that a layer runs on when it is called, on average over layers and iterations that only decode."""
        runs = [(stop - start, rows, len(times)) for (start, stop, rows), times in self.segments.items()]
        calls = sum(layers * count for layers, _, count in runs)
        return sum(layers * rows * count for layers, rows, count in runs) / calls if calls else None

    @property
    def prefill_share(self) -> float | None:
        """Share of the window's time that prompts took; None if that is not known.

        Iterations that mix prompts with newest tokens are charged to prompts, but for what their newest tokens would
        have taken in iterations that only decode.
        """
        every, alone = Totals.of(self.iterations), self.decoding_total
        if not every.seconds or not alone.decode_rows:
            return None
        return max(0.0, 1 - every.decode_rows * (alone.seconds / alone.decode_rows) / every.seconds)

    @property
    def speedup(self) -> Spread | None:
        """Speed over that at full depth, repetition by repetition."""
        return self._speedup_over(self.full_depth)

    @property
    def speedup_over_shortlist_head(self) -> Spread | None:
        """Speed over that at full depth with a head of the shortlist only, repetition by repetition."""
        return self._speedup_over(self.shortlist_full_depth)

    @property
    def decode_speedup(self) -> Spread | None:
        """The same speed-up of iterations that only decode: what `ideal` and `proportional` are to be compared with."""
        return Spread.of(_seconds(base) / _seconds(mine) for mine, base in self._pairs())

    @property
    def ideal(self) -> Spread | None:
        """The speed-up of decoding if leaving itself were free, repetition by repetition.

        Layers and head take what they took in these very runs, on the rows that were there; all the rest (sampling,
        scheduling) takes what it took at full depth. What the realised speed-up lacks of it went into exit tests,
        fills, regrouping and their bookkeeping.
        """
        return Spread.of(_ideal_speedup(mine, base) for mine, base in self._pairs())

    @property
    def proportional(self) -> Spread | None:
        """The speed-up of decoding if a token's time in the layers were in proportion to the layers it ran, likewise.

        What `ideal` lacks of it went into smaller batches, which run less well, and under `recompute` and `verify`
        into carrying early tokens on to the end.
        """

        def share(mine: Totals, base: Totals) -> float:
            return mine.token_layers / mine.new_tokens / (base.token_layers / base.new_tokens)

        return Spread.of(
            _seconds(base) / (_seconds(base) - (1 - share(mine, base)) * _part_s(base, "layers"))
            for mine, base in self._pairs()
        )

    @property
    def realised(self) -> Spread | None:
        """The share of the ideal speed-up that was reached, repetition by repetition."""
        return Spread.of(_seconds(base) / _seconds(mine) / _ideal_speedup(mine, base) for mine, base in self._pairs())

    @property
    def gap(self) -> Gap | None:
        """Where the gap between skipped layers and realised speed goes, over all repetitions."""
        return None if self.full_depth is None else Gap.between(self.decoding_total, self.full_depth.decoding_total)

    def to_json(self) -> dict[str, Any]:
        """Plain containers, for one line of JSON."""
        load, variant = self.workload, self.who.variant
        row: dict[str, Any] = {
            "experiment": self.experiment,
            "contestant": self.who.name,
            "dtype": self.who.dtype,
            "kernels": self.who.kernels,
            "kv_policy": None if variant is None else variant.kv_policy,
            "threshold": None if variant is None else variant.threshold,
            "exit_layer": None if variant is None else variant.exit_layer,
            "head": None if variant is None else variant.head,
            # Text, because which fields there are is a matter of the variant.
            "engine": None if variant is None else json.dumps(dict(variant.engine)),
            "policy": None if variant is None else json.dumps(dict(variant.policy)),
            "batch": load.batch,
            "prompt_tokens": load.prompt_tokens,
            "new_tokens": load.new_tokens,
            "hard_share": load.hard_share,
            "closed_loop": load.requests is not None,
            "sequences": load.num_sequences,
            "repetitions": len(self.whole),
        }
        spreads = {
            "tokens_per_s": Spread.of(self.rates),
            "prefill_tokens_per_s": Spread.of(self.prefill),
            "total_tokens_per_s": Spread.of(self.whole),
            "requests_per_s": Spread.of(self.request_rates),
            "first_token_ms": Spread.of(1e3 * seconds for seconds in self.first_token_s),
            "speedup": self.speedup,
            "speedup_over_shortlist_head": self.speedup_over_shortlist_head,
            "decode_speedup": self.decode_speedup,
            "ideal_speedup": self.ideal,
            "proportional_speedup": self.proportional,
            "realised_share": self.realised,
        }
        for name, spread in spreads.items():
            row[name] = None if spread is None else figure(spread.median)
            row[f"{name}_lowest"] = None if spread is None else figure(spread.low)
            row[f"{name}_highest"] = None if spread is None else figure(spread.high)
        plain = {
            "inter_token_ms_p50": _quantile_ms(self.gaps, 0.50),
            "inter_token_ms_p99": _quantile_ms(self.gaps, 0.99),
            "in_flight": statistics.fmean(self.in_flight) if self.in_flight else None,
            "rows_per_iteration": self.rows_per_iteration,
            "rows_per_layer": self.rows_per_layer,
            "prefill_share": self.prefill_share,
            "mean_layers": self.mean_layers,
        }
        part_us, gap, quality = self.part_us, self.gap, self.quality
        plain |= {f"{part}_us_per_token": part_us.get(part) for part in PARTS}
        plain["gap_full_depth_us"] = None if gap is None else gap.full_depth_us
        plain["gap_by_layers_us"] = None if gap is None else gap.by_layers_us
        plain |= {f"gap_{step}_us": None if gap is None else gap.steps[step] for step in STEPS}
        plain["gap_realised_us"] = None if gap is None else gap.realised_us
        for name in ("rouge_l", "ratio", "ratio_low", "ratio_high", "same_texts", "prompts"):
            plain[f"quality_{name}"] = None if quality is None else getattr(quality, name)
        # NaN, the ratio to nothing, is no JSON.
        row |= {name: None if value is None or value != value else figure(value) for name, value in plain.items()}
        row["exit_layers"] = {str(layer): self.exit_layers[layer] for layer in sorted(self.exit_layers)}
        row["segments"] = [
            {
                "start": start,
                "stop": stop,
                "rows": rows,
                "runs": len(times),
                "us": figure(1e6 * statistics.median(times)),
            }
            for (start, stop, rows), times in sorted(self.segments.items())
        ]
        return row

    def _speedup_over(self, base: Measured | None) -> Spread | None:
        if base is None:
            return None
        pairs = zip(self.rates, base.rates, strict=False)  # one of them may have failed on the way
        return Spread.of(a / b for a, b in pairs if a is not None and b is not None)

    def _pairs(self) -> Iterator[tuple[Totals, Totals]]:
        """Iterations that only decode, mine and at full depth, repetition by repetition."""
        if self.full_depth is not None:
            for mine, base in zip(self.decoding, self.full_depth.decoding, strict=False):
                if mine.new_tokens and base.new_tokens:
                    yield mine, base


def compare(
    experiment: str,
    contestants: Sequence[Contestant],
    workload: Workload,
    prompts: Prompts,
    repetitions: int,
    until_eos: bool = False,
) -> Iterator[Measured | Note]:
    """Measure contestants on one workload, in turn."""
    asked = prompts.draw(workload.num_sequences, workload.prompt_tokens)
    question = Question(asked, workload.new_tokens, workload.batch, until_eos, workload.hard_share)
    measured: dict[int, Measured] = {}
    notes: list[Note] = []
    present: list[Contestant] = []
    for one in contestants:
        if (objection := one.who.objection(question)) is not None:
            notes.append(Note(one.who.name, objection))
        else:
            present.append(one)
            measured[id(one)] = Measured(experiment, one.who, workload)

    rest_s = REST_S if any(one.who.own_process for one in present) else 0.0

    def attempt(one: Contestant, question: Question) -> Trial | None:
        time.sleep(rest_s)
        try:
            return one.run(question)
        except OfframpError as fault:
            notes.append(Note(one.who.name, str(fault)))
            present.remove(one)
            return None

    # All that start together; in a closed loop a prefill of its own would tell nothing of it.
    start = asked[: workload.batch]
    num_prompt_tokens = sum(map(len, start))
    for one in list(present):
        # The first calls at a batch size choose kernels and fault memory in.
        attempt(one, Question(start, 2, workload.batch))
    for repetition in range(repetitions):
        turn = repetition % max(len(present), 1)
        for one in present[turn:] + present[:turn]:
            rate = None
            if not question.closed_loop:
                first = attempt(one, Question(start, 1, workload.batch, hard_share=workload.hard_share))
                if first is None:
                    continue
                rate = num_prompt_tokens / first.total_s
            trial = attempt(one, question)
            if trial is not None:
                measured[id(one)].add(trial, rate)
    found = [measured[id(one)] for one in present]
    bases = {one.who.variant: one for one in found if one.who.variant is not None}
    for one in found:
        variant = one.who.variant
        if variant is not None and variant != variant.baseline:
            one.full_depth = bases.get(variant.baseline)
            if variant != variant.shortlist_baseline:
                one.shortlist_full_depth = bases.get(variant.shortlist_baseline)
    yield from itertools.chain(found, notes)


def figure(value: float) -> float:
    """Five digits, so that a line of results can be read."""
    return float(f"{value:.5g}")


def _seconds(totals: Totals) -> float:
    """Per token."""
    return totals.seconds / totals.new_tokens


def _part_s(totals: Totals, part: Part) -> float:
    """Seconds per token in one part."""
    return totals.parts[part] / totals.new_tokens


def _ideal_speedup(mine: Totals, base: Totals) -> float:
    """See `Measured.ideal`."""
    saved = sum(_part_s(base, part) - _part_s(mine, part) for part in ("layers", "head"))
    return _seconds(base) / (_seconds(base) - saved)


def _quantile_ms(seconds: Sequence[float], share: float) -> float | None:
    if not seconds:
        return None
    ordered = sorted(seconds)
    return 1e3 * ordered[min(int(share * len(ordered)), len(ordered) - 1)]
