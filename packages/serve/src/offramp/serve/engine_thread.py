"""A background loop around an engine: requests in from any thread, outputs out to sinks.

The engine iterates at its own pace in one thread, so nothing that happens in a web server can hold an iteration up, and
the engine needs no locks. What takes long before a request can start (compiling the language of its answer) is done in
a second thread, one request after the other: so neither iterations nor the caller of `submit` wait for it. Sinks and
the observer are called in the loop's thread alone, a sink never again after it was told that its request is over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from offramp.serve.request.output import RequestOutput
from offramp.serve.request.request import Request
from offramp.serve.scheduling.scheduler import QueueFullError

log = logging.getLogger(__name__)


class SteppingEngine(Protocol):
    """What the loop needs of an engine; all of it but `prepare` is called in the loop's thread only."""

    @property
    def has_unfinished(self) -> bool:
        """Whether another step has anything to do."""
        ...

    def prepare(self, request: Request) -> None:
        """Does what may take long before `add_request`, beside the loop; raises for a request that it cannot run."""
        ...

    def add_request(self, request: Request) -> None:
        """Takes a request in; raises for one that it cannot run."""
        ...

    def cancel(self, request_id: str) -> object:
        """Forgets a request and frees what it held."""
        ...

    def step(self) -> Sequence[RequestOutput]:
        """Runs one iteration."""
        ...


class Sink(Protocol):
    """Where a request's outputs go. Called in the loop's thread, so both return at once."""

    def put(self, output: RequestOutput) -> None:
        """Takes the newest output; one with a `finish_reason` is the last."""
        ...

    def fail(self, request_id: str, cause: Exception) -> None:
        """The request is over without an answer."""
        ...


class EngineStoppedError(RuntimeError):
    """The loop has ended, by an error in the engine or because it was closed."""


class OrphanedError(RuntimeError):
    """Nobody has asked for the request's output for a whole lease."""


class EngineThread:
    """Runs an engine in a thread of its own.

    Args:
        engine: The engine; from now on only this object calls it.
        max_requests: Most requests running and waiting together; more are refused with `QueueFullError`.
        lease_s: Seconds after which requests are cancelled when nobody has attended to the loop (see `attended`).
            None never cancels: right where the caller itself holds the requests.
        on_iteration: Called in the loop's thread after each iteration's outputs were delivered, with those outputs,
            and with none when something else happened: a failure, or the end of work.
    """

    def __init__(
        self,
        engine: SteppingEngine,
        *,
        max_requests: int,
        lease_s: float | None = None,
        on_iteration: Callable[[Sequence[RequestOutput]], None] = lambda outputs: None,
    ) -> None:
        self.max_requests = max_requests
        self._engine = engine
        self._lease_s = lease_s
        self._on_iteration = on_iteration
        self._condition = threading.Condition()
        self._unprepared: deque[list[Request]] = deque()
        self._arrivals: list[Request] = []
        self._unpreparable: list[tuple[list[Request], Exception]] = []
        self._cancelled: list[str] = []
        self._sinks: dict[str, Sink] = {}
        self._started: set[str] = set()  # requests that have had an output; the others still wait or are in prefill
        self._new: set[str] = set()  # requests that have not seen the end of an iteration
        self._to_prepare: set[str] = set()
        self._closing = False
        self._stopped: Exception | None = None
        self._attending = 0
        self._attended_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self._preparing = threading.Thread(target=self._prepare, name="engine-prepare", daemon=True)
        self._preparing.start()

    @property
    def failure(self) -> Exception | None:
        """Why the loop has ended; None while it runs."""
        return self._stopped

    @property
    def num_running(self) -> int:
        """Requests that have had an output and are not finished."""
        return len(self._started)

    @property
    def num_waiting(self) -> int:
        """Requests without an output yet."""
        return len(self._sinks) - len(self._started)

    def is_new(self, request_ids: Iterable[str]) -> bool:
        """Whether any of these requests has yet to see the end of an iteration, the first that may run it."""
        with self._condition:
            return not self._new.isdisjoint(request_ids)

    def is_unprepared(self, request_ids: Iterable[str]) -> bool:
        """Whether any of these requests is still to be prepared for the engine, which may take seconds."""
        with self._condition:
            return not self._to_prepare.isdisjoint(request_ids)

    def submit(self, request: Request, sink: Sink) -> None:
        """Hands a request to the engine; see `submit_all`."""
        self.submit_all([request], sink)

    def submit_all(self, requests: Sequence[Request], sink: Sink) -> None:
        """Hands over requests that share a sink: all of them or none.

        Raises:
            EngineStoppedError: The loop has ended; the cause is chained.
            QueueFullError: There is no room for all of them now.
        """
        with self._condition:
            if self._stopped is not None:
                raise EngineStoppedError(_sentence(self._stopped)) from self._stopped
            if len(self._sinks) + len(requests) > self.max_requests:
                raise QueueFullError(
                    f"the engine holds {len(self._sinks)} requests and takes {self.max_requests}; try again later."
                )
            for request in requests:
                assert request.request_id not in self._sinks, f"request id {request.request_id!r} is in use"
                self._sinks[request.request_id] = sink
                self._new.add(request.request_id)
            if any(request.sampling.constraint is not None for request in requests):
                self._unprepared.append(list(requests))
                self._to_prepare.update(request.request_id for request in requests)
            else:
                self._arrivals.extend(requests)
            self._attended_at = time.monotonic()
            self._condition.notify_all()

    def cancel(self, request_id: str) -> bool:
        """Ends a request whose answer nobody waits for; its sink hears nothing more.

        Returns:
            Whether it was still live.
        """
        return bool(self.cancel_all([request_id]))

    def cancel_all(self, request_ids: Iterable[str]) -> list[str]:
        """Ends requests together, before the next iteration: what belongs to one client never ends by halves.

        Returns:
            Those that were still live.
        """
        with self._condition:
            live = [request_id for request_id in request_ids if self._forget(request_id) is not None]
            self._cancelled += live
            self._condition.notify_all()
            return live

    @contextmanager
    def attended(self) -> Iterator[None]:
        """Renews the lease: somebody is here who would cancel what is not wanted any more."""
        with self._condition:
            self._attending += 1
        try:
            yield
        finally:
            with self._condition:
                self._attending -= 1
                self._attended_at = time.monotonic()

    def close(self, timeout_s: float = 10.0) -> None:
        """Stops after what the two threads are doing now; every live request fails."""
        deadline = time.monotonic() + timeout_s
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        for thread in (self._thread, self._preparing):
            thread.join(max(0.0, deadline - time.monotonic()))

    def _prepare(self) -> None:
        """The second thread: from unprepared requests to arrivals."""
        while True:
            with self._condition:
                while not (self._unprepared or self._closing or self._stopped):
                    self._condition.wait()
                if self._closing or self._stopped:
                    return
                requests = self._unprepared.popleft()
                requests = [request for request in requests if request.request_id in self._sinks]
            cause: Exception | None = None
            try:
                for request in requests:
                    self._engine.prepare(request)
            except BaseException as error:
                cause = _as_exception(error)
            with self._condition:  # those that were cancelled meanwhile are unknown to the engine
                live = [request for request in requests if request.request_id in self._sinks]
                self._to_prepare.difference_update(request.request_id for request in live)
                if cause is None:
                    self._arrivals += live
                else:
                    self._unpreparable.append((live, cause))
                self._condition.notify_all()

    def _run(self) -> None:
        try:
            while (arrived := self._take_work()) is not None:
                outputs = self._engine.step() if self._engine.has_unfinished else []
                self._deliver(outputs)
                with self._condition:
                    self._new -= arrived
                self._after_iteration(outputs)
            cause: Exception = EngineStoppedError("the engine was closed")
        except BaseException as error:  # whatever it was, every sink must hear of it
            log.exception("The engine loop has died")
            cause = _as_exception(error)
        with self._condition:
            self._stopped = cause
            live = list(self._sinks.items())
            self._sinks.clear()
            self._started.clear()
            self._new.clear()
            self._to_prepare.clear()
            self._condition.notify_all()
        for request_id, sink in live:
            sink.fail(request_id, cause)
        self._after_iteration([])

    def _take_work(self) -> set[str] | None:
        """Waits for something to do and hands arrivals and cancellations to the engine; None to stop.

        Returns:
            Ids of the requests that arrived.
        """
        with self._condition:
            while not self._has_work():
                self._condition.wait()
            if self._closing:
                return None
            arrivals, self._arrivals = self._arrivals, []
            cancelled, self._cancelled = self._cancelled, []
            unpreparable, self._unpreparable = self._unpreparable, []
            orphans = list(self._sinks) if self._lease_has_run_out() else []
        for requests, cause in unpreparable:
            for request in requests:
                self._fail(request.request_id, cause)
        for request_id in orphans:
            # A front that was only slow, not gone, finds the failure and can end its response.
            self._fail(request_id, OrphanedError(f"nobody asked for the output for {self._lease_s:g} s"))
        cancelled += orphans
        arrived = {request.request_id for request in arrivals}
        for request_id in cancelled:  # first, so that the engine never holds more than `max_requests`
            if request_id not in arrived:
                self._engine.cancel(request_id)
        dropped = set(cancelled)
        for request in arrivals:
            if request.request_id not in dropped:
                try:
                    self._engine.add_request(request)
                except Exception as error:
                    self._fail(request.request_id, error)
        return arrived

    def _has_work(self) -> bool:
        waits = self._arrivals or self._unpreparable or self._cancelled
        return bool(waits) or self._closing or self._engine.has_unfinished

    def _lease_has_run_out(self) -> bool:
        if self._lease_s is None or self._attending:
            return False
        return time.monotonic() - self._attended_at > self._lease_s

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            with self._condition:
                sink = self._sinks.get(output.request_id)
                if sink is None:  # cancelled while the iteration ran
                    continue
                self._started.add(output.request_id)
                if output.finish_reason is not None:
                    self._forget(output.request_id)
            sink.put(output)

    def _fail(self, request_id: str, cause: Exception) -> None:
        with self._condition:
            sink = self._forget(request_id)
        if sink is not None:
            sink.fail(request_id, cause)

    def _forget(self, request_id: str) -> Sink | None:
        self._started.discard(request_id)
        self._new.discard(request_id)
        self._to_prepare.discard(request_id)
        return self._sinks.pop(request_id, None)

    def _after_iteration(self, outputs: Sequence[RequestOutput]) -> None:
        try:
            self._on_iteration(outputs)
        except Exception:
            log.exception("The engine loop's observer failed; the loop goes on")


def _as_exception(error: BaseException) -> Exception:
    """An error as one that may be handed on: what a library in Rust raises when it panics is none by itself."""
    if isinstance(error, Exception):
        return error
    found = EngineStoppedError(f"{type(error).__name__}: {error}")
    found.__cause__ = error
    return found


def _sentence(error: Exception) -> str:
    """An error for a client: what it says, or at least what it is."""
    return str(error).partition("\n")[0] or type(error).__name__
