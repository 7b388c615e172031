"""How what an iteration computed moves a sequence on: new tokens, drafts, the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from offramp.serve.request.iteration_result import IterationResult, SampledToken
from offramp.serve.request.request import Request, RequestStatus
from offramp.serve.scheduling.scheduler_output import Phase, ScheduledRequest
from offramp.serve.scheduling.sequence import SequenceState

TextStops = Callable[[Request, int], bool]
"""Whether a token completes a stop string. Asked once for every token that is not a stop token, before it is added to
the request (so `request.may_stop` speaks of this token)."""


def advance(
    sequence: SequenceState,
    item: ScheduledRequest,
    result: IterationResult,
    num_layers: int,
    text_stops: TextStops | None,
) -> RequestStatus:
    """Add what an iteration gave to a request, and count its rows as computed.

    Args:
        sequence: whose; running.
        item: the rows that ran.
        result: what they gave.
        num_layers: of the model; a token that ran fewer has left early.
        text_stops: asked whether a token completes a stop string; None looks for none. It may fail the request, which
            then stays as it is.

    Returns:
        The status that the request should have now; the caller ends it.
    """
    request = sequence.request
    if request.sampling.prompt_logprobs is not None:
        # Row p tells of token p + 1. Rows that run again tell nothing new.
        request.prompt_logprobs += result.prompt_logprobs[len(request.prompt_logprobs) - item.start :]
    if not request.sampling.max_tokens:
        request.num_computed_tokens = item.start + item.num_tokens
        is_over = request.num_computed_tokens == request.num_prompt_tokens
        return RequestStatus.FINISHED_LENGTH if is_over else RequestStatus.RUNNING
    status = RequestStatus.RUNNING
    if item.samples:
        if item.phase is Phase.DECODE:
            _note_depth(sequence, item, result.draft or result.tokens[-1], num_layers)
        if result.draft is None:
            status = _take_tokens(request, result.tokens, text_stops)
        else:
            assert request.exits.kv_policy == "verify", request.exits.kv_policy
            assert not result.tokens, "a draft is continued from, not judged at once"
            request.drafts.append(result.draft)
    if not request.status.is_finished:
        request.num_computed_tokens = min(item.start + item.num_tokens, request.num_tokens - 1)
    return status


def _note_depth(sequence: SequenceState, item: ScheduledRequest, newest: SampledToken, num_layers: int) -> None:
    """See what the exit of a decoded row means for the sequence's depth and for the keys and values it left."""
    request = sequence.request
    if not request.runs_full_depth:  # else it tells nothing of the sequence
        sequence.depth.add(newest.exit_layer)
    left_early = newest.exit_layer < num_layers
    if request.exits.kv_policy in ("recompute", "verify"):
        request.num_pending = request.num_pending + 1 if left_early else 0
        sequence.num_incomplete = sequence.num_incomplete + 1 if left_early else 0
    elif left_early and sequence.early_from is None and request.exits.kv_policy != "pipeline":
        sequence.early_from = item.start


def _take_tokens(request: Request, tokens: Iterable[SampledToken], text_stops: TextStops | None) -> RequestStatus:
    """Add tokens, which judge all drafts, up to one that ends the request; the status it has afterwards."""
    request.drafts.clear()
    for token in tokens:
        status = _take_token(request, token, text_stops)
        if status.is_finished or request.status.is_finished:
            return status
    return RequestStatus.RUNNING


def _take_token(request: Request, token: SampledToken, text_stops: TextStops | None) -> RequestStatus:
    """Add a token to its request; the status it has afterwards. A stop on the last allowed token is a stop."""
    may_stop = request.may_stop
    is_stop_token = token.token_id in request.stop_ids and may_stop
    text_stopped = not is_stop_token and text_stops is not None and text_stops(request, token.token_id)
    request.output_token_ids.append(token.token_id)
    request.exit_layers.append(token.exit_layer)
    request.confidences.append(token.confidence)
    if request.sampling.logprobs is not None:
        assert token.logprobs is not None, f"request {request.request_id!r} asks for logprobs"
        request.logprobs.append(token.logprobs)
    if is_stop_token or (text_stopped and may_stop):
        return RequestStatus.FINISHED_STOP
    if len(request.output_token_ids) >= request.sampling.max_tokens:
        return RequestStatus.FINISHED_LENGTH
    return RequestStatus.RUNNING
