from __future__ import annotations

import pytest

from offramp.serve.iteration_clock import PARTS, Part
from offramp.serve.metrics import (
    RECORDS_KEPT,
    EngineMetrics,
    Gauges,
    IterationRecord,
    RequestMetrics,
    SegmentRun,
    Totals,
)


def parts(**seconds: float) -> dict[Part, float]:
    return {part: seconds.get(part, 0.0) for part in PARTS}


def test_sums_go_on_when_old_records_are_dropped() -> None:
    metrics = EngineMetrics()
    for number in range(RECORDS_KEPT + 10):
        metrics.add(IterationRecord(number, parts(layers=0.5), (SegmentRun(2, 6, 3, 0.5),), new_tokens=2))
    assert len(metrics.records) == RECORDS_KEPT
    assert metrics.records[0].iteration == 10
    assert metrics.totals.iterations == RECORDS_KEPT + 10
    assert metrics.totals.new_tokens == 2 * (RECORDS_KEPT + 10)
    assert metrics.totals.row_layers == 12 * (RECORDS_KEPT + 10)
    assert metrics.totals.seconds == 0.5 * (RECORDS_KEPT + 10)
    assert Totals.of(list(metrics.records)[:3]).seconds == 1.5
    assert metrics.records[-1].after == Gauges()


def test_times_of_a_request() -> None:
    metrics = RequestMetrics(10.0)
    assert metrics.queue_s is None
    assert metrics.first_token_s is None
    assert metrics.total_s is None
    assert metrics.mean_layers is None
    assert metrics.inter_token_s == []
    metrics.scheduled_at, metrics.token_times, metrics.finished_at = 11.0, [14.0, 14.5, 14.5], 15.0
    metrics.exit_layers = [4, 1, 1]
    assert (metrics.queue_s, metrics.first_token_s, metrics.total_s) == (1.0, 4.0, 5.0)
    assert metrics.inter_token_s == [0.5, 0.0]
    assert metrics.mean_layers == pytest.approx(2)
