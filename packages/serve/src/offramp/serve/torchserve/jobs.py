"""TorchServe's live jobs, and what one call of the handler gives each of them.

With `continuousBatching` TorchServe calls the handler in a loop with all jobs that are live, and takes one piece for
each. The loop is only a pump: it admits new jobs, cancels those that have vanished, and carries pieces away, while the
engine iterates in its own thread. Rules of that loop which this module keeps, so that the handler need not know them:

- A call that raises, or answers with the wrong number of pieces, fails every live job. So nothing here raises.
- A job's first piece carries the status code. So a refusal is a whole answer in the call that first sees the job, and
  other jobs get no piece at all before their first iteration is over: a fault found by then has its own status as well.
  TorchServe keeps a job that it gets nothing for, and shows it again with its payload.
- TorchServe looks whether a client is still there only when it gets a piece for it; a job whose client has left is just
  missing from the next call. So no status is held back for long: the empty pieces after that show who leaves.
- A first piece that is also the last leaves the client without a response head. So an answer in pieces has two or more.
- When the last job goes, no call comes at all. So the engine's thread cancels after a lease (`EngineThread`).
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from offramp.serve.engine_thread import EngineThread
from offramp.serve.protocol.errors import internal
from offramp.serve.protocol.faults import log_fault
from offramp.serve.protocol.replies import EVENT_STREAM, JSON, Complete, Generation, encode
from offramp.serve.protocol.service import OpenAIService
from offramp.serve.torchserve.settings import HandlerSettings

log = logging.getLogger(__name__)

REQUEST_ID_HEADER = "offramp-request-id"
"""The request header in which a gateway says what it calls a request."""


@dataclass(frozen=True)
class Job:
    """A live job, as one call shows it.

    Attributes:
        id: TorchServe's id of it.
        path: What follows the model's version in the URL.
        body: The request's body, as bytes or as what TorchServe has made of them; None when there is no payload, as in
            all calls after a job's first piece.
        request_id: What the gateway calls the request, if one has sent it; the answer's id is made of it.
    """

    id: str
    path: str
    body: object
    request_id: str | None = None


@dataclass(frozen=True)
class Piece:
    """What one call gives one job.

    Attributes:
        body: Part of the response's body, or all of it.
        last: None for a whole answer in one piece; otherwise whether this ends an answer in pieces.
        status: HTTP status code; only the first piece's counts.
        content_type: Only the first piece's counts.
        headers: Further response headers; only the first piece's count.
    """

    body: bytes
    last: bool | None
    status: int = 200
    content_type: str = JSON
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class _Live:
    reply: Generation
    since: float  # seconds of time.monotonic
    prepared: float | None = None  # likewise; None: the engine cannot start yet
    pieces: int = 0
    spoke: bool = False  # whether any of its pieces had content


class Jobs:
    """The jobs under way.

    Args:
        service: Answers requests.
        thread: The engine that `service` uses.
        settings: Limits of a call.
        on_first_piece: Told the seconds from a stream's arrival to its first content.
        on_finished: Told the seconds from a generation's arrival to its end.
    """

    def __init__(
        self,
        service: OpenAIService,
        thread: EngineThread,
        settings: HandlerSettings,
        on_first_piece: Callable[[float], None] = lambda seconds: None,
        on_finished: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._service = service
        self._thread = thread
        self._settings = settings
        self._on_first_piece = on_first_piece
        self._on_finished = on_finished
        self._live: dict[str, _Live] = {}
        self._dead: set[str] = set()  # jobs without a payload, to be ended in the next call
        self._news = threading.Event()

    def wake(self) -> None:
        """The engine has something new: ends the wait of this call, or of the next. Any thread may call."""
        self._news.set()

    def pump(self, jobs: Sequence[Job]) -> list[Piece | None]:
        """One call: what each live job gets, in the same order; None: nothing, not even a status. Never raises."""
        with self._thread.attended():
            ids = {job.id for job in jobs}
            for job_id in [job_id for job_id in self._live if job_id not in ids]:
                self._service.abandon(self._live.pop(job_id).reply)
            self._dead &= ids
            self._thread.refuse_overdue(self._settings.compile_limit_s)
            answered: dict[str, Piece] = {}
            for job in jobs:
                if job.id not in self._live:
                    piece = self._admit(job)
                    if piece is not None:
                        answered[job.id] = piece
            if not answered:  # answers that are ready need not wait for the engine
                self._news.wait(self._settings.wait_ms / 1000)
                self._news.clear()
            return [answered.get(job.id) or self._next_piece(job.id) for job in jobs]

    def _admit(self, job: Job) -> Piece | None:
        """The answer to a new job, if it is known at once; None when the engine works on it."""
        try:
            if job.body is None and (job.id in self._dead or job.path.strip("/") in _GENERATING):
                return self._without_payload(job.id)
            reply = self._service.open(job.path, _octets(job.body), job.request_id or job.id)
        except Exception as error:  # a fault of ours must not reach the other jobs
            log_fault(log, "A request could not be taken in", error)
            reply = Complete.of_error(internal(type(error).__name__))
        if isinstance(reply, Complete):
            return _whole(reply, self._service.card.headers())
        self._live[job.id] = _Live(reply, time.monotonic())
        return None

    def _without_payload(self, job_id: str) -> Piece:
        """Ends, in two pieces, a job that comes without its payload.

        It is a request that TorchServe has put back in its queue after the worker changed; its client may have had half
        an answer from the worker before.
        """
        if job_id in self._dead:
            self._dead.discard(job_id)
            return Piece(b"data: [DONE]\n\n", True)
        self._dead.add(job_id)
        error = internal("its worker was restarted; send it again")
        return Piece(b"data: %b\n\n" % encode(error.body()), False, 200, EVENT_STREAM)

    def _is_open(self, live: _Live) -> bool:
        """Whether the status of an answer is still to be found out: its requests have not been through an iteration."""
        request_ids, now = live.reply.request_ids, time.monotonic()
        if live.pieces or not self._thread.is_new(request_ids):
            return False
        if self._thread.is_unprepared(request_ids):
            return now - live.since <= self._settings.prepare_wait_ms / 1000
        live.prepared = live.prepared or now
        return now - live.prepared <= self._settings.first_wait_ms / 1000

    def _next_piece(self, job_id: str) -> Piece | None:
        live, headers = self._live[job_id], self._service.card.headers()
        if self._is_open(live):
            return None
        try:
            body, last = live.reply.take(self._settings.max_piece_bytes)
        except Exception as error:
            log_fault(log, "An answer could not be formatted", error)
            body, last = b"", True
        error = live.reply.error
        if error is not None and live.pieces == 0:
            self._end(job_id)
            return _whole(Complete.of_error(error), headers)
        if last and error is not None and not live.reply.stream and self._thread.failure is not None:
            # The 200 is out, and an error in its body would look like an answer. The worker is about to go with its
            # engine: the connection is then cut, which the client takes for what it is.
            return Piece(b"", False)
        if body and not live.spoke:
            live.spoke = True
            if live.reply.stream:
                self._on_first_piece(time.monotonic() - live.since)
        live.pieces += 1
        if len(body) == self._settings.max_piece_bytes:
            self._news.set()  # there may be more of it
        if last and live.pieces == 1:
            # Ended already: give the first piece now and the end in the next call.
            last = False
            self._news.set()
        elif last:
            self._end(job_id)
        return Piece(body, last, 200, live.reply.content_type, headers)

    def _end(self, job_id: str) -> None:
        live = self._live.pop(job_id)
        self._service.abandon(live.reply)  # the others of several prompts, when one has failed
        self._on_finished(time.monotonic() - live.since)


def _octets(body: object) -> bytes:
    """The body's bytes; another front's configuration may have let TorchServe decode it already."""
    if body is None:
        return b""
    if isinstance(body, (bytes, bytearray)):
        return bytes(body)
    return (body if isinstance(body, str) else json.dumps(body)).encode("utf-8", "surrogatepass")


def _whole(reply: Complete, headers: dict[str, str]) -> Piece:
    return Piece(reply.body, None, reply.status, JSON, {**headers, **reply.headers})


_GENERATING = frozenset({"v1/completions", "v1/chat/completions"})
