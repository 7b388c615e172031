"""What rows that have left predict: best tokens or logits, by one product for all exits that share an unembedding.

The unembedding is the largest matrix of a small model, and at small batches reading it is what it costs: exits that
share it must not read it once each.

What a row predicts at an exit with a shortlist is known only then. A row whose best token turns out not to be on its
shortlist should have stayed: it is vetoed.

Legend: I requests of the iteration, N rows, V vocabulary, L layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offramp.serve.execution.exit_test import IterationExits
from offramp.serve.execution.sweep import BestTokens, LeftRows, Mask, PickedRows
from offramp.serve.model.packed import PackedModel
from offramp.serve.model.unembedding import Unembedding
from offramp.serve.request.logits_use import LogitsUse


@dataclass(frozen=True)
class Departure:
    """Rows that predict a token, at one exit.

    Attributes:
        items: indices into the scheduled requests, one for each row. At the final exit a request that has its drafts
            judged has one row for each draft and one more, in order of position; otherwise a request has one row.
        exit_layer: where.
        confidence: for each row, what the exit test measured; None where nothing was.
        best: best tokens [len(items)]; None: tokens are chosen from `logits`.
        logits: [len(items), V] fp32, raw; None where nothing is chosen from them or reported.
    """

    items: list[int]
    exit_layer: int
    confidence: list[float | None]
    best: BestTokens | None
    logits: Tensor | None


@dataclass
class Departures:
    """Rows that have left, sorted by what became of them.

    Attributes:
        final: rows that predict a token here.
        vetoed: rows that should have stayed.
    """

    final: list[Departure] = field(default_factory=list)
    vetoed: list[LeftRows] = field(default_factory=list)


@dataclass
class _Part:
    """Rows of one exit that ask the same of logits.

    Attributes:
        rows: with what is known of them so far.
        use: what they ask.
        whole: what gives their logits.
        best: what gives their best tokens.
    """

    rows: LeftRows
    use: LogitsUse
    whole: Unembedding
    best: Unembedding

    @property
    def lacks_logits(self) -> bool:
        return self.rows.logits is None and self.use is not LogitsUse.BEST

    @property
    def lacks_best(self) -> bool:
        """Where there are logits, or will be, they give the best token of all too."""
        if self.rows.best is not None or self.use is LogitsUse.CHOICE:
            return False
        return self.best is not self.whole or (self.rows.logits is None and self.use is LogitsUse.BEST)


@dataclass(frozen=True)
class LogitsUses:
    """What the newest rows of an iteration's requests ask of logits (`LogitsUse`).

    Attributes:
        final: [I] at the final exit.
        early: [I] at any other.
    """

    final: npt.NDArray[np.int64]
    early: npt.NDArray[np.int64]


def unembed(model: PackedModel, exits: IterationExits, uses: LogitsUses, left: Iterable[LeftRows]) -> Departures:
    """Give every row its best token or its logits, and find those that should have stayed.

    A row goes one way or the other by its own needs, never by its neighbours', and what is to be reported of a token
    does not change it.

    Args:
        model: whose exits the rows have left at.
        exits: how sure they were there.
        uses: what they ask.
        left: the rows.
    """
    parts = [part for rows in left for part in _parts(model, exits, uses, rows)]
    heads, logits = (defaultdict[Unembedding, list[_Part]](list) for _ in range(2))
    for part in parts:
        if part.lacks_best:
            heads[part.best].append(part)
        if part.lacks_logits:
            logits[part.whole].append(part)
    for unembedding, group in heads.items():
        found = BestTokens.of(unembedding.head(_states(group)))
        for part, places in zip(group, _places(group), strict=True):
            part.rows.best = found.select(places)
    for unembedding, group in logits.items():
        values = unembedding.logits(_states(group))
        for part, places in zip(group, _places(group), strict=True):
            part.rows.logits = PickedRows(values[places])
    departures = Departures()
    for part in parts:
        _settle(departures, exits, part.rows, is_final=part.rows.exit_layer == model.config.num_layers)
    return departures


def _parts(model: PackedModel, exits: IterationExits, uses: LogitsUses, left: LeftRows) -> Iterator[_Part]:
    """Rows of one exit by what they need."""
    layer = left.exit_layer
    asked = uses.final if layer == model.config.num_layers else uses.early
    kinds = asked[left.items] + len(LogitsUse) * exits.open_exits.group_numbers[left.items]
    distinct = set(kinds.tolist())
    for kind in distinct:
        rows = left if len(distinct) == 1 else left.select(kinds == kind)
        assert rows is not None
        number, use = divmod(kind, len(LogitsUse))
        if use == LogitsUse.CHOICE:
            rows.best = None
        yield _Part(rows, LogitsUse(use), model.exits[layer].unembed, exits.unembedding(number, layer))


def _states(group: Sequence[_Part]) -> Tensor:
    """The states of several parts, one after the other."""
    states = [part.rows.state.gather() for part in group]
    return states[0] if len(states) == 1 else torch.cat(states)


def _places(group: Sequence[_Part]) -> Iterator[slice]:
    """Where the rows of each part then are."""
    start = 0
    for part in group:
        stop = start + len(part.rows.items)
        yield slice(start, stop)
        start = stop


def _settle(departures: Departures, exits: IterationExits, rows: LeftRows, *, is_final: bool) -> None:
    """Sort rows, at the final exit or at another, of which `best`, `logits` or both are known."""
    stays = None if is_final else _vetoed(exits, rows)
    if stays is not None:
        departures.vetoed.extend(filter(None, [rows.select(stays)]))
    rest = rows if stays is None else rows.select(~stays)
    if rest is not None:
        items, logits = rest.items.tolist(), None if rest.logits is None else rest.logits.gather()
        confidence: list[float | None] = [None] * len(items)
        if not is_final:
            measured = exits.confidence[rest.items].tolist()
            confidence = [value if value == value else None for value in measured]
        departures.final.append(Departure(items, rest.exit_layer, confidence, rest.best, logits))


def _vetoed(exits: IterationExits, rows: LeftRows) -> Mask | None:
    """[N] rows of an early exit whose best token is outside their shortlist; None if there are none."""
    if not exits.open_exits.any_veto:
        return None
    if rows.best is not None:
        token_ids = rows.best.token_ids
    else:
        token_ids = cast(PickedRows, rows.logits).gather().argmax(dim=-1).numpy(force=True)
    stays = exits.off_shortlist(rows.items, token_ids)
    return stays if stays.any() else None
