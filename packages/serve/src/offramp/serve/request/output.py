"""What the engine tells the outside of one request."""

from __future__ import annotations

from dataclasses import dataclass

from offramp.serve.measures.records import RequestMetrics
from offramp.serve.request.iteration_result import TokenLogprobs
from offramp.serve.request.request import Blame, FinishReason, Request


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
        blame: what was at fault then.
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
    blame: Blame | None = None

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
            usage=Usage(request.num_given_tokens, len(request.output_token_ids)),
            error=request.error,
            confidences=tuple(request.confidences[first_token:]),
            prompt_logprobs=tuple(request.prompt_logprobs) if first_token == 0 else (),
            metrics=metrics,
            blame=request.blame,
        )
