"""The order of operations of 1F1B pipeline training, with partial micro-batches in its bubbles. No tensors in here.

Each stage runs forward passes until as many micro-batches are in flight as there are stages from it to the last one,
then one backward and one forward pass in turn (Narayanan et al., 2021). Two parts of the idle time can be filled
(EE-LLM, appendix C.2), with r the time of a backward pass over that of a forward pass and
K = floor((S - 1) r / (1 + r)):

- *warm-up*: up to K more micro-batches run forward through the first stages only, just before the first backward pass,
  and back-propagate the losses of the exits they meet;
- *cool-down*: up to K more micro-batches run forward through all stages at the end, and backward through the last ones.

Legend: S stages, M micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from offramp.common.errors import OfframpError

Kind = Literal["forward", "backward"]


class Operation(NamedTuple):
    """One forward or backward pass of a micro-batch on one stage.

    Attributes:
        kind: which of them.
        micro_batch: 0 .. M - 1 are the batch; -1, -2, ... are those put into the warm-up, M, M + 1, ... those put into
            the cool-down.
    """

    kind: Kind
    micro_batch: int


@dataclass(frozen=True)
class Schedule:
    """What every stage does, in order.

    Attributes:
        micro_batches: M, those that run through all stages both ways.
        operations: [S] of each stage.
    """

    micro_batches: int
    operations: tuple[tuple[Operation, ...], ...]

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.operations)

    @property
    def inserted(self) -> int:
        """Micro-batches in the bubbles, beside the M."""
        return len({one.micro_batch for one in self.operations[0] if one.kind == "forward"}) - self.micro_batches


def bubble_capacity(num_stages: int, ratio: float) -> int:
    """K, the most micro-batches that fit into the warm-up or the cool-down without making a step longer.

    Args:
        num_stages: S.
        ratio: r, time of a backward pass over that of a forward pass.
    """
    return math.floor((num_stages - 1) * ratio / (1.0 + ratio) + 1e-9)


def warmup_counts(num_stages: int, inserted: int, ratio: float, exit_stages: Sequence[int]) -> tuple[int, ...]:
    """[S] forward passes of micro-batches in the warm-up, by stage.

    Stage s has room for (r (S - s - 1) - s) / (1 + r) of them, which is K - s. A micro-batch goes no further than the
    last stage on its way that has an exit, since nothing would come back from there.

    Args:
        num_stages: S.
        inserted: micro-batches, at most K.
        ratio: see `bubble_capacity`.
        exit_stages: stages that have early exits.
    """
    counts = [0] * num_stages
    for index in range(inserted):
        room = [s for s in range(num_stages) if (ratio * (num_stages - s - 1) - s) / (1.0 + ratio) + 1e-9 >= index + 1]
        depth = max((s + 1 for s in exit_stages if s in room), default=0)
        for stage in range(depth):
            counts[stage] += 1
    return tuple(counts)


def cooldown_counts(num_stages: int, inserted: int, ratio: float) -> tuple[int, ...]:
    """[S] backward passes of micro-batches in the cool-down, by stage: stage s has room for r s / (1 + r) of them."""
    return tuple(min(inserted, math.floor(ratio * s / (1.0 + ratio) + 1e-9)) for s in range(num_stages))


def forward_only(num_stages: int, micro_batches: int) -> Schedule:
    """An evaluation of M micro-batches on S stages."""
    order = tuple(Operation("forward", micro) for micro in range(micro_batches))
    return Schedule(micro_batches, (order,) * num_stages)


def one_f_one_b(
    num_stages: int, micro_batches: int, warmup: Sequence[int] = (), cooldown: Sequence[int] = ()
) -> Schedule:
    """The 1F1B schedule.

    Args:
        num_stages: S.
        micro_batches: M.
        warmup: [S] see `warmup_counts`; not rising from stage to stage. Empty: none.
        cooldown: [S] see `cooldown_counts`; not falling. Empty: none.

    Raises:
        OfframpError: there is nothing to run.
    """
    if num_stages < 1 or micro_batches < 1:
        raise OfframpError(f"{num_stages} stages and {micro_batches} micro-batches: both must be at least 1.")
    warmup, cooldown = warmup or (0,) * num_stages, cooldown or (0,) * num_stages
    total = micro_batches + max(cooldown)
    operations = []
    for stage in range(num_stages):
        in_flight = min(num_stages - stage, total)
        order = [Operation("forward", micro) for micro in range(in_flight)]
        partial = [-1 - index for index in range(warmup[stage])]
        order += [Operation("forward", micro) for micro in partial]
        # The last one in went least far, so its gradient is there first.
        order += [Operation("backward", micro) for micro in reversed(partial)]
        for micro in range(total):
            if micro < micro_batches + cooldown[stage]:
                order.append(Operation("backward", micro))
            if micro + in_flight < total:
                order.append(Operation("forward", micro + in_flight))
        operations.append(tuple(order))
    return Schedule(micro_batches, tuple(operations))
