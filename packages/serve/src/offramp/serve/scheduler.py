"""Iteration-level batching (Orca, OSDI 2022): before every iteration, choose the tokens and requests that it runs.

A request is a sequence of known tokens, prompt and output, of which the first `num_computed_tokens` are in the cache;
an iteration computes some of the rest. So a prompt longer than the token budget is prefilled in chunks beside the
decodes of other requests, without a mode of its own. Each iteration gives

1. one token to every request that decodes (the budget always allows it),
2. the rest of the budget to prompts, in the order of admission,
3. what is then left to waiting requests, first come first served, while there are seats and blocks.

Nothing starves: every running request advances in every iteration unless older prompts use up the budget, and those are
finite; the head of the queue is never overtaken. All blocks that a request can ever need are reserved when it is
admitted, so a running request is never evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

from offramp.common.errors import OfframpError
from offramp.serve.config import EngineConfig
from offramp.serve.kv_cache.block_pool import BlockPool
from offramp.serve.request import IterationResult, Request, RequestStatus, SampledToken
from offramp.serve.scheduler_output import Phase, ScheduledRequest, SchedulerOutput

TextStops = Callable[[Request, int], bool]
"""Whether a token completes a stop string. Asked once for every token that is not a stop token, before it is added to
the request (so `request.may_stop` speaks of this token)."""


class QueueFullError(OfframpError):
    """Too many requests wait; the same request may be accepted later."""


class Scheduler:
    """Decides what each iteration computes. Not thread-safe: one owner calls it, between iterations.

    The cycle is `schedule`, run the model, `update`. Requests may be added, cancelled or failed at any time in between.
    """

    def __init__(self, config: EngineConfig, block_pool: BlockPool, max_model_len: int) -> None:
        """Build an idle scheduler.

        Args:
            config: its limits; `max_model_len` and the size of the cache, which depend on the model, come beside it.
            block_pool: free blocks, this scheduler's alone.
            max_model_len: most tokens of one request, prompt and completion together.
        """
        self._config = config
        self._pool = block_pool
        self._max_model_len = max_model_len
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._running: dict[str, Request] = {}
        self._block_tables: dict[str, tuple[int, ...]] = {}
        self._num_iterations = 0
        self._in_flight: SchedulerOutput | None = None

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a seat or for blocks."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that were admitted and have not finished."""
        return len(self._running)

    @property
    def has_unfinished(self) -> bool:
        """Whether another iteration has anything to do."""
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> None:
        """Put a new request at the end of the queue.

        Raises:
            QueueFullError: if `max_waiting` requests wait already.
            OfframpError: if the request can never run, or if its id is in use.
        """
        assert request.status is RequestStatus.WAITING, request.status
        self.check(request)
        if request.request_id in self._waiting or request.request_id in self._running:
            raise OfframpError(f"request id {request.request_id!r} is in use by an unfinished request; give another.")
        if len(self._waiting) >= self._config.max_waiting:
            raise QueueFullError(
                f"{len(self._waiting)} requests are waiting and the queue holds {self._config.max_waiting}; try again "
                "later."
            )
        self._waiting[request.request_id] = request

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
        request = self._end(request_id, RequestStatus.FAILED)
        if request is not None:
            request.error = error
        return request

    def schedule(self) -> SchedulerOutput:
        """What the next iteration computes; nothing only if no request is unfinished.

        Every output must be given to `update`, also when running it failed.
        """
        assert self._in_flight is None, "schedule() again before update()"
        scheduled: list[ScheduledRequest] = []
        budget = self._config.max_tokens_per_iteration
        prompts: list[Request] = []
        for request in self._running.values():
            if request.num_computed_tokens < request.num_prompt_tokens:
                prompts.append(request)
            else:
                scheduled.append(self._rows(request, Phase.DECODE, 1))
                budget -= 1
        while budget > 0 and (request := self._next_prompt(prompts)) is not None:
            num_tokens = min(budget, request.num_prompt_tokens - request.num_computed_tokens)
            scheduled.append(self._rows(request, Phase.PREFILL, num_tokens))
            budget -= num_tokens
        self._in_flight = SchedulerOutput(self._num_iterations, tuple(scheduled))
        self._num_iterations += 1
        return self._in_flight

    def update(
        self, output: SchedulerOutput, results: Mapping[str, IterationResult], text_stops: TextStops | None = None
    ) -> list[Request]:
        """Take in what an iteration computed.

        Requests that were cancelled or failed since `schedule` are passed over; every other one whose rows predict a
        token must have it.

        Args:
            output: from the last `schedule`.
            results: request id -> what it got, for the requests with `samples`.
            text_stops: asked whether a token completes a stop string; None looks for none.

        Returns:
            Requests that got a token, in the order of `output`; some have finished with it.
        """
        assert output is self._in_flight, "update() with an output that is not the last one of schedule()"
        self._in_flight = None
        advanced: list[Request] = []
        for item in output.scheduled:
            request = item.request
            if request.status.is_finished:
                continue
            request.num_computed_tokens = item.start + item.num_tokens
            if not item.samples:
                continue
            for token in results[request.request_id].tokens:
                status = _take_token(request, token, text_stops)
                if status.is_finished:
                    self._end(request.request_id, status)
                    break
            advanced.append(request)
        return advanced

    def _next_prompt(self, prompts: list[Request]) -> Request | None:
        """The next request to prefill: one that runs already, else the head of the queue if it can be admitted."""
        if prompts:
            return prompts.pop(0)
        if not self._waiting or len(self._running) >= self._config.max_num_seqs:
            return None
        request_id, request = next(iter(self._waiting.items()))
        num_blocks = -(-request.max_total_tokens // self._config.block_size)
        if num_blocks > self._pool.num_free:
            # Nobody overtakes the head, or a long request could wait for ever while short ones slip past it.
            return None
        del self._waiting[request_id]
        self._block_tables[request_id] = self._pool.allocate(num_blocks)
        self._running[request_id] = request
        request.status = RequestStatus.RUNNING
        return request

    def _rows(self, request: Request, phase: Phase, num_tokens: int) -> ScheduledRequest:
        start = request.num_computed_tokens
        return ScheduledRequest(
            request=request,
            phase=phase,
            start=start,
            num_tokens=num_tokens,
            block_table=self._block_tables[request.request_id],
            samples=start + num_tokens == request.num_tokens,
        )

    def _end(self, request_id: str, status: RequestStatus) -> Request | None:
        request = self._waiting.pop(request_id, None)
        if request is None:
            request = self._running.pop(request_id, None)
            if request is None:
                return None
            # Safe even while an iteration that writes these blocks is running: they are handed out again only by a
            # later schedule(), which comes after it.
            self._pool.free(self._block_tables.pop(request_id))
        request.status = status
        return request


def _take_token(request: Request, token: SampledToken, text_stops: TextStops | None) -> RequestStatus:
    """Add a token to its request; the status it has afterwards. A stop on the last allowed token is a stop."""
    may_stop = request.may_stop
    is_stop_token = token.token_id in request.stop_ids and may_stop
    text_stopped = not is_stop_token and text_stops is not None and text_stops(request, token.token_id)
    request.output_token_ids.append(token.token_id)
    request.exit_layers.append(token.exit_layer)
    if request.sampling.logprobs is not None:
        assert token.logprobs is not None, f"request {request.request_id!r} asks for logprobs"
        request.logprobs.append(token.logprobs)
    if is_stop_token or (text_stopped and may_stop):
        return RequestStatus.FINISHED_STOP
    if len(request.output_token_ids) >= request.sampling.max_tokens:
        return RequestStatus.FINISHED_LENGTH
    return RequestStatus.RUNNING
