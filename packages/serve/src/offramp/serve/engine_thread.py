"""A background loop around an engine: requests in from any thread, outputs out to sinks.

The engine iterates at its own pace in one thread, so nothing that happens in a web server can hold an iteration up, and
the engine needs no locks. What takes long before a request can start (compiling the language of its answer) is done in
a second thread, one request after the other: so neither iterations nor the caller of `submit` wait for it. Sinks and
the observer are called in the loop's thread alone, a sink never again after it was told that its request is over. What
ends a request is said to its sink before the request is forgotten: who finds it gone finds the reason there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from offramp.common.errors import OfframpError
from offramp.serve.request.output import RequestOutput
from offramp.serve.request.request import Request
from offramp.serve.scheduling.scheduler import QueueFullError

_IDLE_S = 1.0
"""Seconds between two looks at an idle engine, which has work without being asked where a process of it was lost."""

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class SteppingEngine(Protocol):
    """What the loop needs of an engine; all but `prepare` and `prepare_known` is called in the loop's thread only."""

    @property
    def has_unfinished(self) -> bool:
        """Whether another step has anything to do."""
        ...

    def prepare(self, request: Request) -> None:
        """Does what may take long before `add_request`, beside the loop; raises for a request that it cannot run."""
        ...

    def prepare_known(self, request: Request) -> bool:
        """Does the same if it takes no time; whether it did."""
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
    """Where a request's outputs go. Called in the loop's thread and under its lock, so both return at once."""

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


@dataclass(eq=False, frozen=True)
class _Handed:
    """A request that somebody has handed over and waits for. When it is over, its id may come again with another one.

    Attributes:
        request: What the engine is to do, or does.
        sink: Where its outputs go.
    """

    request: Request
    sink: Sink


class EngineThread:
    """Runs an engine in a thread of its own.

    Args:
        engine: The engine; from now on only this object calls it.
        max_requests: Most requests running and waiting together; more are refused with `QueueFullError`.
        lease_s: Seconds after which requests are cancelled when nobody has attended to the loop (see `attended`).
            None never cancels: right where the caller itself holds the requests.
        on_iteration: Called in the loop's thread after each iteration's outputs were delivered, with those outputs,
            and with none when something else happened: a failure, or the end of work. Of background requests it does
            not hear.
        on_finished: Called in the loop's thread with each request whose answer is whole, before `on_iteration`.
    """

    def __init__(
        self,
        engine: SteppingEngine,
        *,
        max_requests: int,
        lease_s: float | None = None,
        on_iteration: Callable[[Sequence[RequestOutput]], None] = lambda outputs: None,
        on_finished: Callable[[Request], None] = lambda request: None,
    ) -> None:
        self.max_requests = max_requests
        self._engine = engine
        self._lease_s = lease_s
        self._on_iteration = on_iteration
        self._on_finished = on_finished
        self._condition = threading.Condition()
        self._unprepared: deque[list[_Handed]] = deque()
        self._arrivals: list[_Handed] = []
        self._refused: list[tuple[list[_Handed], Exception]] = []
        self._cancelled: list[str] = []  # of those that the engine has
        self._live: dict[str, _Handed] = {}
        self._taken: set[_Handed] = set()  # requests that the engine has
        self._started: set[_Handed] = set()  # those that have had an output; the others still wait or are in prefill
        self._new: set[_Handed] = set()  # requests that have not seen the end of an iteration
        self._background: set[_Handed] = set()
        # Those that wait to be prepared, or are: since when they do the one or the other, in seconds of time.monotonic.
        self._to_prepare: dict[_Handed, float] = {}
        self._in_preparation: list[_Handed] = []
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
        """Requests that have had an output and are not finished, those in the background apart."""
        return len(self._started - self._background)

    @property
    def num_waiting(self) -> int:
        """Requests without an output yet, those in the background apart."""
        return len(self._live) - len(self._started | self._background)

    def is_new(self, request_ids: Iterable[str]) -> bool:
        """Whether any of these requests has yet to see the end of an iteration, the first that may run it."""
        with self._condition:
            return any(self._live.get(request_id) in self._new for request_id in request_ids)

    def is_unprepared(self, request_ids: Iterable[str]) -> bool:
        """Whether any of these requests is still to be prepared for the engine, which may take seconds."""
        with self._condition:
            return any(self._live.get(request_id) in self._to_prepare for request_id in request_ids)

    def submit(self, request: Request, sink: Sink) -> None:
        """Hands a request to the engine; see `submit_all`."""
        self.submit_all([request], sink)

    def submit_all(self, requests: Sequence[Request], sink: Sink) -> None:
        """Hands over requests that share a sink: all of them or none.

        Raises:
            EngineStoppedError: The loop has ended; the cause is chained.
            QueueFullError: There is no room for all of them now.
            OfframpError: The id of one is that of a request that is not over yet, or of another one of them.
        """
        handed = [_Handed(request, sink) for request in requests]
        with self._condition:
            held = len(self._live) - len(self._background)
            if held + len(handed) > self.max_requests:
                raise QueueFullError(
                    f"the engine holds {held} requests and takes {self.max_requests}; try again later."
                )
            self._admit(handed)
            self._attended_at = time.monotonic()

    def submit_background(self, request: Request, sink: Sink) -> None:
        """Hands over a request that no client waits for: it takes nobody's place, and needs no lease.

        Raises:
            EngineStoppedError: The loop has ended; the cause is chained.
            OfframpError: Its id is that of a request that is not over yet.
        """
        with self._condition:
            handed = _Handed(request, sink)
            self._admit([handed])
            self._background.add(handed)

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
            live = [self._live[request_id] for request_id in dict.fromkeys(request_ids) if request_id in self._live]
            for one in live:
                self._forget(one, in_engine=True)
            self._condition.notify_all()
            return [one.request.request_id for one in live]

    def refuse_overdue(self, limit_s: float) -> None:
        """Ends requests that take too long to prepare, or to come to it; their sinks soon hear why.

        Who waits behind others is told so with `QueueFullError`, and is given as long again when its turn has come.

        Args:
            limit_s: Longest time for either, in seconds.
        """
        cause = OfframpError(
            f"the language asked for is not compiled after {limit_s:g} s; simplify it, or try again later."
        )
        waited = QueueFullError(
            f"the languages of earlier requests have been compiled for {limit_s:g} s, and this one's still waits; "
            "try again later."
        )
        with self._condition:
            now = time.monotonic()
            for one in [one for one, since in self._to_prepare.items() if now - since > limit_s]:
                self._refused.append(([one], cause if one in self._in_preparation else waited))
                del self._to_prepare[one]
                self._condition.notify_all()

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

    def _admit(self, handed: list[_Handed]) -> None:
        if self._stopped is not None:
            raise EngineStoppedError(_sentence(self._stopped)) from self._stopped
        ids: set[str] = set()
        for one in handed:
            request_id = one.request.request_id
            if request_id in self._live or request_id in ids:
                raise OfframpError(f"request id {request_id!r} is in use; give another one.")
            ids.add(request_id)
        self._live.update((one.request.request_id, one) for one in handed)
        self._new.update(handed)
        if not self._settle_known(handed):
            self._unprepared.append(handed)
            self._to_prepare.update(dict.fromkeys(handed, time.monotonic()))
        self._condition.notify_all()

    def _prepare(self) -> None:
        """The second thread: from unprepared requests to arrivals."""
        while True:
            with self._condition:
                while not (self._unprepared or self._closing or self._stopped):
                    self._condition.wait()
                if self._closing or self._stopped:
                    return
                handed = self._unprepared.popleft()
                # Neither those that were cancelled, nor those that waited for too long.
                live = self._in_preparation = [one for one in handed if one in self._to_prepare]
                self._to_prepare.update(dict.fromkeys(live, time.monotonic()))
            cause: Exception | None = None
            try:
                for one in live:
                    self._engine.prepare(one.request)
            except BaseException as error:
                cause = _as_exception(error)
            with self._condition:
                self._settle(live, cause)
                self._in_preparation = []
                self._unprepared = deque(others for others in self._unprepared if not self._settle_known(others))

    def _settle_known(self, handed: list[_Handed]) -> bool:
        """Ends the preparation of requests if it takes no time; whether it did."""
        try:
            if not all(self._engine.prepare_known(one.request) for one in handed):
                return False
        except Exception as error:
            self._settle(handed, error)
        else:
            self._settle(handed, None)
        return True

    def _settle(self, handed: list[_Handed], cause: Exception | None) -> None:
        """Requests are prepared, or cannot be because of `cause`."""
        for one in handed:
            self._to_prepare.pop(one, None)
        if cause is None:
            self._arrivals += handed
        else:
            self._refused.append((handed, cause))
        self._condition.notify_all()

    def _run(self) -> None:
        try:
            while (arrived := self._take_work()) is not None:
                outputs = self._engine.step() if self._engine.has_unfinished else []
                heard = self._deliver(outputs)
                with self._condition:
                    self._new.difference_update(arrived)
                self._after_iteration(heard)
            cause: Exception = EngineStoppedError("the engine was closed")
        except BaseException as error:  # whatever it was, every sink must hear of it
            log.exception("The engine loop has died")
            cause = _as_exception(error)
        with self._condition:
            self._stopped = cause
            for one in list(self._live.values()):
                self._fail(one, cause, in_engine=False)
            self._condition.notify_all()
        self._after_iteration([])

    def _take_work(self) -> list[_Handed] | None:
        """Waits for something to do and hands arrivals and cancellations to the engine; None to stop.

        Returns:
            What arrived.
        """
        with self._condition:
            while not self._has_work():
                self._condition.wait(_IDLE_S)
            if self._closing:
                return None
            refused, self._refused = self._refused, []
            orphans = list(set(self._live.values()) - self._background) if self._lease_has_run_out() else []
        for handed, cause in refused:
            for one in handed:
                self._fail(one, cause)
        for one in orphans:
            # A front that was only slow, not gone, finds the failure and can end its response.
            self._fail(one, OrphanedError(f"nobody asked for the output for {self._lease_s:g} s"))
        with self._condition:
            cancelled, self._cancelled = self._cancelled, []
            arrivals, self._arrivals = [one for one in self._arrivals if self._is_live(one)], []
            self._taken.update(arrivals)
        # First, so that the engine never holds more than `max_requests`, nor two with the same id.
        for request_id in cancelled:
            self._engine.cancel(request_id)
        for one in arrivals:
            try:
                self._engine.add_request(one.request)
            except Exception as error:
                self._fail(one, error, in_engine=False)
        return arrivals

    def _has_work(self) -> bool:
        waits = self._arrivals or self._refused or self._cancelled
        return bool(waits) or self._closing or self._engine.has_unfinished

    def _lease_has_run_out(self) -> bool:
        if self._lease_s is None or self._attending:
            return False
        return time.monotonic() - self._attended_at > self._lease_s

    def _deliver(self, outputs: Sequence[RequestOutput]) -> list[RequestOutput]:
        """Gives outputs to their sinks; those that are not of the background."""
        heard: list[RequestOutput] = []
        for output in outputs:
            with self._condition:
                one = self._live.get(output.request_id)
                background = one in self._background
                if not background:
                    heard.append(output)
                if one is None or one not in self._taken:
                    continue  # what ran was cancelled meanwhile; another one of the same id may wait already
                self._started.add(one)
                one.sink.put(output)
                if output.finish_reason is not None:
                    self._forget(one, in_engine=False)
            if output.finish_reason is not None and output.error is None and not background:
                self._watched(self._on_finished, one.request)
        return heard

    def _is_live(self, handed: _Handed) -> bool:
        return self._live.get(handed.request.request_id) is handed

    def _fail(self, handed: _Handed, cause: Exception, *, in_engine: bool = True) -> None:
        with self._condition:
            if self._is_live(handed):
                handed.sink.fail(handed.request.request_id, cause)
                self._forget(handed, in_engine=in_engine)

    def _forget(self, handed: _Handed, *, in_engine: bool) -> None:
        """Lets go of a live request; `in_engine`: the engine is to do so as well, if it has it."""
        del self._live[handed.request.request_id]
        if in_engine and handed in self._taken:
            self._cancelled.append(handed.request.request_id)
        for members in (self._taken, self._started, self._new, self._background):
            members.discard(handed)
        self._to_prepare.pop(handed, None)

    def _after_iteration(self, outputs: Sequence[RequestOutput]) -> None:
        self._watched(self._on_iteration, outputs)

    @staticmethod
    def _watched(observer: Callable[[_T], None], what: _T) -> None:
        try:
            observer(what)
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
