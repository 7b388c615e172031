"""Sync policies: which of the rows that are sure may leave the iteration at this exit. Rules on booleans, nothing else.

Legend: M decode rows still inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from offramp.serve.config import SyncPolicy

SyncRule = Callable[[Tensor, Tensor], Tensor]
"""From `sure` [M] and `eligible` [M] to the rows that leave [M], all bool.

A row is `sure` if its confidence exceeded its threshold at this exit or at an earlier one of the same pass, and
`eligible` if its request allows exits at all.
"""


def leave_together(sure: Tensor, eligible: Tensor) -> Tensor:
    """`all`: nobody leaves until every eligible row is sure; then all of them do.

    Batch-synchronised exit (Algorithm 1 of the batched early-exit framework for CALM): the status of a row is OR-ed
    over the exits of one pass, and the pass ends when it is true for the whole batch. There every row is eligible. Here
    rows of prompts and of requests that run at full depth share the iteration: they are not asked and simply go on, so
    that one request at full depth does not keep its neighbours from leaving.
    """
    return eligible if bool((sure | ~eligible).all()) else torch.zeros_like(eligible)


def leave_alone(sure: Tensor, eligible: Tensor) -> Tensor:
    """`regroup`: each row leaves as soon as it is sure, and the rest go on as a smaller batch."""
    return sure & eligible


SYNC_POLICIES: Mapping[SyncPolicy, SyncRule] = {"all": leave_together, "regroup": leave_alone}
