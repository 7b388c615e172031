"""Random clients at the whole door for as long as wanted: every answer is right, and then nothing may be left of them.

    python -m benchmarks.door_soak DIR --backend torchserve --minutes 15

Clients ask at the same time: streams, whole answers, chats, requests that are refused, and some that leave, in order or
without a word, before or in the middle of an answer. What each question is answered with is computed beforehand, on an
idle engine without any server; every answer under load must have the same tokens, log-probabilities and exit layers.
Every status is one that was to be expected. The cache is far too small for all, so requests lose their blocks and run
again; the queue is, too, so some are told to come back.

Afterwards the engine must be idle, a request that needs every block of the cache must get them, and each process must
have as many file descriptors as before. Memory is compared between the first and the last third of the time. Exit code
1 says that something differed or was left.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import psutil
from benchmarks.door.connection import Connection, Head, request
from benchmarks.door.servers import BACKENDS, Door

from offramp.serve.config import EngineConfig
from offramp.serve.protocol.replies import Generation
from offramp.serve.served_model import ServedModel

MODEL = "soaked"
ENGINE = {"max_num_seqs": 16, "max_waiting": 24, "kv_cache_bytes": 160 * 8192, "num_threads": 1}
"""160 blocks of the tiny model's cache: 16 sequences want more."""

ANSWER_LIMIT_S = 120.0
"""Nobody may wait longer for an answer: then it hangs."""

IDLE_WITHIN_S = 30.0
WARM_UP_S, SETTLE_S = 10.0, 20.0
"""What is opened once, at a first load, is there before the soak begins; then connections that were kept are closed."""

MAX_GROWTH = {"java": 160 << 20}
"""Bytes that the median of memory may grow from the first to the last third. Java takes what its limit allows (512 MiB)
before it looks for what it could give back."""
MAX_GROWTH_ELSEWHERE = 32 << 20
MAX_FAULTS = 20

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass
class Said:
    """What one choice says.

    Attributes:
        text: Of the choice.
        tokens: Text and log-probability of each token.
        exit_layers: Of each token.
        finish_reason: At its end.
    """

    text: str = ""
    tokens: list[tuple[str, float]] = field(default_factory=list)
    exit_layers: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def take(self, choice: Mapping[str, Any], event: Mapping[str, Any]) -> None:
        """A choice of a whole answer, or what an event adds to it, which tells of no other choice beside its own."""
        message = choice.get("message", choice.get("delta", choice))
        self.text += message.get("content", message.get("text")) or ""
        about = choice.get("logprobs") or {}
        if "content" in about:
            self.tokens += [(entry["token"], entry["logprob"]) for entry in about["content"]]
        elif about:
            self.tokens += zip(about["tokens"], about["token_logprobs"], strict=True)
        self.exit_layers += choice.get("offramp", event.get("offramp", {})).get("exit_layers", [])
        self.finish_reason = choice["finish_reason"] or self.finish_reason

    def differs(self, right: Said) -> str | None:
        """What is not as it should be; log-probabilities may differ in the last bits."""
        for number, ((token, mine), (wanted, its)) in enumerate(zip(self.tokens, right.tokens, strict=False)):
            if token != wanted or abs(mine - its) > 1e-3:
                return f"token {number} is {token!r} ({mine:.4f}) instead of {wanted!r} ({its:.4f})"
        for name in ("text", "exit_layers", "finish_reason"):
            if getattr(self, name) != getattr(right, name):
                return f"{name} is {getattr(self, name)!r:.200} instead of {getattr(right, name)!r:.200}"
        if len(self.tokens) != len(right.tokens):
            return f"there are {len(self.tokens)} tokens instead of {len(right.tokens)}"
        return None


@dataclass(frozen=True)
class Question:
    """A request whose answer is known.

    Attributes:
        path: Of the endpoint.
        body: Without `stream`.
        answer: Its choices.
    """

    path: str
    body: dict[str, Any]
    answer: list[Said]

    def octets(self, key: str, *, stream: bool) -> bytes:
        """As it goes over the wire."""
        body = {**self.body, "stream": stream}
        return request("POST", self.path, body, {"authorization": f"Bearer {key}"})


@dataclass
class Outcome:
    """What was done, and what was wrong with it.

    Attributes:
        counts: Of what was done and the status that it got; 0: the client has left before.
        faults: What was wrong; none if all is well.
        began: When the load began, in seconds of `time.monotonic`.
        first_s: Seconds to the first event of each stream.
        whole_s: Seconds to the end of each answer.
    """

    counts: Counter[tuple[str, int]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def fault(self, what: str) -> None:
        """Notes what is wrong; the first of them are enough."""
        self.counts["fault", 0] += 1
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(f"after {time.monotonic() - self.began:.0f} s, {what}")


def ask_beforehand(
    checkpoint: Path, config: EngineConfig, *, model: str, seed: int, count: int = 40
) -> tuple[list[Question], int]:
    """Questions at random with their answers, each asked alone; and how many tokens the cache of this engine holds."""
    served = ServedModel.load(checkpoint, config, name=model, version="1.0")
    thread, service = served.start(lambda outputs: None)
    source = random.Random(seed)
    questions: list[Question] = []
    try:
        for number in range(count):
            path, body = _question(source, served.engine.checkpoint.config.vocab_size, long=number % 10 == 0)
            body["model"] = model
            reply = service.open(path, json.dumps(body).encode(), f"{number}")
            assert isinstance(reply, Generation), reply
            octets, last = b"", False
            while not last:
                piece, last = reply.take(1 << 20)
                octets += piece
                time.sleep(0 if piece else 0.001)
            questions.append(Question(path, body, said([json.loads(octets)])))
    finally:
        thread.close()
    return questions, served.engine.cache_tokens


def said(objects: Iterable[dict[str, Any]]) -> list[Said]:
    """The choices of an answer: one object, or the events of a stream."""
    choices: dict[int, Said] = {}
    for one in objects:
        if "error" in one:
            raise ValueError(f"an error in the answer: {one['error']}")
        for choice in one["choices"]:
            choices.setdefault(choice["index"], Said()).take(choice, one)
    return [choices[index] for index in sorted(choices)]


def _question(source: random.Random, vocab_size: int, *, long: bool) -> tuple[str, dict[str, Any]]:
    """Some prompts begin alike, so that they share blocks; long answers are neighbours of many others."""
    drawn = source.random() < 0.5
    body: dict[str, Any] = {
        "max_tokens": source.randrange(300, 600) if long else source.randrange(1, 60),
        "temperature": source.uniform(0.3, 1.2) if drawn else 0,
        "seed": source.randrange(1 << 30),
        "n": source.choice((1, 1, 1, 2)) if drawn else 1,
        "offramp": {
            "return_exit_layers": True,
            "threshold": source.choice((-1.0, 0.3, 0.6)),
            "kv_policy": source.choice(("full", "fill", "fill", "recompute", "verify")),
        },
    }
    if body["offramp"]["kv_policy"] == "full":
        del body["offramp"]["threshold"]
    if source.random() < 0.25:
        text = " ".join(source.choices(("once", "upon", "a", "time", "Grüße", "→"), k=source.randrange(1, 12)))
        return CHAT, {**body, "messages": [{"role": "user", "content": text}], "logprobs": True}
    head = list(range(7, 7 + 16 * source.randrange(3)))
    prompt = head + source.choices(range(5, vocab_size), k=source.randrange(1, 40))
    return COMPLETIONS, {**body, "prompt": prompt, "logprobs": 0}


def refused(door: Door) -> dict[str, tuple[bytes, int]]:
    """Requests that nobody should make: octets and the status that they must get."""
    asked = {"model": door.model, "prompt": [5], "max_tokens": 1}
    mine = {"authorization": f"Bearer {door.key}"}

    def post(body: bytes | dict[str, Any], path: str = COMPLETIONS, **headers: str) -> bytes:
        return request("POST", path, body, {**mine, **headers})

    return {
        "no JSON": (post(b'{"model": '), 400),
        "unknown field": (post({**asked, "top_q": 1}), 400),
        "field out of range": (post({**asked, "temperature": 9}), 400),
        "token out of range": (post({**asked, "prompt": [10_000_000]}), 400),
        "prompt too long": (post({**asked, "prompt": [5] * 20_000}), 400),
        "no regular expression": (post({**asked, "structured_outputs": {"regex": "("}}), 400),
        "unknown model": (post({**asked, "model": "gpt"}), 404),
        "unknown version": (post({**asked, "model": f"{door.model}@9"}), 404),
        "no key": (request("POST", COMPLETIONS, asked), 401),
        "wrong key": (request("POST", COMPLETIONS, asked, {"authorization": "Bearer wrong"}), 401),
        "unknown path": (post(asked, "/v1/embeddings"), 404),
        "TorchServe's own path": (post(asked, f"/predictions/{door.model}/1.0/v1/completions"), 404),
        "what stops a model": (request("GET", f"/models/{door.model}?customized=true", headers=mine), 404),
        "wrong method": (request("GET", COMPLETIONS, headers=mine), 405),
        "no JSON by its type": (post(b"{}", **{"content-type": "text/plain"}), 415),
        "too long": (post(b"", **{"content-length": "5000000"}), 413),
        "two lengths": (post(b"", **{"content-length": "0", "transfer-encoding": "chunked"}), 400),
    }


async def load(
    door: Door,
    questions: Sequence[Question],
    *,
    seconds: float,
    clients: int,
    seed: int,
    say: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Clients that ask for some seconds, and finish what they have begun."""
    outcome = Outcome()
    end = time.monotonic() + seconds
    asking = [_Client(door, questions, outcome, seed + number).run(end) for number in range(clients)]
    tasks = [asyncio.create_task(one) for one in asking]
    while tasks:
        done, left = await asyncio.wait(tasks, timeout=60)
        for task in done:
            task.result()
        tasks = list(left)
        say(f"{end - time.monotonic():5.0f} s to go: {dict(outcome.counts)}")
    return outcome


class _Client:
    """Asks one thing after the other, at random."""

    def __init__(self, door: Door, questions: Sequence[Question], outcome: Outcome, seed: int) -> None:
        self._door = door
        self._questions = questions
        self._refused = list(refused(door).items())
        self._outcome = outcome
        self._source = random.Random(seed)
        self._kept: Connection | None = None

    async def run(self, end: float) -> None:
        ways = (self._stream, self._whole, self._refused_one, self._leave, self._reset, self._look)
        while time.monotonic() < end:
            [way] = self._source.choices(ways, (40, 20, 15, 12, 8, 5))
            name = way.__name__.strip("_")
            try:
                with anyio.fail_after(ANSWER_LIMIT_S):
                    await way()
            except TimeoutError:
                self._outcome.fault(f"{name}: no answer within {ANSWER_LIMIT_S:g} s")
                self._kept = None
            except (OSError, EOFError, ValueError, LookupError) as error:
                self._outcome.fault(f"{name}: {type(error).__name__} {error}")
                self._kept = None
            # Bursts and lulls.
            await asyncio.sleep(self._source.expovariate(1 / (0.01 if self._source.random() < 0.9 else 0.5)))
        if self._kept is not None:
            await self._kept.close()

    async def _stream(self) -> None:
        await self._ask("stream", stream=True)

    async def _whole(self) -> None:
        await self._ask("whole", stream=False)

    async def _ask(self, name: str, *, stream: bool) -> None:
        question = self._source.choice(self._questions)
        began = time.monotonic()
        connection, head = await self._send(question.octets(self._door.key, stream=stream))
        if head.status != 200:
            await self._expect(name, head, await connection.body(head), 429)
            return
        octets = b""
        async for piece in connection.pieces(head):
            if stream and not octets:
                self._outcome.first_s.append(time.monotonic() - began)
            octets += piece
        self._outcome.whole_s.append(time.monotonic() - began)
        self._outcome.counts[name, 200] += 1
        got = said(_events(octets) if stream else [json.loads(octets)])
        if len(got) != len(question.answer):
            raise ValueError(f"{len(got)} choices instead of {len(question.answer)}")
        for mine, right in zip(got, question.answer, strict=True):
            if (what := mine.differs(right)) is not None:
                self._outcome.fault(f"{name}: {what}, for {question.body!r:.300}")

    async def _refused_one(self) -> None:
        name, (octets, status) = self._source.choice(self._refused)
        connection, head = await self._send(octets)
        await self._expect(name, head, await connection.body(head), status)

    async def _look(self) -> None:
        path = self._source.choice(("/v1/models", f"/v1/models/{self._door.model}", "/health/live", "/health/ready"))
        connection, head = await self._send(request("GET", path, headers={"authorization": f"Bearer {self._door.key}"}))
        await connection.body(head)
        self._outcome.counts["look", head.status] += 1
        if head.status != 200:
            self._outcome.fault(f"{path}: {head.status}")

    async def _leave(self) -> None:
        """Asks for a stream and leaves in order after some of it."""
        connection = await Connection.to(self._door.port)
        await connection.send(self._source.choice(self._questions).octets(self._door.key, stream=True))
        head = await connection.head()
        self._outcome.counts["leave", head.status] += 1
        if head.status not in (200, 429):
            self._outcome.fault(f"leave: {head.status}")
        for _ in range(self._source.randrange(20)):
            if not await connection.some():
                break
        await connection.close()

    async def _reset(self) -> None:
        """Asks, perhaps not to the end, and leaves without a word at any moment."""
        octets = self._source.choice(self._questions).octets(self._door.key, stream=self._source.random() < 0.5)
        connection = await Connection.to(self._door.port)
        await connection.send(octets[: self._source.choice((10, len(octets) - 5, len(octets), len(octets)))])
        await asyncio.sleep(self._source.expovariate(1 / 0.05))
        connection.reset()
        self._outcome.counts["reset", 0] += 1

    async def _send(self, octets: bytes) -> tuple[Connection, Head]:
        """On the connection that is kept, if it is: one that answers in the wrong order would show."""
        if self._kept is None or not self._kept.open:
            self._kept = await Connection.to(self._door.port)
        await self._kept.send(octets)
        return self._kept, await self._kept.head()

    async def _expect(self, name: str, head: Head, body: bytes, status: int) -> None:
        self._outcome.counts[name, head.status] += 1
        error = json.loads(body).get("error", {})
        if head.status != status or set(error) != {"message", "type", "param", "code"}:
            self._outcome.fault(f"{name}: {head.status} instead of {status}: {body[:300]!r}")
        if status == 429 and "retry-after" not in head.headers:
            self._outcome.fault(f"{name}: 429 without Retry-After")


def _events(octets: bytes) -> Iterator[dict[str, Any]]:
    *events, done, empty = octets.split(b"\n\n")
    if (done, empty) != (b"data: [DONE]", b""):
        raise ValueError("the stream does not end as it should")
    return (json.loads(event.removeprefix(b"data: ")) for event in events)


async def all_blocks(door: Door, cache_tokens: int) -> str | None:
    """Asks what needs every block of the cache; what is wrong if it cannot be had."""
    body = {"model": door.model, "prompt": [5] * (cache_tokens - 1), "max_tokens": 1}
    connection = await Connection.to(door.port)
    with anyio.fail_after(ANSWER_LIMIT_S):
        await connection.send(request("POST", COMPLETIONS, body, {"authorization": f"Bearer {door.key}"}))
        head = await connection.head()
        said = await connection.body(head)
    await connection.close()
    return None if head.status == 200 else f"not every block can be had afterwards: {head.status} {said[:300]!r}"


@dataclass
class Watched:
    """One process, as it was every second.

    Attributes:
        before: File descriptors before the load.
        after: And after it.
        memory: Resident bytes.
        threads: Their number.
    """

    process: psutil.Process
    before: int = 0
    after: int = 0
    memory: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def look(self) -> None:
        self.memory.append(self.process.memory_info().rss)
        self.threads.append(self.process.num_threads())

    def thirds(self, readings: Sequence[int]) -> tuple[float, float]:
        """Medians of the first and the last third."""
        third = max(1, len(readings) // 3)
        return statistics.median(readings[:third]), statistics.median(readings[-third:])


def soak(door: Door, questions: Sequence[Question], cache_tokens: int, options: argparse.Namespace) -> list[str]:
    """Load and what is left of it, told as tables; what was wrong."""
    asyncio.run(load(door, questions, seconds=WARM_UP_S, clients=options.clients, seed=options.seed - options.clients))
    time.sleep(SETTLE_S)
    watched = {name: Watched(process) for name, process in door.processes().items()}
    for one in watched.values():
        one.before = one.process.num_fds()

    async def run() -> tuple[Outcome, str | None]:
        looking = asyncio.create_task(_look_on(list(watched.values())))
        outcome = await load(
            door,
            questions,
            seconds=60 * options.minutes,
            clients=options.clients,
            seed=options.seed,
            say=lambda line: print(line, flush=True),
        )
        looking.cancel()
        return outcome, await all_blocks(door, cache_tokens)

    outcome, fault = asyncio.run(run())
    faults = [*outcome.faults, *([] if fault is None else [fault])]
    faults += _left(door, watched)
    for name, one in watched.items():
        first, last = one.thirds(one.memory)
        if last - first > MAX_GROWTH.get(name, MAX_GROWTH_ELSEWHERE):
            faults.append(f"the memory of {name} has grown by {(last - first) / (1 << 20):.0f} MiB")
    _tell(outcome, watched)
    return faults


async def _look_on(watched: Sequence[Watched]) -> None:
    began = time.monotonic()
    while True:
        for one in watched:
            one.look()
        before = time.monotonic()
        await asyncio.sleep(1)
        # Then nobody else had the processor either, and limits of seconds may have been reached for no other reason.
        if (stood := time.monotonic() - before) > 3:
            print(f"after {before - began:.0f} s the clients stood still for {stood:.0f} s", flush=True)


def _left(door: Door, watched: Mapping[str, Watched]) -> list[str]:
    """What is left of the load when its clients have gone, for longer than it takes to notice."""
    deadline = time.monotonic() + IDLE_WITHIN_S
    while True:
        faults: list[str] = []
        for name, one in watched.items():
            one.after = one.process.num_fds()
            if one.after > one.before:
                faults.append(f"{name} has {one.after} file descriptors, {one.before} before")
        if door.metrics_url is not None:
            for gauge in ("running_requests", "waiting_requests", "live_blocks"):
                if value := _gauge(door.metrics_url, f"offramp_{gauge}"):
                    faults.append(f"{gauge} is {value:g}")
        if not faults or time.monotonic() > deadline:
            return faults
        time.sleep(0.5)


def _gauge(url: str, name: str) -> float:
    with urllib.request.urlopen(url, timeout=10) as response:
        found = re.search(rf"^{name}\{{.*\}} (\S+)$", response.read().decode(), re.MULTILINE)
    return float(found[1]) if found else 0.0


def _tell(outcome: Outcome, watched: Mapping[str, Watched]) -> None:
    print(f"\n{'what':28} status  count")
    for (what, status), count in sorted(outcome.counts.items()):
        print(f"{what:28} {status or '-':>6} {count:6}")
    for name, values in (("first event", outcome.first_s), ("whole answer", outcome.whole_s)):
        if len(values) > 1:
            median, *_ = statistics.quantiles(values, n=2)
            print(f"{name}: median {median:.3f} s, 99% {statistics.quantiles(values, n=100)[-1]:.3f} s, ", end="")
            print(f"longest {max(values):.3f} s")
    print(f"\n{'process':18} {'MiB, first third':>17} {'last third':>11} {'threads':>15} {'descriptors':>15}")
    for name, one in watched.items():
        first, last = one.thirds(one.memory)
        fewer, more = one.thirds(one.threads)
        print(f"{name:18} {first / (1 << 20):17.1f} {last / (1 << 20):11.1f} {fewer:8.0f} {more:6.0f} ", end="")
        print(f"{one.before:8} {one.after:6}")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="a checkpoint directory; a small one gives more requests")
    parser.add_argument("--backend", choices=sorted(BACKENDS), default="torchserve", help="(default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=15.0, help="(default: %(default)g)")
    parser.add_argument("--clients", type=int, default=64, help="(default: %(default)d)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    config = dataclasses.replace(EngineConfig(), **ENGINE)
    questions, cache_tokens = ask_beforehand(options.directory, config, model=MODEL, seed=options.seed)
    engine = [part for name, value in ENGINE.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    with tempfile.TemporaryDirectory() as scratch:
        opened = BACKENDS[options.backend](Path(scratch) / "door", options.directory, engine, model=MODEL)
        with opened as door:
            faults = soak(door, questions, cache_tokens, options)
    for fault in faults:
        print(f"soak: {fault}", file=sys.stderr)
    print("Something is wrong." if faults else "Every answer was right, and nothing is left.")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
