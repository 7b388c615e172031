"""An engine without a model: says scripted words, one token per request and iteration, and can be told to fail."""

from __future__ import annotations

import time
from collections.abc import Callable

from offramp.serve.request.constraint import Constraint
from offramp.serve.request.iteration_result import TokenLogprobs
from offramp.serve.request.output import RequestOutput
from offramp.serve.request.request import Request, RequestStatus


class FakeEngine:
    """Token t of a request is the text ` t`; its exit layer is 1 + t % 4, and confidence t / 8 unless that is 4.

    Of several sequences, number j > 0 says ` j:t`, each with log-probability -1 - 2 * j % 3: -1, -3, -2, ...

    Attributes:
        seen: Ids of requests taken in, in order.
        cancelled: Ids of requests cancelled, in order.
        iterations: Steps made.
        most_live: Most requests held at once.
        on_step: Called at the start of each step; may raise.
        refuse: Ids that `add_request` refuses.
        fail: Ids of requests that fail in their first iteration -> why.
        on_prepare: Called by `prepare`; may raise.
        known: Languages that take no time to prepare: all others do, and are not known afterwards.
    """

    def __init__(self, delay_s: float = 0.0, on_step: Callable[[], object] = lambda: None) -> None:
        self.seen: list[str] = []
        self.cancelled: list[str] = []
        self.iterations = 0
        self.most_live = 0
        self.on_step = on_step
        self.refuse: set[str] = set()
        self.fail: dict[str, str] = {}
        self.on_prepare: Callable[[Request], object] = lambda request: None
        self.known: set[Constraint | None] = {None}
        self._delay_s = delay_s
        self._live: dict[str, Request] = {}

    @property
    def has_unfinished(self) -> bool:
        return bool(self._live)

    def prepare(self, request: Request) -> None:
        self.on_prepare(request)

    def prepare_known(self, request: Request) -> bool:
        return request.sampling.constraint in self.known

    def add_request(self, request: Request) -> None:
        if request.request_id in self.refuse:
            raise ValueError("refused on purpose")
        self.seen.append(request.request_id)
        self._live[request.request_id] = request
        self.most_live = max(self.most_live, len(self._live))

    def cancel(self, request_id: str) -> bool:
        self.cancelled.append(request_id)
        return self._live.pop(request_id, None) is not None

    def step(self) -> list[RequestOutput]:
        self.on_step()
        time.sleep(self._delay_s)
        self.iterations += 1
        outputs: list[RequestOutput] = []
        for request in list(self._live.values()):
            token, sampling = len(request.output_token_ids), request.sampling
            if token == 0 and sampling.prompt_logprobs is not None:
                request.prompt_logprobs += [self._logprobs(t, -0.5, 1) for t in request.prompt_token_ids[1:]]
            text = ""
            if sampling.max_tokens > 0:
                text = f" {token}" if sampling.sequence == 0 else f" {sampling.sequence}:{token}"
                request.output_token_ids.append(token)
                request.exit_layers.append(1 + token % 4)
                request.confidences.append(None if token % 4 == 3 else token / 8)
                if sampling.logprobs is not None:
                    logprob = -1.0 - 2 * sampling.sequence % 3
                    request.logprobs.append(self._logprobs(token, logprob, sampling.logprobs))
            if request.request_id in self.fail:
                request.status, request.error = RequestStatus.FAILED, self.fail[request.request_id]
                del self._live[request.request_id]
            elif len(request.output_token_ids) == sampling.max_tokens:
                request.status = RequestStatus.FINISHED_LENGTH
                del self._live[request.request_id]
            outputs.append(RequestOutput.of(request, token, text))
        return outputs

    @staticmethod
    def _logprobs(token: int, logprob: float, count: int) -> TokenLogprobs:
        return TokenLogprobs(token, logprob, tuple((token + k, logprob - k) for k in range(count)))
