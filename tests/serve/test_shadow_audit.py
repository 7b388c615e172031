"""Shadow audits: what is compared, that they run while nobody waits, and that they take nobody's place."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from helpers.engines import make_engine
from helpers.fake_engine import FakeEngine
from helpers.sinks import RecordingSink, eventually
from helpers.tiny import tiny_model
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy
from offramp.serve.config import WatchSettings
from offramp.serve.engine import Engine
from offramp.serve.engine_thread import EngineThread
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.request import Request
from offramp.serve.request.sampling_params import SamplingParams
from offramp.serve.shadow_audit import Agreement, ShadowAudit
from offramp.serve.watch import Watch

EARLY = ExitOptions("fill", ExitPolicy("margin", {2: -1.0}))
"""Every token leaves."""


def greedy(name: str, tokens: int = 4, exits: ExitOptions = EARLY, temperature: float = 0.0) -> Request:
    return Request(name, (1, 2, 3), SamplingParams(max_tokens=tokens, temperature=temperature), exits)


class Audited:
    """An engine's thread whose answers are all audited."""

    def __init__(self, engine: FakeEngine, max_requests: int = 4, lease_s: float | None = None) -> None:
        self.audit = ShadowAudit(1.0)
        self.heard: list[str] = []
        self.thread = EngineThread(
            engine,
            max_requests=max_requests,
            lease_s=lease_s,
            on_iteration=self._after,
            on_finished=self.audit.finished,
        )

    def _after(self, outputs: object) -> None:
        self.heard += [output.request_id for output in outputs]  # type: ignore[attr-defined]
        self.audit.advance(self.thread)

    def ask(self, request: Request) -> RecordingSink:
        sink = RecordingSink()
        self.thread.submit(request, sink)
        return sink


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(delay_s=0.002)


@pytest.fixture
def audited(engine: FakeEngine) -> Iterator[Audited]:
    audited = Audited(engine)
    yield audited
    audited.thread.close()


def test_answers_are_made_again_and_compared(engine: FakeEngine, audited: Audited) -> None:
    for index in range(3):
        assert audited.ask(greedy(f"r{index}")).over.wait(5)
    eventually(lambda: audited.audit.found == Agreement(texts=3, same_texts=3, tokens=12, agreeing_tokens=12))
    assert engine.seen[-1].startswith("audit-")
    assert not any(name.startswith("audit-") for name in audited.heard), (
        "whoever counts answers does not hear of audits"
    )
    assert audited.audit.num_waiting == 0


def test_drawn_answers_and_those_at_full_depth_are_not_audited(engine: FakeEngine, audited: Audited) -> None:
    assert audited.ask(greedy("drawn", temperature=1.0)).over.wait(5)
    assert audited.ask(greedy("full", exits=ExitOptions("full"))).over.wait(5)
    engine.fail["failed"] = "on purpose"
    assert audited.ask(greedy("failed")).over.wait(5)
    assert audited.audit.num_waiting == 0
    assert engine.seen == ["drawn", "full", "failed"]


def test_an_audit_makes_way_and_comes_again(engine: FakeEngine, audited: Audited) -> None:
    assert audited.ask(greedy("long", tokens=200)).over.wait(5)
    eventually(lambda: "audit-0" in engine.seen)
    assert audited.thread.num_running == audited.thread.num_waiting == 0
    assert audited.ask(greedy("other", tokens=20, exits=ExitOptions("full"))).over.wait(5)
    assert "audit-0" in engine.cancelled
    eventually(lambda: audited.audit.found.texts == 1)
    assert audited.audit.found == Agreement(1, 1, 200, 200)


def test_an_audit_takes_nobodys_place(engine: FakeEngine) -> None:
    audited = Audited(engine, max_requests=2)
    try:
        assert audited.ask(greedy("long", tokens=500)).over.wait(5)
        eventually(lambda: "audit-0" in engine.seen)
        sinks = [audited.ask(greedy(name, exits=ExitOptions("full"))) for name in "ab"]
        assert all(sink.over.wait(5) for sink in sinks)
    finally:
        audited.thread.close()


def test_an_audit_needs_no_lease(engine: FakeEngine) -> None:
    audited = Audited(engine, lease_s=0.05)
    try:
        with audited.thread.attended():
            assert audited.ask(greedy("long", tokens=100)).over.wait(5)
        eventually(lambda: audited.audit.found.texts == 1)  # 100 iterations of 2 ms
        assert audited.audit.found.same_texts == 1
    finally:
        audited.thread.close()


def test_what_fails_is_dropped(engine: FakeEngine, audited: Audited) -> None:
    engine.fail["audit-0"] = "on purpose"
    assert audited.ask(greedy("a")).over.wait(5)
    assert audited.ask(greedy("b")).over.wait(5)
    eventually(lambda: audited.audit.found.texts == 1)
    assert audited.audit.num_waiting == 0


def test_a_share_is_drawn() -> None:
    audit = ShadowAudit(0.25, seed=3)
    for index in range(400):
        request = greedy(str(index))
        request.output_token_ids.append(1)
        audit.finished(request)
    assert 70 < audit.num_waiting < 130


def test_the_interval_is_wilsons() -> None:
    assert Agreement().interval == (0.0, 1.0)
    assert Agreement(texts=10, same_texts=9).interval == pytest.approx((0.5958, 0.9821), abs=1e-4)
    assert Agreement(texts=10, same_texts=10).interval == pytest.approx((0.7225, 1.0), abs=1e-4)


def test_a_real_engine_agrees_with_itself_where_it_should(make_watched: tuple[Engine, Watch, EngineThread]) -> None:
    engine, watch, thread = make_watched
    sinks: list[RecordingSink] = []
    for index, exits in enumerate((EARLY, ExitOptions("verify", EARLY.policy))):
        sinks.append(RecordingSink())
        thread.submit(greedy(f"r{index}", tokens=24, exits=exits), sinks[-1])
    assert all(sink.over.wait(20) for sink in sinks)
    eventually(lambda: watch.agreement.texts == 2)
    # Verified answers are full depth's, and random weights say something else early.
    assert watch.agreement.same_texts == 1
    assert watch.agreement.tokens == 48
    assert 24 <= watch.agreement.agreeing_tokens < 48
    assert engine.num_kept_tokens == 0


@pytest.fixture
def make_watched() -> Iterator[tuple[Engine, Watch, EngineThread]]:
    engine = make_engine(tiny_model(ExitConfig((1, 2), "norm")), num_blocks=64)
    watch = Watch(WatchSettings(audit_share=1.0))
    ready = threading.Event()

    def after(outputs: object) -> None:
        ready.wait()
        watch.advance(thread)

    thread = EngineThread(engine, max_requests=4, on_iteration=after, on_finished=watch.finished)
    ready.set()
    yield engine, watch, thread
    thread.close()
