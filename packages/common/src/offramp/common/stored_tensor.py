"""Tensors in safetensors files: known by shape and type, and read one by one, or in parts, when they are wanted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from offramp.common.errors import OfframpError

_TYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""What safetensors calls a type, and PyTorch's name for it."""
_COMPARED_NUMBERS = 2**22
"""Numbers of each of two tensors that are in memory while they are compared."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        file: that holds it.
        key: its name there.
        shape: sizes of its dimensions.
        dtype: in which it is stored, as PyTorch names it (`bfloat16`); as safetensors does where PyTorch has no such.
    """

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str

    def read(self, dtype: torch.dtype, part: tuple[slice, ...] = ()) -> Tensor:
        """The tensor, or part of it, in memory of its own; nothing else of the file is read.

        Args:
            dtype: to convert it to.
            part: slices of its first dimensions.

        Raises:
            OfframpError: the file is damaged or gone.
        """
        with open_safetensors(self.file) as handle:
            stored: Tensor = handle.get_slice(self.key)[part or ...]  # a view of the file
            return torch.empty(stored.shape, dtype=dtype, device="cpu").copy_(stored)

    def equals(self, other: StoredTensor) -> bool:
        """Whether it holds the numbers of `other`, rows of numbers that is; a few of them are in memory at a time."""
        if not self.shape or self.shape != other.shape or self.dtype != other.dtype:
            return False
        rows = max(1, _COMPARED_NUMBERS // max(1, math.prod(self.shape[1:])))
        with open_safetensors(self.file) as mine, open_safetensors(other.file) as theirs:
            own, its = mine.get_slice(self.key), theirs.get_slice(other.key)
            starts = range(0, self.shape[0], rows)
            return all(torch.equal(own[start : start + rows], its[start : start + rows]) for start in starts)


@contextmanager
def open_safetensors(file: Path) -> Iterator[Any]:
    """A handle of `safe_open`; an `OfframpError` that names the file if it cannot be read."""
    try:
        with safe_open(file, framework="pt") as handle:
            yield handle
    except (SafetensorError, OSError) as fault:
        raise OfframpError(
            f"{file} cannot be read as safetensors: {fault}; it may be cut short, copy it again."
        ) from None


def stored_tensors(file: Path) -> dict[str, StoredTensor]:
    """What a file holds, by name."""
    with open_safetensors(file) as handle:
        found = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 - not a dict
        return {
            name: StoredTensor(file, name, tuple(one.get_shape()), _TYPES.get(kind := str(one.get_dtype()), kind))
            for name, one in found.items()
        }


def read_stored(tensors: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """All of some tensors as they are stored: views of their files, each of which is opened once."""
    read: dict[str, Tensor] = {}
    for file in {tensor.file: None for tensor in tensors.values()}:
        with open_safetensors(file) as handle:
            read |= {name: handle.get_tensor(one.key) for name, one in tensors.items() if one.file == file}
    return read
