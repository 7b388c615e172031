from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from helpers.requests import make_request, make_scheduler
from offramp.common.errors import OfframpError
from offramp.serve.request import IterationResult, Request, RequestStatus, SampledToken
from offramp.serve.scheduler import QueueFullError
from offramp.serve.scheduler_output import Phase, SchedulerOutput

STOP, OTHER = 1, 7


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, run, stop, are cancelled and fail in any order, on a cache that remembers who wrote what."""

    @initialize(
        num_blocks=st.integers(1, 24),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 4),
        extra_budget=st.integers(0, 6),
        max_waiting=st.integers(1, 5),
        max_model_len=st.integers(8, 40),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        extra_budget: int,
        max_waiting: int,
        max_model_len: int,
    ) -> None:
        self.budget = max_num_seqs + extra_budget
        self.block_size, self.max_num_seqs, self.max_waiting = block_size, max_num_seqs, max_waiting
        self.max_tokens = min(max_model_len, num_blocks * block_size)
        self.scheduler, self.pool = make_scheduler(
            num_blocks, block_size, max_num_seqs, self.budget, max_waiting, max_model_len
        )
        self.requests: list[Request] = []
        self.admitted: list[Request] = []
        self.slots: dict[int, tuple[Request, int]] = {}  # slot -> who wrote it last, for which position

    @rule(prompt=st.integers(1, 12), max_tokens=st.integers(1, 8), min_tokens=st.integers(0, 2))
    def add(self, prompt: int, max_tokens: int, min_tokens: int) -> None:
        request = make_request(
            str(len(self.requests)),
            prompt,
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            stop_token_ids=(STOP,),
        )
        num_waiting = self.scheduler.num_waiting
        try:
            self.scheduler.add(request)
        except QueueFullError:
            assert num_waiting == self.max_waiting
            assert request.max_total_tokens <= self.max_tokens
        except OfframpError:
            assert request.max_total_tokens > self.max_tokens
        else:
            assert request.max_total_tokens <= self.max_tokens
            self.requests.append(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), fail=st.booleans())
    def end(self, data: st.DataObject, fail: bool) -> None:
        self.end_one(data.draw(st.sampled_from(self.requests)), fail)

    @rule(data=st.data())
    def iterate(self, data: st.DataObject) -> None:
        output = self.schedule()
        while self.requests and data.draw(st.integers(0, 9)) == 0:  # cancelled while the model runs
            self.end_one(data.draw(st.sampled_from(self.requests)), fail=False)
        self.update(output, token_id=data.draw(st.sampled_from([OTHER, OTHER, OTHER, STOP])))

    def end_one(self, request: Request, fail: bool) -> None:
        finished, num_tokens = request.status.is_finished, len(request.output_token_ids)
        ended = self.scheduler.fail(request.request_id, "why") if fail else self.scheduler.cancel(request.request_id)
        assert (ended is None) == finished
        assert request.status.is_finished
        assert len(request.output_token_ids) == num_tokens

    def schedule(self) -> SchedulerOutput:
        running = [request for request in self.requests if request.status is RequestStatus.RUNNING]
        waiting = [request for request in self.requests if request.status is RequestStatus.WAITING]
        decoding = [request for request in running if request.num_computed_tokens >= request.num_prompt_tokens]
        output = self.scheduler.schedule()
        scheduled = [item.request for item in output.scheduled]
        assert bool(scheduled) == self.scheduler.has_unfinished, "no progress"
        assert output.num_tokens <= self.budget
        assert len({id(request) for request in scheduled}) == len(scheduled) <= self.max_num_seqs
        assert set(decoding) <= set(scheduled), "a decode was left out"
        assert [item.phase for item in output.scheduled] == sorted(
            (item.phase for item in output.scheduled), key=lambda phase: phase is Phase.PREFILL
        )
        new = [request for request in scheduled if request in waiting]
        assert new == waiting[: len(new)], "the queue was overtaken"
        if len(decoding) < len(running):
            oldest = next(request for request in running if request not in decoding)
            assert oldest in scheduled, "the oldest prompt was left out"
        for item in output.scheduled:
            request = item.request
            assert item.num_tokens >= 1
            assert item.start == request.num_computed_tokens
            assert item.start + item.num_tokens <= request.num_tokens
            assert item.samples == (item.start + item.num_tokens == request.num_tokens)
            assert (item.phase is Phase.PREFILL) == (item.start < request.num_prompt_tokens)
            assert item.phase is Phase.PREFILL or item.num_tokens == 1
            assert len(item.token_ids) == item.num_tokens
            assert len(item.block_table) * self.block_size >= request.max_total_tokens
            self.write(request, item.block_table, item.start, item.num_tokens)
        return output

    def write(self, request: Request, block_table: tuple[int, ...], start: int, num_tokens: int) -> None:
        """What the model would do: write the rows' keys and values, then attend to every position up to the last."""

        def slot(position: int) -> int:
            return block_table[position // self.block_size] * self.block_size + position % self.block_size

        for position in range(start, start + num_tokens):
            self.slots[slot(position)] = (request, position)
        for position in range(start + num_tokens):
            assert self.slots.get(slot(position)) == (request, position), "a live block was used by another request"

    def update(self, output: SchedulerOutput, token_id: int) -> None:
        live = [item for item in output.scheduled if not item.request.status.is_finished]
        before = {item.request.request_id: len(item.request.output_token_ids) for item in live}
        sampled = {
            item.request.request_id: IterationResult(
                (SampledToken(token_id if item.request.may_stop else OTHER, exit_layer=1),)
            )
            for item in output.scheduled
            if item.samples
        }
        advanced = self.scheduler.update(output, sampled)
        assert advanced == [item.request for item in live if item.samples]
        for item in live:
            request = item.request
            assert len(request.output_token_ids) == before[request.request_id] + item.samples
            assert len(request.exit_layers) == len(request.output_token_ids)
            assert request.num_computed_tokens == item.start + item.num_tokens

    @invariant()
    def blocks_belong_to_running_requests(self) -> None:
        if not hasattr(self, "pool"):
            return
        running = [request for request in self.requests if request.status is RequestStatus.RUNNING]
        assert len(running) == self.scheduler.num_running <= self.max_num_seqs
        assert self.pool.num_live == sum(-(-request.max_total_tokens // self.block_size) for request in running)

    @invariant()
    def requests_end_for_their_reason(self) -> None:
        for request in getattr(self, "requests", ()):
            output = request.output_token_ids
            assert len(output) <= request.sampling.max_tokens
            assert STOP not in output[:-1]
            if request.status is RequestStatus.FINISHED_STOP:
                assert output[-1] == STOP
            if request.status is RequestStatus.FINISHED_LENGTH:
                assert len(output) == request.sampling.max_tokens
                assert output[-1] != STOP
            if not request.status.is_finished and output:
                assert output[-1] != STOP

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        unfinished = [request for request in self.requests if not request.status.is_finished]
        bound = sum(request.max_total_tokens - request.num_computed_tokens for request in unfinished)
        for _ in range(bound):  # every iteration computes at least one token
            if not self.scheduler.has_unfinished:
                break
            self.update(self.schedule(), OTHER)
        assert not self.scheduler.has_unfinished, "starved"
        assert self.pool.num_live == 0


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
