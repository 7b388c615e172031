"""What is asked of the engine, how far it has come, and what one iteration gives back. Plain data, no tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal, get_args

from offramp.common.errors import OfframpError
from offramp.common.exits.kv_policy import KVPolicy
from offramp.common.exits.policy import ExitPolicy
from offramp.serve.measures.records import RequestMetrics

FinishReason = Literal["stop", "length", "cancelled", "error"]


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise OfframpError(f"{name} {value!r} must be a whole number.")
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"in {low}..{high}"
        raise OfframpError(f"{name} {value} must be {limit}.")


def _check_float(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise OfframpError(f"{name} {value!r} must be a number.")
    if isinstance(value, int) and abs(value) > 2**63:  # it may not even be a float
        raise OfframpError(f"{name} is a whole number of {value.bit_length()} bits; give a smaller one.")


MAX_GRAMMAR = 1 << 16
"""Characters of a grammar. Compiling takes seconds and hundreds of megabytes for one ten times as long."""


@dataclass(frozen=True)
class Constraint:
    """A language that the generated text must be in.

    Attributes:
        kind: what `grammar` is written in; `json` is any JSON object and has none.
        grammar: a JSON schema as text, or a regular expression.
    """

    kind: Literal["json", "json_schema", "regex"]
    grammar: str = ""

    def __post_init__(self) -> None:
        if self.kind not in ("json", "json_schema", "regex"):
            raise OfframpError(f"constraint {self.kind!r} is unknown; choose one of json, json_schema, regex.")
        if not isinstance(self.grammar, str):
            raise OfframpError(f"the grammar of constraint {self.kind!r} is no text: {self.grammar!r}.")
        if len(self.grammar) > MAX_GRAMMAR:
            raise OfframpError(
                f"the grammar of constraint {self.kind!r} has {len(self.grammar)} characters, more than {MAX_GRAMMAR}; "
                "shorten it."
            )
        if (self.kind == "json") != (not self.grammar):
            raise OfframpError(
                "constraint 'json' takes no grammar; leave it out, or choose 'json_schema'."
                if self.grammar
                else f"constraint {self.kind!r} has an empty grammar; give one."
            )


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
        prompt_logprobs: the same for every token of the prompt but the first, from the final exit.
        min_p: sample among tokens at least this fraction as probable as the most probable one.
        repetition_penalty: logits of tokens of prompt and output are divided (if positive) or multiplied (if negative)
            by it (Keskar et al. 2019); 1 changes nothing.
        presence_penalty: subtracted from the logits of tokens of the output.
        frequency_penalty: subtracted from them once for each time they occur in the output.
        logit_bias: (token id, number added to its logit) pairs.
        constraint: a grammar that the text must follow; see `Constraint`.
        sequence: which of several sequences that were asked for with one seed (OpenAI's `n`); they draw differently.
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
    prompt_logprobs: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    constraint: Constraint | None = None
    sequence: int = 0

    def __post_init__(self) -> None:
        # Without a new token there is only the prompt to report on.
        _check_int("max_tokens", self.max_tokens, low=1 if self.prompt_logprobs is None else 0)
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
            _check_int("stop token id", token, low=0, high=2**63 - 1)
        for name, number in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if number is not None:
                _check_int(name, number, low=0)
        _check_float("min_p", self.min_p)
        if not 0 <= self.min_p <= 1:
            raise OfframpError(f"min_p {self.min_p} must be in 0..1 (0 keeps every token).")
        _check_float("repetition_penalty", self.repetition_penalty)
        if not 0.01 <= self.repetition_penalty <= 100:
            raise OfframpError(
                f"repetition_penalty {self.repetition_penalty} must be in 0.01..100 (1 changes nothing)."
            )
        for name, penalty in (("presence", self.presence_penalty), ("frequency", self.frequency_penalty)):
            _check_float(f"{name}_penalty", penalty)
            if not -2 <= penalty <= 2:
                raise OfframpError(f"{name}_penalty {penalty} must be in -2..2 (0 changes nothing).")
        self._check_logit_bias()
        _check_int("sequence", self.sequence, low=0, high=2**32 - 1)
        self._check_constraint()

    def _check_logit_bias(self) -> None:
        pairs = self.logit_bias
        if not isinstance(pairs, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            raise OfframpError(f"logit_bias {pairs!r} must be a tuple of pairs (token id, number).")
        seen: set[int] = set()
        for token, number in pairs:
            _check_int("logit_bias of token", token, low=0)
            _check_float(f"logit_bias of token {token}", number)
            if not -100 <= number <= 100:
                raise OfframpError(f"logit_bias of token {token} is {number}; it must be in -100..100.")
            if token in seen:
                raise OfframpError(f"logit_bias names token {token} twice; give one number for it.")
            seen.add(token)

    def _check_constraint(self) -> None:
        if self.constraint is None:
            return
        if not isinstance(self.constraint, Constraint):
            raise OfframpError(f"constraint {self.constraint!r} must be a Constraint.")
        # It is the grammar that says where the text ends: whatever forbids the end there leaves no token at all.
        if self.min_tokens:
            raise OfframpError(
                f"min_tokens {self.min_tokens} cannot be kept under a constraint; leave one of them out."
            )
        if self.ignore_eos:
            raise OfframpError("ignore_eos leaves a text under a constraint without an end; leave one of them out.")

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether what was said before changes logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `OfframpError` if a model with so many tokens lacks one that these settings name.

        Stop tokens are no part of it: one that the model lacks is never said, and ends nothing.
        """
        for token, _ in self.logit_bias:
            if token >= vocab_size:
                raise OfframpError(f"logit_bias names token {token}, outside the vocabulary of {vocab_size}.")


@dataclass(frozen=True)
class ExitOptions:
    """How deep the tokens of one request run.

    Attributes:
        kv_policy: see `KVPolicy`; `full` is the way to ask for no early exit.
        policy: thresholds in place of the checkpoint's own; None takes the checkpoint's. Without either, every token
            runs all layers.
        max_pending: `recompute` and `verify`: a pass that finds this many incomplete tokens runs all layers.
        static_layer: `static`: the exit at which every generated token leaves.
    """

    kv_policy: KVPolicy = "fill"
    policy: ExitPolicy | None = None
    max_pending: int = 8
    static_layer: int | None = None

    def __post_init__(self) -> None:
        if self.kv_policy not in get_args(KVPolicy):
            raise OfframpError(
                f"KV policy {self.kv_policy!r} is unknown; choose one of {', '.join(get_args(KVPolicy))}."
            )
        if self.kv_policy == "full" and self.policy is not None:
            raise OfframpError("KV policy 'full' never exits, so it takes no exit policy; leave one of them out.")
        if self.kv_policy == "static" and self.policy is not None:
            raise OfframpError("KV policy 'static' asks no confidence, so it takes no exit policy; leave it out.")
        if (self.kv_policy == "static") != (self.static_layer is not None):
            raise OfframpError("KV policy 'static' and static_layer belong together; give both or neither.")
        _check_int("max_pending", self.max_pending, low=1)


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


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural-log probabilities at one generated token, from the raw logits (before temperature, top-k and top-p) of
    the exit that said it; under `verify` always of the last layer, which judged it.

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
        confidence: what the exit test measured where the row left; None at the final exit.
        logprobs: None unless the request asks for them.
    """

    token_id: int
    exit_layer: int
    confidence: float | None = None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class IterationResult:
    """What one iteration gives one request.

    Attributes:
        tokens: new tokens of the answer, in order. Under `verify` a complete pass gives the drafts that the full model
            agrees with and one token of its own; otherwise there is one, or none if `draft` is given.
        draft: under `verify`, a token said by an early exit: it is continued from, but not handed out yet.
        prompt_logprobs: of the prompt's tokens whose logits this iteration computed.
    """

    tokens: tuple[SampledToken, ...] = ()
    draft: SampledToken | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(eq=False)
class Request:
    """One sequence to be continued, and how far it has come. Only the scheduler changes it.

    Attributes:
        request_id: unique among the requests that have not finished.
        prompt_token_ids: at least one token.
        sampling: how tokens are chosen and when the request ends.
        exits: how deep its tokens run.
        eos_token_ids: the model's end-of-sequence tokens, every one of them.
        priority: requests with a smaller number go first.
        client: whose it is; clients take turns within a priority.
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
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    exits: ExitOptions = ExitOptions()
    eos_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    client: str = ""
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
        confidences: for each new token, what the exit test measured; None at the final exit.
        prompt_logprobs: of every token of the prompt but the first, if asked for: all of them with the first output.
        metrics: its times and what happened to it; with the last output only.
    """

    request_id: str
    new_token_ids: tuple[int, ...]
    exit_layers: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    text: str
    finish_reason: FinishReason | None
    usage: Usage
    error: str | None = None
    confidences: tuple[float | None, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    metrics: RequestMetrics | None = None

    @classmethod
    def of(
        cls, request: Request, first_token: int, text: str = "", metrics: RequestMetrics | None = None
    ) -> RequestOutput:
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
            confidences=tuple(request.confidences[first_token:]),
            prompt_logprobs=tuple(request.prompt_logprobs) if first_token == 0 else (),
            metrics=metrics,
        )
