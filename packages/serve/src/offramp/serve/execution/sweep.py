"""The rows that are inside, on their way up, and those that have left.

Legend: N rows, D model, V vocabulary, L layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offramp.serve.model.head_output import HeadOutput
from offramp.serve.model.rows import Places, Rows

Mask = npt.NDArray[np.bool_]


@dataclass
class LeftRows:
    """Rows that have left and predict a token.

    Attributes:
        items: [n] whose.
        exit_layer: where.
        state: [n, D] what the exit's unembedding reads.
        head: best tokens [n], where known already.
        logits: [n, V], where known already.
    """

    items: Places
    exit_layer: int
    state: Tensor
    head: HeadOutput | None = None
    logits: Tensor | None = None

    def select(self, wanted: Mask) -> LeftRows | None:
        """The rows `wanted` [n]; None if there are none."""
        if wanted.all():
            return self
        if not wanted.any():
            return None
        index = torch.from_numpy(np.flatnonzero(wanted))
        return LeftRows(
            self.items[wanted],
            self.exit_layer,
            self.state.index_select(0, index),
            None if self.head is None else self.head.select(index),
            None if self.logits is None else self.logits.index_select(0, index),
        )


@dataclass(frozen=True)
class Arrival:
    """Rows of one request that join a pass where they had left it.

    Attributes:
        item: whose.
        positions: [n] ascending.
        x: [n, D] their states.
        predicts: whether the last of them predicts a token.
    """

    item: int
    positions: Tensor
    x: Tensor
    predicts: bool


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
    arrivals: dict[int, list[Arrival]] = field(default_factory=dict)
    left: list[LeftRows] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.items)

    @property
    def newest(self) -> Places:
        """[n] where the rows are that predict a token."""
        return np.flatnonzero(self.predicts)

    @property
    def runs(self) -> list[tuple[int, slice]]:
        """The requests whose rows are inside, and where these are."""
        bounds = [*np.flatnonzero(np.diff(self.items, prepend=-1)).tolist(), len(self)]
        return [(int(self.items[start]), slice(start, stop)) for start, stop in itertools.pairwise(bounds)]

    def select(self, states: Tensor, places: Places) -> Tensor:
        """Rows at `places` [n] of states [N, D]; all of them without a copy."""
        return states if len(places) == len(states) else states.index_select(0, torch.from_numpy(places))

    def select_rows(self, places: Places) -> Rows:
        """Rows at `places` [n], as tensors."""
        return self.rows if len(places) == len(self) else self.rows.select(places)

    def leave(
        self,
        layer: int,
        places: Places,
        state: Tensor,
        head: HeadOutput | None = None,
        logits: Tensor | None = None,
    ) -> None:
        """Note that the rows at `places` predict a token here; the arguments are those of `LeftRows`."""
        self.left.append(LeftRows(self.items[places], layer, state, head, logits))

    def keep(self, places: Places) -> None:
        """Only these rows go on."""
        self.x, self.rows = self.x.index_select(0, torch.from_numpy(places)), self.rows.select(places)
        self.items, self.predicts, self.bound = self.items[places], self.predicts[places], self.bound[places]

    def admit(self, arrivals: Sequence[Arrival], num_layers: int) -> None:
        """Further rows go on from here."""
        counts = [len(arrival.positions) for arrival in arrivals]
        items = np.repeat([arrival.item for arrival in arrivals], counts)
        predicts = np.zeros(len(items), dtype=np.bool_)
        predicts[np.cumsum(counts) - 1] = [arrival.predicts for arrival in arrivals]
        self.rows, order = self.rows.join(items, np.concatenate([arrival.positions.numpy() for arrival in arrivals]))
        x = torch.cat([self.x, *(arrival.x for arrival in arrivals)])
        self.x = x.index_select(0, torch.from_numpy(order))
        self.items = np.concatenate((self.items, items))[order]
        self.predicts = np.concatenate((self.predicts, predicts))[order]
        self.bound = np.concatenate((self.bound, np.full(len(items), num_layers)))[order]
