"""The one loop over segments: every policy is a rule on the rows that are still inside.

    rows = tokens of this iteration
    for each segment:
        run its layers on the rows
        sure |= confidence > threshold              newest rows of requests that allow exits
        leaving = sync policy(sure)                 all: everybody when all are sure; regroup: each on its own
        KV policy(leaving rows)                     keep their states until their sequence goes past this exit
        rows = the rest, and parked ones            or none: all wait here for a quorum
        kept tokens of their sequences              fill in what lies above, or they join the rows
    best tokens or logits of all rows that predict a token: one product for all exits that share an unembedding

A segment ends at an exit that some row of the iteration may take or was left waiting at, so an iteration without such
rows is one segment.

Rows that this last product vetoes (`departures`) should have stayed: they go on from where they left, in a second sweep
of the same loop.

Legend: I requests of the iteration, N rows, D model, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from offramp.serve.config import EngineConfig
from offramp.serve.devices import on_device
from offramp.serve.execution.departures import Departure, unembed
from offramp.serve.execution.exit_test import RequestExits, Scored
from offramp.serve.execution.iteration import Iteration, Planner
from offramp.serve.execution.kept_tokens import KeptGroup, KeptTokens
from offramp.serve.execution.kv_policy import bound_layers, carries_on, leave_rules
from offramp.serve.execution.leaving import exit_state, note_left, note_untested
from offramp.serve.execution.parked import ParkedRows, Parking
from offramp.serve.execution.stored_states import StoredStates
from offramp.serve.execution.sweep import Arrivals, LeftRows, Mask, Places, Sweep
from offramp.serve.execution.sync_policy import PassTimes, leave_alone, sync_rule
from offramp.serve.kv_cache.storage import KVStorage
from offramp.serve.measures.iteration_clock import IterationClock
from offramp.serve.measures.records import SegmentRun, Trace
from offramp.serve.model.packed import PackedModel
from offramp.serve.model.rows import build_rows
from offramp.serve.request.logits_use import LogitsUse
from offramp.serve.scheduling.scheduler_output import Phase, ScheduledRequest, SchedulerOutput

PromptLogits = Callable[[int, int, Tensor], None]
"""Takes raw final logits [n, V] fp32 of rows of a prompt: index of the request, position of the first row, logits."""

PROMPT_SLICE = 64
"""Most rows of a prompt whose logits are in memory at once."""


class Executor:
    """Runs iterations of one model over one cache.

    Attributes:
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
            config: read for its sync policy and its quorum.
            clock: told what time is spent on; None: a clock of its own.
        """
        self._model = model
        self._cache = cache
        self._clock = clock or IterationClock()
        self._context = model.row_context(max_model_len, cache.block_size)
        self._num_layers = model.config.num_layers
        self._states = StoredStates()
        self._kept = KeptTokens(self._states)
        self._leave_rules = leave_rules(self._kept, self._states)
        self._parking = Parking(config.deep_quorum, config.max_parked_iterations, self._states)
        self._planner = Planner(model, self._kept, self._parking)
        self._times = PassTimes() if config.split_rule == "cost" else None
        self._sync_rule = sync_rule(config, self._num_layers, self._times)
        self.trace = Trace()

    @property
    def num_kept(self) -> int:
        """Tokens that left early and wait for a deeper pass."""
        return len(self._kept)

    @property
    def num_parked(self) -> int:
        """Rows that wait at an exit for company."""
        return len(self._parking)

    def forget(self, request_id: str) -> None:
        """Drop what is kept or parked of a request: it has ended, or its blocks were taken."""
        self._kept.forget(request_id)
        self._parking.forget(request_id)

    def prepare(self, output: SchedulerOutput) -> None:
        """Do what comes before anything is computed: forget the preempted, and copy blocks."""
        self.trace = Trace()
        for request_id in output.preempted:
            self.forget(request_id)
        if output.copies:
            with torch.inference_mode():
                self._cache.copy_blocks(output.copies)

    @torch.inference_mode()
    def run(
        self,
        scheduled: Sequence[ScheduledRequest],
        exits: Sequence[RequestExits | None],
        uses: Sequence[LogitsUse],
        on_prompt_logits: PromptLogits | None = None,
    ) -> list[Departure]:
        """Run one iteration.

        Args:
            scheduled: what to compute; not empty.
            exits: for each of them, the exits its generated tokens may take where they are sure; None: none.
            uses: for each of them, what the token it predicts asks of the logits.
            on_prompt_logits: given the logits of prompts that ask for log-probabilities, in slices.

        Returns:
            Together, every row that predicts a token, once. Requests that decode and whose newest rows are parked have
            none.
        """
        self._encode(scheduled)
        sweep, bounds = self._begin(scheduled)
        iteration = self._planner.plan(scheduled, exits, uses, bounds)
        departures: list[Departure] = []
        while True:
            self._climb(iteration, sweep, on_prompt_logits)
            self._clock.lap("other")
            found = unembed(self._model, iteration.exits, iteration.requests.uses, sweep.left)
            self._clock.lap("head")
            departures += found.final
            if not found.vetoed:
                if self._parking.is_open:
                    self.trace.parked_requests = len(self._parking.waiting(iteration.requests.decodes))
                return departures
            sweep, on_prompt_logits = self._resume(iteration, sweep, found.vetoed), None

    def _encode(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Read the sources of requests whose first rows these are."""
        sources = [(item.request.source_token_ids, item.source_table) for item in scheduled if item.encodes]
        if sources:
            self._clock.lap("other")
            self._model.encode(sources, self._cache)
            self._clock.lap("encoder")

    def _begin(self, scheduled: Sequence[ScheduledRequest]) -> tuple[Sweep, set[int]]:
        """The rows of an iteration, and the layers at which some of them leave whatever they are sure of."""
        is_parked = [item.request.request_id in self._parking for item in scheduled]
        rows = build_rows(scheduled, self._context, is_parked)
        tokens: list[int] = []
        predicts = np.zeros(len(rows), dtype=np.bool_)
        bound = np.full(len(rows), self._num_layers)
        bounds: set[int] = set()
        for item, waits in zip(scheduled, is_parked, strict=True):
            if waits:
                continue
            start = len(tokens)
            tokens += item.token_ids
            predicts[len(tokens) - 1] = item.samples
            layers = bound_layers(item)
            if layers is not None:
                bound[start : len(tokens)] = layers
                bounds.update(layers)
        x = self._model.embed(on_device(np.array(tokens, dtype=np.int64), self._model.device))
        return Sweep(x, x, rows, rows.sequences.numpy().astype(np.intp), predicts, bound), bounds

    def _climb(self, iteration: Iteration, sweep: Sweep, on_prompt_logits: PromptLogits | None) -> None:
        """Take the rows from where they are to where they leave."""
        for layer in iteration.pauses:
            if layer <= sweep.depth:
                continue
            if len(sweep):
                self._run_layers(sweep, layer)
                self._pass_exit(iteration, sweep, layer)
            elif not (sweep.arrivals or self._parking.is_open):
                return
            sweep.depth = layer
            self._take_along(iteration, sweep)
        if len(sweep):
            self._run_layers(sweep, self._num_layers)
            self._finish(iteration, sweep, on_prompt_logits)

    def _run_layers(self, sweep: Sweep, stop: int) -> None:
        self._clock.lap("other")
        sweep.x, sweep.previous = self._model.run_layers(sweep.x, sweep.rows, self._cache, sweep.depth, stop)
        seconds = self._clock.lap("layers")
        num_rows = len(sweep)
        self.trace.segments.append(SegmentRun(sweep.depth, stop, num_rows, seconds))
        if self._times is not None:
            self._times.ran(sweep.depth, stop, num_rows, seconds)
        sweep.depth = stop

    def _pass_exit(self, iteration: Iteration, sweep: Sweep, layer: int) -> None:
        """Test rows at an exit, and let go those that may or must leave."""
        block = self._model.exits[layer].block
        if block is not None:
            block.write(sweep.x, sweep.rows, self._cache)
        num_rows = len(sweep)
        leaves, asked, scored = self._ask(iteration, sweep, layer)
        leaving = sweep.bound == layer
        if leaves.any():
            if len(asked) == num_rows:
                leaving |= leaves
            else:
                # Rows that were carried along share the fate of their sequence's newest one.
                goes = np.zeros(len(iteration.scheduled), dtype=np.bool_)
                goes[sweep.items[asked[leaves]]] = True
                leaving |= goes[sweep.items]
        seconds = self._clock.lap("exit_test")
        if not leaving.any():
            return
        note_left(self._model, self._cache, sweep, layer, leaving, scored)
        seconds += self._clock.lap("other")
        seconds += self._settle(iteration, sweep, layer, np.flatnonzero(leaving))
        staying = np.flatnonzero(~leaving)
        if len(staying):
            sweep.keep(staying)
        else:
            sweep.clear()
        seconds += self._clock.lap("other")
        if self._times is not None:
            self._times.left(layer, num_rows, seconds)

    def _ask(self, iteration: Iteration, sweep: Sweep, layer: int) -> tuple[Mask, Places, list[Scored]]:
        """Test newest rows, and let the sync policy decide.

        Returns:
            Which rows leave [n], the places of these n among the rows inside, and what was measured.
        """
        gate, asked = iteration.exits, sweep.newest
        if self._sync_rule is leave_alone and gate.open_exits.to_all(layer):
            # Whoever was sure before has left, so every newest row is tested and decides for itself.
            scored = gate.test(layer, sweep, asked, self._cache) if len(asked) else []
            return gate.sure[sweep.items[asked]], asked, scored
        asked = asked[gate.open_exits.asked[sweep.items[asked]]]
        items = sweep.items[asked]
        if not len(asked):
            return gate.sure[items], asked, []
        is_tested = gate.is_tested(layer)[items]
        scored = gate.test(layer, sweep, asked[is_tested], self._cache) if is_tested.any() else []
        leaves = self._sync_rule(gate.sure[items], layer, len(sweep)) & gate.may_leave(layer)[items]
        return leaves, asked, scored

    def _settle(self, iteration: Iteration, sweep: Sweep, layer: int, gone: Places) -> float:
        """Let the KV policies of rows that leave do what they do; the seconds they took."""
        policies = iteration.requests.distinct_kv_policies
        for policy in policies:
            places = gone
            if len(policies) > 1:
                places = gone[iteration.requests.kv_policies[sweep.items[gone]] == policy]
                if not len(places):
                    continue
            positions = sweep.rows.positions.numpy()[places].tolist()
            owners = map(iteration.owner, sweep.items[places].tolist())
            self._leave_rules[policy](layer, sweep.select(sweep.x, places), positions, owners)
        return self._clock.lap("fill")

    def _take_along(self, iteration: Iteration, sweep: Sweep) -> None:
        """Let rows join that had stopped here: those that resume, parked ones, and kept ones of all that go past."""
        layer = sweep.depth
        resumed = sweep.arrivals.pop(layer, None)
        if resumed is not None:
            sweep.admit(resumed, self._num_layers)
        if self._parking.is_open:
            self._park_or_wake(iteration, sweep)
        if iteration.requests.keeping and len(sweep):
            self._take_kept(iteration, sweep)

    def _take_kept(self, iteration: Iteration, sweep: Sweep) -> None:
        """What is kept here of sequences that go past: carry it on, or fill in what lies above."""
        inside = set(sweep.items.tolist())
        carried: list[tuple[int, KeptGroup]] = []
        filled: list[tuple[int, KeptGroup]] = []
        for item in iteration.requests.keeping:
            group = self._kept.take(iteration.owner(item), sweep.depth) if item in inside else None
            if group is not None:
                (filled if iteration.requests.kv_policies[item] == "fill" else carried).append((item, group))
        # All come out of the store first: if filling fails, nobody else would give the room of the others back.
        to_fill, to_carry = (self._arrivals(some, predicts=False) if some else None for some in (filled, carried))
        if to_fill is not None:
            self._fill(sweep, to_fill)
        if to_carry is not None:
            self.trace.pending_rows += len(to_carry)
            sweep.admit(to_carry, self._num_layers)

    def _arrivals(self, groups: Sequence[tuple[int, KeptGroup | ParkedRows]], *, predicts: bool) -> Arrivals:
        """Rows of some requests, with their states; the last of each may predict a token."""
        counts = [len(group.positions) for _, group in groups]
        is_newest = np.zeros(sum(counts), dtype=np.bool_)
        if predicts:
            is_newest[np.cumsum(counts) - 1] = True
        return Arrivals(
            np.repeat([item for item, _ in groups], counts),
            np.array([position for _, group in groups for position in group.positions]),
            self._states.take([slot for _, group in groups for slot in group.slots]),
            is_newest,
        )

    def _fill(self, sweep: Sweep, kept: Arrivals) -> None:
        """Make keys and values of kept tokens for every layer above (saturated KV; CALM, section 3.2).

        Algorithm 1, lines 9 to 11, put off until somebody looks: all at once reads the weights once. The same is
        defined for training and naive generation by `Layout.exit_depths`.
        """
        self._clock.lap("other")
        self._model.fill(sweep.depth, kept.x, sweep.rows.at(kept.items, kept.positions), self._cache)
        self.trace.filled_rows += len(kept)
        self._clock.lap("fill")

    def _park_or_wake(self, iteration: Iteration, sweep: Sweep) -> None:
        """Where the layers above have too few rows, put these away; else let those that wait here join them."""
        layer, decodes = sweep.depth, iteration.requests.decodes
        waiting = self._parking.waiting(decodes, layer)
        if not waiting and not len(sweep):
            return
        if self._goes_on(iteration, sweep, waiting):
            groups = [(decodes[request_id], self._parking.take(request_id)) for request_id in waiting]
            if groups:
                sweep.admit(self._arrivals(groups, predicts=True), self._num_layers)
            return
        parked: dict[int, ParkedRows] = {}
        slots = self._states.put(sweep.x)
        for item, position, slot in zip(sweep.items.tolist(), sweep.rows.positions.tolist(), slots, strict=True):
            rows = parked.get(item)
            if rows is None:
                rows = parked[item] = ParkedRows(layer, waited=int(iteration.waited[item]))
                self._parking.put(iteration.owner(item), rows)
            rows.positions.append(position)
            rows.slots.append(slot)
        sweep.clear()

    def _goes_on(self, iteration: Iteration, sweep: Sweep, waiting: Mapping[str, ParkedRows]) -> bool:
        """Whether the layers above run for the rows inside and for those that wait here."""
        parking = self._parking
        count = len(waiting) + int(np.count_nonzero(sweep.predicts))
        if iteration.is_idle or parking.has_quorum(count, len(iteration.requests.decodes)):
            return True
        if any(parking.is_due(rows.waited) for rows in waiting.values()):
            return True
        # Whoever may not leave here, such as a prompt, does not wait; nor does who has waited enough at exits below.
        may_wait = iteration.exits.open_exits.to(sweep.depth)[sweep.items]
        return not may_wait.all() or any(map(parking.is_due, iteration.waited[sweep.items].tolist()))

    def _finish(self, iteration: Iteration, sweep: Sweep, on_prompt_logits: PromptLogits | None) -> None:
        """At the final exit, note the rows that predict a token and no others."""
        layer = self._num_layers
        places = np.flatnonzero(sweep.predicts | iteration.requests.is_judged[sweep.items])
        if len(places):
            note_untested(self._model, self._cache, sweep, layer, places)
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
                logits = unembed.logits(exit_state(self._model, self._cache, sweep, layer, places))
                on_prompt_logits(index, start, logits)

    def _resume(self, iteration: Iteration, sweep: Sweep, vetoed: Sequence[LeftRows]) -> Sweep:
        """A sweep of rows that should have stayed, from where they left."""
        groups: dict[int, list[tuple[int, KeptGroup]]] = {}
        for left in vetoed:
            self.trace.vetoed_rows += len(left.items)
            iteration.exits.sure[left.items] = False
            for item in left.items.tolist():
                # Whoever may leave early is kept where it left, and with it what it had taken along.
                request, layer = iteration.scheduled[item].request, left.exit_layer
                group = self._kept.take(request.request_id, layer)
                assert group is not None
                if not carries_on(request):  # `fill`: those before it did leave
                    for position, slot in zip(group.positions[:-1], group.slots[:-1], strict=True):
                        self._kept.keep(request.request_id, layer, position, slot)
                    group = KeptGroup(group.positions[-1:], group.slots[-1:])
                groups.setdefault(layer, []).append((item, group))
        arrivals = {layer: self._arrivals(some, predicts=True) for layer, some in groups.items()}
        sweep.clear()
        sweep.previous = sweep.x
        resumed = Sweep(sweep.x, sweep.x, sweep.rows, sweep.items, sweep.predicts, sweep.bound, arrivals=arrivals)
        resumed.depth = min(arrivals)
        self._take_along(iteration, resumed)
        return resumed
