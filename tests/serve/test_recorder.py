from __future__ import annotations

import pytest

from helpers.engines import drain, make_engine
from helpers.tiny import tiny_model
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy
from offramp.serve.measures.iteration_clock import PARTS, Part
from offramp.serve.measures.records import (
    RECORDS_KEPT,
    EngineMetrics,
    Gauges,
    IterationRecord,
    RequestMetrics,
    SegmentRun,
    Totals,
)
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.request import Request
from offramp.serve.request.sampling_params import SamplingParams


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


def test_the_engine_records_its_iterations_and_gives_each_request_its_times() -> None:
    engine = make_engine(tiny_model(ExitConfig((1,), "norm")), num_blocks=8, kernels="plain")
    leave = ExitPolicy("cosine", {1: -2.0})
    sometimes = ExitPolicy("cosine", {1: 0.45})  # what left is filled in when the next token goes past
    kinds = (ExitOptions("full"), ExitOptions("fill", sometimes), ExitOptions("recompute", leave, max_pending=2))
    sampling = SamplingParams(max_tokens=10, temperature=0)
    requests = [Request(str(index), (5, 6, 7, 8, 9), sampling, kind) for index, kind in enumerate(kinds)]
    for request in requests:
        engine.add_request(request)
    outputs = drain(engine)
    last = {output.request_id: output.metrics for output in outputs if output.finish_reason is not None}
    assert all(output.metrics is None for output in outputs if output.finish_reason is None)
    for request in requests:
        metrics = last[request.request_id]
        assert metrics is not None
        assert len(metrics.token_times) == 10
        assert metrics.exit_layers == request.exit_layers
        assert metrics.confidences == request.confidences
        assert metrics.queue_s is not None
        assert metrics.first_token_s is not None
        assert metrics.total_s is not None
        assert 0 <= metrics.queue_s < metrics.first_token_s < metrics.total_s
        assert min(metrics.inter_token_s) > 0

    # 5 + 10 tokens fill four blocks of four, so eight blocks do not hold three requests.
    totals = engine.metrics.totals
    preemptions = [metrics.preemptions for metrics in last.values() if metrics is not None]
    assert sum(preemptions) == totals.preemptions > 0
    assert totals.new_tokens == 30
    assert totals.token_layers == sum(sum(request.exit_layers) for request in requests)
    assert totals.filled_rows > 0
    assert totals.pending_rows > 0
    records = list(engine.metrics.records)
    assert [record.iteration for record in records] == list(range(len(records)))
    assert all(record.row_layers >= record.decode_rows + record.prefill_rows for record in records)
    assert all(record.parts["layers"] > 0 for record in records)
    # Every row that was decoded or prefilled entered at the bottom; carried rows join further up.
    assert sum(run.rows for record in records for run in record.segments if run.start == 0) == (
        totals.decode_rows + totals.prefill_rows
    )
    assert records[-1].after == Gauges(0, 0, 0, records[-1].after.cached_blocks, 8)


def test_an_iteration_without_rows_has_run_nothing() -> None:
    engine = make_engine(tiny_model(), kernels="plain")
    engine.add_request(Request("a", (5, 6), SamplingParams(max_tokens=2)))
    drain(engine)
    engine.step()
    assert engine.metrics.records[-2].segments
    assert engine.metrics.records[-1].segments == ()


def test_prefix_hits_are_counted_and_cancelled_requests_are_forgotten() -> None:
    engine = make_engine(tiny_model(), kernels="plain")
    prompt = tuple(range(5, 18))
    for index in range(2):
        engine.add_request(Request(str(index), prompt, SamplingParams(max_tokens=2, temperature=0)))
        (metrics,) = [output.metrics for output in drain(engine) if output.metrics is not None]
        assert metrics.cached_tokens == 12 * index  # three blocks of four; the last token of the prompt is never one
    assert engine.metrics.totals.prefix_hit_tokens == 12
    engine.add_request(Request("gone", prompt, SamplingParams(max_tokens=9)))
    engine.step()
    engine.cancel("gone")
    assert engine._recorder.num_requests == 0
