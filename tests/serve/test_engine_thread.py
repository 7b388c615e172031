from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from helpers.fake_engine import FakeEngine
from helpers.sinks import RecordingSink, eventually, request
from offramp.common.errors import OfframpError
from offramp.serve.engine_thread import EngineStoppedError, EngineThread, OrphanedError
from offramp.serve.request.constraint import Constraint
from offramp.serve.request.output import RequestOutput
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


def test_every_request_gets_its_own_outputs_in_order(thread: EngineThread) -> None:
    sinks = {f"r{i}": RecordingSink() for i in range(8)}
    for i, (name, sink) in enumerate(sinks.items()):
        thread.submit(request(name, max_tokens=i + 1), sink)
    for i, (name, sink) in enumerate(sinks.items()):
        assert sink.over.wait(5)
        assert sink.text == "".join(f" {token}" for token in range(i + 1))
        assert {output.request_id for output in sink.outputs} == {name}
    assert thread.num_running == thread.num_waiting == 0


def test_requests_join_while_others_run(engine: FakeEngine, thread: EngineThread) -> None:
    long, short = RecordingSink(), RecordingSink()
    thread.submit(request("long", 500), long)
    eventually(lambda: len(long.outputs) > 3)
    thread.submit(request("short", 3), short)
    assert short.over.wait(5)
    assert not long.over.is_set()


def test_a_cancelled_request_is_silent_and_leaves_the_engine(engine: FakeEngine, thread: EngineThread) -> None:
    sink, other = RecordingSink(), RecordingSink()
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
    sink = RecordingSink()
    thread.submit_all([request(f"a{i}", 10_000) for i in range(6)], sink)
    with pytest.raises(QueueFullError, match="takes 8"):
        thread.submit_all([request(f"b{i}") for i in range(3)], sink)
    late = RecordingSink()
    thread.submit_all([request("c0", 2), request("c1", 2)], late)
    eventually(lambda: len(engine.seen) == 8)
    assert not any(name.startswith("b") for name in engine.seen)


def test_the_engine_never_holds_more_than_the_limit(engine: FakeEngine, thread: EngineThread) -> None:
    go_on = threading.Event()
    sink, late = RecordingSink(), RecordingSink()
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
    bad, good = RecordingSink(), RecordingSink()
    thread.submit_all([request("bad")], bad)
    thread.submit(request("good"), good)
    assert bad.over.wait(5)
    assert good.over.wait(5)
    assert [str(cause) for _, cause in bad.failures] == ["refused on purpose"]
    assert good.text == " 0 1 2 3"
    assert thread.failure is None


def test_when_the_loop_dies_live_and_later_requests_fail_at_once_with_the_cause(engine: FakeEngine) -> None:
    thread = EngineThread(engine, max_requests=8)
    sinks = [RecordingSink(), RecordingSink()]
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
        thread.submit(request("late"), RecordingSink())
    assert isinstance(caught.value.__cause__, MemoryError)


def test_requests_that_nobody_asks_for_are_cancelled_after_the_lease(engine: FakeEngine) -> None:
    thread = EngineThread(engine, max_requests=8, lease_s=0.15)
    sink = RecordingSink()
    thread.submit(request("orphan", 100_000), sink)
    for _ in range(6):  # twice the lease, but attended to
        with thread.attended():
            time.sleep(0.05)
    assert not sink.over.is_set()
    assert sink.over.wait(5)
    assert isinstance(sink.failures[0][1], OrphanedError)
    eventually(lambda: engine.cancelled == ["orphan"])
    again = RecordingSink()
    thread.submit(request("next"), again)
    assert again.over.wait(5), "the loop goes on"
    assert again.text == " 0 1 2 3"
    thread.close()


def test_one_long_call_keeps_the_lease(engine: FakeEngine) -> None:
    thread = EngineThread(engine, max_requests=8, lease_s=0.05)
    sink = RecordingSink()
    thread.submit(request("r", 100_000), sink)
    with thread.attended():
        time.sleep(0.3)
        assert not sink.over.is_set()
    thread.close()


def test_close_fails_what_is_live(engine: FakeEngine) -> None:
    thread = EngineThread(engine, max_requests=8)
    sink = RecordingSink()
    thread.submit(request("r", 100_000), sink)
    thread.close()
    assert isinstance(sink.failures[0][1], EngineStoppedError)
    with pytest.raises(EngineStoppedError):
        thread.submit(request("late"), RecordingSink())


def test_an_observer_that_fails_does_not_stop_the_loop(engine: FakeEngine) -> None:
    seen: list[int] = []

    def observe(outputs: object) -> None:
        seen.append(1)
        raise RuntimeError("the observer is broken")

    thread = EngineThread(engine, max_requests=8, on_iteration=observe)
    sink = RecordingSink()
    thread.submit(request("r"), sink)
    assert sink.over.wait(5)
    assert sink.text == " 0 1 2 3"
    eventually(lambda: len(seen) >= 4)
    thread.close()


def test_only_the_loop_calls_sinks_and_the_observer(engine: FakeEngine) -> None:
    callers: set[str] = set()

    class Watching(RecordingSink):
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
    bad, good = RecordingSink(), RecordingSink()
    thread.submit(request("bad", constraint=Constraint("json")), bad)
    thread.submit(request("good", constraint=Constraint("json")), good)
    assert good.over.wait(5)
    assert good.text == " 0 1 2 3"
    assert [str(cause) for _, cause in bad.failures] == ["Panic: unreachable was reached"]


def test_when_the_loop_panics_everybody_hears_of_it(engine: FakeEngine, thread: EngineThread) -> None:
    def panic() -> None:
        raise Panic("unreachable was reached")

    engine.on_step = panic
    sink = RecordingSink()
    thread.submit(request("r"), sink)
    assert sink.over.wait(5)
    assert str(thread.failure) == "Panic: unreachable was reached"
    with pytest.raises(EngineStoppedError, match="unreachable was reached"):
        thread.submit(request("late"), RecordingSink())


def test_an_id_in_use_is_refused_and_nothing_of_the_call_stays(engine: FakeEngine, thread: EngineThread) -> None:
    first = RecordingSink()
    thread.submit(request("a", 10_000), first)
    for again in (["b", "a"], ["c", "c"]):
        with pytest.raises(OfframpError, match="is in use"):
            thread.submit_all([request(name) for name in again], RecordingSink())
    good = RecordingSink()
    thread.submit_all([request("b"), request("c")], good)
    eventually(lambda: len([output for output in good.outputs if output.finish_reason]) == 2)
    assert engine.seen == ["a", "b", "c"]
    assert not first.over.is_set()


def test_an_id_comes_again_before_the_engine_hears_that_the_first_one_is_cancelled(
    engine: FakeEngine, thread: EngineThread
) -> None:
    first, second = RecordingSink(), RecordingSink()
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


def test_a_sink_has_heard_the_end_of_a_request_before_it_is_forgotten(engine: FakeEngine) -> None:
    known: list[tuple[str, bool]] = []

    class Asking(RecordingSink):
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
