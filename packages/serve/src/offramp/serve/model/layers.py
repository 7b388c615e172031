"""What the engine asks of layers, whatever computes them.

Legend: N rows, D model, L layers of a stack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from offramp.serve.kv_cache.storage import KVStorage
from offramp.serve.model.rows import Rows


class Layers(Protocol):
    """A stack of L Transformer blocks with their places in the cache: the backbone, or the blocks of exit heads."""

    def run(self, x: Tensor, rows: Rows, cache: KVStorage, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Run layers `start` + 1 .. `stop` on states [N, D] that have been through `start` layers.

        The rows' keys and values are in the cache before any of them is read.

        Returns:
            The states [N, D], and those before the last of these layers. `x` itself stays as it is.
        """
        ...

    def write(self, index: int, x: Tensor, rows: Rows, cache: KVStorage) -> None:
        """Only write the keys and values of layer `index` + 1 for states [N, D] that have been through `index`."""
        ...


class Fill(Protocol):
    """Keys and values of skipped cache layers, made from one state: the *fill* of early exits."""

    def write(self, first: int, x: Tensor, rows: Rows, cache: KVStorage) -> None:
        """Write all cache layers from `first` on, which is that after an exit, for states [N, D] that left there."""
        ...


@dataclass(frozen=True)
class ExitBlock:
    """The block of one exit head, a stack's layer `index` + 1."""

    layers: Layers
    index: int

    def run(self, x: Tensor, rows: Rows, cache: KVStorage) -> Tensor:
        """States [N, D] -> [N, D]."""
        return self.layers.run(x, rows, cache, self.index, self.index + 1)[0]

    def write(self, x: Tensor, rows: Rows, cache: KVStorage) -> None:
        """Only the rows' keys and values."""
        self.layers.write(self.index, x, rows, cache)
