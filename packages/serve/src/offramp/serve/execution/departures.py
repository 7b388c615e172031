"""What rows that have left predict: best tokens or logits, by one product for all exits that share an unembedding.

The unembedding is the largest matrix of a small model, and at small batches reading it is what it costs: exits that
share it must not read it once each.

What a row predicts at an exit with a shortlist is known only then. A row whose best token turns out not to be on its
shortlist should have stayed: it is vetoed.

Legend: N rows, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from offramp.serve.execution.exit_test import Unembedding
from offramp.serve.execution.iteration import Iteration
from offramp.serve.execution.sweep import LeftRows, Mask
from offramp.serve.model.head_output import HeadOutput
from offramp.serve.model.packed import PackedModel


@dataclass(frozen=True)
class Departure:
    """Rows that predict a token, at one exit. Either best tokens or logits are given, as their requests need.

    Attributes:
        items: indices into the scheduled requests, one for each row. At the final exit a request that has its drafts
            judged has one row for each draft and one more, in order of position; otherwise a request has one row.
        exit_layer: where.
        confidence: for each row, what the exit test measured; None where nothing was.
        head: best tokens [len(items)].
        logits: [len(items), V] fp32, raw.
    """

    items: list[int]
    exit_layer: int
    confidence: list[float | None]
    head: HeadOutput | None
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


def unembed(model: PackedModel, iteration: Iteration, left: Iterable[LeftRows]) -> Departures:
    """Give every row its best token or its logits, and find those that should have stayed.

    A row goes one way or the other by its own needs, never by its neighbours'.
    """
    departures = Departures()
    waiting: dict[tuple[Unembedding, bool], list[LeftRows]] = {}
    for whole in left:
        needs = iteration.needs_logits[whole.items]
        for needs_logits in (False, True):
            rows = whole.select(needs == needs_logits)
            if rows is None:
                continue
            if needs_logits and rows.logits is not None:
                _settle(departures, iteration, replace(rows, head=None))
            elif needs_logits:
                key = Unembedding(model.exits[rows.exit_layer].unembed)
                waiting.setdefault((key, True), []).append(rows)
            elif rows.head is not None or rows.logits is not None:
                head = rows.head or HeadOutput.of(cast(Tensor, rows.logits))
                _settle(departures, iteration, replace(rows, head=head, logits=None))
            else:
                for key, part in _by_unembedding(model, iteration, rows):
                    waiting.setdefault((key, False), []).append(part)
    for (unembedding, needs_logits), group in waiting.items():
        state = group[0].state if len(group) == 1 else torch.cat([rows.state for rows in group])
        logits = unembedding.linear.logits(state) if needs_logits else None
        head = None if needs_logits else unembedding.head(state)
        start = 0
        for rows in group:
            part = slice(start, start + len(rows.items))
            start = part.stop
            best = None if head is None else head.select(part)
            _settle(departures, iteration, replace(rows, head=best, logits=None if logits is None else logits[part]))
    return departures


def _by_unembedding(model: PackedModel, iteration: Iteration, rows: LeftRows) -> Iterable[tuple[Unembedding, LeftRows]]:
    """Rows of one exit by what gives their best tokens."""
    whole = Unembedding(model.exits[rows.exit_layer].unembed)
    if rows.exit_layer == iteration.num_layers or not iteration.exits.any_shortlist_only:
        return [(whole, rows)]
    keys = [iteration.exits.shortlist_only(item, rows.exit_layer) or whole for item in rows.items.tolist()]
    parts: list[tuple[Unembedding, LeftRows]] = []
    for key in dict.fromkeys(keys):
        part = rows.select(np.array([other == key for other in keys]))
        assert part is not None
        parts.append((key, part))
    return parts


def _settle(departures: Departures, iteration: Iteration, rows: LeftRows) -> None:
    """Sort rows of which either `head` or `logits` is known."""
    stays = _vetoed(iteration, rows)
    if stays is not None:
        departures.vetoed.extend(filter(None, [rows.select(stays)]))
    rest = rows if stays is None else rows.select(~stays)
    if rest is not None:
        confidence = _confidence(iteration, rest)
        departures.final.append(Departure(rest.items.tolist(), rest.exit_layer, confidence, rest.head, rest.logits))


def _vetoed(iteration: Iteration, rows: LeftRows) -> Mask | None:
    """[N] rows whose best token is outside their shortlist; None if there are none."""
    if rows.exit_layer == iteration.num_layers or not iteration.exits.any_veto:
        return None
    token_ids = rows.head.token_ids if rows.head is not None else cast(Tensor, rows.logits).argmax(dim=-1)
    stays = iteration.exits.off_shortlist(rows.items, token_ids.numpy(force=True))
    return stays if stays.any() else None


def _confidence(iteration: Iteration, rows: LeftRows) -> list[float | None]:
    if rows.exit_layer == iteration.num_layers:
        return [None] * len(rows.items)
    return [value if value == value else None for value in iteration.exits.confidence[rows.items].tolist()]
