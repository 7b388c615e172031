"""One sequence to be continued: what was asked, and how far it has come."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal

from offramp.common.errors import OfframpError
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.iteration_result import SampledToken, TokenLogprobs
from offramp.serve.request.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "cancelled", "error"]
Blame = Literal["request", "numbers", "engine"]
"""Why a request has failed: it asked for what cannot be, its logits are not finite, or anything else."""


class RequestStatus(Enum):
    """Where a request is in its life. The members after RUNNING are final."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED_STOP = auto()
    FINISHED_LENGTH = auto()
    CANCELLED = auto()
    FAILED = auto()

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended, in whatever way."""
        return self is not RequestStatus.WAITING and self is not RequestStatus.RUNNING


_FINISH_REASONS: dict[RequestStatus, FinishReason] = {
    RequestStatus.FINISHED_STOP: "stop",
    RequestStatus.FINISHED_LENGTH: "length",
    RequestStatus.CANCELLED: "cancelled",
    RequestStatus.FAILED: "error",
}


@dataclass(eq=False)
class Request:
    """One sequence to be continued, and how far it has come. Only the scheduler changes it.

    Attributes:
        request_id: unique among the requests that have not finished.
        prompt_token_ids: at least one token; what the decoder reads first.
        sampling: how tokens are chosen and when the request ends.
        exits: how deep its tokens run.
        eos_token_ids: the model's end-of-sequence tokens, every one of them.
        priority: requests with a smaller number go first.
        client: whose it is; clients take turns within a priority.
        source_token_ids: what the encoder of an encoder-decoder model reads; empty for a decoder-only one.
        status: where it is in its life.
        output_token_ids: tokens generated; a token that ended the request is the last of them and is counted.
        exit_layers: for each of them, the number of layers that were run for the row that predicted it.
        logprobs: for each of them, if asked for; otherwise empty.
        confidences: for each of them, what the exit test measured; None at the final exit.
        drafts: `verify`: tokens after the output that early exits said and the full model has not judged yet.
        num_pending: `recompute` and `verify`: rows that left early since the last complete pass. It follows from the
            exit layers alone, so a preemption does not change when the next complete pass comes.
        num_computed_tokens: tokens of prompt, output and drafts whose keys and values are in the cache. The newest
            token is not among them until the next iteration has run it.
        num_exact_tokens: how many of them, from the first on, have the keys and values that a pass of all layers over
            the same tokens gives, at every layer. Only these may be used for another request.
        num_cached_tokens: tokens of the prompt whose keys and values another request had left behind when this one
            started.
        num_preemptions: how often its blocks were taken for another request, so that it had to run again.
        error: why it failed, one sentence; None otherwise.
        blame: what was at fault then.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    exits: ExitOptions = field(default_factory=ExitOptions)
    eos_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    client: str = ""
    source_token_ids: tuple[int, ...] = ()
    status: RequestStatus = field(default=RequestStatus.WAITING, init=False)
    output_token_ids: list[int] = field(default_factory=list, init=False)
    exit_layers: list[int] = field(default_factory=list, init=False)
    confidences: list[float | None] = field(default_factory=list, init=False)
    logprobs: list[TokenLogprobs] = field(default_factory=list, init=False)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list, init=False)
    drafts: list[SampledToken] = field(default_factory=list, init=False)
    num_pending: int = field(default=0, init=False)
    num_computed_tokens: int = field(default=0, init=False)
    num_exact_tokens: int = field(default=0, init=False)
    num_cached_tokens: int = field(default=0, init=False)
    num_preemptions: int = field(default=0, init=False)
    error: str | None = field(default=None, init=False)
    blame: Blame | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise OfframpError("the prompt has no token; give at least one.")
        ends = () if self.sampling.ignore_eos else self.eos_token_ids
        self._stop_ids = frozenset(self.sampling.stop_token_ids).union(ends)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_source_tokens(self) -> int:
        """Tokens of the source; 0 without one."""
        return len(self.source_token_ids)

    @property
    def num_given_tokens(self) -> int:
        """Tokens of the text that was given to be read: the source where there is one, else the prompt."""
        return self.num_source_tokens or self.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt, output and drafts."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + len(self.drafts)

    @property
    def runs_full_depth(self) -> bool:
        """Whether the pass that runs the newest token must run all layers, whatever its confidence."""
        kv_policy = self.exits.kv_policy
        if kv_policy == "full" or (kv_policy in ("recompute", "verify") and self.num_pending >= self.exits.max_pending):
            return True
        # A draft that would end the request must be judged before anything can follow it.
        ends = len(self.output_token_ids) + len(self.drafts) >= self.sampling.max_tokens
        return bool(self.drafts) and (ends or self.drafts[-1].token_id in self._stop_ids)

    @property
    def max_total_tokens(self) -> int:
        """Most tokens it can ever have: prompt and `max_tokens`."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None while it has not."""
        return _FINISH_REASONS.get(self.status)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end it: its own stop tokens, and the model's end-of-sequence tokens unless they are ignored."""
        return self._stop_ids

    @property
    def may_stop(self) -> bool:
        """Whether the next token may end it by a stop token or a stop string: `min_tokens` come before it."""
        return len(self.output_token_ids) >= self.sampling.min_tokens

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids at positions `start` up to but not including `stop`, of prompt, output and drafts in a row."""
        split = len(self.prompt_token_ids)
        generated = self.output_token_ids
        if self.drafts:
            generated = [*generated, *(draft.token_id for draft in self.drafts)]
        if start >= split:
            return generated[start - split : stop - split]
        return [*self.prompt_token_ids[start:stop], *generated[: max(stop - split, 0)]]


def prompt_and_source(
    given: Iterable[int], decoder_start_token_id: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Prompt and source of a request for a text that was given.

    Args:
        given: its tokens.
        decoder_start_token_id: what the decoder of an encoder-decoder model reads first, for which the text is the
            source; None: the model continues the text.
    """
    return (tuple(given), ()) if decoder_start_token_id is None else ((decoder_start_token_id,), tuple(given))
