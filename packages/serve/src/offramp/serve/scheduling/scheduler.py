"""Iteration-level batching (Orca, OSDI 2022): before every iteration, choose the tokens and requests that it runs.

A request is a sequence of known tokens, prompt and output, of which the first `num_computed_tokens` are in the cache;
an iteration computes some of the rest. So a prompt longer than the token budget is prefilled in chunks beside the
decodes of other requests, and a request whose blocks were taken runs its known tokens again, without a mode of its own.
Each iteration gives

1. one token to every request that decodes. Tokens that wait for a complete pass may come along in it, so they count; if
   that is more than the budget, those requests go first that have waited longest;
2. the rest of the budget to requests that prefill;
3. what is then left to waiting requests, while there are seats and blocks.

The encoder of an encoder-decoder model reads a source all at once, in the iteration of the request's first rows, and
its rows count as those of a prompt. The first source of an iteration is read even where it is more than what is left of
the budget: it cannot be cut, and would wait for ever behind decodes that do not end.

**Rank.** Requests are ranked by priority, the smaller number first, and then by when they were first admitted. Blocks
are handed out as tokens come, by rank. When there are none, the request of the lowest rank loses all of its own and
runs again later (preemption by recompute), with its tokens, exits and rank kept. It never takes blocks from a higher
rank, so the highest always goes on, ends, and leaves its blocks to the next: every request ends as long as more urgent
ones do not keep coming. That a priority can starve those behind it is what it means; a waiting request also takes seats
and blocks from running ones of a less urgent priority, never of its own.

**Admission.** Waiting requests come in by priority, and clients take turns (`fair_queue`); nobody overtakes the head.
It needs blocks for all its known tokens beside those that running requests need for theirs, and one more for each of
these, so that what was just admitted (or preempted) does not come and go with every block that fills up. A head whose
next block is just being computed by a running request waits for it, to share it instead of computing it again. Where
deep passes are put off, prompts wait for the next one (`prompt_hold`).

Which keys and values requests share is said in `block_tables`.

**In flight.** A sequence is in flight from when its rows are scheduled until they are answered. Where all stages are in
one process that is one iteration. In a pipeline (`offramp.serve.pipeline`) there may be several iterations under way,
each with other sequences, and answers come in any order between them. All bookkeeping is immediate all the same: blocks
that an end, a cancel or a preemption frees are handed out at once, and blocks enter the prefix cache when their tokens
are counted as computed, though later stages may still have to write them. That is right because every stage runs
iterations in the order in which they were scheduled: whatever an iteration reads was written before, and whoever is
given a block writes it after those who had it. A preempted sequence's answer is dropped, as it says the same token when
it has run again. So that all stages have work, an iteration takes no more than its share of those that decode.

**Grouping by depth**, if it is on, makes an iteration run only decodes of similar expected depth: the one that has
waited longest leads, whatever its rank, and takes along those near it (`depth_grouping`). So a decode waits for at most
as many iterations as there are other decodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from offramp.common.errors import OfframpError
from offramp.serve.config import EngineConfig
from offramp.serve.kv_cache.block_pool import BlockPool
from offramp.serve.kv_cache.prefix_cache import PrefixNode
from offramp.serve.request.iteration_result import IterationResult
from offramp.serve.request.request import Blame, Request, RequestStatus
from offramp.serve.scheduling.admission_queue import AdmissionQueue
from offramp.serve.scheduling.block_tables import BlockTables
from offramp.serve.scheduling.depth_grouping import similar_depths
from offramp.serve.scheduling.limits import check_limits
from offramp.serve.scheduling.progress import TextStops, advance
from offramp.serve.scheduling.prompt_hold import PromptHold
from offramp.serve.scheduling.scheduler_output import Phase, ScheduledRequest, SchedulerOutput
from offramp.serve.scheduling.sequence import SequenceState


class QueueFullError(OfframpError):
    """Too many requests wait; the same request may be accepted later."""


class Scheduler:
    """Decides what each iteration computes. Not thread-safe: one owner calls it, between iterations.

    The cycle is `schedule`, run the model, `update`. Requests may be added, cancelled or failed at any time in between,
    and `schedule` may be called again before `update`.

    Attributes:
        num_preemptions: how often a running request lost its blocks.
    """

    def __init__(self, config: EngineConfig, block_pool: BlockPool, max_model_len: int, num_layers: int) -> None:
        """Build an idle scheduler.

        Args:
            config: its limits; `max_model_len` and the size of the cache, which depend on the model, come beside it.
            block_pool: free blocks, this scheduler's alone.
            max_model_len: most tokens of one request, prompt and completion together.
            num_layers: layers of the model; a token that ran fewer has left early.
        """
        self._config = config
        self._max_model_len = max_model_len
        self._cache_tokens = block_pool.num_blocks * config.block_size
        self._num_layers = num_layers
        self._tables = BlockTables(block_pool, config.block_size, config.prefix_caching)
        self._waiting = AdmissionQueue(quantum=config.max_tokens_per_iteration)
        self._hold = PromptHold(config.deep_quorum, config.max_parked_iterations)
        self._running: dict[str, SequenceState] = {}
        self._just_preempted: list[str] = []
        self._num_iterations = 0
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a seat or for blocks, for the first time or after a preemption."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that have a seat."""
        return len(self._running)

    @property
    def has_unfinished(self) -> bool:
        """Whether another iteration has anything to do."""
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> None:
        """Put a new request at the end of the queue.

        Raises:
            QueueFullError: if `max_waiting` requests wait already (not counting preempted ones).
            OfframpError: if the request can never run, or if its id is in use.
        """
        assert request.status is RequestStatus.WAITING, request.status
        self.check(request)
        name = request.request_id
        if name in self._waiting or name in self._running:
            raise OfframpError(f"request id {name!r} is in use by an unfinished request; give another.")
        num_waiting = self._waiting.num_new
        if num_waiting >= self._config.max_waiting:
            raise QueueFullError(
                f"{num_waiting} requests are waiting and the queue holds {self._config.max_waiting}; try again later."
            )
        self._waiting.push(request)

    def check(self, request: Request) -> None:
        """Raise `OfframpError` if a request can never run, however long it waits."""
        check_limits(request, self._config, self._max_model_len, self._cache_tokens)

    def cancel(self, request_id: str) -> Request | None:
        """End a request whose answer nobody wants; its blocks are free at once.

        Returns:
            The request, or None if no unfinished request has this id (it may just have finished).
        """
        return self._end(request_id, RequestStatus.CANCELLED)

    def fail(self, request_id: str, error: str, blame: Blame = "engine") -> Request | None:
        """End a request that cannot be computed.

        Args:
            request_id: which.
            error: why, one sentence.
            blame: what is at fault. Where it is its numbers, what it has computed or taken over may be the cause, and
                nobody else is to fail of it: its blocks leave the prefix cache.

        Returns:
            The request, or None if no unfinished request has this id.
        """
        sequence = self._running.get(request_id)
        if sequence is not None and blame == "numbers":
            self._tables.withdraw(sequence)
        request = self._end(request_id, RequestStatus.FAILED)
        if request is not None:
            request.error, request.blame = error, blame
        return request

    def schedule(self) -> SchedulerOutput:
        """What the next iteration computes; nothing only if no request is unfinished, or some are in flight.

        Everything scheduled must be given to `update`, also when running it failed.
        """
        num_startable = min(len(self._waiting), self._config.max_num_seqs - len(self._running))
        if not self._hold.holds(num_startable, self._running.values()):
            self._admit()
        running = sorted(self._running.values(), key=lambda sequence: sequence.rank)
        ready = [sequence for sequence in running if sequence.in_flight is None]
        copies: list[tuple[int, int]] = []
        scheduled = self._plan(ready, self._choose_decodes(ready), copies)
        if not scheduled and ready[:1] == running[:1]:
            # Those chosen wait for blocks of a higher rank that was not. The highest can always go on.
            scheduled = self._plan(ready[:1], set(ready[:1]), copies)
        scheduled.sort(key=lambda item: item.phase is Phase.PREFILL)
        for item in scheduled:
            self._running[item.request.request_id].in_flight = item
        output = SchedulerOutput(self._num_iterations, tuple(scheduled), tuple(self._just_preempted), tuple(copies))
        self._just_preempted.clear()
        self._num_iterations += 1
        return output

    def awaits(self, item: ScheduledRequest) -> bool:
        """Whether an answer to these rows is wanted: they are in flight, and nothing has ended or preempted them."""
        sequence = self._running.get(item.request.request_id)
        return sequence is not None and sequence.in_flight is item

    def update(
        self, output: SchedulerOutput, results: Mapping[str, IterationResult], text_stops: TextStops | None = None
    ) -> list[Request]:
        """Take in what an iteration computed.

        Requests that were cancelled, failed or preempted since `schedule` are passed over. One that decodes may have no
        result: its newest row is parked at an exit, and it is scheduled again as it is. Every other one whose rows
        predict a token must have a result, and one that asks for `prompt_logprobs` must have those of its rows (which
        may be left out if it runs again and has them all).

        Args:
            output: from `schedule`; or with some of its requests only, if the others are answered at other times.
            results: request id -> what it got.
            text_stops: asked whether a token completes a stop string; None looks for none.

        Returns:
            Requests that got a token or ended with what they got, in the order of `output`.
        """
        advanced: list[Request] = []
        parked: list[str] = []
        has_prompts = False
        for item in output.scheduled:
            request = item.request
            has_prompts |= item.phase is Phase.PREFILL
            if not self.awaits(item):
                continue
            sequence = self._running[request.request_id]
            sequence.in_flight, sequence.is_encoded = None, True
            if item.phase is Phase.DECODE and request.request_id not in results:
                parked.append(request.request_id)
                continue
            result = results[request.request_id] if item.samples else results.get(request.request_id)
            status = advance(sequence, item, result or IterationResult(), self._num_layers, text_stops)
            if not request.status.is_finished:  # `text_stops` may fail it
                self._tables.share_exact(sequence)
                if status.is_finished:
                    self._end(request.request_id, status)
            if item.samples or request.status.is_finished:
                advanced.append(request)
        self._hold.update(parked, has_prompts=has_prompts)
        return advanced

    def _admit(self) -> None:
        while (head := self._waiting.head()) is not None:
            if len(self._running) >= self._config.max_num_seqs and not self._lower_than(head):
                return
            hits = self._tables.prefix_hits(head)
            rows = self._config.max_tokens_per_iteration - 1
            rows -= min(rows, sum(s.num_decode_rows for s in self._running.values() if s.decodes))
            rows -= sum(
                s.num_source_rows + s.num_prefill_tokens - s.request.num_computed_tokens
                for s in self._running.values()
                if not s.decodes and s.request.priority <= head.request.priority
            )
            if rows < 0 or self._tables.is_next_under_way(head, hits, self._running.values()):
                return
            while not self._has_room(head, hits):
                victim = self._lower_than(head)
                if victim is None:
                    return
                self._preempt(victim)
            self._start(head, hits)

    def _has_room(self, sequence: SequenceState, hits: Sequence[PrefixNode]) -> bool:
        """Whether there is a seat, and blocks enough for a good while."""
        if not self._running:
            return True
        if len(self._running) >= self._config.max_num_seqs:
            return False
        wanted = self._tables.num_to_start(sequence, hits)
        wanted += sum(self._tables.num_to_go_on(other) for other in self._running.values())
        return self._tables.num_available - wanted >= len(self._running)

    def _start(self, head: SequenceState, hits: Sequence[PrefixNode]) -> None:
        """Give a seat to the head of the queue, and what the prefix cache holds of its tokens."""
        request = head.request
        self._waiting.pop(head)
        self._tables.start(head, hits)
        if not request.num_preemptions:
            request.num_cached_tokens = request.num_computed_tokens
        request.status = RequestStatus.RUNNING
        self._running[request.request_id] = head

    def _choose_decodes(self, running: Sequence[SequenceState]) -> set[SequenceState]:
        """Which of the requests that decode take part in this iteration."""
        decodes = [sequence for sequence in running if sequence.decodes]
        budget = self._config.max_tokens_per_iteration - (len(decodes) < len(running))
        if self._config.group_by_depth and decodes:
            depths = [sequence.expected_depth(self._num_layers) for sequence in decodes]
            leader = min(range(len(decodes)), key=lambda index: decodes[index].last_chosen)
            decodes = [decodes[index] for index in similar_depths(depths, leader, self._num_layers)]
            decodes.sort(key=lambda sequence: sequence.last_chosen)
        else:
            decodes.sort(key=lambda sequence: (sequence.request.priority, sequence.last_chosen))
            share = -(-len(self._running) // (self._config.pipeline_stages or 1))
            decodes = decodes[:share]
        chosen: set[SequenceState] = set()
        for sequence in decodes:
            if sequence.num_decode_rows <= budget:
                budget -= sequence.num_decode_rows
                sequence.last_chosen = self._num_iterations
                chosen.add(sequence)
        return chosen

    def _plan(
        self, running: Iterable[SequenceState], decodes: set[SequenceState], copies: list[tuple[int, int]]
    ) -> list[ScheduledRequest]:
        """Rows for requests by rank, and the blocks they need.

        Args:
            running: by rank.
            decodes: those of them that decode now.
            copies: takes the blocks to copy.
        """
        budget = self._config.max_tokens_per_iteration - sum(sequence.num_decode_rows for sequence in decodes)
        scheduled: list[ScheduledRequest] = []
        num_encoded = 0
        for sequence in running:
            request = sequence.request
            if request.request_id not in self._running:  # a higher rank has just taken its blocks
                continue
            if sequence in decodes:
                phase, num_tokens = Phase.DECODE, 1
            elif sequence.decodes:
                continue
            else:
                phase = Phase.PREFILL
                sequence.last_chosen = self._num_iterations
                num_source, left = sequence.num_source_rows, budget
                if num_source:
                    # The decoder's first row comes with the source.
                    left = max(budget - num_source, 0 if num_encoded else min(budget, 1))
                num_tokens = min(left, sequence.num_prefill_tokens - request.num_computed_tokens)
            num_tokens = self._provide_blocks(sequence, num_tokens, copies)
            if num_tokens:
                scheduled.append(sequence.rows(phase, num_tokens, self._num_layers))
                if phase is Phase.PREFILL:
                    num_encoded += sequence.num_source_rows
                    budget = max(0, budget - sequence.num_source_rows - num_tokens)
        return scheduled

    def _provide_blocks(self, sequence: SequenceState, num_tokens: int, copies: list[tuple[int, int]]) -> int:
        """Give a sequence blocks for its next tokens, if need be by taking them from those of lower rank.

        Returns:
            For how many tokens there are blocks: `num_tokens` or fewer; 0 if all blocks belong to higher ranks.
        """
        if not num_tokens or self._tables.has_room(sequence, num_tokens):
            return num_tokens
        while not (fitting := self._tables.num_fitting(sequence, num_tokens)):
            victim = self._lowest()
            if victim is None or victim is sequence:
                return 0
            self._preempt(victim)
        if copy := self._tables.extend(sequence, fitting):
            copies.append(copy)
        return fitting

    def _lowest(self) -> SequenceState | None:
        """The running request of the lowest rank."""
        return max(self._running.values(), key=lambda sequence: sequence.rank, default=None)

    def _lower_than(self, head: SequenceState) -> SequenceState | None:
        """The running request of the lowest rank, if it must give way to a waiting one."""
        lowest = self._lowest()
        return lowest if lowest is not None and lowest.request.priority > head.request.priority else None

    def _preempt(self, sequence: SequenceState) -> None:
        """Take a running request's blocks and seat; it waits to run again."""
        request = sequence.request
        del self._running[request.request_id]
        self._tables.release(sequence)
        request.drafts.clear()
        if request.exits.kv_policy == "verify":
            request.num_pending = 0
        sequence.num_incomplete, sequence.in_flight = 0, None
        request.num_computed_tokens = request.num_exact_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.WAITING
        self._waiting.put_back(sequence)
        self._just_preempted.append(request.request_id)
        self.num_preemptions += 1

    def _end(self, request_id: str, status: RequestStatus) -> Request | None:
        request = self._waiting.remove(request_id)
        if request is None:
            sequence = self._running.pop(request_id, None)
            if sequence is None:
                return None
            self._tables.release(sequence)
            request = sequence.request
            self._waiting.refund(request)
        request.status = status
        return request
