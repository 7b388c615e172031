"""What takes long before a request can start: compiling the language of its answer, beside the loop."""

from __future__ import annotations

import threading
import time
import types
from collections.abc import Iterator

import pytest

from helpers.fake_engine import FakeEngine
from helpers.sinks import RecordingSink, eventually, request
from offramp.common.errors import OfframpError
from offramp.serve.engine_thread import EngineStoppedError, EngineThread
from offramp.serve.request.constraint import Constraint
from offramp.serve.request.request import Request
from offramp.serve.scheduling.scheduler import QueueFullError


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(delay_s=0.002)


@pytest.fixture
def thread(engine: FakeEngine) -> Iterator[EngineThread]:
    thread = EngineThread(engine, max_requests=8)
    yield thread
    thread.close()


def test_what_takes_long_before_a_request_starts_holds_nobody_up(engine: FakeEngine, thread: EngineThread) -> None:
    busy, go_on = threading.Event(), threading.Event()

    def prepare(slow: Request) -> None:
        busy.set()
        assert go_on.wait(5)

    engine.on_prepare = prepare
    slow, gone, other = RecordingSink(), RecordingSink(), RecordingSink()
    thread.submit(request("slow", constraint=Constraint("json")), slow)
    thread.submit(request("gone", constraint=Constraint("json")), gone)
    assert busy.wait(5)
    thread.submit(request("other", 20), other)  # nor does this call wait
    assert other.over.wait(5)
    assert len(other.outputs) == 20
    assert engine.seen == ["other"]
    assert thread.is_new(["slow"])
    assert thread.is_unprepared(["slow"])
    assert thread.num_waiting == 2
    assert thread.cancel("gone")
    go_on.set()
    assert slow.over.wait(5)
    assert slow.text == " 0 1 2 3"
    eventually(lambda: not thread.is_new(["slow"]))
    assert engine.seen == ["other", "slow"]
    assert not gone.outputs
    assert not gone.failures


def test_a_request_that_cannot_be_prepared_fails_alone(engine: FakeEngine, thread: EngineThread) -> None:
    def prepare(bad: Request) -> None:
        if bad.request_id == "bad":
            raise OfframpError("no such language.")

    engine.on_prepare = prepare
    bad, good = RecordingSink(), RecordingSink()
    thread.submit(request("bad", constraint=Constraint("json")), bad)
    thread.submit(request("good", constraint=Constraint("json")), good)
    assert bad.over.wait(5)
    assert good.over.wait(5)
    assert [str(cause) for _, cause in bad.failures] == ["no such language."]
    assert good.text == " 0 1 2 3"
    assert not thread.is_new(["bad", "good"])
    assert not thread.is_unprepared(["bad", "good"])


def test_close_waits_for_what_is_being_prepared_and_prepares_nothing_more(engine: FakeEngine) -> None:
    prepared: list[str] = []
    busy = threading.Event()

    def prepare(slow: Request) -> None:
        busy.set()
        time.sleep(0.1)
        prepared.append(slow.request_id)

    engine.on_prepare = prepare
    before = threading.active_count()
    thread = EngineThread(engine, max_requests=8)
    sinks = [RecordingSink() for _ in range(3)]
    for number, sink in enumerate(sinks):
        thread.submit(request(str(number), constraint=Constraint("json")), sink)
    assert busy.wait(5)
    thread.close()
    assert threading.active_count() == before
    assert prepared == ["0"]
    assert all(isinstance(sink.failures[0][1], EngineStoppedError) for sink in sinks)


def test_an_id_comes_again_while_the_first_one_of_it_is_prepared(engine: FakeEngine, thread: EngineThread) -> None:
    busy, go_on = threading.Event(), threading.Event()

    def prepare(slow: Request) -> None:
        if slow.sampling.max_tokens == 9:
            busy.set()
            assert go_on.wait(30)

    engine.on_prepare = prepare
    first, second = RecordingSink(), RecordingSink()
    thread.submit(request("x", 9, Constraint("json")), first)
    assert busy.wait(5)
    thread.cancel("x")
    thread.submit(request("x", 3, Constraint("json")), second)
    go_on.set()
    assert second.over.wait(30)
    assert second.text == " 0 1 2"
    assert not second.failures
    assert engine.seen == ["x"], "the first one never got there"
    assert not first.outputs
    assert not first.failures


def test_an_id_comes_again_while_the_first_one_of_it_fails_to_prepare(engine: FakeEngine, thread: EngineThread) -> None:
    busy, go_on = threading.Event(), threading.Event()

    def prepare(bad: Request) -> None:
        busy.set()
        assert go_on.wait(30)
        raise OfframpError("no such language.")

    engine.on_prepare = prepare
    first, second = RecordingSink(), RecordingSink()
    thread.submit(request("x", constraint=Constraint("json")), first)
    assert busy.wait(5)
    thread.cancel("x")
    thread.submit(request("x", 3), second)
    go_on.set()
    assert second.over.wait(30)
    assert (second.text, second.failures) == (" 0 1 2", [])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the thread reads, in place of the time."""
    now = [0.0]
    monkeypatch.setattr("offramp.serve.engine_thread.time", types.SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_who_takes_too_long_to_prepare_is_refused_and_who_waits_for_it_hears_that_it_may_come_again(
    clock: list[float], engine: FakeEngine, thread: EngineThread
) -> None:
    busy, go_on = threading.Event(), threading.Event()

    def prepare(slow: Request) -> None:
        busy.set()
        assert go_on.wait(30)

    engine.on_prepare = prepare
    slow, waits, later = RecordingSink(), RecordingSink(), RecordingSink()
    thread.submit(request("slow", constraint=Constraint("json")), slow)
    assert busy.wait(5)
    thread.submit(request("waits", constraint=Constraint("json")), waits)
    clock[0] = 3.0
    thread.submit(request("later", constraint=Constraint("json")), later)
    clock[0] = 10.0
    thread.refuse_overdue(10.0)
    assert thread.is_unprepared(["slow"])
    assert thread.is_unprepared(["waits"])
    clock[0] = 10.5
    thread.refuse_overdue(10.0)
    assert slow.over.wait(30)
    assert waits.over.wait(30)
    assert "not compiled after 10 s" in str(slow.failures[0][1])
    assert not isinstance(slow.failures[0][1], QueueFullError)
    assert isinstance(waits.failures[0][1], QueueFullError)
    go_on.set()
    assert later.over.wait(30)
    assert later.text == " 0 1 2 3"
    assert engine.seen == ["later"]


def test_the_time_to_prepare_begins_with_the_turn(clock: list[float], engine: FakeEngine, thread: EngineThread) -> None:
    busy = {name: threading.Event() for name in ("first", "second")}
    go_on = {name: threading.Event() for name in busy}

    def prepare(slow: Request) -> None:
        busy[slow.request_id].set()
        assert go_on[slow.request_id].wait(30)

    engine.on_prepare = prepare
    sinks = {name: RecordingSink() for name in busy}
    for name, sink in sinks.items():
        thread.submit(request(name, constraint=Constraint("json")), sink)
    assert busy["first"].wait(30)
    clock[0] = 9.0
    go_on["first"].set()
    assert busy["second"].wait(30)
    clock[0] = 18.0
    thread.refuse_overdue(10.0)
    go_on["second"].set()
    for sink in sinks.values():
        assert sink.over.wait(30)
        assert (sink.text, sink.failures) == (" 0 1 2 3", [])


def test_a_known_language_waits_for_no_other(engine: FakeEngine, thread: EngineThread) -> None:
    busy = {name: threading.Event() for name in ("one", "two")}
    go_on = {name: threading.Event() for name in busy}

    def prepare(slow: Request) -> None:
        if slow.request_id in busy:
            busy[slow.request_id].set()
            assert go_on[slow.request_id].wait(30)
        engine.known.add(slow.sampling.constraint)

    engine.on_prepare = prepare
    sinks = {name: RecordingSink() for name in ("one", "two", "same", "again")}
    thread.submit(request("one", constraint=Constraint("regex", "a")), sinks["one"])
    assert busy["one"].wait(30)
    thread.submit(request("two", constraint=Constraint("regex", "b")), sinks["two"])
    thread.submit(request("same", constraint=Constraint("regex", "a")), sinks["same"])
    go_on["one"].set()
    assert busy["two"].wait(30)
    assert sinks["same"].over.wait(30), "it became known while it waited"
    thread.submit(request("again", constraint=Constraint("regex", "a")), sinks["again"])
    assert sinks["again"].over.wait(30)
    assert not sinks["two"].over.is_set()
    go_on["two"].set()
    assert sinks["two"].over.wait(30)
    assert all(sink.text == " 0 1 2 3" for sink in sinks.values())


def test_a_language_known_to_be_bad_is_refused_at_once(
    engine: FakeEngine, thread: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def known(bad: Request) -> bool:
        raise OfframpError("no such language.")

    monkeypatch.setattr(engine, "prepare_known", known)
    sink = RecordingSink()
    thread.submit_all([request("a"), request("b")], sink)
    eventually(lambda: len(sink.failures) == 2)
    assert {str(cause) for _, cause in sink.failures} == {"no such language."}
    assert engine.seen == []
