"""What one iteration gives one request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


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


class SampledToken(NamedTuple):
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


class IterationResult(NamedTuple):
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
