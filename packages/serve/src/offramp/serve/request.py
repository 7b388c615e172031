"""What is asked of the engine, how far it has come, and what one iteration gives back. Plain data, no tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal, get_args

from offramp.common.errors import OfframpError
from offramp.common.exits.policy import ExitPolicy

KVPolicy = Literal["full", "fill"]
"""Where the keys and values of skipped layers come from. `full`: nothing is skipped, no token leaves early. `fill`: the
skipped layers make them from the state at the exit (saturated KV)."""

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    Attributes:
        max_tokens: most tokens to generate.
        min_tokens: tokens to generate before anything but `max_tokens` may end the request: until then no stop token
            can be sampled and no stop string is looked for.
        temperature: 0 is greedy: the largest raw logit, the lowest token id on ties.
        top_k: sample among the k most probable tokens; None is all of them.
        top_p: sample among the fewest most probable tokens whose probabilities reach p together (nucleus sampling,
            Holtzman et al. 2020), after `top_k`.
        seed: makes the request's draws reproducible, whatever shares its batch; None draws afresh every time.
        stop: strings that end the request; neither they nor what follows is part of the text.
        stop_token_ids: tokens that end the request, beside the model's end-of-sequence tokens.
        ignore_eos: go on after the model's end-of-sequence tokens; `stop_token_ids` still end the request.
        logprobs: number of alternatives reported for each token beside its own log-probability; None reports nothing.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_int("max_tokens", self.max_tokens, low=1)
        _check_int("min_tokens", self.min_tokens, low=0)
        if self.min_tokens > self.max_tokens:
            raise OfframpError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}; lower it.")
        _check_float("temperature", self.temperature)
        if not 0 <= self.temperature < math.inf:
            raise OfframpError(f"temperature {self.temperature} must be a finite number of at least 0 (0 is greedy).")
        if self.top_k is not None:
            _check_int("top_k", self.top_k, low=1)
        _check_float("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise OfframpError(f"top_p {self.top_p} must be above 0 and at most 1 (1 keeps every token).")
        if self.seed is not None:
            _check_int("seed", self.seed, low=-(2**63), high=2**63 - 1)
        if not isinstance(self.stop, tuple) or not all(isinstance(text, str) for text in self.stop):
            raise OfframpError(f"stop {self.stop!r} must be a tuple of strings.")
        if "" in self.stop:
            raise OfframpError("stop holds an empty string, which every text contains; leave it out.")
        if not isinstance(self.stop_token_ids, tuple):
            raise OfframpError(f"stop_token_ids {self.stop_token_ids!r} must be a tuple of token ids.")
        for token in self.stop_token_ids:
            _check_int("stop token id", token, low=0)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, low=0)

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0


@dataclass(frozen=True)
class ExitOptions:
    """How deep the tokens of one request run.

    Attributes:
        kv_policy: see `KVPolicy`; `full` is the way to ask for no early exit.
        policy: thresholds in place of the checkpoint's own; None takes the checkpoint's. Without either, every token
            runs all layers.
    """

    kv_policy: KVPolicy = "fill"
    policy: ExitPolicy | None = None

    def __post_init__(self) -> None:
        if self.kv_policy not in get_args(KVPolicy):
            raise OfframpError(
                f"KV policy {self.kv_policy!r} is unknown; choose one of {', '.join(get_args(KVPolicy))}."
            )
        if self.kv_policy == "full" and self.policy is not None:
            raise OfframpError("KV policy 'full' never exits, so it takes no exit policy; leave one of them out.")

    @property
    def enabled(self) -> bool:
        """Whether tokens may leave early."""
        return self.kv_policy != "full"


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
        return self in _FINISH_REASONS


_FINISH_REASONS: dict[RequestStatus, FinishReason] = {
    RequestStatus.FINISHED_STOP: "stop",
    RequestStatus.FINISHED_LENGTH: "length",
    RequestStatus.CANCELLED: "cancelled",
    RequestStatus.FAILED: "error",
}


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural-log probabilities at one generated token, from the raw logits (before temperature, top-k and top-p) of
    the exit that said it.

    Attributes:
        token_id: the generated token.
        logprob: its log-probability, at most 0.
        top: the most probable tokens, (token id, log-probability), best first; empty for `logprobs=0`. The generated
            token is among them only if it is one of the most probable.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class SampledToken:
    """The token that one row predicted.

    Attributes:
        token_id: the token.
        exit_layer: number of layers that were run for the row.
        logprobs: None unless the request asks for them.
    """

    token_id: int
    exit_layer: int
    logprobs: TokenLogprobs | None = None


@dataclass(eq=False)
class Request:
    """One sequence to be continued, and how far it has come. Only the scheduler changes it.

    Attributes:
        request_id: unique among the requests that have not finished.
        prompt_token_ids: at least one token.
        sampling: how tokens are chosen and when the request ends.
        exits: how deep its tokens run.
        eos_token_ids: the model's end-of-sequence tokens, every one of them.
        status: where it is in its life.
        output_token_ids: tokens generated; a token that ended the request is the last of them and is counted.
        exit_layers: for each of them, the number of layers that were run for the row that predicted it.
        logprobs: for each of them, if asked for; otherwise empty.
        num_computed_tokens: tokens of prompt and output whose keys and values are in the cache. The newest output token
            is not among them until the next iteration has run it.
        error: why it failed, one sentence; None otherwise.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    exits: ExitOptions = ExitOptions()
    eos_token_ids: frozenset[int] = frozenset()
    status: RequestStatus = field(default=RequestStatus.WAITING, init=False)
    output_token_ids: list[int] = field(default_factory=list, init=False)
    exit_layers: list[int] = field(default_factory=list, init=False)
    logprobs: list[TokenLogprobs] = field(default_factory=list, init=False)
    num_computed_tokens: int = field(default=0, init=False)
    error: str | None = field(default=None, init=False)

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
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

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

    @property
    def forbidden_ids(self) -> frozenset[int]:
        """Tokens that must not be sampled next: every stop token, until `min_tokens` are generated."""
        return frozenset() if self.may_stop else self._stop_ids

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids at positions `start` up to but not including `stop`, of prompt and output as one sequence."""
        split = len(self.prompt_token_ids)
        if start >= split:
            return self.output_token_ids[start - split : stop - split]
        return [*self.prompt_token_ids[start:stop], *self.output_token_ids[: max(stop - split, 0)]]


@dataclass(frozen=True)
class Usage:
    """Tokens of a request so far.

    Attributes:
        prompt_tokens: tokens of the prompt.
        completion_tokens: tokens generated, counting the one that ended the request.
    """

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class RequestOutput:
    """What one iteration gives the outside for one request. The last one of a request has a `finish_reason`.

    Attributes:
        request_id: whose.
        new_token_ids: tokens generated since the last output.
        exit_layers: for each of them, the number of layers run.
        logprobs: for each of them, if asked for; otherwise empty.
        text: text that has become certain since the last output; it lags behind the tokens while a character is
            incomplete or a stop string may be under way.
        finish_reason: None while the request goes on.
        usage: tokens so far.
        error: why it failed, one sentence, if `finish_reason` is `error`.
    """

    request_id: str
    new_token_ids: tuple[int, ...]
    exit_layers: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    text: str
    finish_reason: FinishReason | None
    usage: Usage
    error: str | None = None

    @classmethod
    def of(cls, request: Request, first_token: int, text: str = "") -> RequestOutput:
        """The output that reports everything from the output token with index `first_token` on."""
        return cls(
            request_id=request.request_id,
            new_token_ids=tuple(request.output_token_ids[first_token:]),
            exit_layers=tuple(request.exit_layers[first_token:]),
            logprobs=tuple(request.logprobs[first_token:]),
            text=text,
            finish_reason=request.finish_reason,
            usage=Usage(request.num_prompt_tokens, len(request.output_token_ids)),
            error=request.error,
        )


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise OfframpError(f"{name} {value!r} must be a whole number.")
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"in {low}..{high}"
        raise OfframpError(f"{name} {value} must be {limit}.")


def _check_float(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise OfframpError(f"{name} {value!r} must be a number.")
