"""The simulated schedule is the one that DeepSpeed makes, and that the engine's stages run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

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


class Span(NamedTuple):
    """What a stage ran: seconds without waiting, and when it got its message, sent its own, and ended."""

    kind: str
    micro_batch: int
    seconds: float
    got: float
    sent: float
    end: float


def recorded(case: Case) -> list[Span]:
    """In each process: all this stage runs in one step."""
    from offramp.train.pipeline.engine import deepspeed_config, make_engine
    from offramp.train.pipeline.stage_module import StageModule

    # isort: split
    import deepspeed
    import torch
    from deepspeed import comm as dist

    from offramp.train.pipeline.stages import plan_stages

    deepspeed.init_distributed("gloo", verbose=False)
    model = case.model()
    module = StageModule(model, plan_stages(model.config, model.exit_config, 2, case.bounds))
    engine = make_engine(module, deepspeed_config(), torch.optim.SGD(module.parameters(), lr=0.0))
    engine.objective = case.run_objective().at(0)
    spans: list[Span] = []

    def timed(kind: str, run: Callable[..., None]) -> Callable[..., None]:
        def operation(micro_batch: int, exchange: Any) -> None:
            receive, send, waited, at = exchange.receive, exchange.send, [0.0], {"got": 0.0, "sent": 0.0}

            def timed_receive(operation: Operation) -> Any:
                start = time.perf_counter()
                message = receive(operation)
                at["got"] = time.perf_counter()
                waited[0] += at["got"] - start
                return message

            def timed_send(operation: Operation, message: Any) -> None:
                at["sent"] = time.perf_counter()
                send(operation, message)

            exchange.receive, exchange.send = timed_receive, timed_send
            start = time.perf_counter()
            run(micro_batch, exchange)
            end = time.perf_counter()
            exchange.receive, exchange.send = receive, send
            spans.append(Span(kind, micro_batch, end - start - waited[0], at["got"], at["sent"], end))

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
        assert [(span.kind, span.micro_batch) for span in spans] == list(operations)
        times.append({(span.kind, span.micro_batch): span for span in spans})
    for micro in range(6):  # one clock for all processes of a machine
        assert times[0]["forward", micro].sent <= times[1]["forward", micro].got
        assert times[1]["backward", micro].sent <= times[0]["backward", micro].got

    def mean(spans: list[Span], wanted: str) -> float:
        lengths = [span.seconds for span in spans if span.kind == wanted]
        return sum(lengths) / len(lengths)

    works = [StageWork(mean(spans, "forward"), mean(spans, "backward")) for spans in stages]
    first = min(span.end - span.seconds for spans in stages for span in spans)
    measured = max(span.end for spans in stages for span in spans) - first
    # Messages and the waits of a busy machine only make it longer.
    assert measured > 0.7 * simulate(simulated, works).seconds
