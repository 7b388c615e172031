"""Weights that a model starts with when it has none: a parameter's own numbers, whatever else is there.

Each parameter is drawn by itself, from the run's seed and its name in the whole model. So a process that holds a few of
them draws these alone, and has what one that holds them all has.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor


def fresh_weight(name: str, shape: Sequence[int], spread: float, seed: int) -> Tensor:
    """A parameter as Hugging Face draws it: matrices normal, biases zero, norms one; in fp32, on the CPU.

    Args:
        name: in the whole model.
        shape: sizes of its dimensions.
        spread: standard deviation of matrices, `initializer_range`.
        seed: of the run.
    """
    if len(shape) > 1:
        whole = torch.empty(*shape, dtype=torch.float32, device="cpu")
        return whole.normal_(0.0, spread, generator=name_generator(name, seed))
    fill = torch.zeros if name.endswith(".bias") else torch.ones
    return fill(*shape, dtype=torch.float32, device="cpu")


def name_generator(name: str, seed: int) -> torch.Generator:
    """The generator of one parameter."""
    return torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
