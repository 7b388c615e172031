"""The one loop over segments: every policy is a rule on the rows that are still inside.

    rows = tokens of this iteration
    for each segment:
        run its layers on the rows
        sure |= confidence > threshold              decode rows whose request allows exits
        leaving = sync policy(sure)                 all: everybody when all are sure; regroup: each on its own
        leaving rows: fill the cache above
        rows = the rest
    logits of all rows that predict a token: one product for all exits that share an unembedding

A segment ends at an exit that some row of the iteration may take, so an iteration without such rows is one segment.

Legend: N rows, M decode rows, D model, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offramp.serve import kv_policy
from offramp.serve.exit_test import IterationExits, RequestExits
from offramp.serve.kv_cache.storage import KVStorage
from offramp.serve.model.linear import PackedLinear
from offramp.serve.model.packed import PackedModel
from offramp.serve.model.rows import Rows, build_rows
from offramp.serve.scheduler_output import Phase, ScheduledRequest
from offramp.serve.sync_policy import SyncRule


@dataclass(frozen=True)
class Departure:
    """Rows that predict a token at one exit.

    Attributes:
        items: indices into the scheduled requests, one for each row.
        exit_layer: where.
        logits: [len(items), V] fp32, raw.
    """

    items: list[int]
    exit_layer: int
    logits: Tensor


@dataclass
class ExecutorStats:
    """What was really run, since the start.

    Attributes:
        calls: for each backbone layer, how often it was called.
        rows_run: for each backbone layer, the rows it was run on.
        rows_filled: rows that left early.
    """

    calls: list[int]
    rows_run: list[int]
    rows_filled: int = 0


@dataclass(frozen=True)
class _Leaving:
    """Rows that have left, before they have logits.

    Attributes:
        items: see `Departure`.
        exit_layer: where.
        head_state: [len(items), D] what the exit's unembedding reads.
        logits: [len(items), V] where the exit test has computed them already.
    """

    items: list[int]
    exit_layer: int
    head_state: Tensor
    logits: Tensor | None


@dataclass
class _Pass:
    """State of one iteration.

    Attributes:
        x: [N, D] states of the rows inside.
        previous: [N, D] states before the layer run last.
        rows: the rows inside.
        depth: layers run.
        inside: [M] for each decode row inside, its index into the scheduled requests.
        left: rows that have left.
    """

    x: Tensor
    previous: Tensor
    rows: Rows
    inside: Tensor
    depth: int = 0
    left: list[_Leaving] = field(default_factory=list)


class Executor:
    """Runs iterations of one model over one cache."""

    def __init__(self, model: PackedModel, cache: KVStorage, max_model_len: int, sync_rule: SyncRule) -> None:
        """Set up.

        Args:
            model: packed weights.
            cache: with `model.num_cache_layers` layers.
            max_model_len: most tokens of one sequence.
            sync_rule: who may leave; see `offramp.serve.sync_policy`.
        """
        self._model = model
        self._cache = cache
        self._sync_rule = sync_rule
        self._context = model.row_context(max_model_len, cache.block_size)
        num_layers = model.config.num_layers
        self.stats = ExecutorStats([0] * num_layers, [0] * num_layers)

    @torch.inference_mode()
    def run(self, scheduled: Sequence[ScheduledRequest], exits: Sequence[RequestExits | None]) -> list[Departure]:
        """Run one iteration.

        Args:
            scheduled: what to compute, decodes first; not empty.
            exits: for each of them, the exits its generated tokens may take; None runs all layers.

        Returns:
            Together, every row that predicts a token, once.
        """
        rows = build_rows(scheduled, self._context)
        num_decode = sum(item.phase is Phase.DECODE for item in scheduled)
        x = self._model.embed(torch.tensor([token for item in scheduled for token in item.token_ids]))
        state = _Pass(x, x, rows, torch.arange(num_decode))
        allowed = IterationExits(self._model, [item.request for item in scheduled[:num_decode]], exits[:num_decode])
        sure = torch.zeros(num_decode, dtype=torch.bool)
        for layer in self._exits_passed(allowed, exits):
            self._run_layers(state, layer)
            self._pass_exit(state, layer, allowed, sure)
            if not len(state.rows):
                return self._departures(state.left)
        self._run_layers(state, self._model.config.num_layers)
        self._finish(state, scheduled)
        return self._departures(state.left)

    def _exits_passed(self, allowed: IterationExits, exits: Sequence[RequestExits | None]) -> list[int]:
        """Early exits where this iteration pauses."""
        if self._model.has_exit_blocks and any(point is not None for point in exits):
            # The block of a head attends over the sequence, so every token that passes it leaves keys and values there,
            # also where it is not tested (a prompt's) or not any more (`all`).
            return [layer for layer in self._model.exits if layer != self._model.config.num_layers]
        return allowed.layers

    def _run_layers(self, state: _Pass, stop: int) -> None:
        num_rows = len(state.rows)
        state.x, state.previous = self._model.run_layers(state.x, state.rows, self._cache, state.depth, stop)
        for index in range(state.depth, stop):
            self.stats.calls[index] += 1
            self.stats.rows_run[index] += num_rows
        state.depth = stop

    def _pass_exit(self, state: _Pass, layer: int, allowed: IterationExits, sure: Tensor) -> None:
        """Test the rows at an exit and let go those that may leave; `sure` [M] is updated in place."""
        block = self._model.exits[layer].block
        if block is not None:
            block.write(state.x, state.rows, self._cache)
        tested = (allowed.is_tested(layer) & ~sure)[state.inside].nonzero()[:, 0]
        head_state, logits = None, None
        if len(tested):
            if allowed.needs_states:
                head_state = self._head_state(state, layer, tested)
            passed, logits = allowed.test(
                layer, state.inside[tested], state.x[tested], state.previous[tested], head_state
            )
            sure[state.inside[tested]] = passed
        leaving = self._sync_rule(sure[state.inside], allowed.eligible[state.inside])
        gone = leaving.nonzero()[:, 0]
        if not len(gone):
            return
        # Under `all` rows may leave that were sure earlier and not tested here; then nothing can be reused.
        reused = torch.isin(gone, tested).all() if head_state is not None else False
        if reused:
            assert head_state is not None
            places = torch.searchsorted(tested, gone)
            head_state = head_state[places]
            logits = None if logits is None else logits[places]
        else:
            head_state, logits = self._head_state(state, layer, gone), None
        state.left.append(_Leaving(state.inside[gone].tolist(), layer, head_state, logits))
        kv_policy.fill(self._model, layer, state.x[gone], state.rows.select(gone), self._cache)
        self.stats.rows_filled += len(gone)
        stay = (~leaving).nonzero()[:, 0]
        kept = torch.cat((stay, torch.arange(len(state.inside), len(state.rows))))
        state.x, state.rows = state.x[kept], state.rows.select(kept)
        state.inside = state.inside[stay]

    def _head_state(self, state: _Pass, layer: int, decode_rows: Tensor) -> Tensor:
        """State [len(decode_rows), D] that the exit's unembedding reads."""
        rows = state.rows.select(decode_rows) if self._model.exits[layer].block is not None else state.rows
        return self._model.exit_state(layer, state.x[decode_rows], rows, self._cache)

    def _finish(self, state: _Pass, scheduled: Sequence[ScheduledRequest]) -> None:
        """Logits of the final exit, for the rows that predict a token and no others."""
        items, places = state.inside.tolist(), list(range(len(state.inside)))
        last = len(state.inside) - 1
        for index, item in enumerate(scheduled):
            if item.phase is Phase.DECODE:
                continue
            last += item.num_tokens
            if item.samples:
                items.append(index)
                places.append(last)
        if items:
            layer = self._model.config.num_layers
            x = state.x if len(places) == len(state.x) else state.x[torch.tensor(places)]
            state.left.append(_Leaving(items, layer, self._model.exit_state(layer, x, state.rows, self._cache), None))

    def _departures(self, left: Sequence[_Leaving]) -> list[Departure]:
        """Give every row its logits.

        The unembedding is the largest matrix of a small model, and at small batches reading it is what it costs: exits
        that share it must not read it once each.
        """
        departures: list[Departure] = []
        pending: dict[PackedLinear, list[_Leaving]] = {}
        for one in left:
            if one.logits is None:
                pending.setdefault(self._model.exits[one.exit_layer].unembed, []).append(one)
            else:
                departures.append(Departure(one.items, one.exit_layer, one.logits))
        for unembed, group in pending.items():
            logits = unembed(torch.cat([one.head_state for one in group])).float()
            parts = logits.split([len(one.items) for one in group])
            departures += [Departure(one.items, one.exit_layer, part) for one, part in zip(group, parts, strict=True)]
        return departures
