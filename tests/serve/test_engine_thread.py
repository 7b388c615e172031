from __future__ import annotations

import threading
import time
import types
from collections.abc import Callable, Iterator

import pytest

from helpers.fake_engine import FakeEngine
from offramp.common.errors import OfframpError
from offramp.serve.engine_thread import EngineStoppedError, EngineThread, OrphanedError
from offramp.serve.request.constraint import Constraint
from offramp.serve.request.output import RequestOutput
from offramp.serve.request.request import Request
from offramp.serve.request.sampling_params import SamplingParams
from offramp.serve.scheduling.scheduler import QueueFullError


class Recorder:
    """A sink that keeps everything and can be waited for."""

    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []
        self.failures: list[tuple[str, Exception]] = []
        self.over = threading.Event()

    def put(self, output: RequestOutput) -> None:
        self.outputs.append(output)
        if output.finish_reason is not None:
            self.over.set()

    def fail(self, request_id: str, cause: Exception) -> None:
        self.failures.append((request_id, cause))
        self.over.set()

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)


def request(name: str, max_tokens: int = 4, constraint: Constraint | None = None) -> Request:
    return Request(name, (1, 2), SamplingParams(max_tokens=max_tokens, constraint=constraint))


def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.005)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(delay_s=0.002)


@pytest.fixture
def thread(engine: FakeEngine) -> Iterator[EngineThread]:
    thread = EngineThread(engine, max_requests=8)
    yield thread
    thread.close()


def test_every_request_gets_its_own_outputs_in_order(thread: EngineThread) -> None:
    sinks = {f"r{i}": Recorder() for i in range(8)}
    for i, (name, sink) in enumerate(sinks.items()):
        thread.submit(request(name, max_tokens=i + 1), sink)
    for i, (name, sink) in enumerate(sinks.items()):
        assert sink.over.wait(5)
        assert sink.text == "".join(f" {token}" for token in range(i + 1))
        assert {output.request_id for output in sink.outputs} == {name}
    assert thread.num_running == thread.num_waiting == 0


def test_requests_join_while_others_run(engine: FakeEngine, thread: EngineThread) -> None:
    long, short = Recorder(), Recorder()
    thread.submit(request("long", 500), long)
    eventually(lambda: len(long.outputs) > 3)
    thread.submit(request("short", 3), short)
    assert short.over.wait(5)
    assert not long.over.is_set()


def test_a_cancelled_request_is_silent_and_leaves_the_engine(engine: FakeEngine, thread: EngineThread) -> None:
    sink, other = Recorder(), Recorder()
    thread.submit(request("gone", 10_000), sink)
    thread.submit(request("stays", 20), other)
    eventually(lambda: len(sink.outputs) > 2)
    assert thread.cancel("gone")
    eventually(lambda: engine.cancelled == ["gone"])
    heard = len(sink.outputs)
    assert other.over.wait(5)
    assert len(sink.outputs) <= heard + 1
    assert not sink.failures
    assert not thread.cancel("gone"), "it was live only once"
    assert not thread.cancel("never heard of")


def test_a_full_queue_refuses_all_requests_of_a_call_or_none(engine: FakeEngine, thread: EngineThread) -> None:
    sink = Recorder()
    thread.submit_all([request(f"a{i}", 10_000) for i in range(6)], sink)
    with pytest.raises(QueueFullError, match="takes 8"):
        thread.submit_all([request(f"b{i}") for i in range(3)], sink)
    late = Recorder()
    thread.submit_all([request("c0", 2), request("c1", 2)], late)
    eventually(lambda: len(engine.seen) == 8)
    assert not any(name.startswith("b") for name in engine.seen)


def test_the_engine_never_holds_more_than_the_limit(engine: FakeEngine, thread: EngineThread) -> None:
    go_on = threading.Event()
    sink, late = Recorder(), Recorder()
    thread.submit_all([request(f"a{i}", 10_000) for i in range(8)], sink)
    eventually(lambda: bool(sink.outputs))
    engine.on_step = go_on.wait
    for i in range(8):
        thread.cancel(f"a{i}")
    thread.submit_all([request(f"b{i}") for i in range(8)], late)
    go_on.set()
    assert late.over.wait(5)
    assert len(engine.seen) == 16
    assert engine.most_live == 8


def test_a_request_that_the_engine_refuses_fails_alone(engine: FakeEngine, thread: EngineThread) -> None:
    engine.refuse.add("bad")
    bad, good = Recorder(), Recorder()
    thread.submit_all([request("bad")], bad)
    thread.submit(request("good"), good)
    assert bad.over.wait(5)
    assert good.over.wait(5)
    assert [str(cause) for _, cause in bad.failures] == ["refused on purpose"]
    assert good.text == " 0 1 2 3"
    assert thread.failure is None


def test_when_the_loop_dies_live_and_later_requests_fail_at_once_with_the_cause(engine: FakeEngine) -> None:
    thread = EngineThread(engine, max_requests=8)
    sinks = [Recorder(), Recorder()]
    for i, sink in enumerate(sinks):
        thread.submit(request(f"r{i}", 10_000), sink)
    eventually(lambda: all(sink.outputs for sink in sinks))

    def explode() -> None:
        raise MemoryError("the KV cache is on fire")

    engine.on_step = explode
    for i, sink in enumerate(sinks):
        assert sink.over.wait(5)
        assert sink.failures == [(f"r{i}", thread.failure)]
    with pytest.raises(EngineStoppedError, match="the KV cache is on fire") as caught:
        thread.submit(request("late"), Recorder())
    assert isinstance(caught.value.__cause__, MemoryError)


def test_requests_that_nobody_asks_for_are_cancelled_after_the_lease(engine: FakeEngine) -> None:
    thread = EngineThread(engine, max_requests=8, lease_s=0.15)
    sink = Recorder()
    thread.submit(request("orphan", 100_000), sink)
    for _ in range(6):  # twice the lease, but attended to
        with thread.attended():
            time.sleep(0.05)
    assert not sink.over.is_set()
    assert sink.over.wait(5)
    assert isinstance(sink.failures[0][1], OrphanedError)
    eventually(lambda: engine.cancelled == ["orphan"])
    again = Recorder()
    thread.submit(request("next"), again)
    assert again.over.wait(5), "the loop goes on"
    assert again.text == " 0 1 2 3"
    thread.close()


def test_one_long_call_keeps_the_lease(engine: FakeEngine) -> None:
    thread = EngineThread(engine, max_requests=8, lease_s=0.05)
    sink = Recorder()
    thread.submit(request("r", 100_000), sink)
    with thread.attended():
        time.sleep(0.3)
        assert not sink.over.is_set()
    thread.close()


def test_close_fails_what_is_live(engine: FakeEngine) -> None:
    thread = EngineThread(engine, max_requests=8)
    sink = Recorder()
    thread.submit(request("r", 100_000), sink)
    thread.close()
    assert isinstance(sink.failures[0][1], EngineStoppedError)
    with pytest.raises(EngineStoppedError):
        thread.submit(request("late"), Recorder())


def test_an_observer_that_fails_does_not_stop_the_loop(engine: FakeEngine) -> None:
    seen: list[int] = []

    def observe(outputs: object) -> None:
        seen.append(1)
        raise RuntimeError("the observer is broken")

    thread = EngineThread(engine, max_requests=8, on_iteration=observe)
    sink = Recorder()
    thread.submit(request("r"), sink)
    assert sink.over.wait(5)
    assert sink.text == " 0 1 2 3"
    eventually(lambda: len(seen) >= 4)
    thread.close()


def test_what_takes_long_before_a_request_starts_holds_nobody_up(engine: FakeEngine, thread: EngineThread) -> None:
    busy, go_on = threading.Event(), threading.Event()

    def prepare(slow: Request) -> None:
        busy.set()
        assert go_on.wait(5)

    engine.on_prepare = prepare
    slow, gone, other = Recorder(), Recorder(), Recorder()
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
    bad, good = Recorder(), Recorder()
    thread.submit(request("bad", constraint=Constraint("json")), bad)
    thread.submit(request("good", constraint=Constraint("json")), good)
    assert bad.over.wait(5)
    assert good.over.wait(5)
    assert [str(cause) for _, cause in bad.failures] == ["no such language."]
    assert good.text == " 0 1 2 3"
    assert not thread.is_new(["bad", "good"])
    assert not thread.is_unprepared(["bad", "good"])


def test_only_the_loop_calls_sinks_and_the_observer(engine: FakeEngine) -> None:
    callers: set[str] = set()

    class Watching(Recorder):
        def fail(self, request_id: str, cause: Exception) -> None:
            callers.add(threading.current_thread().name)
            super().fail(request_id, cause)

    def refuse(bad: Request) -> None:
        raise OfframpError("no such language.")

    engine.on_prepare = refuse
    thread = EngineThread(
        engine, max_requests=8, on_iteration=lambda outputs: callers.add(threading.current_thread().name)
    )
    sink = Watching()
    thread.submit(request("bad", constraint=Constraint("json")), sink)
    assert sink.over.wait(5)
    thread.close()
    assert callers == {"engine"}


class Panic(BaseException):
    """What libraries in Rust raise when they panic."""


def test_a_library_that_panics_over_a_request_takes_no_later_one_with_it(
    engine: FakeEngine, thread: EngineThread
) -> None:
    def panic(bad: Request) -> None:
        if bad.request_id == "bad":
            raise Panic("unreachable was reached")

    engine.on_prepare = panic
    bad, good = Recorder(), Recorder()
    thread.submit(request("bad", constraint=Constraint("json")), bad)
    thread.submit(request("good", constraint=Constraint("json")), good)
    assert good.over.wait(5)
    assert good.text == " 0 1 2 3"
    assert [str(cause) for _, cause in bad.failures] == ["Panic: unreachable was reached"]


def test_when_the_loop_panics_everybody_hears_of_it(engine: FakeEngine, thread: EngineThread) -> None:
    def panic() -> None:
        raise Panic("unreachable was reached")

    engine.on_step = panic
    sink = Recorder()
    thread.submit(request("r"), sink)
    assert sink.over.wait(5)
    assert str(thread.failure) == "Panic: unreachable was reached"
    with pytest.raises(EngineStoppedError, match="unreachable was reached"):
        thread.submit(request("late"), Recorder())


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
    sinks = [Recorder() for _ in range(3)]
    for number, sink in enumerate(sinks):
        thread.submit(request(str(number), constraint=Constraint("json")), sink)
    assert busy.wait(5)
    thread.close()
    assert threading.active_count() == before
    assert prepared == ["0"]
    assert all(isinstance(sink.failures[0][1], EngineStoppedError) for sink in sinks)


def test_an_id_in_use_is_refused_and_nothing_of_the_call_stays(engine: FakeEngine, thread: EngineThread) -> None:
    first = Recorder()
    thread.submit(request("a", 10_000), first)
    for again in (["b", "a"], ["c", "c"]):
        with pytest.raises(OfframpError, match="is in use"):
            thread.submit_all([request(name) for name in again], Recorder())
    good = Recorder()
    thread.submit_all([request("b"), request("c")], good)
    eventually(lambda: len([output for output in good.outputs if output.finish_reason]) == 2)
    assert engine.seen == ["a", "b", "c"]
    assert not first.over.is_set()


def test_an_id_comes_again_while_the_first_one_of_it_is_prepared(engine: FakeEngine, thread: EngineThread) -> None:
    busy, go_on = threading.Event(), threading.Event()

    def prepare(slow: Request) -> None:
        if slow.sampling.max_tokens == 9:
            busy.set()
            assert go_on.wait(30)

    engine.on_prepare = prepare
    first, second = Recorder(), Recorder()
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
    first, second = Recorder(), Recorder()
    thread.submit(request("x", constraint=Constraint("json")), first)
    assert busy.wait(5)
    thread.cancel("x")
    thread.submit(request("x", 3), second)
    go_on.set()
    assert second.over.wait(30)
    assert (second.text, second.failures) == (" 0 1 2", [])


def test_an_id_comes_again_before_the_engine_hears_that_the_first_one_is_cancelled(
    engine: FakeEngine, thread: EngineThread
) -> None:
    first, second = Recorder(), Recorder()
    inside, go_on = threading.Event(), threading.Event()
    thread.submit(request("x", 10_000), first)
    eventually(lambda: len(first.outputs) > 5)

    def hold() -> None:
        inside.set()
        assert go_on.wait(30)

    engine.on_step = hold
    assert inside.wait(5)
    thread.cancel("x")  # an iteration of it runs
    thread.submit(request("x", 3), second)
    assert thread.is_new(["x"])
    go_on.set()
    assert second.over.wait(30)
    assert (second.text, second.failures) == (" 0 1 2", [])
    assert engine.cancelled == ["x"]
    assert engine.seen == ["x", "x"]


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
    slow, waits, later = Recorder(), Recorder(), Recorder()
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
    sinks = {name: Recorder() for name in busy}
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
    sinks = {name: Recorder() for name in ("one", "two", "same", "again")}
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
    sink = Recorder()
    thread.submit_all([request("a"), request("b")], sink)
    eventually(lambda: len(sink.failures) == 2)
    assert {str(cause) for _, cause in sink.failures} == {"no such language."}
    assert engine.seen == []


def test_a_sink_has_heard_the_end_of_a_request_before_it_is_forgotten(engine: FakeEngine) -> None:
    known: list[tuple[str, bool]] = []

    class Asking(Recorder):
        def put(self, output: RequestOutput) -> None:
            known.append((output.request_id, thread.is_new([output.request_id])))
            super().put(output)

        def fail(self, request_id: str, cause: Exception) -> None:
            known.append((request_id, thread.is_new([request_id])))
            super().fail(request_id, cause)

    def refuse(bad: Request) -> None:
        raise OfframpError("no such language.")

    engine.on_prepare = refuse
    engine.refuse.add("refused")
    thread = EngineThread(engine, max_requests=8)
    for one in (request("good", 1), request("refused"), request("bad", constraint=Constraint("json"))):
        sink = Asking()
        thread.submit(one, sink)
        assert sink.over.wait(30)
        eventually(lambda: thread.num_waiting == thread.num_running == 0)
    engine.on_step = lambda: 1 / 0
    last = Asking()
    thread.submit(request("last"), last)
    assert last.over.wait(30)
    assert known == [("good", True), ("refused", True), ("bad", True), ("last", True)]
