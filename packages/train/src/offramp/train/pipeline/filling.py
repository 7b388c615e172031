"""Partial micro-batches in the bubbles of 1F1B: which rows they are, and what makes their gradients unbiased.

A filled step cuts a batch of R rows into M micro-batches that go through all stages both ways, some that reach the
first stages only (warm-up), and some that come back through the last ones only (cool-down); see `schedule`. The
objective is that of the whole batch, yet a row in a bubble gives only some stages the gradient of only some exits.
Which rows those are is drawn anew for every step, so that what is there may stand for what is missing.

With F rows in whole micro-batches, W_e rows in the warm-up that meet exit e, and C_s rows in the cool-down that come
back to stage s, rows are weighted, for the parameters of stage s and the loss of exit e, by

    R / (F + W_e)                    in the warm-up
    R / (F + W_e) * F / (F + C_s)    in whole micro-batches and in the cool-down

With these weights F, W_e and C_s rows count as R for every s and e, and every row is as likely as any other to be in
any place. So the expectation over the draw is the gradient of the whole batch, exactly, for each parameter (Horvitz and
Thompson, 1952). One divisor for all stages, as in EE-LLM's code, does not do that. The first factor belongs to the loss
of an exit. The second belongs to a stage, so a gradient is multiplied by the quotient of both stages' factors on its
way down.

Legend: B batch, T time, R rows of a batch, S stages, M micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from offramp.common.errors import OfframpError
from offramp.train.data.batch import TokenBatch
from offramp.train.losses import MicroBatch
from offramp.train.pipeline.schedule import Operation, Schedule


@dataclass(frozen=True)
class FillSettings:
    """The strategy's `fill_bubbles`.

    Attributes:
        warmup: micro-batches put into the warm-up; None: as many as fit.
        cooldown: micro-batches put into the cool-down; None: as many as fit.
        ratio: time of a backward pass over that of a forward pass, if stages are alike; None: estimated stage by stage.
    """

    warmup: int | None = None
    cooldown: int | None = None
    ratio: float | None = None

    @classmethod
    def from_value(cls, value: Any) -> FillSettings | None:
        """Read `true`, `false`, or a mapping of the attributes.

        Raises:
            OfframpError: it is none of them.
        """
        if isinstance(value, bool) or value is None:
            return cls() if value else None
        known = [entry.name for entry in fields(cls)]
        if not isinstance(value, Mapping) or not set(value) <= set(known):
            raise OfframpError(f"fill_bubbles is {value!r}; give true, false, or some of {', '.join(known)}.")
        for name in ("warmup", "cooldown"):
            count = value.get(name)
            if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 0):
                raise OfframpError(f"fill_bubbles.{name} is {count!r}; it must be a whole number, not negative.")
        ratio = value.get("ratio")
        if ratio is not None and not (isinstance(ratio, int | float) and 0.0 < ratio < math.inf):
            raise OfframpError(f"fill_bubbles.ratio is {ratio!r}; it must be a number above 0.")
        return cls(**value)


@dataclass(frozen=True)
class Weights:
    """Factors on gradients; see the module.

    Attributes:
        loss: [S] on the losses of a stage's exits.
        whole: [S] on what a stage accumulates of whole micro-batches and of those in the cool-down.
    """

    loss: tuple[float, ...]
    whole: tuple[float, ...]

    @classmethod
    def even(cls, num_stages: int) -> Weights:
        """Those of a step without partial micro-batches."""
        return cls((1.0,) * num_stages, (1.0,) * num_stages)

    @classmethod
    def of(cls, schedule: Schedule, rows: Mapping[int, int]) -> Weights:
        """The factors of a step.

        Args:
            schedule: of it.
            rows: micro-batch -> its rows.
        """
        whole = sum(count for micro, count in rows.items() if 0 <= micro < schedule.micro_batches)
        early, late = [], []
        for operations in schedule.operations:
            back = [one.micro_batch for one in operations if one.kind == "backward"]
            early.append(sum(rows[micro] for micro in back if micro < 0))
            late.append(sum(rows[micro] for micro in back if micro >= schedule.micro_batches))
        total = sum(rows.values())
        return cls(tuple(total / (whole + own) for own in early), tuple(whole / (whole + own) for own in late))

    def of_loss(self, micro_batch: int, stage: int) -> float:
        """On the losses of a stage's exits, in its backward pass of a micro-batch."""
        return self.loss[stage] * (1.0 if micro_batch < 0 else self.whole[stage])

    def of_message(self, micro_batch: int, sender: int) -> float:
        """On the gradient that a stage hands down."""
        return 1.0 if micro_batch < 0 else self.whole[sender - 1] / self.whole[sender]


def backward_rows(schedule: Schedule, rows: Mapping[int, int]) -> tuple[int, ...]:
    """[S] rows of a step that give a stage's parameters a gradient."""
    return tuple(
        sum(count for micro, count in rows.items() if Operation("backward", micro) in operations)
        for operations in schedule.operations
    )


def arrange(batch: MicroBatch, schedule: Schedule, seed: int, step: int) -> list[MicroBatch]:
    """Cut a batch into a schedule's micro-batches, such that `result[n]` is micro-batch n, also for n < 0.

    Args:
        batch: of at least as many rows as there are micro-batches.
        schedule: with partial micro-batches.
        seed: of the run.
        step: optimizer step; with the seed it says which rows are where, on all stages alike.
    """
    order = torch.randperm(batch.tokens.num_rows, generator=torch.Generator().manual_seed(seed * 1_000_003 + step))
    order = order.to(batch.tokens.input_ids.device)
    tokens = TokenBatch(*(tensor[order] for tensor in batch.tokens))
    mixed = MicroBatch(tokens, *(None if tensor is None else tensor[order] for tensor in batch[1:]))
    return mixed.split(schedule.micro_batches + schedule.inserted)


def rows_of(schedule: Schedule, queue: Sequence[MicroBatch]) -> dict[int, int]:
    """Micro-batch -> rows, for a queue as `arrange` makes it."""
    micros = {one.micro_batch for one in schedule.operations[0] if one.kind == "forward"}
    return {micro: queue[micro].tokens.num_rows for micro in sorted(micros)}
