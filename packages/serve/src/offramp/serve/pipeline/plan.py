"""What every stage is told of an iteration: its rows, where their keys and values lie, and who asks for a token.

Block tables are sent whole: those of 32 sequences of 1,000 tokens are 8 KiB, less than the states beside them.

Legend: I requests of the iteration, N rows, X early exits of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from offramp.serve.execution.exit_test import RequestExits, exit_levels
from offramp.serve.model.rows import RowContext, Rows, build_rows
from offramp.serve.request.logits_use import LogitsUse
from offramp.serve.scheduling.scheduler_output import SchedulerOutput

NO_RULE = -1
NOBODY = -1


@dataclass(frozen=True)
class StagePlan:
    """One iteration, as stages see it.

    Attributes:
        number: of the iteration.
        positions: [N] int64; see `Rows`.
        slots: [N] int64; see `Rows`.
        sequences: [N] int32; see `Rows`. Sequences are requests.
        block_tables: [I, blocks] int32; see `Rows`.
        copies: [copies, 2] int64 blocks to copy, from and to, before anything is computed.
        newest: [I] int64 which row predicts a token that nobody has said yet, or `NOBODY`. Stages change it.
        rules: [I] int64 number of the measure and shortlist by which that row is tested at exits, or `NO_RULE`.
        levels: [I, X] float64 what its confidence must exceed there.
        uses: [I] int64 what the token asks of the logits (`LogitsUse`).
    """

    number: int
    positions: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    sequences: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    copies: npt.NDArray[np.int64]
    newest: npt.NDArray[np.int64]
    rules: npt.NDArray[np.int64]
    levels: npt.NDArray[np.float64]
    uses: npt.NDArray[np.int64]

    @property
    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """All but the number, in order."""
        return tuple(getattr(self, field.name) for field in fields(self)[1:])

    def rows(self, context: RowContext) -> Rows:
        """The rows; `context` is what they share."""
        return Rows(
            *map(torch.from_numpy, (self.positions, self.slots, self.sequences, self.block_tables)), context=context
        )


def make_plan(
    output: SchedulerOutput,
    exits: Sequence[RequestExits | None],
    rules: Sequence[int],
    uses: Sequence[LogitsUse],
    candidates: Sequence[int],
    context: RowContext,
) -> StagePlan:
    """The plan of an iteration.

    Args:
        output: what the scheduler chose.
        exits: for each request, the exits that its newest row may take; None: none.
        rules: for each request, the number of their rule, or `NO_RULE`.
        uses: for each request, what its next token asks of the logits.
        candidates: X layers.
        context: what rows share.
    """
    scheduled = output.scheduled
    rows = build_rows(scheduled, context)
    last = np.cumsum([item.num_tokens for item in scheduled]) - 1
    return StagePlan(
        output.iteration,
        rows.positions.numpy(),
        rows.slots.numpy(),
        rows.sequences.numpy(),
        rows.block_tables.numpy(),
        np.array(output.copies, dtype=np.int64).reshape(-1, 2),
        np.where([item.samples for item in scheduled], last, NOBODY).astype(np.int64),
        np.array(rules, dtype=np.int64),
        exit_levels(exits, [item.request for item in scheduled], candidates),
        np.array(uses, dtype=np.int64),
    )
