"""Answers from an engine in this process.

The engine iterates in its thread, the event loop sends. Whoever waits here is woken after each iteration and takes what
is there for it. A status is sent only when there is something to send with it, because a client that leaves is noticed
at any time: so every fault that is found before the first word has a status of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from anyio import CapacityLimiter, to_thread

from offramp.serve.engine_thread import EngineThread
from offramp.serve.http.backend import Answer, Asked
from offramp.serve.http.news import News
from offramp.serve.http.prometheus import PrometheusMetrics
from offramp.serve.measures.records import EngineMetrics
from offramp.serve.metrics import MetricsReporter
from offramp.serve.protocol.replies import JSON, Complete, Generation, encode
from offramp.serve.protocol.service import OpenAIService
from offramp.serve.request.output import RequestOutput
from offramp.serve.watch import Watch

OnIteration = Callable[[Sequence[RequestOutput]], None]
_OVERDUE_EVERY_S = 0.5
_MAX_PIECE_BYTES = 1_000_000  # so that a long answer is written in parts that the event loop can be left between


class EngineBackend:
    """One model in this process.

    Args:
        start: Starts the engine's thread with an observer of its iterations, and gives the service on it.
        engine: The engine's own sums.
        watch: What the model sees of itself; None sees nothing.
        compile_limit_s: Longest time for which a language is compiled, and before that longest wait for those of
            others.
    """

    def __init__(
        self,
        start: Callable[[OnIteration], tuple[EngineThread, OpenAIService]],
        engine: EngineMetrics,
        watch: Watch | None = None,
        *,
        compile_limit_s: float = 30.0,
    ) -> None:
        self._start = start
        self._engine = engine
        self._watch = watch
        self._prometheus: PrometheusMetrics | None = None
        self._compile_limit_s = compile_limit_s
        self._thread: EngineThread | None = None

    @property
    def failure(self) -> Exception | None:
        """Why the engine has stopped; None while it runs."""
        return None if self._thread is None else self._thread.failure

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Starts the engine and lets it generate a token: from then on it is known that it can."""
        self._news = News(asyncio.get_running_loop())
        # Tokenizers are not made to be used by several threads at once, and one request after the other is no slower.
        self._turn = CapacityLimiter(1)

        def after_iteration(outputs: Sequence[RequestOutput]) -> None:
            self._news.announce()
            self._totals.observe(outputs, thread.num_running, thread.num_waiting)

        thread, self._service = self._start(after_iteration)
        self._thread = thread
        card = self._service.card
        self._prometheus = PrometheusMetrics({"model_name": card.name, "model_version": card.version})
        self._totals = MetricsReporter(self._prometheus.emit, self._engine, self._watch)
        overdue = asyncio.create_task(self._refuse_overdue(self._thread))
        try:
            prompt = encode({"model": self._service.card.name, "prompt": [0], "max_tokens": 1, "temperature": 0})
            async with self.open(Asked("v1/completions", prompt, "warm-up")):
                pass
            yield
        finally:
            overdue.cancel()
            await to_thread.run_sync(self._thread.close)

    @asynccontextmanager
    async def open(self, asked: Asked) -> AsyncIterator[Answer]:
        """See `Backend`."""
        card, began = self._service.card, time.monotonic()
        # Beside the event loop: to tokenize a long prompt takes as long as many iterations.
        reply = await to_thread.run_sync(
            self._service.open, asked.path, asked.body, asked.request_id, limiter=self._turn
        )
        if isinstance(reply, Complete):
            headers = {**card.headers(), **reply.headers}
            yield Answer(reply.status, reply.body, JSON, headers, card.name_and_version)
            return
        try:
            if reply.stream:
                first, last = await self._next_piece(reply)
                self._totals.first_token(time.monotonic() - began)
                body = self._pieces(reply, first, last, began)
            else:
                body = b""
                last = False
                while not last:
                    piece, last = await self._next_piece(reply)
                    body += piece
                self._totals.finished(time.monotonic() - began)
            if reply.error is not None:
                raise reply.error
            yield Answer(200, body, reply.content_type, card.headers(), card.name_and_version)
        finally:
            self._service.abandon(reply)

    def metrics(self) -> bytes:
        """See `Backend`."""
        return b"" if self._prometheus is None else self._prometheus.text()

    def model_names(self) -> tuple[str, ...]:
        """See `Backend`."""
        return (self._service.card.name,)

    def unready(self) -> str | None:
        """See `Backend`."""
        if self._thread is None:
            return "the engine has not started"
        return None if self._thread.failure is None else "the engine has stopped"

    async def _next_piece(self, reply: Generation) -> tuple[bytes, bool]:
        """The next piece that is not empty, or the last, and whether it is the last."""
        while True:
            news = self._news.next
            piece, last = reply.take(_MAX_PIECE_BYTES)
            if piece or last:
                return piece, last
            await news.wait()

    async def _pieces(self, reply: Generation, piece: bytes, last: bool, began: float) -> AsyncIterator[bytes]:
        yield piece
        while not last:
            piece, last = await self._next_piece(reply)
            yield piece
        self._totals.finished(time.monotonic() - began)

    async def _refuse_overdue(self, thread: EngineThread) -> None:
        while True:
            await asyncio.sleep(_OVERDUE_EVERY_S)
            thread.refuse_overdue(self._compile_limit_s)
