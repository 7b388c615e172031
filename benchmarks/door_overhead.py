"""What the door costs: the engine alone, the ASGI door around it, and the gateway with TorchServe, in one run.

    python -m benchmarks.door_overhead DIR --threads 2 --dtype bf16

Everybody is given the same list of requests, of which 32 are under way at any time; through a door they are streams.
All are loaded at the same time, and take turns in every round, each time beginning with another one; who has no turn
has nothing to do. What counts is each round's ratio to the engine alone, and the median of rounds. The clients are one
process on the same machine, which reads streams without decoding them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
from benchmarks.door.closed_loop import Figures, Record, Work, engine_alone, through, works
from benchmarks.door.servers import BACKENDS

from offramp.serve.config import EngineConfig

ALONE = "engine alone"
Run = Callable[[Sequence[Work]], list[Record]]


@dataclasses.dataclass
class Contestant:
    """One way to the same engine.

    Attributes:
        run: Answers a list of works.
        processes: Those that take part, beside this one.
        figures: Of each round.
        cpu: Seconds of the processor for each thousand tokens, of each process in each round.
    """

    run: Run
    processes: dict[str, psutil.Process]
    figures: list[Figures] = dataclasses.field(default_factory=list)
    cpu: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    def take_turn(self, given: Sequence[Work], seats: int) -> None:
        watched = {**self.processes, "clients": psutil.Process()}
        before = {name: sum(process.cpu_times()[:2]) for name, process in watched.items()}
        records = self.run(given)
        thousands = sum(work.tokens for work in given) / 1000
        for name, process in watched.items():
            self.cpu.setdefault(name, []).append((sum(process.cpu_times()[:2]) - before[name]) / thousands)
        self.figures.append(Figures.of(records, seats))


def _door(backend: str, folder: Path, options: argparse.Namespace, stack: contextlib.ExitStack) -> Contestant:
    engine = ["--num-threads", str(options.threads), "--dtype", options.dtype, "--max-num-seqs", str(options.clients)]
    door = stack.enter_context(BACKENDS[backend](folder, options.directory, engine, model="m"))
    return Contestant(lambda given: asyncio.run(through(door, given, options.clients)), door.processes())


def _alone(options: argparse.Namespace, stack: contextlib.ExitStack) -> tuple[Contestant, int]:
    """The engine alone, and the size of its vocabulary."""
    config = EngineConfig(num_threads=options.threads, dtype=options.dtype, max_num_seqs=options.clients)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=engine_alone, args=(options.directory, config, there), daemon=True)
    process.start()
    stack.callback(lambda: (here.send(None), process.join(30)))

    def run(given: Sequence[Work]) -> list[Record]:
        here.send((given, options.clients))
        return here.recv()

    vocab_size = here.recv()
    assert process.pid is not None
    return Contestant(run, {"engine": psutil.Process(process.pid)}), vocab_size


def _tell(contestants: dict[str, Contestant]) -> None:
    alone = contestants[ALONE].figures
    print(f"\n{'':14} {'tokens/s':>9} {'of alone':>9} {'first token':>12} {'more':>8} {'between':>9}   (medians; ms)")
    for name, one in contestants.items():
        ratios = [mine.tokens_per_s / its.tokens_per_s for mine, its in zip(one.figures, alone, strict=True)]
        later = [mine.first_s - its.first_s for mine, its in zip(one.figures, alone, strict=True)]
        print(
            f"{name:14} {statistics.median(f.tokens_per_s for f in one.figures):9.0f} "
            f"{statistics.median(ratios):9.3f} {1000 * statistics.median(f.first_s for f in one.figures):12.1f} "
            f"{1000 * statistics.median(later):+8.1f} {1000 * statistics.median(f.between_s for f in one.figures):9.2f}"
            f"   rounds: {', '.join(f'{ratio:.3f}' for ratio in ratios)}; "
            f"{', '.join(f'{1000 * more:+.1f}' for more in later)}"
        )
    print("\nseconds of the processor for each thousand tokens:")
    for name, one in contestants.items():
        print(f"{name:14} " + ", ".join(f"{part} {statistics.median(cpu):.3f}" for part, cpu in one.cpu.items()))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="a checkpoint directory")
    parser.add_argument("--clients", type=int, default=32, help="(default: %(default)d)")
    parser.add_argument("--requests", type=int, default=160, help="in each turn (default: %(default)d)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)d)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the engine")
    parser.add_argument("--dtype", default="fp32", help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        alone, vocab_size = _alone(options, stack)
        contestants = {ALONE: alone}
        for name, backend in (("asgi", "asgi"), ("gateway", "torchserve")):
            contestants[name] = _door(backend, Path(scratch) / name, options, stack)
        given = works(options.requests, vocab_size=vocab_size)
        for one in contestants.values():  # first calls of everything
            one.run(given[: options.clients])
        names = list(contestants)
        for number in range(options.rounds):
            for name in names[number % 3 :] + names[: number % 3]:
                contestants[name].take_turn(given, options.clients)
            print(f"round {number + 1} of {options.rounds} is over", flush=True)
        _tell(contestants)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
