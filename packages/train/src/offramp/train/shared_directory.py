"""On several nodes, sees whether all of them have the checkpoint directory before anything is trained."""

from __future__ import annotations

import os
import socket
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed
from typing_extensions import override

from offramp.common.errors import OfframpError

PATIENCE_S = 90.0
"""How long a new file may take to be seen on another node; NFS remembers for up to a minute what it saw last."""


class SharedDirectory(pl.Callback):
    """Refuses a run whose nodes have different directories under the path of its checkpoints.

    Each stage of a pipeline writes its own files, and every rank reads when a run goes on. On directories of their own
    a checkpoint would never be whole, or one node would go on from it and another from the beginning.
    """

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let rank 0 write a file, and all others look for it.

        Raises:
            OfframpError: on every rank, if one does not see it.
        """
        directory = getattr(trainer.checkpoint_callback, "dirpath", None)
        if trainer.num_nodes == 1 or directory is None or "://" in str(directory):
            return
        path = Path(directory)
        file = path / trainer.strategy.broadcast(f".seen-by-all-{uuid.uuid4().hex}")
        fault = None
        if trainer.is_global_zero:
            try:
                path.mkdir(parents=True, exist_ok=True)
                file.touch()
            except OSError as error:
                fault = f"{path} cannot be written: {error}."
        self._agree(fault)
        deadline = time.monotonic() + PATIENCE_S
        while not (seen := file.is_file()) and time.monotonic() < deadline:
            with suppress(OSError):  # it may not be there at all
                os.listdir(path)  # which lets some file systems look again, as asking for one file does not
            time.sleep(0.1)
        try:
            self._agree(
                None
                if seen
                else f"rank {trainer.global_rank} on {socket.gethostname()} does not see what rank 0 writes to {path}; "
                "put trainer.default_root_dir on storage that all nodes share, or set trainer.enable_checkpointing to "
                "false."
            )
        finally:
            if trainer.is_global_zero:
                file.unlink(missing_ok=True)

    @staticmethod
    def _agree(fault: str | None) -> None:
        """Raise the first fault of any rank on all of them."""
        faults: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(faults, fault)
        if first := next(filter(None, faults), None):
            raise OfframpError(first)
