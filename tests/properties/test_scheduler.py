from __future__ import annotations

from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from helpers.hash_model import EXITS, VOCABULARY, HashRunner, exact_keys, solo
from helpers.requests import make_request, make_scheduler
from offramp.common.errors import OfframpError
from offramp.common.exits.kv_policy import KVPolicy
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.iteration_result import IterationResult
from offramp.serve.request.request import Request, RequestStatus
from offramp.serve.scheduling.scheduler import QueueFullError
from offramp.serve.scheduling.scheduler_output import Phase, ScheduledRequest, SchedulerOutput

STOP = 0
EXAMPLES, STEPS = 350, 40  # some examples end before they have taken every step


class Wish(NamedTuple):
    """A request to make."""

    shared: int
    tail: list[int]
    max_tokens: int
    min_tokens: int
    policy: KVPolicy
    max_pending: int
    priority: int
    client: str
    prompt_logprobs: int | None
    source: tuple[int, ...]


WISHES = st.builds(
    Wish,
    shared=st.integers(0, 8),
    tail=st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=3),
    max_tokens=st.integers(0, 12),
    min_tokens=st.integers(0, 10),
    policy=st.sampled_from(["full", "fill", "recompute", "verify", "static"]),
    max_pending=st.integers(1, 4),
    priority=st.sampled_from([0, 0, 1]),
    client=st.sampled_from("ab"),
    prompt_logprobs=st.sampled_from([None, None, None, 0]),
    source=st.one_of(st.just(()), st.lists(st.integers(1, 9), max_size=6).map(tuple)),
)


def exit_options(policy: KVPolicy, max_pending: int) -> ExitOptions:
    return ExitOptions(policy, max_pending=max_pending, static_layer=EXITS[0] if policy == "static" else None)


def rows_of(item: ScheduledRequest) -> int:
    """Most rows that a request takes in an iteration."""
    pending = item.phase is Phase.DECODE and item.request.exits.kv_policy in ("recompute", "verify")
    return item.num_tokens + pending * (item.request.num_computed_tokens - item.request.num_exact_tokens)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests of every policy come, run, stop, are cancelled and fail in any order, on a model made of hashes."""

    num_steps = 0  # of all examples together

    @initialize(
        num_blocks=st.integers(3, 12),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 6),
        extra_budget=st.integers(0, 8),
        max_waiting=st.integers(1, 12),
        max_model_len=st.integers(8, 40),
        prefix_caching=st.booleans(),
        group_by_depth=st.booleans(),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        extra_budget: int,
        max_waiting: int,
        max_model_len: int,
        prefix_caching: bool,
        group_by_depth: bool,
    ) -> None:
        self.budget = max_num_seqs + extra_budget
        self.block_size, self.max_num_seqs, self.max_waiting = block_size, max_num_seqs, max_waiting
        self.max_model_len, self.cache_tokens = max_model_len, num_blocks * block_size
        self.grouped = group_by_depth
        self.scheduler, self.pool = make_scheduler(
            num_blocks,
            block_size,
            max_num_seqs,
            self.budget,
            max_waiting,
            max_model_len,
            prefix_caching=prefix_caching,
            group_by_depth=group_by_depth,
        )
        self.runner = HashRunner(block_size, num_blocks)
        self.requests: list[Request] = []
        self.admitted: dict[Request, int] = {}  # -> the iteration in which it first had a seat
        self.last_run: dict[Request, int] = {}
        self.iteration = 0

    @rule(wishes=st.lists(WISHES, min_size=1, max_size=4))
    def add(self, wishes: list[Wish]) -> None:
        for wish in wishes:
            self.add_one(wish)

    def add_one(self, wish: Wish) -> None:
        max_tokens = wish.max_tokens if wish.prompt_logprobs is not None else max(1, wish.max_tokens)
        request = make_request(
            str(len(self.requests)),
            (*([2] * wish.shared), *wish.tail),
            exits=exit_options(wish.policy, wish.max_pending),
            priority=wish.priority,
            client=wish.client,
            max_tokens=max_tokens,
            min_tokens=min(wish.min_tokens, max_tokens),
            stop_token_ids=(STOP,),
            prompt_logprobs=wish.prompt_logprobs,
            source=wish.source,
        )
        fits = request.max_total_tokens <= self.max_model_len
        fits &= self.in_blocks(len(wish.source)) + request.max_total_tokens <= self.cache_tokens
        fits &= len(wish.source) <= min(self.max_model_len, self.budget)
        if wish.policy in ("recompute", "verify"):
            fits &= min(wish.max_pending, max_tokens) + 2 <= self.budget
        waiting = [one for one in self.requests if one.status is RequestStatus.WAITING and not one.num_preemptions]
        try:
            self.scheduler.add(request)
        except QueueFullError:
            assert len(waiting) == self.max_waiting
            assert fits
        except OfframpError:
            assert not fits
        else:
            assert fits
            self.requests.append(request)

    def in_blocks(self, num_tokens: int) -> int:
        """Tokens that their blocks have room for."""
        return -(-num_tokens // self.block_size) * self.block_size

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.end_one(data.draw(st.sampled_from(self.requests)), fail=False)

    @precondition(lambda self: self.scheduler.has_unfinished)
    @rule(number=st.integers(1, 6))
    def iterate(self, number: int) -> None:
        for _ in range(number):
            output = self.schedule()
            self.update(output, self.runner.run(output))

    @precondition(lambda self: self.scheduler.has_unfinished)
    @rule(data=st.data(), fail=st.booleans(), crash=st.integers(0, 3).map(lambda number: number == 0))
    def iterate_and_end_some_meanwhile(self, data: st.DataObject, fail: bool, crash: bool) -> None:
        output = self.schedule()
        # A crash is a model that could not be run: nothing was copied or written. Before that an engine has forgotten
        # what it kept of the preempted.
        for request_id in output.preempted if crash else ():
            self.runner.forget(request_id)
        results = {} if crash else self.runner.run(output)
        for request in data.draw(st.lists(st.sampled_from(self.requests), max_size=2)):
            self.end_one(request, fail)
        for item in output.scheduled if crash else ():
            self.end_one(item.request, fail=True)
        self.update(output, results)

    def end_one(self, request: Request, fail: bool) -> None:
        finished, num_tokens = request.status.is_finished, len(request.output_token_ids)
        ended = self.scheduler.fail(request.request_id, "why") if fail else self.scheduler.cancel(request.request_id)
        assert (ended is None) == finished
        assert request.status.is_finished
        assert len(request.output_token_ids) == num_tokens
        self.runner.forget(request.request_id)

    def schedule(self) -> SchedulerOutput:
        before = {request: request.status for request in self.requests}
        output = self.scheduler.schedule()
        self.iteration += 1
        scheduled = [item.request for item in output.scheduled]
        assert bool(scheduled) == self.scheduler.has_unfinished, "no progress"
        assert sum(rows_of(item) for item in output.scheduled) <= self.budget
        sources = [item.request.num_source_tokens for item in output.scheduled if item.encodes]
        # One source may be more than what is left, and then nothing else but its first row is begun.
        if len(sources) > 1:
            assert sum(rows_of(item) for item in output.scheduled) + sum(sources) <= self.budget
        assert len(set(scheduled)) == len(scheduled) <= self.max_num_seqs
        assert [item.phase for item in output.scheduled] == sorted(
            (item.phase for item in output.scheduled), key=lambda phase: phase is Phase.PREFILL
        )
        for request, status in before.items():
            if status is RequestStatus.RUNNING and request.status is RequestStatus.WAITING:
                assert request.request_id in output.preempted
            if request.status is RequestStatus.RUNNING:
                self.admitted.setdefault(request, self.iteration)
        for item in output.scheduled:
            self.check_rows(item)
            self.last_run[item.request] = self.iteration
        self.check_turns()
        return output

    def check_rows(self, item: ScheduledRequest) -> None:
        request, stop = item.request, item.start + item.num_tokens
        assert item.num_tokens >= 1
        assert item.start == request.num_computed_tokens
        assert stop <= request.num_tokens
        assert item.samples == (stop == request.num_tokens and request.sampling.max_tokens > 0)
        assert (item.phase is Phase.PREFILL) == (
            item.start < request.num_prompt_tokens or item.start < request.num_tokens - 1
        )
        assert item.phase is Phase.PREFILL or item.num_tokens == 1
        assert len(item.token_ids) == item.num_tokens
        assert len(set(item.block_table)) == len(item.block_table)
        assert len(item.block_table) * self.block_size >= stop
        for block in item.block_table[item.start // self.block_size : -(-stop // self.block_size)]:
            assert self.pool.is_private(block), "another request sees what this one writes"
        assert len(item.source_table) * self.block_size == self.in_blocks(request.num_source_tokens)
        assert not set(item.source_table) & set(item.block_table)
        assert all(self.pool.is_private(block) for block in item.source_table)
        assert not item.encodes or (item.source_table and item.start == 0)
        if item.exit_layers is not None:
            assert len(item.exit_layers) == item.num_tokens
            assert item.phase is Phase.PREFILL
            assert request.num_preemptions

    def check_turns(self) -> None:
        """The highest rank always advances; with decodes in groups it waits at most once for each of the others."""
        running = [request for request in self.requests if request.status is RequestStatus.RUNNING]
        if not running:
            return
        ranks = {request: (request.priority, self.admitted[request]) for request in running}
        highest = [request for request in running if ranks[request] == min(ranks.values())]
        limit = 2 * self.max_num_seqs if self.grouped or self.has_pending(running) else 0
        assert any(
            self.iteration - max(self.last_run.get(request, 0), self.admitted[request] - 1) <= limit
            for request in highest
        ), "the highest rank was left out"

    @staticmethod
    def has_pending(running: list[Request]) -> bool:
        return any(request.exits.kv_policy in ("recompute", "verify") for request in running)

    def update(self, output: SchedulerOutput, results: dict[str, IterationResult]) -> None:
        live = [item for item in output.scheduled if not item.request.status.is_finished]
        for item in live:
            self.check_prefix(item)
        advanced = self.scheduler.update(output, results)
        ended = [item.request for item in live if item.request.status.is_finished]
        assert advanced == [item.request for item in live if item.samples or item.request in ended]
        for item in live:
            request = item.request
            assert len(request.exit_layers) == len(request.confidences) == len(request.output_token_ids)
            if request.sampling.max_tokens:
                assert request.num_computed_tokens == min(item.start + item.num_tokens, request.num_tokens - 1)
            assert request.num_exact_tokens <= request.num_computed_tokens
        for request in ended:
            self.runner.forget(request.request_id)
            self.check_answer(request, complete=True)

    def check_prefix(self, item: ScheduledRequest) -> None:
        """Keys said to be exact (its own and others' that it took over) are those of a full pass."""
        request = item.request
        tokens = request.tokens(0, min(request.num_exact_tokens, item.start))
        exact = exact_keys(tokens, request.source_token_ids)
        for position, slot in enumerate(self.runner.slots(item.block_table, len(tokens))):
            assert [layer[slot] for layer in self.runner.keys[1:]] == [layer[position] for layer in exact[1:]]

    def check_answer(self, request: Request, complete: bool) -> None:
        """A request's answer is what it is alone, without a cache."""
        wanted = solo(request)
        assert len(wanted) == len(request.output_token_ids) or not complete
        wanted = wanted[: len(request.output_token_ids)]
        assert request.output_token_ids == [token.token_id for token in wanted]
        assert request.confidences == [token.confidence for token in wanted]
        if request.exits.kv_policy != "verify":
            assert request.exit_layers == [token.exit_layer for token in wanted]
        if complete and request.sampling.prompt_logprobs is not None:
            assert [one.token_id for one in request.prompt_logprobs] == list(request.prompt_token_ids[1:])
            assert request.num_cached_tokens == 0

    @invariant()
    def steps_are_counted(self) -> None:
        SchedulerMachine.num_steps += hasattr(self, "pool")  # once after the start, then after each rule

    @invariant()
    def blocks_are_counted(self) -> None:
        if not hasattr(self, "pool"):
            return
        running = [request for request in self.requests if request.status is RequestStatus.RUNNING]
        waiting = [request for request in self.requests if request.status is RequestStatus.WAITING]
        assert len(running) == self.scheduler.num_running <= self.max_num_seqs
        assert len(waiting) == self.scheduler.num_waiting
        assert self.pool.num_live + self.pool.num_cached + self.pool.num_free == self.pool.num_blocks
        most = [self.in_blocks(one.max_total_tokens) + self.in_blocks(one.num_source_tokens) for one in running]
        assert self.pool.num_live <= sum(tokens // self.block_size + 1 for tokens in most)
        assert running or not self.pool.num_live
        assert self.scheduler.num_preemptions == sum(request.num_preemptions for request in self.requests)

    @invariant()
    def requests_end_for_their_reason(self) -> None:
        for request in getattr(self, "requests", ()):
            output = request.output_token_ids
            assert len(output) <= request.sampling.max_tokens
            if request.status is RequestStatus.FINISHED_STOP:
                assert output[-1] == STOP
            if request.status is RequestStatus.FINISHED_LENGTH:
                assert len(output) == request.sampling.max_tokens

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        unfinished = [request for request in self.requests if not request.status.is_finished]
        # The highest rank advances by a token at least every so many iterations, and is then followed by the next.
        bound = sum(2 * request.max_total_tokens + 2 for request in unfinished) * (2 * self.max_num_seqs + 1)
        for _ in range(bound):
            if not self.scheduler.has_unfinished:
                break
            output = self.schedule()
            self.update(output, self.runner.run(output))
        assert not self.scheduler.has_unfinished, "starved"
        assert self.pool.num_live == 0
        for request in self.requests:
            self.check_answer(request, complete=False)


class TestScheduler(SchedulerMachine.TestCase):
    """Here alone at least 10,000 random steps are taken; the block pool's and the prefix cache's come on top."""

    settings = settings(max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None)

    def runTest(self) -> None:
        before = SchedulerMachine.num_steps
        super().runTest()
        assert SchedulerMachine.num_steps - before >= 10_000
