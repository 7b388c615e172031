"""Lightning's checkpoint files: written whole or not at all, and how many of them stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from safetensors import SafetensorError
from typing_extensions import override

from offramp.common.errors import OfframpError
from offramp.train.training_checkpoint import make_durable, put_in_place, remove, remove_leftovers, scratch_of


class WholeFileIO(TorchCheckpointIO):
    """Writes beside the file's place and moves it there when it is on the disk.

    Lightning's own goes by the system's directory for temporary files, which is often another file system, so that
    the last part of its way is a copy that can be cut off.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a file; addresses such as `s3://` are left to Lightning.

        Raises:
            OfframpError: it cannot be written. Other checkpoints are as they were.
        """
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        file = Path(path)
        scratch = scratch_of(file)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(file.parent)
            write_state(checkpoint, scratch)
            put_in_place(scratch, file)
        except OSError as fault:
            scratch.unlink(missing_ok=True)
            raise cannot_write(file, str(fault)) from fault

    @override
    def remove_checkpoint(self, path: Any) -> None:
        """Remove a file."""
        if "://" in str(path):
            super().remove_checkpoint(path)
        else:
            remove(Path(path))


def keep_previous(callback: ModelCheckpoint) -> None:
    """Let the one before the newest checkpoint stay, unless the callback says what is to stay.

    Of a newest one that turns out to be damaged, a run resumes from the one before. Lightning's default keeps one.
    """
    if callback.monitor is None and callback.save_top_k == 1:
        callback.monitor, callback.mode, callback.save_top_k = "step", "max", 2
        callback.kth_value = torch.tensor(-torch.inf)


def cannot_write(path: Path, reason: str) -> OfframpError:
    """The error for a checkpoint that could not be written."""
    return OfframpError(
        f"{path} cannot be written: {reason}; make room, and resume from the checkpoint before it, which is as it was."
    )


def write_durably(write: Callable[[Path], None], path: Path) -> None:
    """Let `write` write a file, and wait until it is on the disk.

    Raises:
        OSError: it cannot be written; libraries have words of their own for that.
    """
    try:
        write(path)
    except SafetensorError as fault:
        raise OSError(str(fault)) from fault
    except RuntimeError as fault:  # torch
        if isinstance(fault.__context__, OSError):
            raise fault.__context__ from None
        raise
    make_durable([path])


def write_state(state: Any, path: Path) -> None:
    """`write_durably` of tensors and plain values, in torch's format."""

    def write(path: Path) -> None:
        with path.open("wb") as file:
            torch.save(state, file)

    write_durably(write, path)
