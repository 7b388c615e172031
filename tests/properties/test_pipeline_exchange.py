"""Messages between stages arrive whole and in any order that a schedule asks for, and nobody waits for ever."""

from __future__ import annotations

import threading
from collections import defaultdict
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.processes import run_processes
from offramp.common.errors import OfframpError
from offramp.train.pipeline.exchange import Exchange, Links, watched
from offramp.train.pipeline.schedule import (
    Operation,
    Schedule,
    bubble_capacity,
    cooldown_counts,
    forward_only,
    one_f_one_b,
    warmup_counts,
)


class Channels:
    """What all stages of a pipeline share: first in, first out, for each kind and sender."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.sent: dict[tuple[str, int], list[Tensor]] = defaultdict(list)
        self.taken: dict[tuple[str, int], int] = defaultdict(int)


class FakeLinks:
    """The channels in one process. A message is taken when its receiver has asked for it, as with gloo and NCCL."""

    def __init__(self, channels: Channels, stage: int, num_stages: int) -> None:
        self.channels, self.stage, self.num_stages = channels, stage, num_stages
        self.ranks, self.limit, self.name = list(range(num_stages)), timedelta(seconds=20), str(stage)
        self.asked: dict[tuple[str, int], int] = defaultdict(int)

    def name_of(self, stage: int) -> str:
        return str(stage)

    def send(self, kind: str, tensor: Tensor) -> Any:
        key = kind, self.stage
        with self.channels.changed:
            self.channels.sent[key].append(tensor)
            number = len(self.channels.sent[key])
            self.channels.changed.notify_all()
        return FakeWork(self.channels, lambda: self.channels.taken[key] >= number)

    def receive(self, kind: str, tensor: Tensor) -> Any:
        key = kind, self.stage - (1 if kind == "forward" else -1)
        self.asked[key] += 1
        number = self.asked[key]
        with self.channels.changed:
            self.channels.taken[key] = number
            self.channels.changed.notify_all()
        sent = self.channels.sent[key]
        return FakeWork(self.channels, lambda: len(sent) >= number, lambda: tensor.copy_(sent[number - 1]))


class FakeWork:
    def __init__(self, channels: Channels, done: Any, then: Any = None) -> None:
        self.channels, self.done, self.then = channels, done, then

    def wait(self, limit: timedelta) -> None:
        with self.channels.changed:
            if not self.channels.changed.wait_for(self.done, limit.total_seconds()):
                raise RuntimeError("Timed out waiting")
            if self.then is not None:
                self.then()


def run(schedule: Schedule, trained: list[bool]) -> list[dict[Operation, Any]]:
    """[S] what each stage received for each operation; a message is kind, micro-batch and sender."""
    channels, stages = Channels(), schedule.num_stages
    received: list[dict[Operation, Any]] = [{} for _ in range(stages)]
    most: list[int] = [0] * stages
    faults: list[BaseException] = []

    def stage(index: int) -> None:
        try:
            links: Any = FakeLinks(channels, index, stages)
            exchange = Exchange(
                links,
                schedule,
                lambda operation: torch.empty(3),
                lambda kind, sender: kind == "forward" or any(trained[:sender]),
            )
            operations = schedule.operations[index]
            for position, operation in enumerate(operations):
                for one in operations[position : position + 2]:
                    exchange.prepare(one)
                if exchange.expects(operation):
                    received[index][operation] = exchange.receive(operation).tolist()
                if exchange.sends(operation):
                    message = [float(operation.kind == "forward"), float(operation.micro_batch), float(index)]
                    exchange.send(operation, torch.tensor(message))
                most[index] = max(most[index], *(len(sent) for sent in exchange._sent.values()))
            exchange.finish()
            assert not exchange._waiting, "a message that nobody reads"
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=stage, args=(index,)) for index in range(stages)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults, faults
    assert max(most) <= 2 * stages + schedule.inserted + 1
    return received


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    stages, count = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    if draw(st.booleans()):
        return forward_only(stages, count)
    ratio = draw(st.floats(0.3, 4.0))
    capacity = bubble_capacity(stages, ratio)
    exits = sorted(draw(st.sets(st.integers(0, stages - 1))))
    early = warmup_counts(stages, draw(st.integers(0, capacity)), ratio, exits)
    return one_f_one_b(stages, count, early, cooldown_counts(stages, draw(st.integers(0, capacity)), ratio))


@settings(deadline=None, max_examples=150)
@given(schedules(), st.lists(st.booleans(), min_size=4, max_size=4))
def test_every_operation_gets_its_own_message(schedule: Schedule, trained: list[bool]) -> None:
    received = run(schedule, trained)
    for index, operations in enumerate(schedule.operations):
        for operation in operations:
            source = index - (1 if operation.kind == "forward" else -1)
            wanted = 0 <= source < schedule.num_stages and operation in schedule.operations[source]
            if operation.kind == "backward":
                wanted = wanted and any(trained[:source])
            message = [float(operation.kind == "forward"), float(operation.micro_batch), float(source)]
            assert received[index].get(operation) == (message if wanted else None)


class Grid:
    """The part of DeepSpeed's grid that links read: one pipeline of all processes."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.pipe_parallel_size = dist.get_world_size()
        self.pipe_groups = [list(range(self.pipe_parallel_size))]
        self.group = dist.new_group()

    def get_stage_id(self) -> int:
        return torch.distributed.get_rank()

    def stage_to_global(self, stage_id: int) -> int:
        return stage_id

    def get_pipe_parallel_group(self) -> Any:
        return self.group

    get_data_parallel_group = get_model_parallel_group = get_pipe_parallel_group


def one_that_stops() -> str | None:
    """Stage 1 of 3 stops before the second micro-batch; returns what the others are told."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    links = Links(Grid())
    links.limit_to(timedelta(seconds=2))
    exchange = Exchange(
        links, one_f_one_b(3, 3), lambda operation: torch.empty(2, 4, 8), lambda kind, sender: sender > 0
    )
    try:
        for operation in one_f_one_b(3, 3).operations[links.stage]:
            if links.stage == 1 and operation == Operation("forward", 1):
                threading.Event().wait(5)  # longer than the others have patience
                return None
            if exchange.expects(operation):
                exchange.receive(operation)
            if exchange.sends(operation):
                exchange.send(operation, torch.zeros(2, 4, 8))
        exchange.finish()
    except OfframpError as fault:
        return str(fault)
    return ""


@pytest.mark.slow
def test_a_stage_that_stops_is_named() -> None:
    first, _, last = run_processes(one_that_stops, 3, timeout_s=300)
    patience = "waited 0.0333333 minutes (timeout_minutes) for"
    assert first is not None
    assert first.startswith(f"stage 0 (rank 0) {patience} the gradient of micro-batch")
    assert "stage 1 (rank 1) did not answer" in first
    assert last is not None
    assert last.startswith(f"stage 2 (rank 2) {patience} the states of micro-batch 2")


def test_a_process_that_ended_is_named_and_other_faults_stay_what_they_are() -> None:
    limit = timedelta(minutes=30)
    with (
        pytest.raises(OfframpError, match="stage 0 was waiting for the states when stage 1 ended"),
        watched("stage 0", "the states", "stage 1", limit),
    ):
        raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:27840.")
    with pytest.raises(RuntimeError, match="size mismatch"), watched("stage 0", "the states", "stage 1", limit):
        raise RuntimeError("size mismatch")
