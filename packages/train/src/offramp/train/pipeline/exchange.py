"""Messages between neighbouring stages: in which order they go, and a watch over them.

States go down the pipeline and gradients up, each on a process group of its own, so that every channel between two
stages carries one kind of message in one direction. Its order is that of the sender's operations. A receiver that needs
a later message first takes the earlier ones, too, and keeps them; a sender never waits for its receiver. So whatever
order of operations has no circle in it runs to its end.

A message that does not come within the time limit ends the process with one sentence that says which it was.

Legend: B batch, T time, D model, S stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout

from offramp.train.lost_process import LostProcess, ended, timed_out
from offramp.train.pipeline.schedule import Kind, Operation, Schedule

MESSAGES: dict[Kind, str] = {"forward": "states", "backward": "gradient"}
"""What goes to the next stage after a forward pass, and to the one before after a backward pass."""


@contextmanager
def watched(who: str, what: str, peer: str, limit: timedelta) -> Iterator[None]:
    """Turn a time-out, or the end of the other process, into one sentence.

    Args:
        who: waits.
        what: it waits for.
        peer: whom it waits for.
        limit: how long it would.

    Raises:
        LostProcess: see above.
    """
    try:
        yield
    except RuntimeError as error:
        if timed_out(error):
            raise LostProcess(
                f"{who} waited {limit.total_seconds() / 60:g} minutes (timeout_minutes) for {what} and {peer} did not "
                "answer; see what that process is doing, or give it more time."
            ) from error
        if ended(error):
            raise LostProcess(
                f"{who} was waiting for {what} when {peer} ended; the message of that process says why."
            ) from error
        raise


class Links:
    """The channels of this process, one down and one up. Made by all processes together.

    Args:
        grid: DeepSpeed's process grid.
        others: groups beside its own that are to have the time limit, too.
    """

    def __init__(self, grid: Any, others: Sequence[dist.ProcessGroup] = ()) -> None:
        self.stage, self.num_stages = int(grid.get_stage_id()), int(grid.pipe_parallel_size)
        self.ranks = [int(grid.stage_to_global(stage_id=stage)) for stage in range(self.num_stages)]
        self.limit = timedelta(minutes=30)
        own = (grid.get_pipe_parallel_group(), grid.get_data_parallel_group(), grid.get_model_parallel_group())
        self._collectives = (*own, *others)
        self._groups: dict[Kind, Any] = {}
        if self.num_stages > 1:
            for kind in MESSAGES:
                for ranks in grid.pipe_groups:  # every rank takes part in making every group
                    group = dist.new_group(ranks)
                    if self.ranks[self.stage] in ranks:
                        self._groups[kind] = group

    def limit_to(self, limit: timedelta) -> None:
        """Set how long a process waits for another; DeepSpeed's own groups would always take half an hour."""
        self.limit = limit
        for group in self._collectives:
            _set_pg_timeout(limit, group)

    @property
    def name(self) -> str:
        """This process, for people."""
        return self.name_of(self.stage)

    def name_of(self, stage: int) -> str:
        """A process of this pipeline, for people."""
        return f"stage {stage} (rank {self.ranks[stage]})"

    def send(self, kind: Kind, tensor: Tensor) -> dist.Work:
        """Start sending to the neighbour that `kind` goes to."""
        work = dist.isend(tensor, self.ranks[self.stage + _step(kind)], group=self._groups[kind])
        assert work is not None
        return work

    def receive(self, kind: Kind, tensor: Tensor) -> dist.Work:
        """Start receiving from the neighbour that `kind` comes from."""
        work = dist.irecv(tensor, self.ranks[self.stage - _step(kind)], group=self._groups[kind])
        assert work is not None
        return work


class _Message(NamedTuple):
    work: dist.Work
    tensor: Tensor


class Exchange:
    """The messages of one run of a schedule, as this stage sees them.

    Args:
        links: the channels.
        schedule: what all stages do.
        empty: a tensor for the message of an operation [B, T, D].
        carries: whether the message of an operation goes from a stage to the next in its direction: (kind, sender).
    """

    def __init__(
        self,
        links: Links,
        schedule: Schedule,
        empty: Callable[[Operation], Tensor],
        carries: Callable[[Kind, int], bool],
    ) -> None:
        self._links, self._empty = links, empty
        own = frozenset(schedule.operations[links.stage])
        self._incoming: dict[Kind, Iterator[Operation]] = {}
        self._expected: dict[Kind, frozenset[Operation]] = {}
        self._outgoing: dict[Kind, frozenset[Operation]] = {}
        self._order: dict[Kind, dict[Operation, int]] = {}  # of the neighbour that a kind goes to
        for kind in MESSAGES:
            step = _step(kind)
            before, after = links.stage - step, links.stage + step
            common: list[Operation] = []
            if 0 <= before < links.num_stages and carries(kind, before):
                common = [one for one in schedule.operations[before] if one.kind == kind and one in own]
            self._incoming[kind], self._expected[kind] = iter(common), frozenset(common)
            taken: frozenset[Operation] = frozenset()
            order: dict[Operation, int] = {}
            if 0 <= after < links.num_stages:
                order = {one: index for index, one in enumerate(schedule.operations[after])}
                if carries(kind, links.stage):
                    taken = frozenset(one for one in own if one.kind == kind and one in order)
            self._outgoing[kind], self._order[kind] = taken, order
        self._waiting: dict[Operation, _Message] = {}
        self._sent: dict[Kind, dict[Operation, _Message]] = {kind: {} for kind in MESSAGES}
        # A neighbour that sends nothing back does not say what it has taken, so it may only be so much behind.
        self._ahead = 2 * len(links.ranks) + schedule.inserted

    def expects(self, operation: Operation) -> bool:
        """Whether an operation needs a message from a neighbour."""
        return operation in self._expected[operation.kind]

    def sends(self, operation: Operation) -> bool:
        """Whether an operation's result goes to a neighbour."""
        return operation in self._outgoing[operation.kind]

    def prepare(self, operation: Operation) -> None:
        """Let the message of an operation come while something else is computed."""
        while self.expects(operation) and operation not in self._waiting:
            following = next(self._incoming[operation.kind])
            tensor = self._empty(following)
            self._waiting[following] = _Message(self._links.receive(following.kind, tensor), tensor)

    def receive(self, operation: Operation) -> Tensor:
        """[B, T, D] the message that an operation needs."""
        self.prepare(operation)
        work, tensor = self._waiting.pop(operation)
        source = self._links.stage - _step(operation.kind)
        with self._watched(f"the {MESSAGES[operation.kind]} of {name_of(operation)}", source):
            work.wait(self._links.limit)
        # Whatever the neighbour did before that, it has taken all it needed.
        back: Kind = "backward" if operation.kind == "forward" else "forward"
        order = self._order[back]
        if operation in order:
            for one in [one for one in self._sent[back] if order[one] < order[operation]]:
                self._wait_for(one)
        return tensor

    def send(self, operation: Operation, tensor: Tensor) -> None:
        """Send what an operation gives its neighbour, without waiting."""
        sent = self._sent[operation.kind]
        sent[operation] = _Message(self._links.send(operation.kind, tensor), tensor)
        while len(sent) > self._ahead:
            self._wait_for(next(iter(sent)))

    def finish(self) -> None:
        """Wait until everything has been taken."""
        for sent in self._sent.values():
            for operation in list(sent):
                self._wait_for(operation)

    def _wait_for(self, operation: Operation) -> None:
        target = self._links.stage + _step(operation.kind)
        with self._watched(f"the {MESSAGES[operation.kind]} of {name_of(operation)} to be taken", target):
            self._sent[operation.kind].pop(operation).work.wait(self._links.limit)

    def _watched(self, what: str, stage: int) -> Any:
        return watched(self._links.name, what, self._links.name_of(stage), self._links.limit)


def _step(kind: Kind) -> int:
    """Stages from a sender to its receiver."""
    return 1 if kind == "forward" else -1


def name_of(operation: Operation) -> str:
    """The micro-batch of an operation, for people."""
    if operation.micro_batch < 0:
        return f"inserted micro-batch {-operation.micro_batch}"
    return f"micro-batch {operation.micro_batch + 1}"
