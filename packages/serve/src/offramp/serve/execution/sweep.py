"""The rows that are inside, on their way up, and those that have left.

Legend: N rows, D model, V vocabulary, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offramp.serve.devices import on_host, rows_at
from offramp.serve.model.head_output import HeadOutput
from offramp.serve.model.rows import Places, Rows

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class BestTokens:
    """Best tokens of rows, on the host.

    Attributes:
        token_ids: [n].
        logits: [n] fp32 theirs; not finite if a token cannot be told.
    """

    token_ids: npt.NDArray[np.int64]
    logits: npt.NDArray[np.float32]

    @classmethod
    def of(cls, head: HeadOutput) -> BestTokens:
        """Of all rows of an output."""
        token_ids, logits = on_host(head.token_ids, head.best)
        return cls(token_ids.numpy(), logits.numpy())

    @classmethod
    def measured(cls, head: HeadOutput, values: Tensor) -> tuple[BestTokens, Tensor]:
        """Of all rows, and the confidences [N] that were measured with them, on the host too."""
        token_ids, logits, values = on_host(head.token_ids, head.best, values)
        return cls(token_ids.numpy(), logits.numpy()), values

    def select(self, places: Places | slice) -> BestTokens:
        """The rows at `places`."""
        return BestTokens(self.token_ids[places], self.logits[places])


@dataclass(frozen=True)
class PickedRows:
    """Rows of a tensor, which are not gathered as long as nobody reads them.

    Attributes:
        tensor: [N, ...].
        places: [n] which of them; None: all.
    """

    tensor: Tensor
    places: Places | None = None

    def select(self, places: Places) -> PickedRows:
        """Of these rows, those at `places`."""
        return PickedRows(self.tensor, places if self.places is None else self.places[places])

    def gather(self) -> Tensor:
        """[n, ...]."""
        return self.tensor if self.places is None else rows_at(self.tensor, self.places)


@dataclass
class LeftRows:
    """Rows that have left and predict a token.

    Attributes:
        items: [n] whose.
        exit_layer: where.
        state: [n, D] what the exit's unembedding reads.
        best: best tokens [n], where known already.
        logits: [n, V], where known already.
    """

    items: Places
    exit_layer: int
    state: PickedRows
    best: BestTokens | None = None
    logits: PickedRows | None = None

    def select(self, wanted: Mask) -> LeftRows | None:
        """The rows `wanted` [n]; None if there are none."""
        if wanted.all():
            return self
        places = np.flatnonzero(wanted)
        if not len(places):
            return None
        return LeftRows(
            self.items[places],
            self.exit_layer,
            self.state.select(places),
            None if self.best is None else self.best.select(places),
            None if self.logits is None else self.logits.select(places),
        )


@dataclass(frozen=True)
class Arrivals:
    """Rows that join a pass where they had left it.

    Attributes:
        items: [n] whose.
        positions: [n] ascending for each of them.
        x: [n, D] their states.
        predicts: [n] rows that predict a token.
    """

    items: Places
    positions: npt.NDArray[np.int64]
    x: Tensor
    predicts: Mask

    def __len__(self) -> int:
        return len(self.items)


@dataclass
class Sweep:
    """The rows inside, on their way up.

    Attributes:
        x: [N, D] states.
        previous: [N, D] states before the layer run last.
        rows: N; sequences are indices of requests.
        items: [N] whose.
        predicts: [N] rows that predict a token.
        bound: [N] layer at which a row leaves, whatever it is sure of; L is the rule.
        depth: layers run.
        arrivals: rows to come, by exit layer.
        left: rows that have left and predict a token.
    """

    x: Tensor
    previous: Tensor
    rows: Rows
    items: Places
    predicts: Mask
    bound: Places
    depth: int = 0
    arrivals: dict[int, Arrivals] = field(default_factory=dict)
    left: list[LeftRows] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.items)

    @property
    def newest(self) -> Places:
        """[n] where the rows are that predict a token."""
        return np.flatnonzero(self.predicts)

    def select(self, states: Tensor, places: Places) -> Tensor:
        """Rows at `places` [n] of states [N, D]; all of them without a copy."""
        return states if len(places) == len(states) else rows_at(states, places)

    def select_rows(self, places: Places) -> Rows:
        """Rows at `places` [n], as tensors."""
        return self.rows if len(places) == len(self) else self.rows.select(places)

    def keep(self, places: Places) -> None:
        """Only these rows go on."""
        self.x, self.rows = rows_at(self.x, places), self.rows.select(places)
        self.items, self.predicts, self.bound = self.items[places], self.predicts[places], self.bound[places]

    def clear(self) -> None:
        """Nobody goes on."""
        nobody = slice(0)
        self.x, self.rows = self.x[nobody], self.rows.select(nobody)
        self.items, self.predicts, self.bound = self.items[nobody], self.predicts[nobody], self.bound[nobody]

    def admit(self, arrivals: Arrivals, num_layers: int) -> None:
        """Further rows go on from here."""
        self.rows, order = self.rows.join(arrivals.items, arrivals.positions)
        self.x = rows_at(torch.cat((self.x, arrivals.x)), order)
        self.items = np.concatenate((self.items, arrivals.items))[order]
        self.predicts = np.concatenate((self.predicts, arrivals.predicts))[order]
        self.bound = np.concatenate((self.bound, np.full(len(arrivals), num_layers)))[order]
