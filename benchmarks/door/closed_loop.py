"""A fixed list of requests, so many of them under way at any time: by the engine alone, and through a door."""

from __future__ import annotations

import asyncio
import queue
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

from benchmarks.door.connection import Connection, request
from benchmarks.door.servers import Door

from offramp.serve.config import EngineConfig
from offramp.serve.engine_thread import EngineThread
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.output import RequestOutput
from offramp.serve.request.request import Request
from offramp.serve.request.sampling_params import SamplingParams
from offramp.serve.served_model import ServedModel

LAST_CHUNK = b"\r\n0\r\n\r\n"


@dataclass(frozen=True)
class Work:
    """One request: greedy, to its last token, at full depth.

    Attributes:
        prompt: Token ids.
        tokens: To be generated.
    """

    prompt: tuple[int, ...]
    tokens: int


@dataclass
class Record:
    """How a request went, in seconds of `time.monotonic`, which all processes share."""

    tokens: int
    asked: float
    first: float = 0.0
    ended: float = 0.0


@dataclass(frozen=True)
class Figures:
    """Of the time when all seats are taken: from when as many have ended as there are seats, to the last one's start.

    Attributes:
        tokens_per_s: Generated in that time.
        first_s: Median seconds to the first token.
        between_s: Median seconds between tokens.
    """

    tokens_per_s: float
    first_s: float
    between_s: float

    @classmethod
    def of(cls, records: Sequence[Record], seats: int) -> Figures:
        """From all records of a run. A request's tokens are taken to come evenly between its first and its last."""
        begin, end = sorted(one.ended for one in records)[seats - 1], max(one.asked for one in records)
        tokens = 0.0
        for one in records:
            inside = min(one.ended, end) - max(one.first, begin)
            tokens += one.tokens * max(inside, 0.0) / (one.ended - one.first)
        here = [one for one in records if begin <= one.asked]
        return cls(
            tokens / (end - begin),
            statistics.median(one.first - one.asked for one in here),
            statistics.median((one.ended - one.first) / (one.tokens - 1) for one in here),
        )


def works(count: int, *, vocab_size: int, seed: int = 0) -> list[Work]:
    """Requests of different lengths, so that they neither start nor end together."""
    source = random.Random(seed)
    return [
        Work(tuple(source.choices(range(5, vocab_size), k=source.randrange(16, 49))), source.randrange(48, 81))
        for _ in range(count)
    ]


class _Watch:
    """Sink of one request of the engine alone."""

    def __init__(self, record: Record, over: queue.SimpleQueue[Exception | None]) -> None:
        self._record, self._over = record, over

    def put(self, output: RequestOutput) -> None:
        now = time.monotonic()
        self._record.first = self._record.first or now
        if output.finish_reason is not None:
            self._record.ended = now
            self._over.put(None)

    def fail(self, request_id: str, cause: Exception) -> None:
        self._over.put(cause)


def engine_alone(checkpoint: Path, config: EngineConfig, pipe: Pipe) -> None:
    """A process with an engine and nothing else: runs lists of works as they come through the pipe, until a None."""
    model = ServedModel.load(checkpoint, config, name="alone", version="1.0")
    thread, _ = model.start(lambda outputs: None)
    pipe.send(model.engine.checkpoint.model.config.vocab_size)
    while (given := pipe.recv()) is not None:
        pipe.send(_run_alone(thread, *given))
    thread.close()


def _run_alone(thread: EngineThread, given: Sequence[Work], seats: int) -> list[Record]:
    over: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    records: list[Record] = []

    def start(work: Work) -> None:
        records.append(Record(work.tokens, time.monotonic()))
        sampling = SamplingParams(max_tokens=work.tokens, temperature=0.0, ignore_eos=True)
        asked = Request(f"{len(records)}", work.prompt, sampling, ExitOptions("full"), frozenset())
        thread.submit(asked, _Watch(records[-1], over))

    for work in given[:seats]:
        start(work)
    for number in range(len(given)):
        if (cause := over.get()) is not None:
            raise cause
        if number + seats < len(given):
            start(given[number + seats])
    return records


async def through(door: Door, given: Sequence[Work], seats: int) -> list[Record]:
    """The same as streams through a door, each seat on a connection of its own."""
    records: list[Record] = []
    left = iter(given)
    await asyncio.gather(*(_seat(door, left, records) for _ in range(seats)))
    return records


async def _seat(door: Door, left: Iterator[Work], records: list[Record]) -> None:
    connection = await Connection.to(door.port)
    for work in left:
        body = {
            "model": door.model,
            "prompt": work.prompt,
            "max_tokens": work.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "offramp": {"exit_policy": "full"},
        }
        octets = request("POST", "/v1/completions", body, {"authorization": f"Bearer {door.key}"})
        record = Record(work.tokens, time.monotonic())
        records.append(record)
        await connection.send(octets)
        head = await connection.head()
        assert head.status == 200, head
        # Nothing is decoded, so that the clients take as little as can be of a machine that the server needs.
        tail = b""
        while not tail.endswith(LAST_CHUNK):
            piece = await connection.some()
            assert piece, "the connection ended in the middle of an answer"
            record.first = record.first or time.monotonic()
            tail = (tail + piece)[-200:]
        record.ended = time.monotonic()
        assert b"data: [DONE]" in tail, tail
    await connection.close()
