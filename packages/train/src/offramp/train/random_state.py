"""Random states of all ranks in checkpoints, so that a resumed run draws what the unbroken one would have drawn."""

from __future__ import annotations

import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed
from typing_extensions import override

KEY = "random_states"
"""In a checkpoint: one state for each rank."""


class RandomStates(pl.Callback):
    """Keeps the states of Python's, NumPy's and torch's global generators.

    They are put back before the first step, after everything that starts up has drawn what it wanted. On another number
    of ranks than the checkpoint was written by, there is nothing to put back.
    """

    def __init__(self) -> None:
        self._states: list[dict[str, Any]] | None = None

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the states; every rank takes part."""
        state = random_state()
        states = [state]
        if trainer.world_size > 1:
            states = [{}] * trainer.world_size
            torch.distributed.all_gather_object(states, state)
        checkpoint[KEY] = states

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the states for the first step."""
        self._states = checkpoint.get(KEY)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Put this rank's state back, once."""
        states, self._states = self._states, None
        if states is not None and len(states) == trainer.world_size:
            set_random_state(states[trainer.global_rank])


def random_state() -> dict[str, Any]:
    """The state of this process, in plain values and tensors."""
    version, words, spare = random.getstate()
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "python": [version, list(words), spare],
        "numpy": [kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, gauss],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Put back what `random_state` gave."""
    version, words, spare = state["python"]
    random.setstate((version, tuple(words), spare))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
