"""KV policies: where the keys and values of skipped layers come from.

Upper layers of later tokens attend to a token that left early, so the slots it skipped must hold something. A policy
says whether a request's rows may leave, and what happens to the cache when they do.

Legend: N rows that leave, D model.
"""

from __future__ import annotations

from torch import Tensor

from offramp.common.exits.policy import ExitPolicy
from offramp.serve.kv_cache.storage import KVStorage
from offramp.serve.model.packed import PackedModel
from offramp.serve.model.rows import Rows
from offramp.serve.request import ExitOptions


def exit_policy(options: ExitOptions, default: ExitPolicy | None) -> ExitPolicy | None:
    """The exits that a request may take: its own policy, else the checkpoint's; None under `full`: it never leaves."""
    if options.kv_policy == "full":
        return None
    return default if options.policy is None else options.policy


def fill(model: PackedModel, layer: int, x: Tensor, rows: Rows, cache: KVStorage) -> None:
    """`fill`: the skipped layers make keys and values from the exit state (saturated KV; CALM, section 3.2), at once.

    Algorithm 1, lines 9 to 11. The same is defined for training and naive generation by `Layout.exit_depths`.

    Args:
        model: weights.
        layer: exit layer.
        x: [N, D] states after it.
        rows: the rows that leave.
        cache: written at every cache layer after the exit.
    """
    model.fill(layer, x, rows, cache)
