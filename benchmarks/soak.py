"""Random load on the engine for as long as wanted, and then nothing may be left of it.

    python benchmarks/soak.py DIR --minutes 30

Requests arrive at random with random lengths, KV policies, exit policies, sampling, priorities and clients; some are
cancelled; the cache is far too small for all of them, so requests lose their blocks and run again. At the end the
process must be as it was: no block in use, no state kept, no thread left, memory flat. A sample of the answers is
compared with the same requests alone on an idle engine. Exit code 1 says that something was left or differed.

The time is shared by several engines, one after the other, whose settings are drawn at random too.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from offramp.common.exits.policy import ExitPolicy
from offramp.serve.config import EngineConfig
from offramp.serve.engine import Engine
from offramp.serve.engine_thread import EngineThread
from offramp.serve.measures.records import Totals
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.output import RequestOutput
from offramp.serve.request.request import Request
from offramp.serve.request.sampling_params import SamplingParams
from offramp.serve.scheduling.scheduler import QueueFullError

SAMPLE = 30
"""Answers that are compared with those of the same requests alone."""

MAX_GROWTH = 32 << 20
"""Bytes that memory may grow over the second half of the time: allocators are never quite still."""


@dataclass
class Answer:
    """What came back for one request."""

    request: Request
    token_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """What was wrong afterwards, nothing if all is well; and what was done."""

    faults: list[str]
    totals: Totals
    finished: Counter[str]


class Desk:
    """Sink of all requests: collects answers, and says when a request is over."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.finished: Counter[str] = Counter()
        self.faults: list[str] = []
        self.sample: list[Answer] = []
        self._seen = 0
        self._lock = threading.Lock()

    def open(self, request: Request) -> None:
        with self._lock:
            self.answers[request.request_id] = Answer(request)

    def put(self, output: RequestOutput) -> None:
        with self._lock:
            answer = self.answers.get(output.request_id)
            if answer is None:
                return
            answer.token_ids += output.new_token_ids
            if output.finish_reason is not None:
                self._close(answer, output.finish_reason)
                if output.error is not None:
                    self.faults.append(output.error)

    def fail(self, request_id: str, cause: Exception) -> None:
        with self._lock:
            self.faults.append(f"{type(cause).__name__}: {cause}")
            self.answers.pop(request_id, None)

    def cancel(self, request_id: str) -> None:
        with self._lock:
            if self.answers.pop(request_id, None) is not None:
                self.finished["cancelled"] += 1

    def somebody(self, source: random.Random) -> str | None:
        with self._lock:
            return source.choice(list(self.answers)) if self.answers else None

    def _close(self, answer: Answer, reason: str) -> None:
        del self.answers[answer.request.request_id]
        self.finished[reason] += 1
        # Every answer is equally likely to be in the sample (reservoir sampling), and memory does not grow with time.
        self._seen += 1
        if len(self.sample) < SAMPLE:
            self.sample.append(answer)
        elif (place := random.Random(self._seen).randrange(self._seen)) < SAMPLE:
            self.sample[place] = answer


def soak(directory: Path, seconds: float, seed: int, say: Callable[[str], None] = lambda line: None) -> Outcome:
    """Load the engine for some seconds."""
    threads_before = {thread.ident for thread in threading.enumerate()}
    source = random.Random(seed)
    config = _engine_config(source)
    say(", ".join(f"{field.name} {getattr(config, field.name)}" for field in dataclasses.fields(config)))
    engine = Engine.from_checkpoint(directory, config)
    desk = Desk()
    # All that the queue holds may arrive between two iterations; the thread refuses what is more.
    thread = EngineThread(engine, max_requests=config.max_waiting)
    numbers = itertools.count()
    process = psutil.Process()
    memory: list[tuple[float, int]] = []
    start = time.monotonic()
    told = start
    while (now := time.monotonic()) < start + seconds:
        for _ in range(source.randrange(4)):
            request = _request(engine, source, f"{next(numbers)}")
            desk.open(request)
            try:
                thread.submit(request, desk)
            except QueueFullError:
                desk.cancel(request.request_id)
                desk.finished["refused"] += 1
        if source.random() < 0.06 and (victim := desk.somebody(source)) is not None:
            thread.cancel(victim)
            desk.cancel(victim)
        # Bursts and lulls: at times the engine is far behind, at times idle.
        time.sleep(source.expovariate(1 / (0.002 if source.random() < 0.8 else 0.1)))
        memory.append((now - start, process.memory_info().rss))
        memory = _thinned(memory)
        if now - told > 60:
            told = now
            say(f"{now - start:5.0f} s  {_story(desk, engine)}  rss {memory[-1][1] >> 20} MiB")
    while desk.answers and not thread.failure:
        time.sleep(0.01)
    thread.close()
    say(_story(desk, engine))
    faults = [f"{len(desk.faults)} requests failed, for example: {desk.faults[0]}"] if desk.faults else []
    if engine.has_unfinished:
        faults.append(f"{engine.num_running} requests run and {engine.num_waiting} wait after the end")
    if (live := engine.cache_tokens // config.block_size - engine.num_free_blocks) != 0:
        faults.append(f"{live} blocks are in use")
    if engine.num_kept_tokens:
        faults.append(f"{engine.num_kept_tokens} states of early tokens are kept")
    if engine.num_parked_rows:
        faults.append(f"{engine.num_parked_rows} rows are parked")
    left = [one.name for one in threading.enumerate() if one.ident not in threads_before]
    if left:
        faults.append(f"threads are left: {', '.join(left)}")
    if (growth := _growth(memory)) > MAX_GROWTH:
        faults.append(f"memory grew by {growth >> 20} MiB over the second half")
    totals = copy.deepcopy(engine.metrics.totals)
    faults += _differences(engine, desk.sample)
    return Outcome(faults, totals, desk.finished)


def _engine_config(source: random.Random) -> EngineConfig:
    """Settings at random, but for the sync policies and the split rule under which exits depend on the batch."""
    return EngineConfig(
        block_size=8,
        num_blocks=48,
        max_num_seqs=12,
        max_tokens_per_iteration=48,
        max_waiting=40,
        max_model_len=256,
        group_by_depth=source.choice((False, True)),
        deep_quorum=source.choice((0.0, 0.5, 1.0)),
        max_parked_iterations=source.choice((1, 8)),
        quantization=source.choice(("none", "int8")),
    )


def _request(engine: Engine, source: random.Random, request_id: str) -> Request:
    vocab_size = engine.checkpoint.model.config.vocab_size
    long = source.random() < 0.1
    length = source.randrange(80, 160) if long else source.randrange(1, 40)
    # Some prompts begin alike, so that they share blocks.
    head = [token % vocab_size for token in range(7, 7 + 16 * source.randrange(3))]
    prompt = (head + source.choices(range(vocab_size), k=length))[:160]
    sampled = source.random() < 0.5
    sampling = SamplingParams(
        max_tokens=source.randrange(1, 60),
        temperature=source.uniform(0.2, 1.5) if sampled else 0.0,
        top_p=source.choice((1.0, 0.9)) if sampled else 1.0,
        seed=source.randrange(1 << 30),
        ignore_eos=source.random() < 0.7,
        logprobs=source.choice((None, None, 2)),
    )
    return Request(
        request_id,
        tuple(prompt),
        sampling,
        _exits(engine, source),
        frozenset(engine.checkpoint.eos_token_ids),
        priority=source.choice((0, 0, 0, 1)),
        client=source.choice(("a", "b", "c")),
    )


def _exits(engine: Engine, source: random.Random) -> ExitOptions:
    layers = engine.checkpoint.exits.layers
    policy = source.choice(("full", "fill", "recompute", "verify", "static")) if layers else "full"
    if policy == "full":
        return ExitOptions("full")
    if policy == "static":
        return ExitOptions("static", static_layer=source.choice(layers))
    shortlist = source.choice((None, tuple(range(0, engine.checkpoint.model.config.vocab_size, 3))))
    rule = ExitPolicy(
        measure=source.choice(("margin", "margin", "max_probability", "entropy", "cosine")),
        thresholds={layer: source.choice((-1.0, 0.2, 0.5, 0.9)) for layer in layers},
        min_layer=source.choice((0, 0, layers[-1])),
        decay=source.choice((None, None, 4.0)),
        shortlist=shortlist,
        shortlist_only=source.choice((False, shortlist is not None)),
    )
    return ExitOptions(policy, rule, max_pending=source.choice((1, 3, 8)))


def _differences(engine: Engine, sample: list[Answer]) -> list[str]:
    """Which answers are not those of the same requests alone. Every policy here promises that they are."""
    faults: list[str] = []
    for answer in sample:
        old = answer.request
        again = Request(old.request_id, old.prompt_token_ids, old.sampling, old.exits, old.eos_token_ids)
        engine.add_request(again)
        while engine.has_unfinished:
            engine.step()
        if again.output_token_ids != answer.token_ids:
            faults.append(
                f"request {old.request_id} ({old.exits.kv_policy}, temperature {old.sampling.temperature:g}, "
                f"{old.num_preemptions} preemptions) got {answer.token_ids} under load and {again.output_token_ids} "
                "alone"
            )
    return faults


def _thinned(memory: list[tuple[float, int]], most: int = 2000) -> list[tuple[float, int]]:
    return memory if len(memory) < most else memory[::2]


def _growth(memory: list[tuple[float, int]]) -> int:
    """Bytes by which a straight line through the second half of the readings rises over it (least squares)."""
    half = memory[len(memory) // 2 :]
    if len(half) < 3:
        return 0
    mean_x = sum(x for x, _ in half) / len(half)
    mean_y = sum(y for _, y in half) / len(half)
    spread = sum((x - mean_x) ** 2 for x, _ in half)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in half) / spread
    return int(slope * (half[-1][0] - half[0][0]))


def _story(desk: Desk, engine: Engine) -> str:
    totals = engine.metrics.totals
    counts = ", ".join(f"{count} {reason}" for reason, count in sorted(desk.finished.items()))
    return (
        f"{totals.iterations} iterations, {totals.new_tokens} tokens, {totals.preemptions} preemptions, "
        f"{totals.prefix_hit_tokens} prefix hits, {totals.parked_requests} parked; requests: {counts or 'none yet'}"
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="a checkpoint directory; a small one gives more iterations")
    parser.add_argument("--minutes", type=float, default=30.0, help="(default: %(default)g)")
    parser.add_argument("--rounds", type=int, default=3, help="engines that share the time (default: %(default)d)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    faults: list[str] = []
    for number in range(options.rounds):
        seconds = 60 * options.minutes / options.rounds
        outcome = soak(options.directory, seconds, options.seed + number, lambda line: print(line, flush=True))
        faults += [f"round {number}: {fault}" for fault in outcome.faults]
    for fault in faults:
        print(f"soak: {fault}", file=sys.stderr)
    print("Something is wrong." if faults else "Nothing is left.")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
