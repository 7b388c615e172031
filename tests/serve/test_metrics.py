from __future__ import annotations

from offramp.serve.measures.iteration_clock import PARTS, Part
from offramp.serve.measures.records import EngineMetrics, Gauges, IterationRecord, RequestMetrics
from offramp.serve.metrics import METRICS, MetricsReporter
from offramp.serve.request.output import RequestOutput, Usage
from offramp.serve.watch import Watch


def parts(**seconds: float) -> dict[Part, float]:
    return {part: seconds.get(part, 0.0) for part in PARTS}


class Front:
    """A reporter, what it emitted since it was last asked, and the engine it reports on."""

    def __init__(self) -> None:
        self.now = 100.0
        self.engine = EngineMetrics()
        self._emitted: list[tuple[str, float]] = []
        self.reporter = MetricsReporter(
            lambda name, value: self._emitted.append((name, value)), self.engine, clock=lambda: self.now
        )

    def iterate(self, tokens: int, layers: int, running: int = 1, waiting: int = 0) -> None:
        number = self.engine.totals.iterations
        self.engine.add(
            IterationRecord(
                number,
                parts(layers=0.25, head=0.5),
                new_tokens=tokens,
                token_layers=tokens * layers,
                after=Gauges(live_blocks=number, free_blocks=9),
            )
        )
        outputs = [RequestOutput("r", (5,) * tokens, (layers,) * tokens, (), "", None, Usage(1, tokens))]
        self.reporter.observe(outputs, running, waiting)

    def emitted(self) -> dict[str, float]:
        found = dict(self._emitted)
        assert set(found) <= set(METRICS)
        self._emitted.clear()
        return found


def test_sums_of_the_engine_are_emitted_once_a_second_and_when_it_goes_idle() -> None:
    front = Front()
    front.iterate(tokens=1, layers=4, waiting=2)
    assert front.emitted() == {
        "offramp_running_requests": 1,
        "offramp_waiting_requests": 2,
        "offramp_generated_tokens_total": 1,
        "offramp_iterations_total": 1,
        "offramp_layers_seconds_total": 0.25,
        "offramp_head_seconds_total": 0.5,
        "offramp_mean_layers": 4,
        "offramp_live_blocks": 0,
        "offramp_cached_blocks": 0,
        "offramp_free_blocks": 9,
    }
    for index in range(50):
        front.now += 0.01
        front.iterate(tokens=2, layers=1 + 2 * (index % 2))
    assert front.emitted() == {}
    front.reporter.observe([], running=0, waiting=0)
    found = front.emitted()
    assert found["offramp_running_requests"] == 0
    assert found["offramp_generated_tokens_total"] == 100
    assert found["offramp_mean_layers"] == 2
    assert found["offramp_layers_seconds_total"] == 12.5
    assert found["offramp_live_blocks"] == 50
    # Nothing has happened since: gauges of an idle engine are not worth a line of log each time.
    front.reporter.observe([], running=0, waiting=0)
    assert front.emitted() == {"offramp_running_requests": 0, "offramp_waiting_requests": 0}


def test_what_a_model_sees_of_itself_is_emitted_with_the_sums() -> None:
    watch = Watch()
    emitted: list[tuple[str, float]] = []
    engine, now = EngineMetrics(), [0.0]
    reporter = MetricsReporter(lambda name, value: emitted.append((name, value)), engine, watch, clock=lambda: now[0])
    for number in range(3):
        engine.add(IterationRecord(number, parts()))
        if number:
            watch.agreement.texts += 2
            watch.agreement.same_texts += 1
        now[0] += 1
        reporter.observe([], running=1, waiting=0)
    found = [(name, value) for name, value in emitted if "audit" in name]
    counts = [("offramp_audited_texts_total", 2), ("offramp_audited_same_texts_total", 1)]
    assert [one for one in found if one[0].endswith("_total")] == [*counts, *counts]
    assert ("offramp_audit_agreement", 0.5) in found
    assert {name for name, _ in found} <= set(METRICS)


def test_times_of_a_request_are_emitted_with_its_last_output() -> None:
    front = Front()
    front.now += 0.5
    metrics = RequestMetrics(10.0, scheduled_at=12.0, token_times=[13.0, 13.5, 15.0])
    outputs = [
        RequestOutput("r", (5,), (4,), (), "", None, Usage(1, 1)),
        RequestOutput("r", (5,), (4,), (), "", "stop", Usage(1, 1), metrics=metrics),
    ]
    front.reporter.observe(outputs, running=1, waiting=0)
    found = front.emitted()
    assert found["offramp_queue_seconds"] == 2
    assert found["offramp_inter_token_seconds"] == 1
