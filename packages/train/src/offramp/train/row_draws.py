"""Random draws that depend on a run's seed, the step and a row's tokens alone.

All stages of a pipeline agree on them without a word, it does not matter how a batch is split into micro-batches and
ranks, and a run that goes on from a checkpoint draws what it would have drawn.

Legend: T time.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor


def row_generator(row: Tensor, seed: int, step: int, purpose: str = "") -> torch.Generator:
    """A generator for one row.

    Args:
        row: [T] token ids, on the CPU.
        seed: of the run.
        step: optimizer step.
        purpose: draws for different purposes are independent.
    """
    content = zlib.crc32(row.numpy().tobytes(), zlib.crc32(f"{seed} {step}{purpose}".encode()))
    return torch.Generator().manual_seed(content)
