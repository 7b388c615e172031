"""The one loop over segments: every policy is a rule on the rows that are still inside.

    rows = tokens of this iteration
    for each segment:
        run its layers on the rows
        sure |= confidence > threshold              newest rows of requests that allow exits
        leaving = sync policy(sure)                 all: everybody when all are sure; regroup: each on its own
        KV policy(leaving rows)                     fill the cache above, or keep their states for later
        rows = the rest, and kept rows of their sequences that had stopped here
    best tokens or logits of all rows that predict a token: one product for all exits that share an unembedding

A segment ends at an exit that some row of the iteration may take or was left waiting at, so an iteration without such
rows is one segment.

What a row says at an exit with a shortlist is known only after that last product, which is the dearest thing at small
batches and so is done once. A row whose best token turns out not to be on its shortlist should have stayed: it goes on
from where it left, in a second sweep of the same loop.

Legend: I requests of the iteration, N rows, D model, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offramp.serve.config import EngineConfig
from offramp.serve.execution.exit_test import IterationExits, Mask, RequestExits, Scored
from offramp.serve.execution.kept_tokens import KeptTokens
from offramp.serve.execution.kv_policy import LeaveRule, bound_layers, carries_on, leave_rules
from offramp.serve.execution.sync_policy import PassTimes, sync_rule
from offramp.serve.kv_cache.storage import KVStorage
from offramp.serve.measures.iteration_clock import IterationClock
from offramp.serve.measures.records import SegmentRun, Trace
from offramp.serve.model.head_output import HeadOutput
from offramp.serve.model.linear import PackedLinear
from offramp.serve.model.packed import PackedModel
from offramp.serve.model.rows import Rows, build_rows
from offramp.serve.scheduling.scheduler_output import Phase, ScheduledRequest, SchedulerOutput

Places = npt.NDArray[np.intp]

PromptLogits = Callable[[int, int, Tensor], None]
"""Takes raw final logits [n, V] fp32 of rows of a prompt: index of the request, position of the first row, logits."""

PROMPT_SLICE = 64
"""Most rows of a prompt whose logits are in memory at once."""


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
class ExecutorStats:
    """What was really run, since the start.

    Attributes:
        calls: for each backbone layer, how often it was called.
        rows_run: for each backbone layer, the rows it was run on.
        rows_filled: rows whose skipped layers were filled.
        rows_vetoed: rows that had left and went on, because they would have said a token outside their shortlist.
    """

    calls: list[int]
    rows_run: list[int]
    rows_filled: int = 0
    rows_vetoed: int = 0


@dataclass(frozen=True)
class _Left:
    """Rows that have left and predict a token.

    Attributes:
        items: [n] whose.
        exit_layer: where.
        state: [n, D] what the exit's unembedding reads.
        places: [n] which of the rows that were inside.
        x: states after the exit layer of all rows that were inside.
        positions: of these.
        head: best tokens [n], where known already.
        logits: [n, V], where known already.
    """

    items: Places
    exit_layer: int
    state: Tensor
    places: Places
    x: Tensor
    positions: Tensor
    head: HeadOutput | None = None
    logits: Tensor | None = None

    def select(self, wanted: Mask) -> _Left | None:
        """The rows `wanted` [n]; None if there are none."""
        if wanted.all():
            return self
        if not wanted.any():
            return None
        index = torch.from_numpy(np.flatnonzero(wanted))
        return _Left(
            self.items[wanted],
            self.exit_layer,
            self.state[index],
            self.places[wanted],
            self.x,
            self.positions,
            None if self.head is None else self.head.select(index),
            None if self.logits is None else self.logits[index],
        )


@dataclass(frozen=True)
class _Arrival:
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
class _Sweep:
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
    arrivals: dict[int, list[_Arrival]] = field(default_factory=dict)
    left: list[_Left] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.items)

    def leave(
        self,
        layer: int,
        places: Places,
        state: Tensor,
        head: HeadOutput | None = None,
        logits: Tensor | None = None,
    ) -> None:
        """Note that the rows at `places` predict a token here; the arguments are those of `_Left`."""
        items, positions = self.items[places], self.rows.positions
        self.left.append(_Left(items, layer, state, places, self.x, positions, head, logits))

    def keep(self, places: Places) -> None:
        """Only these rows go on."""
        index = torch.from_numpy(places)
        self.x, self.rows = self.x.index_select(0, index), self.rows.select(index)
        self.items, self.predicts, self.bound = self.items[places], self.predicts[places], self.bound[places]

    def admit(self, arrivals: Sequence[_Arrival], num_layers: int) -> None:
        """Further rows go on from here."""
        counts = [len(arrival.positions) for arrival in arrivals]
        items = np.repeat([arrival.item for arrival in arrivals], counts)
        predicts = np.zeros(len(items), dtype=np.bool_)
        predicts[np.cumsum(counts) - 1] = [arrival.predicts for arrival in arrivals]
        self.rows, order = self.rows.join(
            torch.from_numpy(items.astype(np.int32)), torch.cat([arrival.positions for arrival in arrivals])
        )
        self.x = torch.cat([self.x, *(arrival.x for arrival in arrivals)])[order]
        places = order.numpy()
        self.items = np.concatenate((self.items, items))[places]
        self.predicts = np.concatenate((self.predicts, predicts))[places]
        self.bound = np.concatenate((self.bound, np.full(len(items), num_layers)))[places]


@dataclass(frozen=True)
class _Iteration:
    """What does not change while an iteration runs.

    Attributes:
        scheduled: I.
        exits: of their newest rows.
        needs_logits: [I] requests whose tokens take more than the largest logit.
        is_judged: [I] requests whose kept rows are judged by the full model.
        carrying: indices of requests whose rows may be kept.
        pauses: exits at which something may happen, ascending.
    """

    scheduled: Sequence[ScheduledRequest]
    exits: IterationExits
    needs_logits: Mask
    is_judged: Mask
    carrying: list[int]
    pauses: list[int]

    def owner(self, item: int) -> str:
        return self.scheduled[item].request.request_id


class Executor:
    """Runs iterations of one model over one cache.

    Attributes:
        stats: what was run since the start.
        trace: what was run since `prepare`.
    """

    def __init__(
        self,
        model: PackedModel,
        cache: KVStorage,
        max_model_len: int,
        config: EngineConfig,
        clock: IterationClock | None = None,
    ) -> None:
        """Set up.

        Args:
            model: packed weights.
            cache: with `model.num_cache_layers` layers.
            max_model_len: most tokens of one sequence.
            config: read for its sync policy.
            clock: told what time is spent on; None: a clock of its own.
        """
        self._model = model
        self._cache = cache
        self._clock = clock or IterationClock()
        self._context = model.row_context(max_model_len, cache.block_size)
        self._num_layers = num_layers = model.config.num_layers
        self._kept = KeptTokens()
        self._leave_rules = leave_rules(model, cache, self._kept)
        self._times = PassTimes() if config.split_rule == "cost" else None
        self._sync_rule = sync_rule(config, num_layers, self._times)
        self.stats = ExecutorStats([0] * num_layers, [0] * num_layers)
        self.trace = Trace()

    @property
    def num_kept(self) -> int:
        """Tokens that left early and wait for a deeper pass."""
        return len(self._kept)

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a request: it has ended, or its blocks were taken."""
        self._kept.forget(request_id)

    @torch.inference_mode()
    def prepare(self, output: SchedulerOutput) -> None:
        """Do what comes before anything is computed: forget the preempted, and copy blocks."""
        self.trace = Trace()
        for request_id in output.preempted:
            self.forget(request_id)
        if output.copies:
            self._cache.copy_blocks(output.copies)

    @torch.inference_mode()
    def run(
        self,
        scheduled: Sequence[ScheduledRequest],
        exits: Sequence[RequestExits | None],
        needs_logits: Sequence[bool],
        on_prompt_logits: PromptLogits | None = None,
    ) -> list[Departure]:
        """Run one iteration.

        Args:
            scheduled: what to compute; not empty.
            exits: for each of them, the exits its generated tokens may take where they are sure; None: none.
            needs_logits: for each of them, whether the token it predicts takes more than the largest logit.
            on_prompt_logits: given the logits of prompts that ask for log-probabilities, in slices.

        Returns:
            Together, every row that predicts a token, once.
        """
        sweep = self._begin(scheduled)
        iteration = self._plan(scheduled, exits, np.array(needs_logits, dtype=np.bool_), sweep)
        departures: list[Departure] = []
        while True:
            self._climb(iteration, sweep, on_prompt_logits)
            said, vetoed = self._say(iteration, sweep.left)
            departures += said
            if not vetoed:
                return departures
            sweep, on_prompt_logits = self._resume(iteration, sweep, vetoed), None

    def _begin(self, scheduled: Sequence[ScheduledRequest]) -> _Sweep:
        rows = build_rows(scheduled, self._context)
        tokens: list[int] = []
        predicts = np.zeros(len(rows), dtype=np.bool_)
        bound = np.full(len(rows), self._num_layers)
        for item in scheduled:
            start = len(tokens)
            tokens += item.token_ids
            predicts[len(tokens) - 1] = item.samples
            layers = bound_layers(item)
            if layers is not None:
                bound[start : len(tokens)] = layers
        x = self._model.embed(torch.tensor(tokens))
        return _Sweep(x, x, rows, rows.sequences.numpy().astype(np.intp), predicts, bound)

    def _plan(
        self,
        scheduled: Sequence[ScheduledRequest],
        exits: Sequence[RequestExits | None],
        needs_logits: Mask,
        sweep: _Sweep,
    ) -> _Iteration:
        requests = [item.request for item in scheduled]
        is_decode = [item.phase is Phase.DECODE for item in scheduled]
        allowed = [
            point if decodes and not request.runs_full_depth else None
            for point, decodes, request in zip(exits, is_decode, requests, strict=True)
        ]
        gate = IterationExits(self._model, requests, allowed, needs_logits)
        carrying = [
            index
            for index, (request, decodes) in enumerate(zip(requests, is_decode, strict=True))
            if decodes and carries_on(request)
        ]
        if self._model.has_exit_blocks:
            # The block of a head attends over the sequence, so every token that passes it leaves keys and values there,
            # whether it is tested or not, and for whichever request reads them later.
            pauses = set(self._model.exits)
        else:
            pauses = set(gate.layers)
            pauses.update(np.unique(sweep.bound).tolist())
            for index in carrying:
                pauses.update(self._kept.depths(requests[index].request_id))
        return _Iteration(
            scheduled,
            gate,
            needs_logits,
            np.array(
                [
                    decodes and request.exits.kv_policy == "verify"
                    for request, decodes in zip(requests, is_decode, strict=True)
                ]
            ),
            carrying,
            sorted(pauses - {self._num_layers}),
        )

    def _climb(self, iteration: _Iteration, sweep: _Sweep, on_prompt_logits: PromptLogits | None) -> None:
        """Take the rows from where they are to where they leave."""
        for layer in iteration.pauses:
            if layer <= sweep.depth:
                continue
            if len(sweep):
                self._run_layers(sweep, layer)
                self._pass_exit(iteration, sweep, layer)
            elif not sweep.arrivals:
                return
            sweep.depth = layer
            self._take_along(iteration, sweep)
        if len(sweep):
            self._run_layers(sweep, self._num_layers)
            self._finish(iteration, sweep, on_prompt_logits)

    def _run_layers(self, sweep: _Sweep, stop: int) -> None:
        self._clock.lap("other")
        sweep.x, sweep.previous = self._model.run_layers(sweep.x, sweep.rows, self._cache, sweep.depth, stop)
        seconds = self._clock.lap("layers")
        num_rows = len(sweep)
        self.trace.segments.append(SegmentRun(sweep.depth, stop, num_rows, seconds))
        if self._times is not None:
            self._times.ran(sweep.depth, stop, num_rows, seconds)
        for index in range(sweep.depth, stop):
            self.stats.calls[index] += 1
            self.stats.rows_run[index] += num_rows
        sweep.depth = stop

    def _pass_exit(self, iteration: _Iteration, sweep: _Sweep, layer: int) -> None:
        """Test rows at an exit, and let go those that may or must leave."""
        block = self._model.exits[layer].block
        if block is not None:
            block.write(sweep.x, sweep.rows, self._cache)
        gate, num_rows = iteration.exits, len(sweep)
        leaving = sweep.bound == layer
        tested: Places = np.empty(0, dtype=np.intp)
        scored: list[Scored] = []
        asked = np.flatnonzero(sweep.predicts & gate.asked[sweep.items])
        if len(asked):
            items = sweep.items[asked]
            tested = asked[gate.is_tested(layer)[items]]
            if len(tested):
                scored = self._test(iteration, sweep, layer, tested)
            leaves = self._sync_rule(gate.sure[items], layer, num_rows) & gate.may_leave(layer)[items]
            if leaves.any():
                # Rows that were carried along share the fate of their sequence's newest one.
                goes = np.zeros(len(iteration.scheduled), dtype=np.bool_)
                goes[items[leaves]] = True
                leaving |= goes[sweep.items]
        seconds = self._clock.lap("exit_test")
        if not leaving.any():
            return
        self._part(iteration, sweep, layer, leaving, tested, scored)
        seconds += self._clock.lap("other")
        gone = np.flatnonzero(leaving)
        seconds += self._settle(iteration, sweep, layer, gone)
        sweep.keep(np.flatnonzero(~leaving))
        seconds += self._clock.lap("other")
        if self._times is not None:
            self._times.left(layer, num_rows, seconds)

    def _test(self, iteration: _Iteration, sweep: _Sweep, layer: int, tested: Places) -> list[Scored]:
        x, previous = sweep.x, sweep.previous
        if len(tested) < len(sweep):
            index = torch.from_numpy(tested)
            x, previous = x.index_select(0, index), previous.index_select(0, index)

        def exit_state(part: Places) -> Tensor:
            return self._exit_state(sweep, layer, tested[part])

        return iteration.exits.test(layer, sweep.items[tested], x, previous, exit_state)

    def _exit_state(self, sweep: _Sweep, layer: int, places: Places) -> Tensor:
        """State [n, D] that an exit's unembedding reads, for the rows at `places` [n]."""
        x, rows = sweep.x, sweep.rows
        if len(places) < len(sweep):
            index = torch.from_numpy(places)
            x = x.index_select(0, index)
            if self._model.exits[layer].block is not None:
                rows = rows.select(index)
        return self._model.exit_state(layer, x, rows, self._cache)

    def _part(
        self, iteration: _Iteration, sweep: _Sweep, layer: int, leaving: Mask, tested: Places, scored: Iterable[Scored]
    ) -> None:
        """Note which tokens the leaving rows predict, with what the test has computed already."""
        speaks = leaving & sweep.predicts
        leaves = leaving[tested]
        members = tested[leaves]
        for part in scored:
            if part.state is None:
                continue
            mine = part.select(leaves)
            if mine is not None and mine.state is not None:
                places = members[mine.places]
                speaks[places] = False
                sweep.leave(layer, places, mine.state, mine.head, mine.logits)
        if speaks.any():
            places = np.flatnonzero(speaks)
            sweep.leave(layer, places, self._exit_state(sweep, layer, places))

    def _settle(self, iteration: _Iteration, sweep: _Sweep, layer: int, gone: Places) -> float:
        """Let the KV policies of rows that leave do what they do; the seconds they took."""
        owners: dict[LeaveRule, list[int]] = {}
        for place, item in zip(gone.tolist(), sweep.items[gone].tolist(), strict=True):
            rule = self._leave_rules[iteration.scheduled[item].request.exits.kv_policy]
            owners.setdefault(rule, []).append(place)
        filled = len(owners.get(self._leave_rules["fill"], ()))
        self.trace.filled_rows += filled
        self.stats.rows_filled += filled
        for rule, places in owners.items():
            names = [iteration.owner(item) for item in sweep.items[places].tolist()]
            if len(places) == len(sweep):
                rule(layer, sweep.x, sweep.rows, names)
            else:
                index = torch.tensor(places)
                rule(layer, sweep.x.index_select(0, index), sweep.rows.select(index), names)
        return self._clock.lap("fill")

    def _take_along(self, iteration: _Iteration, sweep: _Sweep) -> None:
        """Let rows join that had left here: kept ones of sequences that have just gone past, and those that resume."""
        layer = sweep.depth
        arrivals = sweep.arrivals.pop(layer, [])
        if iteration.carrying and len(sweep):
            inside = set(sweep.items[sweep.predicts].tolist())
            for item in iteration.carrying:
                group = self._kept.take(iteration.owner(item), layer) if item in inside else None
                if group is not None:
                    arrivals.append(_Arrival(item, group.positions, group.states, predicts=False))
                    self.trace.pending_rows += len(group.positions)
        if arrivals:
            sweep.admit(arrivals, self._num_layers)

    def _finish(self, iteration: _Iteration, sweep: _Sweep, on_prompt_logits: PromptLogits | None) -> None:
        """At the final exit, note the rows that predict a token and no others."""
        layer = self._num_layers
        places = np.flatnonzero(sweep.predicts | iteration.is_judged[sweep.items])
        if len(places):
            sweep.leave(layer, places, self._exit_state(sweep, layer, places))
        if on_prompt_logits is None:
            return
        for index, item in enumerate(iteration.scheduled):
            request = item.request
            if request.sampling.prompt_logprobs is None or item.phase is Phase.DECODE:
                continue
            # The row at position p tells of token p + 1.
            stop = min(item.start + item.num_tokens, request.num_prompt_tokens - 1)
            if len(request.prompt_logprobs) >= stop:  # it runs again
                continue
            (mine,) = np.nonzero(sweep.items == index)
            unembed = self._model.exits[layer].unembed
            for start in range(item.start, stop, PROMPT_SLICE):
                places = mine[start - item.start : min(start + PROMPT_SLICE, stop) - item.start]
                logits = unembed.logits(self._exit_state(sweep, layer, places))
                on_prompt_logits(index, start, logits)

    def _say(self, iteration: _Iteration, left: Iterable[_Left]) -> tuple[list[Departure], list[_Left]]:
        """Give every row its best token or its logits, and find those that should have stayed.

        The unembedding is the largest matrix of a small model, and at small batches reading it is what it costs: exits
        that share it must not read it once each. A row goes one way or the other by its own needs, never by its
        neighbours'.
        """
        self._clock.lap("other")
        said: list[Departure] = []
        vetoed: list[_Left] = []
        waiting: dict[tuple[PackedLinear, bool], list[_Left]] = {}

        def settle(one: _Left, head: HeadOutput | None, logits: Tensor | None) -> None:
            stays = self._vetoed(iteration, one, head, logits)
            if stays is None:
                said.append(self._departure(iteration, one, head, logits))
                return
            vetoed.extend(filter(None, [one.select(stays)]))
            rest = replace(one, head=head, logits=logits).select(~stays)
            if rest is not None:
                said.append(self._departure(iteration, rest, rest.head, rest.logits))

        for whole in left:
            needs = iteration.needs_logits[whole.items]
            for needs_logits in (False, True):
                one = whole.select(needs == needs_logits)
                if one is None:
                    continue
                if needs_logits and one.logits is not None:
                    settle(one, None, one.logits)
                elif not needs_logits and (one.head is not None or one.logits is not None):
                    settle(one, one.head or HeadOutput.of(cast(Tensor, one.logits)), None)
                else:
                    waiting.setdefault((self._model.exits[one.exit_layer].unembed, needs_logits), []).append(one)
        for (unembed, needs_logits), group in waiting.items():
            state = group[0].state if len(group) == 1 else torch.cat([one.state for one in group])
            start = 0
            logits = unembed.logits(state) if needs_logits else None
            head = None if needs_logits else unembed.head(state)
            for one in group:
                part = slice(start, start + len(one.items))
                settle(one, None if head is None else head.select(part), None if logits is None else logits[part])
                start = part.stop
        self._clock.lap("head")
        return said, vetoed

    def _vetoed(
        self, iteration: _Iteration, left: _Left, head: HeadOutput | None, logits: Tensor | None
    ) -> Mask | None:
        """[n] rows whose best token is outside their shortlist; None if there are none."""
        if left.exit_layer == self._num_layers:
            return None
        shortlists = [iteration.exits.may_say(item) for item in left.items.tolist()]
        if all(shortlist is None for shortlist in shortlists):
            return None
        token_ids = head.token_ids if head is not None else cast(Tensor, logits).argmax(dim=-1)
        stays = np.array(
            [
                shortlist is not None and not bool(shortlist[token])
                for shortlist, token in zip(shortlists, token_ids.tolist(), strict=True)
            ]
        )
        return stays if stays.any() else None

    def _departure(
        self, iteration: _Iteration, left: _Left, head: HeadOutput | None, logits: Tensor | None
    ) -> Departure:
        items = left.items.tolist()
        confidence: list[float | None] = [None] * len(items)
        if left.exit_layer < self._num_layers:
            measured = iteration.exits.confidence[left.items].tolist()
            confidence = [value if value == value else None for value in measured]
        return Departure(items, left.exit_layer, confidence, head, logits)

    def _resume(self, iteration: _Iteration, sweep: _Sweep, vetoed: Sequence[_Left]) -> _Sweep:
        """A sweep of rows that should have stayed, from where they left."""
        arrivals: dict[int, list[_Arrival]] = {}
        for left in vetoed:
            self.stats.rows_vetoed += len(left.items)
            iteration.exits.sure[left.items] = False
            for place, item in zip(left.places.tolist(), left.items.tolist(), strict=True):
                request = iteration.scheduled[item].request
                x, positions = left.x[place : place + 1], left.positions[place : place + 1]
                if carries_on(request):
                    # What it had taken along was put away with it, and what waits here joins now that it goes past.
                    group = self._kept.take(request.request_id, left.exit_layer)
                    assert group is not None
                    x, positions = group.states, group.positions
                arrivals.setdefault(left.exit_layer, []).append(_Arrival(item, positions, x, predicts=True))
        sweep.keep(np.empty(0, dtype=np.intp))
        sweep.previous = sweep.x
        resumed = _Sweep(sweep.x, sweep.x, sweep.rows, sweep.items, sweep.predicts, sweep.bound, arrivals=arrivals)
        resumed.depth = min(arrivals)
        self._take_along(iteration, resumed)
        return resumed
