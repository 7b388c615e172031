"""The simulated schedule is the one that DeepSpeed makes, and that the engine's stages run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from helpers.gradients import Case
from helpers.processes import run_processes
from offramp.train.pipeline.schedule import Operation, one_f_one_b
from offramp.train.pipeline.simulation import StageWork, simulate


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 12])
def test_the_order_is_deepspeeds(stages: int, micro_batches: int) -> None:
    from offramp.train.pipeline import quiet_deepspeed  # noqa: F401

    # isort: split
    from deepspeed.runtime.pipe import schedule

    ours = one_f_one_b(stages, micro_batches)
    for stage in range(stages):
        theirs, done = [], {schedule.ForwardPass: 0, schedule.BackwardPass: 0}
        names: dict[type, Any] = {schedule.ForwardPass: "forward", schedule.BackwardPass: "backward"}
        for step in schedule.TrainSchedule(micro_batches, stages, stage):
            for instruction in step:
                if (kind := type(instruction)) in done:
                    theirs.append(Operation(names[kind], done[kind]))
                    done[kind] += 1
        assert tuple(theirs) == ours.operations[stage]


def recorded(case: Case) -> list[tuple[str, int, float, float]]:
    """In each process: kind, micro-batch, seconds without waiting, and end of all this stage runs in one step."""
    from offramp.train.pipeline.engine import StageModule, make_engine

    # isort: split
    import deepspeed
    import torch
    from deepspeed import comm as dist

    from offramp.train.losses import Objective
    from offramp.train.pipeline.stages import plan_stages

    deepspeed.init_distributed("gloo", verbose=False)
    model = case.model()
    module = StageModule(model, plan_stages(model.config, model.exit_config, 2, case.bounds))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 0},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
    }
    engine = make_engine(module, config, torch.optim.SGD(module.parameters(), lr=0.0))
    engine.objective = Objective(case.weights)
    spans: list[tuple[str, int, float, float]] = []

    def timed(kind: str, run: Callable[..., None]) -> Callable[..., None]:
        def operation(micro_batch: int, exchange: Any) -> None:
            receive, waited = exchange.receive, [0.0]

            def timed_receive(operation: Operation) -> Any:
                start = time.perf_counter()
                message = receive(operation)
                waited[0] += time.perf_counter() - start
                return message

            exchange.receive = timed_receive
            start = time.perf_counter()
            run(micro_batch, exchange)
            end = time.perf_counter()
            exchange.receive = receive
            spans.append((kind, micro_batch, end - start - waited[0], end))

        return operation

    engine._forward, engine._backward = timed("forward", engine._forward), timed("backward", engine._backward)
    micro = case.batch(0).split(case.micro_batches)
    counts = engine.objective.counts(case.batch(0))
    engine.train_batch(micro, counts)
    dist.barrier()
    spans.clear()
    engine.train_batch(micro, counts)
    dist.barrier()
    return spans


@pytest.mark.slow
def test_real_stages_run_what_is_simulated() -> None:
    case = Case(exits=(1, 3), bounds=(2,), micro_batches=6, rows=6)
    stages = run_processes(recorded, 2, case, timeout_s=300)
    simulated = one_f_one_b(2, 6)
    times = []
    for spans, operations in zip(stages, simulated.operations, strict=True):
        assert [Operation(kind, micro) for kind, micro, _, _ in spans] == list(operations)
        times.append({(kind, micro): end for kind, micro, _, end in spans})
    for micro in range(6):  # one clock for all processes of a machine
        assert times[0]["forward", micro] <= times[1]["forward", micro]
        assert times[1]["backward", micro] <= times[0]["backward", micro]

    def mean(spans: list[tuple[str, int, float, float]], wanted: str) -> float:
        lengths = [seconds for kind, _, seconds, _ in spans if kind == wanted]
        return sum(lengths) / len(lengths)

    works = [StageWork(mean(spans, "forward"), mean(spans, "backward")) for spans in stages]
    first = min(end - seconds for spans in stages for _, _, seconds, end in spans)
    measured = max(end for spans in stages for _, _, _, end in spans) - first
    # Messages and the waits of a busy machine only make it longer.
    assert measured > 0.7 * simulate(simulated, works).seconds
