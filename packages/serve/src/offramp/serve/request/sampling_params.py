"""How the tokens of one request are chosen, and when it ends."""

from __future__ import annotations

import math
from dataclasses import dataclass

from offramp.common.errors import OfframpError
from offramp.serve.number_checks import check_number, check_whole
from offramp.serve.request.constraint import Constraint


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
        check_whole("max_tokens", self.max_tokens, low=1 if self.prompt_logprobs is None else 0)
        check_whole("min_tokens", self.min_tokens, low=0)
        if self.min_tokens > self.max_tokens:
            raise OfframpError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}; lower it.")
        check_number("temperature", self.temperature)
        if not 0 <= self.temperature < math.inf:
            raise OfframpError(f"temperature {self.temperature} must be a finite number of at least 0 (0 is greedy).")
        if self.top_k is not None:
            check_whole("top_k", self.top_k, low=1)
        check_number("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise OfframpError(f"top_p {self.top_p} must be above 0 and at most 1 (1 keeps every token).")
        if self.seed is not None:
            check_whole("seed", self.seed, low=-(2**63), high=2**63 - 1)
        if not isinstance(self.stop, tuple) or not all(isinstance(text, str) for text in self.stop):
            raise OfframpError(f"stop {self.stop!r} must be a tuple of strings.")
        if "" in self.stop:
            raise OfframpError("stop holds an empty string, which every text contains; leave it out.")
        if not isinstance(self.stop_token_ids, tuple):
            raise OfframpError(f"stop_token_ids {self.stop_token_ids!r} must be a tuple of token ids.")
        for token in self.stop_token_ids:
            check_whole("stop token id", token, low=0, high=2**63 - 1)
        for name, number in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if number is not None:
                check_whole(name, number, low=0)
        check_number("min_p", self.min_p)
        if not 0 <= self.min_p <= 1:
            raise OfframpError(f"min_p {self.min_p} must be in 0..1 (0 keeps every token).")
        check_number("repetition_penalty", self.repetition_penalty)
        if not 0.01 <= self.repetition_penalty <= 100:
            raise OfframpError(
                f"repetition_penalty {self.repetition_penalty} must be in 0.01..100 (1 changes nothing)."
            )
        for name, penalty in (("presence", self.presence_penalty), ("frequency", self.frequency_penalty)):
            check_number(f"{name}_penalty", penalty)
            if not -2 <= penalty <= 2:
                raise OfframpError(f"{name}_penalty {penalty} must be in -2..2 (0 changes nothing).")
        self._check_logit_bias()
        check_whole("sequence", self.sequence, low=0, high=2**32 - 1)
        self._check_constraint()

    def _check_logit_bias(self) -> None:
        pairs = self.logit_bias
        if not isinstance(pairs, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            raise OfframpError(f"logit_bias {pairs!r} must be a tuple of pairs (token id, number).")
        seen: set[int] = set()
        for token, number in pairs:
            check_whole("logit_bias of token", token, low=0)
            check_number(f"logit_bias of token {token}", number)
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
