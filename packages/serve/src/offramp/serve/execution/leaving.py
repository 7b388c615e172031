"""Noting which rows have left at an exit and predict a token, with what the exit test has computed of them already.

Legend: N rows inside, n of them, D model.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from torch import Tensor

from offramp.serve.execution.exit_test import Scored
from offramp.serve.execution.sweep import LeftRows, Mask, PickedRows, Places, Sweep
from offramp.serve.kv_cache.storage import KVStorage
from offramp.serve.model.packed import PackedModel


def exit_state(model: PackedModel, cache: KVStorage, sweep: Sweep, layer: int, places: Places) -> Tensor:
    """State [n, D] that an exit's unembedding reads, for the rows at `places` [n]."""
    rows = sweep.rows if model.exits[layer].block is None else sweep.select_rows(places)
    return model.exit_state(layer, sweep.select(sweep.x, places), rows, cache)


def note_left(
    model: PackedModel, cache: KVStorage, sweep: Sweep, layer: int, leaving: Mask, scored: Iterable[Scored]
) -> None:
    """Note which tokens are predicted by rows that leave.

    Args:
        model: whose exit.
        cache: of the model.
        sweep: the rows inside; `left` grows.
        layer: exit layer.
        leaving: [N] who leaves.
        scored: what the exit test measured.
    """
    predicting = leaving & sweep.predicts
    for part in scored:
        rows = part.left(layer, sweep.items)
        if rows is None:
            continue
        goes = leaving[part.places]
        mine = rows.select(goes)
        if mine is not None:
            predicting[part.places[goes]] = False
            sweep.left.append(mine)
    if predicting.any():
        note_untested(model, cache, sweep, layer, np.flatnonzero(predicting))


def note_untested(model: PackedModel, cache: KVStorage, sweep: Sweep, layer: int, places: Places) -> None:
    """Note rows at `places` [n] that predict a token of which nothing is known yet."""
    state = exit_state(model, cache, sweep, layer, places)
    sweep.left.append(LeftRows(sweep.items[places], layer, PickedRows(state)))
