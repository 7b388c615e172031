"""Figures of a benchmark from the times of tokens and iterations."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import pytest

from offramp.serve.bench.contestants import Identity
from offramp.serve.bench.measure import Measured
from offramp.serve.bench.plan import Variant, Workload
from offramp.serve.bench.quality import Answers, Quality
from offramp.serve.bench.trial import Question, Trial
from offramp.serve.measures.iteration_clock import PARTS
from offramp.serve.measures.records import IterationRecord, SegmentRun


def test_figures_are_made_of_the_times_of_tokens() -> None:
    trial = Trial([[1.0, 1.5, 2.0, 3.0], [2.0, 3.0, 4.0]], exit_layers=[(2.0, 9), (2.5, 1), (4.0, 2)])
    assert trial.window == (2.0, 4.0)
    assert trial.rate == 1.5  # 3.0 of the first, 3.0 and 4.0 of the second: 2.0 is not after 2.0
    assert trial.num_tokens == 7
    assert trial.gaps == [0.5, 0.5, 1.0, 1.0, 1.0]
    assert trial.first_token_s == [1.0, 2.0]
    assert trial.window_layers == [1, 2]
    assert trial.request_rate is None
    assert Trial([[1.0], [2.0]]).rate is None


def test_in_a_closed_loop_only_the_time_with_all_seats_taken_counts() -> None:
    # Two seats: the first two end at 2 and 3, their followers start then; the last one starts at 7.
    times = [[1.0, 2.0], [1.0, 3.0], [3.0, 6.0], [4.0, 7.0], [7.0, 9.0], [8.0, 12.0]]
    trial = Trial(times, starts=[0.0, 0.0, 2.0, 3.0, 6.0, 7.0], in_flight=2)
    assert trial.window == (3.0, 7.0)
    assert trial.rate == pytest.approx(4 / 4)  # 4, 6, 7 and 7; what came at 3 is warm-up, what comes after 7 the tail
    assert trial.request_rate == pytest.approx(2 / 4)
    assert trial.mean_in_flight == pytest.approx(2.0)
    assert trial.first_token_s == [1.0, 1.0]  # of those that start at 3 and 6
    assert trial.gaps == [3.0, 3.0]


def test_hard_sequences_are_spread_evenly() -> None:
    question = Question([[0]] * 8, 2, 4, hard_share=0.25)
    assert question.closed_loop
    assert [question.is_hard(index) for index in range(8)] == [False, False, False, True] * 2
    assert not any(Question([[0]] * 8, 2, 8).is_hard(index) for index in range(8))
    assert all(Question([[0]] * 8, 2, 8, hard_share=1.0).is_hard(index) for index in range(8))


def _measured(variant: Variant, depth: int, runs: Sequence[tuple[int, int, int, float]], **parts: float) -> Measured:
    """One repetition of one iteration that gives two tokens of `depth`; `runs` are (start, stop, rows, seconds)."""
    one = Measured("x", Identity("one", "fp32", variant, "plain"), Workload(2, 1, 3))
    segments = tuple(SegmentRun(*run) for run in runs)
    seconds = dict.fromkeys(PARTS, 0.0)
    seconds["layers"] = sum(run.seconds for run in segments)
    seconds.update((part, parts[part]) for part in PARTS if part in parts)
    record = IterationRecord(0, seconds, segments, decode_rows=2, new_tokens=2, token_layers=2 * depth)
    # The first tokens and the prompts come before the window.
    prompt = IterationRecord(0, dict.fromkeys(PARTS, 99.0), prefill_rows=7, new_tokens=2)
    one.add(
        Trial([[1.0, 2.0]] * 2, exit_layers=[(2.0, depth)] * 2, iterations=[(1.0, prompt), (2.0, record)]),
        prefill_rate=1.0,
    )
    return one


def test_the_ideal_speedup_leaves_only_layers_and_head() -> None:
    base = _measured(Variant(), 4, [(0, 4, 2, 16.0)], head=4.0)
    early = _measured(Variant(kv_policy="fill"), 1, [(0, 1, 2, 6.0)], head=5.0, fill=1.0)
    early.full_depth = base
    early.rates, base.rates = [3.0, None, 8.0], [2.0, 1.0, 4.0]  # the second had no window
    assert early.ideal is not None
    assert early.proportional is not None
    assert early.realised is not None
    assert early.decode_speedup is not None
    assert early.ideal.median == pytest.approx(10 / (3 + 2.5))
    assert early.proportional.median == pytest.approx(10 / (2 + 2))
    assert early.decode_speedup.median == pytest.approx(10 / 6)
    assert early.realised.median == pytest.approx(5.5 / 6)
    assert early.speedup is not None
    assert (early.speedup.median, early.speedup.low, early.speedup.high) == (1.75, 1.5, 2.0)
    assert base.ideal is None
    assert early.exit_layers == Counter({1: 2})


def test_the_gap_is_told_step_by_step() -> None:
    base = _measured(Variant(), 4, [(0, 4, 2, 16.0)], head=4.0, scheduling=2.0)  # a row of a layer takes 2 s
    early = _measured(
        Variant(kv_policy="recompute"),
        2,
        # Both tokens leave at 2, one row of an earlier token is carried on, alone.
        [(0, 2, 2, 8.0), (2, 4, 1, 6.0)],
        head=3.0,
        exit_test=1.0,
        fill=0.5,
        scheduling=2.5,
    )
    early.full_depth = base
    gap = early.gap
    assert gap is not None
    us = 1e6 / 2  # of a second of the iteration, per token
    assert gap.full_depth_us == pytest.approx(22 * us)
    assert gap.by_layers_us == pytest.approx((8 + 4 + 2) * us)
    assert gap.steps == {
        "carried_on": pytest.approx(4 * us),
        "smaller_batches": pytest.approx(2 * us),
        "exit_test": pytest.approx(1 * us),
        "fill": pytest.approx(0.5 * us),
        "head": pytest.approx(-1 * us),
        "rest": pytest.approx(0.5 * us),
    }
    assert gap.by_layers_us + sum(gap.steps.values()) == pytest.approx(gap.realised_us)
    assert gap.realised_us == pytest.approx(sum(early.part_us.values()))
    assert early.rows_per_layer == pytest.approx(1.5)


def test_the_share_of_prefill_is_what_newest_tokens_leave() -> None:
    one = Measured("x", Identity("one", "fp32", Variant(), "plain"), Workload(1, 1, 3, requests=3))
    alone = IterationRecord(0, {**dict.fromkeys(PARTS, 0.0), "layers": 2.0}, decode_rows=2, new_tokens=2)
    mixed = IterationRecord(
        1, {**dict.fromkeys(PARTS, 0.0), "layers": 6.0}, decode_rows=2, prefill_rows=9, new_tokens=3
    )
    one.iterations = [alone, mixed]
    assert one.prefill_share == pytest.approx((6 - 2) / 8)
    one.iterations = [mixed]
    assert one.prefill_share is None


def test_a_ratio_to_nothing_is_unknown_in_json() -> None:
    one = _measured(Variant(), 4, [(0, 4, 2, 16.0)])
    nothing = Answers(["", ""], [0.0, 0.0], Counter())
    one.quality = Quality.of(nothing, nothing)
    row = one.to_json()
    assert (row["quality_ratio"], row["quality_same_texts"]) == (None, 1.0)
    json.dumps(row, allow_nan=False)
