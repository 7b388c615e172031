"""What early exits cost a pipeline in time and memory: measured on this machine, and planned.

    python -m benchmarks.exit_overhead                 two stages, an exit at the start of the second
    python -m benchmarks.exit_overhead --stages 4      an exit at the start of each middle stage

The pipeline without exits and the one with them have the same layers on the same stages. They live in the same
processes and take turns, step by step. An exit is minimal: an unembedding of its own. The plan gets the times of passes
and exits that were measured in these very steps, of each pipeline its own; the bound is EE-LLM's (appendix A.3.1).
Memory is counted tensor by tensor (`benchmarks.live_bytes`) in a step that is not timed.

Legend: S stages, M micro-batches, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from benchmarks.live_bytes import LiveBytes
from torch import Tensor

from offramp.common.exits.config import ExitConfig
from offramp.common.model.config import ModelConfig
from offramp.common.model.transformer import MultiExitTransformer
from offramp.train.data.batch import TokenBatch
from offramp.train.losses import ExitLosses, ExitSums, MicroBatch, Objective
from offramp.train.pipeline.costs import MicroBatchShape
from offramp.train.pipeline.estimate import Estimator
from offramp.train.pipeline.exchange import Exchange
from offramp.train.pipeline.report import milliseconds, table
from offramp.train.pipeline.schedule import Schedule, one_f_one_b
from offramp.train.pipeline.simulation import HeadWork, StageWork, simulate, time_bound
from offramp.train.pipeline.stages import plan_stages
from offramp.train.pipeline.times import estimated

PLAIN, EXITS = "without exits", "with exits"


@dataclass(frozen=True)
class Setting:
    """What is run.

    Attributes:
        stages: S.
        layers: of each stage.
        micro_batches: M.
        rows: of a micro-batch.
        time: tokens of a row.
        size: of states.
        vocabulary: V.
        rounds: steps of each pipeline that are timed.
    """

    stages: int
    layers: int
    micro_batches: int
    rows: int
    time: int
    size: int
    vocabulary: int
    rounds: int

    @property
    def depth(self) -> int:
        """Layers of the model."""
        return self.stages * self.layers

    @property
    def bounds(self) -> list[int]:
        """The last layer of every stage but the last."""
        return [self.layers * stage for stage in range(1, self.stages)]

    @property
    def exits(self) -> tuple[int, ...]:
        """What every middle stage starts with; of two stages, the second."""
        return tuple(self.bounds[:-1] or self.bounds)

    def estimator(self, layers: tuple[int, ...]) -> Estimator:
        """The plan of a pipeline with these exits; its times are of no use."""
        exits = ExitConfig(layers, head="bare", tied=False)
        config = ModelConfig.from_hf(
            {
                "model_type": "llama",
                "vocab_size": self.vocabulary,
                "hidden_size": self.size,
                "intermediate_size": 8 * self.size // 3,
                "num_hidden_layers": self.depth,
                "num_attention_heads": self.size // 64,
                "num_key_value_heads": self.size // 64,
                "max_position_embeddings": self.time,
                "rms_norm_eps": 1e-5,
                "tie_word_embeddings": False,
            }
        )
        model = MultiExitTransformer(config, exits)
        model.reset_parameters(seed=0)
        shape = MicroBatchShape(self.rows, self.time)
        plan = plan_stages(config, exits, self.stages, self.bounds)
        return Estimator(plan, model.train(), shape, estimated(config, exits, shape, 1e12, ""), self.micro_batches)


@dataclass
class Stopwatch:
    """Seconds of what a stage does in one step.

    Attributes:
        forward: of each forward pass, without waiting.
        backward: of each backward pass, without waiting and without early exits.
        exits: of the early exits of each backward pass.
        spans: start and end of each pass, waiting included.
    """

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    exits: list[float] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)


class Pipeline:
    """One of the two pipelines: this process's stage of it, with a watch at everything that it does."""

    def __init__(self, setting: Setting, layers: tuple[int, ...]) -> None:
        from offramp.train.pipeline.engine import deepspeed_config, make_engine
        from offramp.train.pipeline.stage_module import StageModule

        estimator = setting.estimator(layers)
        memory, works = estimator.memory(), estimator.works()
        self.module = StageModule(estimator.model, estimator.plan)
        self.engine = engine = make_engine(
            self.module,
            deepspeed_config(),
            torch.optim.AdamW(self.module.parameters(), lr=1e-5),
        )
        engine.objective = Objective({**dict.fromkeys(layers, 0.3), setting.depth: 1.0})
        self.stays, self.planned = memory[engine.stage_id].total, estimator.run(works).peaks[engine.stage_id].bytes
        ids = torch.randint(0, setting.vocabulary, (setting.micro_batches * setting.rows, setting.time + 1))
        segments = torch.zeros_like(ids[:, 1:])
        batch = MicroBatch(TokenBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), segments))
        self.queue, self.counts = batch.split(setting.micro_batches), engine.objective.counts(batch)
        self.watch = Stopwatch()
        self._forward, self._backward, self._run = engine._forward, engine._backward, engine._run

        def forward(micro_batch: int, exchange: Exchange) -> None:
            self._timed(self._forward, self.watch.forward, micro_batch, exchange)

        def backward(micro_batch: int, exchange: Exchange) -> None:
            self._timed(self._backward, self.watch.backward, micro_batch, exchange)

        engine._forward, engine._backward = forward, backward

    def _timed(self, run: Callable[..., None], times: list[float], micro_batch: int, exchange: Exchange) -> None:
        waited, early = [0.0], [0.0]
        start = time.perf_counter()
        with _measured(Exchange, "receive", waited), _measured_exits(early):
            run(micro_batch, exchange)
        end = time.perf_counter()
        times.append(end - start - waited[0] - early[0])
        if times is self.watch.backward:
            self.watch.exits.append(early[0])
        self.watch.spans.append((start, end))

    def step(self) -> tuple[Stopwatch, float, float]:
        """Run one; what was done, and when it began and ended."""
        self.watch = Stopwatch()
        torch.distributed.barrier()
        start = time.perf_counter()
        self.engine.train_batch(self.queue, self.counts)
        return self.watch, start, time.perf_counter()

    def counted(self) -> int:
        """Bytes of activations that are alive at most in a step."""
        peak = 0

        def run(micro_batches: Sequence[MicroBatch], schedule: Schedule) -> ExitSums:
            nonlocal peak
            with LiveBytes() as live:
                sums = self._run(micro_batches, schedule)
            peak = live.peak - live.now  # what is left are gradients
            return sums

        self.engine._run = run
        self.step()
        self.engine._run = self._run
        return peak


@contextmanager
def _measured(kind: type, name: str, seconds: list[float]) -> Iterator[None]:
    original = getattr(kind, name)

    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        try:
            return original(*args)
        finally:
            seconds[0] += time.perf_counter() - start

    setattr(kind, name, timed)
    try:
        yield
    finally:
        setattr(kind, name, original)


@contextmanager
def _measured_exits(seconds: list[float]) -> Iterator[None]:
    original = ExitLosses.of

    def timed(self: ExitLosses, layer: int) -> Iterator[Tensor]:
        start = time.perf_counter()
        yield from original(self, layer)  # goes on when the loss has been back-propagated
        if layer != self.objective.final_layer:
            seconds[0] += time.perf_counter() - start

    ExitLosses.of = timed
    try:
        yield
    finally:
        ExitLosses.of = original


def _worker(rank: int, setting: Setting, port: int, threads: int, answer: str) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(setting.stages),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    warnings.filterwarnings("ignore")
    torch.set_num_threads(threads)
    from offramp.train.pipeline import quiet_deepspeed  # noqa: F401 - before deepspeed

    # isort: split
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    pipelines = {PLAIN: Pipeline(setting, ()), EXITS: Pipeline(setting, setting.exits)}
    for pipeline in pipelines.values():
        pipeline.step()  # warms up
    steps: dict[str, list[tuple[Stopwatch, float, float]]] = {name: [] for name in pipelines}
    for index in range(setting.rounds):
        names = list(pipelines) if index % 2 == 0 else list(reversed(pipelines))
        for name in names:
            steps[name].append(pipelines[name].step())
    memory = {name: (one.stays, one.planned, one.counted()) for name, one in pipelines.items()}
    gathered: list[Any] = [None] * setting.stages
    torch.distributed.all_gather_object(gathered, (steps, memory))
    if rank == 0:
        Path(answer).write_text(json.dumps(_report(setting, gathered), indent=2) + "\n", encoding="utf-8")


def _report(setting: Setting, gathered: Sequence[Any]) -> dict[str, Any]:
    """What all stages saw, in seconds and bytes."""
    whole: dict[str, list[float]] = {}
    passes: dict[str, list[float]] = {}
    for name in (PLAIN, EXITS):
        rounds = [[steps[name][index] for steps, _ in gathered] for index in range(setting.rounds)]
        whole[name] = [max(end for _, _, end in one) - min(start for _, start, _ in one) for one in rounds]
        passes[name] = [
            max(watch.spans[-1][1] for watch, _, _ in one) - min(watch.spans[0][0] for watch, _, _ in one)
            for one in rounds
        ]

    def median(name: str, stage: int, of: str) -> float:
        steps, _ = gathered[stage]
        return statistics.median(statistics.fmean(getattr(watch, of)) for watch, _, _ in steps[name])

    heads = [median(EXITS, s, "exits") for s in range(setting.stages)]
    works = {
        name: [StageWork(median(name, s, "forward"), median(name, s, "backward")) for s in range(setting.stages)]
        for name in (PLAIN, EXITS)
    }
    plain = works[PLAIN]
    works[EXITS] = [_with_exit(work, head) for work, head in zip(works[EXITS], heads, strict=True)]
    ratios = [a / b for a, b in zip(whole[EXITS], whole[PLAIN], strict=True)]
    return {
        "setting": {**vars(setting), "exits": list(setting.exits)},
        "step_s": {name: statistics.median(times) for name, times in whole.items()},
        "passes_s": {name: statistics.median(times) for name, times in passes.items()},
        "overhead": statistics.median(ratios) - 1.0,
        "overhead_range": [min(ratios) - 1.0, max(ratios) - 1.0],
        "overhead_passes": statistics.median(a / b for a, b in zip(passes[EXITS], passes[PLAIN], strict=True)) - 1.0,
        "planned": _planned(works, setting.micro_batches),
        "stages": [
            {
                "forward_s": work.forward,
                "backward_s": work.backward,
                "exit_s": head,
                "memory": {
                    name: dict(zip(("stays", "planned", "counted"), memory[name], strict=True)) for name in works
                },
            }
            for work, head, (_, memory) in zip(plain, heads, gathered, strict=True)
        ],
        "more_stages": {
            str(count): _planned(_more(works, max(heads), count), setting.micro_batches) for count in (4, 8)
        }
        if setting.stages == 2
        else {},
    }


def _with_exit(work: StageWork, seconds: float) -> StageWork:
    return replace(work, heads=(HeadWork(0.0, seconds, 0.0, 0.0),)) if seconds else work


def _more(works: dict[str, list[StageWork]], exit_seconds: float, stages: int) -> dict[str, list[StageWork]]:
    """As many stages of the same layers: middle ones as the first, the last as the last."""
    first, last = works[PLAIN][0], works[PLAIN][-1]
    plain = [first] * (stages - 1) + [last]
    return {
        PLAIN: plain,
        EXITS: [_with_exit(work, exit_seconds if 0 < s < stages - 1 else 0.0) for s, work in enumerate(plain)],
    }


def _planned(works: dict[str, list[StageWork]], micro_batches: int) -> dict[str, Any]:
    schedule = {name: one_f_one_b(len(own), micro_batches) for name, own in works.items()}
    return {
        "passes_s": {name: simulate(schedule[name], own).seconds for name, own in works.items()},
        "bound_s": {name: time_bound(own, micro_batches) for name, own in works.items()},
    }


def show(report: dict[str, Any]) -> str:
    """The report as tables."""
    planned, rows = report["planned"], []
    for name in (PLAIN, EXITS):
        seconds = (
            report["step_s"][name],
            report["passes_s"][name],
            planned["passes_s"][name],
            planned["bound_s"][name],
        )
        rows.append([name, *map(milliseconds, seconds)])
    low, high = report["overhead_range"]
    added = [f"{100 * report['overhead']:+.1f}%", f"{100 * report['overhead_passes']:+.1f}%"]
    for key in ("passes_s", "bound_s"):
        added.append(f"{100 * (planned[key][EXITS] / planned[key][PLAIN] - 1):+.1f}%")
    rows.append(["added", *added])
    head = ["", "step, ms", "passes, ms", "planned, ms", "bound, ms"]
    lines = [table(head, rows), f"added to a step: {100 * low:+.1f}% to {100 * high:+.1f}% in single rounds", ""]
    head = ["stage", "forward, ms", "backward, ms", "exit, ms", "activations, MB", "with exits", "change"]
    head += ["as planned", "with exits", "weights etc.", "with exits"]
    rows = []
    for index, stage in enumerate(report["stages"]):
        without, own = stage["memory"][PLAIN], stage["memory"][EXITS]
        times = [milliseconds(stage[key]) for key in ("forward_s", "backward_s", "exit_s")]
        counted = [f"{one['counted'] / 1e6:.1f}" for one in (without, own)]
        change = f"{100 * (own['counted'] / without['counted'] - 1):+.2f}%"
        others = [f"{one[key] / 1e6:.1f}" for key in ("planned", "stays") for one in (without, own)]
        rows.append([str(index), *times, *counted, change, *others])
    lines.append(table(head, rows))
    for count, more in report["more_stages"].items():
        times = [
            f"{milliseconds(more[key][PLAIN])} -> {milliseconds(more[key][EXITS])} ms "
            f"({100 * (more[key][EXITS] / more[key][PLAIN] - 1):+.1f}%)"
            for key in ("passes_s", "bound_s")
        ]
        lines.append(f"{count} stages like these, an exit on each middle one: planned {times[0]}, bound {times[1]}")
    return "\n".join(lines)


def main() -> None:
    """Run both pipelines in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--layers", type=int, default=3, help="of each stage")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=1, help="of a micro-batch")
    parser.add_argument("--time", type=int, default=512, help="tokens of a row")
    parser.add_argument("--size", type=int, default=384, help="of states; a multiple of 192")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=7, help="steps of each pipeline that are timed")
    parser.add_argument("--out", type=Path, default=Path("build/exit_overhead"))
    options = vars(parser.parse_args())
    out = options.pop("out")
    setting, cores = Setting(**options), os.cpu_count() or 1
    threads = max(1, cores // setting.stages)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "report.json"
        torch.multiprocessing.spawn(_worker, (setting, port, threads, str(answer)), nprocs=setting.stages)
        report = json.loads(answer.read_text(encoding="utf-8"))
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{setting.stages}_stages.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(
        f"{setting.stages} stages of {setting.layers} layers, {setting.micro_batches} micro-batches of {setting.rows} "
        f"x {setting.time} tokens, D {setting.size}, V {setting.vocabulary}; exits after {list(setting.exits)}; "
        f"{setting.stages} processes with {threads} threads each on {cores} cores"
    )
    if setting.stages > cores:
        print("there are more stages than cores, so stages wait for each other's cores and times hold that, too")
    print(show(report))


if __name__ == "__main__":
    main()
