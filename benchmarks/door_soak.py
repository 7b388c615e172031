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
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import psutil
from benchmarks.door.connection import Connection, request
from benchmarks.door.random_clients import ANSWER_LIMIT_S, COMPLETIONS, Outcome, Question, ask_beforehand, load
from benchmarks.door.servers import BACKENDS, Door

from offramp.serve.config import EngineConfig

MODEL = "soaked"
ENGINE = {"max_num_seqs": 16, "max_waiting": 24, "kv_cache_bytes": 160 * 8192, "num_threads": 1}
"""160 blocks of the tiny model's cache: 16 sequences want more."""

IDLE_WITHIN_S = 30.0
WARM_UP_S, SETTLE_S = 10.0, 20.0
"""What is opened once, at a first load, is there before the soak begins; then connections that were kept are closed."""

MAX_GROWTH = {"java": 160 << 20}
"""Bytes that the median of memory may grow from the first to the last third. Java takes what its limit allows (512 MiB)
before it looks for what it could give back."""
MAX_GROWTH_ELSEWHERE = 32 << 20


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
