"""Random clients at a door, and what each must be answered: computed beforehand, on an engine without a server."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
from benchmarks.door.connection import Connection, Head, request
from benchmarks.door.servers import Door

from offramp.serve.config import EngineConfig
from offramp.serve.protocol.replies import Generation
from offramp.serve.served_model import ServedModel

ANSWER_LIMIT_S = 120.0
"""Nobody may wait longer for an answer: then it hangs."""

KEPT_S = 5.0
"""A connection that has been quiet for longer is not used again: the door may just be closing it."""

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
            path, body = _question(source, served.engine.checkpoint.model.config.vocab_size, long=number % 10 == 0)
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
    told = 0
    while tasks:
        done, left = await asyncio.wait(tasks, timeout=60)
        for task in done:
            task.result()
        tasks = list(left)
        say(f"{end - time.monotonic():5.0f} s to go: {dict(outcome.counts)}")
        for fault in outcome.faults[told:]:
            say(f"      {fault}")
        told = len(outcome.faults)
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
        if self._kept is None or not self._kept.open or self._kept.quiet_s > KEPT_S:
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
