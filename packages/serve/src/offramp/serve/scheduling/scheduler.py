"""Iteration-level batching (Orca, OSDI 2022): before every iteration, choose the tokens and requests that it runs.

A request is a sequence of known tokens, prompt and output, of which the first `num_computed_tokens` are in the cache;
an iteration computes some of the rest. So a prompt longer than the token budget is prefilled in chunks beside the
decodes of other requests, and a request whose blocks were taken runs its known tokens again, without a mode of its own.
Each iteration gives

1. one token to every request that decodes. Tokens that wait for a complete pass may come along in it, so they count; if
   that is more than the budget, those requests go first that have waited longest;
2. the rest of the budget to requests that prefill;
3. what is then left to waiting requests, while there are seats and blocks.

**Rank.** Requests are ranked by priority, the smaller number first, and then by when they were first admitted. Blocks
are handed out as tokens come, by rank. When there are none, the request of the lowest rank loses all of its own and
runs again later (preemption by recompute), with its tokens, exits and rank kept. It never takes blocks from a higher
rank, so the highest always goes on, ends, and leaves its blocks to the next: every request ends as long as more urgent
ones do not keep coming. That a priority can starve those behind it is what it means; a waiting request also takes seats
and blocks from running ones of a less urgent priority, never of its own.

**Admission.** Waiting requests come in by priority, and clients take turns (`fair_queue`); nobody overtakes the head.
It needs blocks for all its known tokens beside those that running requests need for theirs, and one more for each of
these, so that what was just admitted (or preempted) does not come and go with every block that fills up. A head whose
next block is just being computed by a running request waits for it, to share it instead of computing it again.

**Exactness.** Blocks enter the prefix cache when they are full of tokens with exact keys and values
(`Request.num_exact_tokens`), and requests of any policy start with what it holds of their prompts, but for the last
token of the prompt, whose logits are needed. A request that is run again takes from it no more than was exact before.
Whoever would write into a block that others can see writes into a copy.

**Grouping by depth**, if it is on, makes an iteration run only decodes of similar expected depth: the one that has
waited longest leads, whatever its rank, and takes along those near it (`depth_grouping`). So a decode waits for at most
as many iterations as there are other decodes.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from offramp.common.errors import OfframpError
from offramp.serve.config import EngineConfig
from offramp.serve.kv_cache.block_pool import BlockPool
from offramp.serve.kv_cache.prefix_cache import ROOT, PrefixCache, PrefixNode
from offramp.serve.request import IterationResult, Request, RequestStatus, SampledToken
from offramp.serve.scheduling.depth_grouping import DepthMean, similar_depths
from offramp.serve.scheduling.fair_queue import FairQueue
from offramp.serve.scheduling.scheduler_output import Phase, ScheduledRequest, SchedulerOutput

TextStops = Callable[[Request, int], bool]
"""Whether a token completes a stop string. Asked once for every token that is not a stop token, before it is added to
the request (so `request.may_stop` speaks of this token)."""


class QueueFullError(OfframpError):
    """Too many requests wait; the same request may be accepted later."""


@dataclass(eq=False)
class _Sequence:
    """What the scheduler keeps of a request that was admitted, beside the request itself.

    Attributes:
        request: the request.
        order: counts first admissions; kept when it is preempted.
        blocks: its block table.
        num_known: blocks at its beginning that the prefix cache knows.
        chain: serial number of the last of these, or `ROOT`.
        early_from: `fill`, `static`: position of the first token that left early; keys and values from there on are not
            exact, and never will be.
        num_incomplete: `recompute`, `verify`: computed tokens, the last ones, whose keys and values are missing in some
            layers. `Request.num_pending` counts the same but for a preemption, after which there are none.
        depth: how deep its tokens go.
        last_chosen: the last iteration in which it might run.
    """

    request: Request
    order: int = -1
    blocks: list[int] = field(default_factory=list)
    num_known: int = 0
    chain: int = ROOT
    early_from: int | None = None
    num_incomplete: int = 0
    depth: DepthMean = field(default_factory=DepthMean)
    last_chosen: int = -1

    @property
    def rank(self) -> tuple[int, int]:
        """The smaller, the more urgent."""
        return self.request.priority, self.order

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens to compute before it decodes: the prompt, and after a preemption all but the newest token."""
        return max(self.request.num_prompt_tokens, self.request.num_tokens - 1)

    @property
    def decodes(self) -> bool:
        """Whether only the newest token is left to compute."""
        return self.request.num_computed_tokens >= self.num_prefill_tokens

    @property
    def num_decode_rows(self) -> int:
        """Most rows that its next decode can take: the newest token, and those that may come along to be completed."""
        return 1 + self.num_incomplete

    @property
    def exact_limit(self) -> int:
        """Tokens that may be taken from the prefix cache. The newest token has to run: its logits are needed."""
        limit = self.request.num_tokens - 1
        return limit if self.early_from is None else min(limit, self.early_from)

    def expected_depth(self, num_layers: int) -> float | None:
        """Layers that its next decode is expected to run; None if nothing is known."""
        if self.request.runs_full_depth:
            return num_layers
        static_layer = self.request.exits.static_layer
        return self.depth.value if static_layer is None else static_layer


class Scheduler:
    """Decides what each iteration computes. Not thread-safe: one owner calls it, between iterations.

    The cycle is `schedule`, run the model, `update`. Requests may be added, cancelled or failed at any time in between.

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
        self._pool = block_pool
        self._max_model_len = max_model_len
        self._num_layers = num_layers
        self._prefix = PrefixCache(block_pool, config.block_size) if config.prefix_caching else None
        self._waiting = FairQueue(quantum=config.max_tokens_per_iteration)
        self._preempted: list[_Sequence] = []  # by rank
        self._running: dict[str, _Sequence] = {}
        self._just_preempted: list[str] = []
        self._admissions = itertools.count()
        self._num_iterations = 0
        self._in_flight: SchedulerOutput | None = None
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a seat or for blocks, for the first time or after a preemption."""
        return len(self._waiting) + len(self._preempted)

    @property
    def num_running(self) -> int:
        """Requests that have a seat."""
        return len(self._running)

    @property
    def has_unfinished(self) -> bool:
        """Whether another iteration has anything to do."""
        return bool(self._waiting or self._preempted or self._running)

    def add(self, request: Request) -> None:
        """Put a new request at the end of the queue.

        Raises:
            QueueFullError: if `max_waiting` requests wait already (not counting preempted ones).
            OfframpError: if the request can never run, or if its id is in use.
        """
        assert request.status is RequestStatus.WAITING, request.status
        self.check(request)
        name = request.request_id
        if name in self._waiting or name in self._running or any(s.request.request_id == name for s in self._preempted):
            raise OfframpError(f"request id {name!r} is in use by an unfinished request; give another.")
        if len(self._waiting) >= self._config.max_waiting:
            raise QueueFullError(
                f"{len(self._waiting)} requests are waiting and the queue holds {self._config.max_waiting}; try again "
                "later."
            )
        self._waiting.push(request)

    def check(self, request: Request) -> None:
        """Raise `OfframpError` if a request can never run, however long it waits."""
        sizes = (
            f"{request.num_prompt_tokens} prompt tokens and max_tokens {request.sampling.max_tokens} make "
            f"{request.max_total_tokens} tokens"
        )
        if request.max_total_tokens > self._max_model_len:
            raise OfframpError(
                f"{sizes}, more than the {self._max_model_len} that the model takes; shorten the prompt or lower "
                "max_tokens."
            )
        capacity = self._pool.num_blocks * self._config.block_size
        if request.max_total_tokens > capacity:
            raise OfframpError(
                f"{sizes}, more than the {capacity} that the KV cache holds; shorten the prompt, lower max_tokens or "
                "enlarge the cache."
            )
        if request.exits.kv_policy not in ("recompute", "verify"):
            return
        # One row is for others: a request that always takes the whole budget would shut them out.
        budget = self._config.max_tokens_per_iteration
        num_pending = min(request.exits.max_pending, request.sampling.max_tokens)
        if num_pending + 2 > budget:
            raise OfframpError(
                f"max_pending {request.exits.max_pending} lets {num_pending} tokens run again beside a new one, and "
                f"max_tokens_per_iteration {budget} leaves no row for other requests; lower the first or raise the "
                "second."
            )

    def cancel(self, request_id: str) -> Request | None:
        """End a request whose answer nobody wants; its blocks are free at once.

        Returns:
            The request, or None if no unfinished request has this id (it may just have finished).
        """
        return self._end(request_id, RequestStatus.CANCELLED)

    def fail(self, request_id: str, error: str) -> Request | None:
        """End a request that cannot be computed, for example because its logits are not finite.

        Args:
            request_id: which.
            error: why, one sentence.

        Returns:
            The request, or None if no unfinished request has this id.
        """
        sequence = self._running.get(request_id)
        if sequence is not None and self._prefix is not None:
            # What it has computed or taken over may be the cause; others must not fail of it again.
            for block_id in sequence.blocks[: sequence.num_known + 1]:
                self._prefix.withdraw(block_id)
        request = self._end(request_id, RequestStatus.FAILED)
        if request is not None:
            request.error = error
        return request

    def schedule(self) -> SchedulerOutput:
        """What the next iteration computes; nothing only if no request is unfinished.

        Every output must be given to `update`, also when running it failed.
        """
        assert self._in_flight is None, "schedule() again before update()"
        self._admit()
        running = sorted(self._running.values(), key=lambda sequence: sequence.rank)
        copies: list[tuple[int, int]] = []
        scheduled = self._plan(running, self._choose_decodes(running), copies)
        if not scheduled:
            # Those chosen wait for blocks of a higher rank that was not. The highest can always go on.
            scheduled = self._plan(running[:1], set(running[:1]), copies)
        scheduled.sort(key=lambda item: item.phase is Phase.PREFILL)
        self._in_flight = SchedulerOutput(
            self._num_iterations, tuple(scheduled), tuple(self._just_preempted), tuple(copies)
        )
        self._just_preempted.clear()
        self._num_iterations += 1
        return self._in_flight

    def update(
        self, output: SchedulerOutput, results: Mapping[str, IterationResult], text_stops: TextStops | None = None
    ) -> list[Request]:
        """Take in what an iteration computed.

        Requests that were cancelled or failed since `schedule` are passed over; every other one whose rows predict a
        token must have a result, and one that asks for `prompt_logprobs` must have those of its rows (which may be left
        out if it runs again and has them all).

        Args:
            output: from the last `schedule`.
            results: request id -> what it got.
            text_stops: asked whether a token completes a stop string; None looks for none.

        Returns:
            Requests that got a token or ended with what they got, in the order of `output`.
        """
        assert output is self._in_flight, "update() with an output that is not the last one of schedule()"
        self._in_flight = None
        advanced: list[Request] = []
        for item in output.scheduled:
            request = item.request
            if request.status.is_finished:
                continue
            sequence = self._running[request.request_id]
            result = results[request.request_id] if item.samples else results.get(request.request_id)
            status = _take(sequence, item, result or IterationResult(), self._num_layers, text_stops)
            if request.status.is_finished:  # `text_stops` may fail it
                advanced.append(request)
                continue
            request.num_computed_tokens = min(item.start + item.num_tokens, request.num_tokens - 1)
            if not request.sampling.max_tokens:
                request.num_computed_tokens = item.start + item.num_tokens
                if request.num_computed_tokens == request.num_prompt_tokens:
                    status = RequestStatus.FINISHED_LENGTH
            self._share_exact_blocks(sequence)
            if status.is_finished:
                self._end(request.request_id, status)
            if item.samples or status.is_finished:
                advanced.append(request)
        return advanced

    def _admit(self) -> None:
        while (head := self._head()) is not None:
            if len(self._running) >= self._config.max_num_seqs and not self._lower_than(head):
                return
            hits = self._prefix_hits(head)
            rows = self._config.max_tokens_per_iteration - 1
            rows -= min(rows, sum(s.num_decode_rows for s in self._running.values() if s.decodes))
            rows -= sum(
                s.num_prefill_tokens - s.request.num_computed_tokens
                for s in self._running.values()
                if not s.decodes and s.request.priority <= head.request.priority
            )
            if rows < 0 or self._is_next_block_under_way(head, hits):
                return
            while not self._has_room(head, hits):
                victim = self._lower_than(head)
                if victim is None:
                    return
                self._preempt(victim)
            self._start(head, hits)

    def _head(self) -> _Sequence | None:
        """Who should start next. At equal priority those go first who have run before."""
        request = self._waiting.head()
        if self._preempted and (request is None or self._preempted[0].request.priority <= request.priority):
            return self._preempted[0]
        return None if request is None else _Sequence(request)

    def _prefix_hits(self, sequence: _Sequence) -> list[PrefixNode]:
        """Known blocks that a sequence may start with; the last one may reach beyond what it may take over."""
        request = sequence.request
        asked = request.sampling.prompt_logprobs is not None
        if self._prefix is None or (asked and len(request.prompt_logprobs) < request.num_prompt_tokens - 1):
            return []
        size = self._config.block_size
        limit = sequence.exact_limit
        # The block that the limit lies in counts if all of it is known and matches.
        num_tokens = min(request.num_tokens, -(-limit // size) * size)
        hits = self._prefix.match(request.tokens, num_tokens)
        if len(hits) == self._pool.num_blocks and len(hits) * size > limit:
            hits.pop()  # the last one could only be written in a copy, for which there would be no block
        return hits

    def _is_next_block_under_way(self, sequence: _Sequence, hits: Sequence[PrefixNode]) -> bool:
        """Whether a running request is computing the very block that a waiting one would begin with."""
        if self._prefix is None or sequence.request.sampling.prompt_logprobs is not None:
            return False
        size = self._config.block_size
        start = len(hits) * size
        if start + size > sequence.exact_limit:
            return False
        chain = hits[-1].serial if hits else ROOT
        wanted = sequence.request.tokens(start, start + size)
        return any(
            other.chain == chain
            and other.num_known == len(hits)
            and not other.decodes
            and start + size <= other.request.num_prompt_tokens
            and other.request.tokens(start, start + size) == wanted
            for other in self._running.values()
        )

    def _has_room(self, sequence: _Sequence, hits: Sequence[PrefixNode]) -> bool:
        """Whether there is a seat, and blocks enough for a good while."""
        if not self._running:
            return True
        if len(self._running) >= self._config.max_num_seqs:
            return False
        wanted = self._blocks_for(sequence.request.num_tokens)
        wanted -= sum(self._pool.is_live(hit.block_id) for hit in hits)
        wanted += len(hits) * self._config.block_size > sequence.exact_limit  # a copy
        for other in self._running.values():
            wanted += max(0, self._blocks_for(other.request.num_tokens) - len(other.blocks))
        return self._pool.num_available - wanted >= len(self._running)

    def _start(self, sequence: _Sequence, hits: Sequence[PrefixNode]) -> None:
        """Give a seat to the head of the queue, and what the prefix cache holds of its tokens."""
        request = sequence.request
        if self._preempted and self._preempted[0] is sequence:
            del self._preempted[0]
        else:
            self._waiting.pop()
            sequence.order = next(self._admissions)
        size = self._config.block_size
        num_tokens = min(len(hits) * size, sequence.exact_limit)
        num_known = num_tokens // size
        self._pool.share([hit.block_id for hit in hits])
        sequence.blocks = [hit.block_id for hit in hits]
        sequence.num_known = num_known
        sequence.chain = hits[num_known - 1].serial if num_known else ROOT
        request.num_computed_tokens = request.num_exact_tokens = num_tokens
        if not request.num_preemptions:
            request.num_cached_tokens = num_tokens
        request.status = RequestStatus.RUNNING
        self._running[request.request_id] = sequence

    def _choose_decodes(self, running: Sequence[_Sequence]) -> set[_Sequence]:
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
        chosen: set[_Sequence] = set()
        for sequence in decodes:
            if sequence.num_decode_rows <= budget:
                budget -= sequence.num_decode_rows
                sequence.last_chosen = self._num_iterations
                chosen.add(sequence)
        return chosen

    def _plan(
        self, running: Iterable[_Sequence], decodes: set[_Sequence], copies: list[tuple[int, int]]
    ) -> list[ScheduledRequest]:
        """Rows for requests by rank, and the blocks they need.

        Args:
            running: by rank.
            decodes: those of them that decode now.
            copies: takes the blocks to copy.
        """
        budget = self._config.max_tokens_per_iteration - sum(sequence.num_decode_rows for sequence in decodes)
        scheduled: list[ScheduledRequest] = []
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
                num_tokens = min(budget, sequence.num_prefill_tokens - request.num_computed_tokens)
            num_tokens = self._provide_blocks(sequence, num_tokens, copies)
            if num_tokens:
                scheduled.append(self._rows(sequence, phase, num_tokens))
                budget -= num_tokens if phase is Phase.PREFILL else 0
        return scheduled

    def _provide_blocks(self, sequence: _Sequence, num_tokens: int, copies: list[tuple[int, int]]) -> int:
        """Give a sequence blocks for its next tokens, if need be by taking them from those of lower rank.

        Returns:
            For how many tokens there are blocks: `num_tokens` or fewer; 0 if all blocks belong to higher ranks.
        """
        if not num_tokens:
            return 0
        start, size = sequence.request.num_computed_tokens, self._config.block_size
        first = start // size
        if start + num_tokens <= len(sequence.blocks) * size and self._pool.is_private(sequence.blocks[first]):
            return num_tokens
        while True:
            copy = first < len(sequence.blocks) and not self._pool.is_private(sequence.blocks[first])
            available = self._pool.num_available - copy
            fitting = (len(sequence.blocks) + available) * size - start
            if available >= 0 and fitting > 0:
                num_tokens = min(num_tokens, fitting)
                break
            victim = self._lowest()
            if victim is None or victim is sequence:
                return 0
            self._preempt(victim)
        if copy:
            (target,) = self._pool.allocate(1)
            copies.append((sequence.blocks[first], target))
            self._pool.release([sequence.blocks[first]])
            sequence.blocks[first] = target
        sequence.blocks += self._pool.allocate(max(0, self._blocks_for(start + num_tokens) - len(sequence.blocks)))
        return num_tokens

    def _rows(self, sequence: _Sequence, phase: Phase, num_tokens: int) -> ScheduledRequest:
        request = sequence.request
        start, stop = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        first, exit_layers = request.num_prompt_tokens, None
        if phase is Phase.PREFILL and request.exits.kv_policy in ("fill", "static") and stop > first:
            # The row at the position of output token i predicted token i + 1.
            exit_layers = tuple(
                self._num_layers if position < first else request.exit_layers[position - first + 1]
                for position in range(start, stop)
            )
            if min(exit_layers) == self._num_layers:
                exit_layers = None
        return ScheduledRequest(
            request=request,
            phase=phase,
            start=start,
            num_tokens=num_tokens,
            block_table=tuple(sequence.blocks),
            samples=stop == request.num_tokens and request.sampling.max_tokens > 0,
            exit_layers=exit_layers,
        )

    def _share_exact_blocks(self, sequence: _Sequence) -> None:
        """See how much of a sequence is exact, and let others find the blocks that are full of it."""
        request = sequence.request
        exact = request.num_computed_tokens - sequence.num_incomplete
        if sequence.early_from is not None:
            exact = min(exact, sequence.early_from)
        request.num_exact_tokens = exact
        if self._prefix is None:
            return
        size = self._config.block_size
        while (sequence.num_known + 1) * size <= exact:
            index = sequence.num_known
            tokens = tuple(request.tokens(index * size, (index + 1) * size))
            node = self._prefix.insert(sequence.chain, tokens, sequence.blocks[index])
            if node.block_id != sequence.blocks[index]:
                self._pool.share([node.block_id])
                self._pool.release([sequence.blocks[index]])
                sequence.blocks[index] = node.block_id
            sequence.chain = node.serial
            sequence.num_known += 1

    def _lowest(self) -> _Sequence | None:
        """The running request of the lowest rank."""
        return max(self._running.values(), key=lambda sequence: sequence.rank, default=None)

    def _lower_than(self, head: _Sequence) -> _Sequence | None:
        """The running request of the lowest rank, if it must give way to a waiting one."""
        lowest = self._lowest()
        return lowest if lowest is not None and lowest.request.priority > head.request.priority else None

    def _preempt(self, sequence: _Sequence) -> None:
        """Take a running request's blocks and seat; it waits to run again."""
        request = sequence.request
        del self._running[request.request_id]
        self._release(sequence)
        request.drafts.clear()
        if request.exits.kv_policy == "verify":
            request.num_pending = 0
        sequence.num_incomplete = 0
        request.num_computed_tokens = request.num_exact_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.WAITING
        insort(self._preempted, sequence, key=lambda other: other.rank)
        self._just_preempted.append(request.request_id)
        self.num_preemptions += 1

    def _release(self, sequence: _Sequence) -> None:
        # Backwards: of a chain of known blocks, the end must be lost before the beginning.
        self._pool.release(sequence.blocks[::-1])
        sequence.blocks, sequence.num_known, sequence.chain = [], 0, ROOT

    def _end(self, request_id: str, status: RequestStatus) -> Request | None:
        request = self._waiting.remove(request_id)
        if request is None:
            sequence = self._running.pop(request_id, None)
            if sequence is None:
                sequence = next((s for s in self._preempted if s.request.request_id == request_id), None)
                if sequence is None:
                    return None
                self._preempted.remove(sequence)
            # Safe even while an iteration that writes these blocks is running: they are handed out again only by a
            # later schedule(), which comes after it.
            self._release(sequence)
            request = sequence.request
            self._waiting.refund(request, request.max_total_tokens - request.num_tokens)
        request.status = status
        return request

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._config.block_size)


def _take(
    sequence: _Sequence,
    item: ScheduledRequest,
    result: IterationResult,
    num_layers: int,
    text_stops: TextStops | None,
) -> RequestStatus:
    """Add what an iteration gave to a request; the status it has afterwards."""
    request = sequence.request
    if request.sampling.prompt_logprobs is not None:
        # Row p tells of token p + 1. Rows that run again tell nothing new.
        request.prompt_logprobs += result.prompt_logprobs[len(request.prompt_logprobs) - item.start :]
    if not item.samples:
        return RequestStatus.RUNNING
    newest = result.draft or result.tokens[-1]
    if item.phase is Phase.DECODE:
        if not request.runs_full_depth:  # else it tells nothing of the sequence
            sequence.depth.add(newest.exit_layer)
        left_early = newest.exit_layer < num_layers
        if request.exits.kv_policy in ("recompute", "verify"):
            request.num_pending = request.num_pending + 1 if left_early else 0
            sequence.num_incomplete = sequence.num_incomplete + 1 if left_early else 0
        elif left_early and sequence.early_from is None:
            sequence.early_from = item.start
    if result.draft is not None:
        assert request.exits.kv_policy == "verify", request.exits.kv_policy
        assert not result.tokens, "a draft is continued from, not judged at once"
        request.drafts.append(result.draft)
        return RequestStatus.RUNNING
    request.drafts.clear()
    for token in result.tokens:
        status = _take_token(request, token, text_stops)
        if status.is_finished or request.status.is_finished:
            return status
    return RequestStatus.RUNNING


def _take_token(request: Request, token: SampledToken, text_stops: TextStops | None) -> RequestStatus:
    """Add a token to its request; the status it has afterwards. A stop on the last allowed token is a stop."""
    may_stop = request.may_stop
    is_stop_token = token.token_id in request.stop_ids and may_stop
    text_stopped = not is_stop_token and text_stops is not None and text_stops(request, token.token_id)
    request.output_token_ids.append(token.token_id)
    request.exit_layers.append(token.exit_layer)
    request.confidences.append(token.confidence)
    if request.sampling.logprobs is not None:
        assert token.logprobs is not None, f"request {request.request_id!r} asks for logprobs"
        request.logprobs.append(token.logprobs)
    if is_stop_token or (text_stopped and may_stop):
        return RequestStatus.FINISHED_STOP
    if len(request.output_token_ids) >= request.sampling.max_tokens:
        return RequestStatus.FINISHED_LENGTH
    return RequestStatus.RUNNING
