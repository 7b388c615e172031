"""The service behind the endpoints: from a path and a body to an answer.

All that can be wrong with a request is found in `open`, before anything of the answer is sent, because the status code
is sent with the first piece.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from offramp.common.errors import OfframpError
from offramp.common.exits.policy import ExitPolicy
from offramp.serve.engine_thread import EngineStoppedError, EngineThread
from offramp.serve.protocol.card import ModelCard
from offramp.serve.protocol.errors import (
    ApiError,
    bad_request,
    engine_dead,
    prompt_too_long,
    queue_full,
    unknown_endpoint,
    unknown_model,
)
from offramp.serve.protocol.prompts import encode_chat, encode_prompts
from offramp.serve.protocol.replies import ChatGeneration, Complete, CompletionGeneration, Generation, encode
from offramp.serve.protocol.requests import ChatBody, CompletionBody, GenerationBody, OfframpOptions, parse_body
from offramp.serve.request import ExitOptions, Request, SamplingParams
from offramp.serve.scheduler import QueueFullError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
# OpenAI's is "as much as fits". Here the cache reserves room for it, so a few idle chats would keep all others out.
DEFAULT_CHAT_TOKENS = 1024
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class OpenAIService:
    """Answers OpenAI's endpoints with an engine.

    Args:
        thread: The running engine.
        tokenizer: The model's tokenizer.
        card: The model and its limits.
    """

    def __init__(self, thread: EngineThread, tokenizer: PreTrainedTokenizerBase, card: ModelCard) -> None:
        self.card = card
        self._thread = thread
        self._tokenizer = tokenizer
        self._endpoints: dict[str, Callable[[str, bytes], Complete | Generation]] = {
            "v1/models": lambda reply_id, body: self._models(),
            f"v1/models/{card.name}": lambda reply_id, body: Complete(200, encode(card.to_json())),
            "v1/completions": self._completion,
            "v1/chat/completions": self._chat,
            "health": lambda reply_id, body: self._health(),
        }

    def open(self, path: str, body: bytes, reply_id: str) -> Complete | Generation:
        """Takes a request in.

        Args:
            path: The path below the service's root, such as ``v1/completions``.
            body: The request's body.
            reply_id: Unique among the answers that are under way.

        Returns:
            The answer, if it is known at once, and every refusal is; otherwise the answer in the making.
        """
        try:
            path = path.strip("/")
            endpoint = self._endpoints.get(path)
            if endpoint is None:
                model = path.removeprefix("v1/models/")
                if model != path:
                    raise unknown_model(model, self.card.name)
                raise unknown_endpoint(path, ", ".join(self._endpoints))
            return endpoint(reply_id, body)
        except ApiError as error:
            return Complete.of_error(error)

    def abandon(self, reply: Generation) -> None:
        """Cancels what is left of an answer that nobody waits for any more."""
        for request_id in reply.request_ids:
            self._thread.cancel(request_id)

    def _models(self) -> Complete:
        return Complete(200, encode({"object": "list", "data": [self.card.to_json()]}))

    def _health(self) -> Complete:
        failure = self._thread.failure
        if failure is not None:
            return Complete.of_error(engine_dead(str(failure)))
        load = {"status": "ok", "running": self._thread.num_running, "waiting": self._thread.num_waiting}
        return Complete(200, encode(load))

    def _completion(self, reply_id: str, body: bytes) -> Generation:
        parsed = parse_body(CompletionBody, _decode(body))
        self._check_model(parsed)
        prompts = encode_prompts(parsed, self._tokenizer, self.card.vocab_size)
        budgets = [self._budget(len(ids), parsed.max_tokens, DEFAULT_COMPLETION_TOKENS, "prompt") for ids in prompts]
        return self._generate(CompletionGeneration, f"cmpl-{reply_id}", parsed, prompts, budgets, parsed.logprobs)

    def _chat(self, reply_id: str, body: bytes) -> Generation:
        parsed = parse_body(ChatBody, _decode(body))
        self._check_model(parsed)
        ids = encode_chat(parsed, self._tokenizer)
        asked = parsed.max_completion_tokens if parsed.max_tokens is None else parsed.max_tokens
        budget = self._budget(len(ids), asked, DEFAULT_CHAT_TOKENS, "messages")
        logprobs = (parsed.top_logprobs or 0) if parsed.logprobs else None
        return self._generate(ChatGeneration, f"chatcmpl-{reply_id}", parsed, [ids], [budget], logprobs)

    def _generate(
        self,
        kind: type[CompletionGeneration] | type[ChatGeneration],
        answer_id: str,
        body: GenerationBody,
        prompts: list[list[int]],
        budgets: list[int],
        logprobs: int | None,
    ) -> Generation:
        """Submits one request for each prompt; `budgets` are their most tokens to generate."""
        if len(prompts) > self._thread.max_requests:
            raise bad_request(
                f"{len(prompts)} prompts are more than the {self._thread.max_requests} requests that this server takes "
                "together; send fewer at once.",
                param="prompt",
            )
        try:
            exits = exit_options(body.offramp, self.card)
            requests = [
                Request(
                    request_id=f"{answer_id}-{index}",
                    prompt_token_ids=tuple(ids),
                    sampling=SamplingParams(
                        max_tokens=budget,
                        temperature=body.temperature,
                        top_p=body.top_p,
                        seed=body.seed,
                        stop=tuple(body.stop),
                        logprobs=logprobs,
                    ),
                    exits=exits,
                    eos_token_ids=self.card.eos_token_ids,
                )
                for index, (ids, budget) in enumerate(zip(prompts, budgets, strict=True))
            ]
        except OfframpError as error:
            raise bad_request(str(error)) from error
        reply = kind(
            answer_id,
            self.card.name,
            [request.request_id for request in requests],
            stream=body.stream,
            include_usage=body.stream_options is not None and body.stream_options.include_usage,
            exit_layers=body.offramp.return_exit_layers,
            token_text=self._token_text,
        )
        try:
            self._thread.submit_all(requests, reply)
        except QueueFullError as error:
            raise queue_full(self._thread.max_requests) from error
        except EngineStoppedError as error:
            raise engine_dead(str(error)) from error
        return reply

    def _check_model(self, body: GenerationBody) -> None:
        if body.model != self.card.name:
            raise unknown_model(body.model, self.card.name)

    def _budget(self, num_tokens: int, asked: int | None, default: int, param: str) -> int:
        """Most tokens to generate after a prompt of `num_tokens`.

        Raises:
            ApiError: 400 when the prompt, or it and what is asked for, can never fit.
        """
        for limit, what in ((self.card.max_model_len, "context"), (self.card.cache_tokens, "cache")):
            if num_tokens >= limit or (asked is not None and num_tokens + asked > limit):
                raise prompt_too_long(num_tokens, None if num_tokens >= limit else asked, limit, param, what)
        room = min(self.card.max_model_len, self.card.cache_tokens) - num_tokens
        return min(default, room) if asked is None else asked

    def _token_text(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))


def exit_options(options: OfframpOptions, card: ModelCard) -> ExitOptions:
    """How deep a request's tokens run, from what it asks and what the checkpoint has.

    Raises:
        ApiError: 400 for early exits where the model has none, and for options that exclude each other.
        OfframpError: The engine's own objection to a value.
    """
    wishes = [name for name in ("threshold", "thresholds", "min_exit_layer") if getattr(options, name) is not None]
    if options.exit_policy == "full" or options.kv_policy == "full":
        if options.exit_policy == "early" or options.kv_policy not in (None, "full"):
            raise bad_request("'offramp.exit_policy' and 'offramp.kv_policy' contradict each other.", param="offramp")
        if wishes:
            raise bad_request(
                f"'offramp.{wishes[0]}' has no meaning when every layer is run; leave it out.",
                param=f"offramp.{wishes[0]}",
            )
        return ExitOptions(kv_policy="full")
    if options.exit_policy == "early":
        wishes.insert(0, "exit_policy")
    if wishes and not card.exit_layers:
        raise bad_request(
            f"'offramp.{wishes[0]}' needs early exits, and this model has none.", param=f"offramp.{wishes[0]}"
        )
    policy = card.policy
    if options.threshold is not None and options.thresholds is not None:
        raise bad_request("Give 'offramp.threshold' or 'offramp.thresholds', not both.", param="offramp.threshold")
    if options.threshold is not None:
        policy = (policy or ExitPolicy()).with_threshold(options.threshold, card.exit_layers)
    if options.thresholds is not None:
        policy = dataclasses.replace(policy or ExitPolicy(), thresholds=options.thresholds)
        policy.check(card.exit_layers)
    if wishes and (policy is None or not policy.thresholds):
        raise bad_request(
            "This model has exits but no thresholds of its own; give 'offramp.threshold'.",
            param="offramp.threshold",
        )
    if options.min_exit_layer is not None and policy is not None:
        policy = dataclasses.replace(policy, min_layer=options.min_exit_layer)
    # None as a KV policy is the engine's default; what it does not know, it refuses by name.
    kv_policy = {} if options.kv_policy is None else {"kv_policy": options.kv_policy}
    return ExitOptions(policy=policy if wishes else None, **kv_policy)  # pyright: ignore[reportArgumentType]


def _decode(body: bytes) -> object:
    """JSON to Python, with the words of JSON alone: no NaN, no infinity."""
    if not body:
        raise bad_request("The request has no body; send a JSON object with content-type: application/json.")
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_constant, parse_float=_finite)
        if _SURROGATE.search(body):
            # No tokenizer takes half a character. Checked only where it can be: escapes like these are rare.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except RecursionError:
        raise bad_request("The request body is nested too deeply.") from None
    except UnicodeError:
        raise bad_request("The request body holds bytes or escapes that are no Unicode characters.") from None
    except ValueError as error:
        raise bad_request(f"The request body is not valid JSON: {error}") from None


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number is too large")
    return value
