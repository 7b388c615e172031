"""What a layer of any family may ask of the layout of a batch.

Legend: B batch, T time, L layers.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class BatchLayout(Protocol):
    """How the tokens of a batch lie; each family's own says who may see whom, too."""

    @property
    def exit_depths(self) -> Tensor | None:
        """[B, T] layers after which a token's state stays as it is; None: no token is frozen."""
        ...

    @property
    def skipped_layers(self) -> Tensor | None:
        """[B, L] bool: layers that leave a row as it is; None: no layer does."""
        ...
