"""What a schedule costs: a discrete-event simulation of its stages. Numbers only, no tensors.

A stage does one operation at a time. A forward pass needs the states of the stage before, a backward pass the gradient
of the stage after; both take `transfer` seconds on the way, beside what the stages compute, and wait at the receiver
for as long as they must.

Legend: S stages, M micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offramp.train.pipeline.schedule import Operation, Schedule


class HeadWork(NamedTuple):
    """One exit of a stage, per micro-batch.

    Attributes:
        forward: seconds.
        backward: seconds.
        held: bytes that autograd keeps between the two.
        working: bytes alive at most while the head is computed and back-propagated, `held` among them.
        freed: of the stage's `held`, what is gone by then if the head is deferred: that of the layers above it.
    """

    forward: float
    backward: float
    held: float
    working: float
    freed: float = 0.0


@dataclass(frozen=True)
class StageWork:
    """One stage, per micro-batch.

    Attributes:
        forward: seconds, without the exits.
        backward: seconds, without the exits, recomputation included.
        held: bytes of activations that wait for the backward pass, without the exits.
        working: bytes on top of that while layers are back-propagated, activations that are made again among them.
        ending: bytes on top of what waits for later micro-batches, when only the embedding is left.
        heads: the exits, the final one among them.
        deferred: the exits' forward is done in the backward pass, each after that of the layers above it.
    """

    forward: float
    backward: float
    held: float = 0.0
    working: float = 0.0
    ending: float = 0.0
    heads: tuple[HeadWork, ...] = ()
    deferred: bool = True

    def seconds(self, kind: str) -> float:
        """Of a whole forward or backward pass, exits included."""
        forward = sum(head.forward for head in self.heads)
        if kind == "forward":
            return self.forward + (0.0 if self.deferred else forward)
        return self.backward + sum(head.backward for head in self.heads) + (forward if self.deferred else 0.0)

    @property
    def total(self) -> float:
        """Seconds of both passes."""
        return self.seconds("forward") + self.seconds("backward")


@dataclass(frozen=True)
class StagePeak:
    """The most that a stage has alive at once.

    Attributes:
        in_flight: micro-batches whose activations wait.
        logits: tensors of exit logits, one per exit and micro-batch.
        bytes: activations, logits included.
    """

    in_flight: int
    logits: int
    bytes: float


@dataclass(frozen=True)
class Timeline:
    """When everything happens.

    Attributes:
        schedule: what was run.
        spans: [S] start and end in seconds of each operation of a stage, in its order.
        busy: [S] seconds that a stage computes.
        peaks: [S] see `StagePeak`.
    """

    schedule: Schedule
    spans: tuple[tuple[tuple[float, float], ...], ...]
    busy: tuple[float, ...]
    peaks: tuple[StagePeak, ...]

    @property
    def seconds(self) -> float:
        """From the first operation's start to the last one's end: a step without its optimizer."""
        return max(spans[-1][1] for spans in self.spans)

    @property
    def bubble_share(self) -> float:
        """Share of all stages' time in which nothing is computed."""
        whole = len(self.busy) * self.seconds
        return 1.0 - sum(self.busy) / whole if whole else 0.0


def simulate(schedule: Schedule, works: Sequence[StageWork], transfer: float = 0.0) -> Timeline:
    """Run a schedule.

    Args:
        schedule: the order of operations.
        works: [S] what they cost.
        transfer: seconds that states or gradients of a micro-batch are on the way to a neighbour.
    """
    ended: list[dict[Operation, float]] = [{} for _ in works]
    spans: list[list[tuple[float, float]]] = [[] for _ in works]
    runs = [frozenset(operations) for operations in schedule.operations]
    waiting = True
    while waiting:
        waiting, moved = False, False
        for stage, operations in enumerate(schedule.operations):
            clock = spans[stage][-1][1] if spans[stage] else 0.0
            for operation in operations[len(spans[stage]) :]:
                source = stage - 1 if operation.kind == "forward" else stage + 1
                ready = 0.0
                if 0 <= source < len(works) and operation in runs[source]:
                    if operation not in ended[source]:
                        waiting = True
                        break
                    ready = ended[source][operation] + transfer
                start = max(clock, ready)
                clock = start + works[stage].seconds(operation.kind)
                ended[stage][operation] = clock
                spans[stage].append((start, clock))
                moved = True
        if waiting and not moved:
            raise ValueError("the schedule waits for itself")
    busy = tuple(sum(end - start for start, end in stage) for stage in spans)
    peaks = tuple(_peak(operations, work) for operations, work in zip(schedule.operations, works, strict=True))
    return Timeline(schedule, tuple(tuple(stage) for stage in spans), busy, peaks)


def _peak(operations: Sequence[Operation], work: StageWork) -> StagePeak:
    """Walk through a stage's operations; what is alive does not depend on how long they take."""
    heads = work.heads
    kept = work.held + (0.0 if work.deferred else sum(head.held for head in heads))
    # Beyond what waits: the layers at work, a head at work, or the embedding's gradient.
    extra = [work.working, work.ending - work.held]
    extra += [head.working - (head.freed if work.deferred else head.held) for head in heads]
    in_flight = most = logits = 0
    most_bytes = 0.0
    # A forward pass whose backward pass never comes keeps nothing.
    returning = {operation.micro_batch for operation in operations if operation.kind == "backward"}
    for kind, micro in operations:
        if micro not in returning:
            continue
        if kind == "forward":
            in_flight += 1
            most = max(most, in_flight)
            most_bytes = max(most_bytes, in_flight * kept)
            if not work.deferred:
                logits = max(logits, in_flight * len(heads))
        else:
            most_bytes = max(most_bytes, in_flight * kept + max(extra))
            if work.deferred and heads:
                logits = max(logits, 1)
            in_flight -= 1
    return StagePeak(most, logits, most_bytes)


def time_bound(works: Sequence[StageWork], micro_batches: int, transfer: float = 0.0) -> float:
    """Upper bound on a step (EE-LLM, appendix A.3.1): once through all stages but the last, then M times the slowest.

    In the paper's terms, with the stages' totals written out, this is f_IN + b_IN + (P - 1)(f_BB + b_BB) +
    sum_{i<P} N_i (f_EE + b_EE) + M max_i {...}. The paper leaves out communication; an operation that has to wait for
    a message is here as if it were longer by that, both ways.

    The paper's stages are alike but for their exits. Where the shares of forward and backward passes differ much from
    stage to stage, as with a frozen backbone, a step can be a few per cent longer.
    """
    hop = 2.0 * transfer if len(works) > 1 else 0.0
    totals = [work.total + hop for work in works]
    return sum(totals[:-1]) + micro_batches * max(totals)
