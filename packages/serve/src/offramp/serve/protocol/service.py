"""The service behind the endpoints: from a path and a body to an answer.

Nearly all that can be wrong with a request is found in `open`, before anything of the answer is sent, because the
status code is sent with the first piece. What takes long to find (a language that cannot be compiled) and what only the
engine finds ends the answer with an error (`Generation.error`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from offramp.common.errors import OfframpError
from offramp.serve.engine_thread import EngineStoppedError, EngineThread
from offramp.serve.exit_overrides import ExitOverrideError, exit_options
from offramp.serve.protocol.card import ModelCard
from offramp.serve.protocol.echo import Echo
from offramp.serve.protocol.errors import (
    ApiError,
    bad_request,
    busy,
    engine_dead,
    queue_full,
    unknown_endpoint,
    unknown_model,
)
from offramp.serve.protocol.prompts import encode_chat, encode_prompts
from offramp.serve.protocol.replies import (
    ChatGeneration,
    Complete,
    CompletionGeneration,
    Generation,
    Report,
    encode,
    internal_error,
)
from offramp.serve.protocol.requests import (
    MAX_DIGITS,
    ChatBody,
    CompletionBody,
    GenerationBody,
    OfframpOptions,
    model_of,
    parse_body,
)
from offramp.serve.protocol.room import Room
from offramp.serve.protocol.sampling import field_at_fault, sampling_params
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.request import Request, prompt_and_source
from offramp.serve.scheduling.scheduler import QueueFullError
from offramp.serve.text import Decoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_FIELDS = 10_000
"""Of a JSON object. So many at fault take a tenth of a second to name, and no field needs more."""
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
# OpenAI's is "as much as fits". A small model that does not find its end would fill the context every time.
DEFAULT_CHAT_TOKENS = 1024
_EXACT = 2**53  # below it, a float is a whole number and no other
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class OpenAIService:
    """Answers OpenAI's endpoints with an engine.

    Args:
        thread: The running engine.
        tokenizer: The model's tokenizer.
        card: The model and its limits.
        check: The engine's own check of a request, called in the front's thread; raises `OfframpError`.
        adapt: From the exits that a request would carry to those it carries; see `offramp.serve.adaptation`.
    """

    def __init__(
        self,
        thread: EngineThread,
        tokenizer: PreTrainedTokenizerBase,
        card: ModelCard,
        check: Callable[[Request], None] = lambda request: None,
        adapt: Callable[[ExitOptions], ExitOptions] = lambda exits: exits,
    ) -> None:
        self.card = card
        self._adapt = adapt
        self._thread = thread
        self._tokenizer = tokenizer
        self._check = check
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
        self._thread.cancel_all(reply.request_ids)

    def _models(self) -> Complete:
        return Complete(200, encode({"object": "list", "data": [self.card.to_json()]}))

    def _health(self) -> Complete:
        failure = self._thread.failure
        if failure is not None:
            return Complete.of_error(engine_dead(str(failure)))
        load = {"status": "ok", "running": self._thread.num_running, "waiting": self._thread.num_waiting}
        return Complete(200, encode(load))

    def _completion(self, reply_id: str, body: bytes) -> Generation:
        parsed = parse_body(CompletionBody, self._addressed(body))
        sequences = parsed.best_of or parsed.n
        self._check_count(len(parsed.prompt), sequences)
        if parsed.echo and self.card.max_source_len is not None:
            raise bad_request(
                "'echo' is not supported by this model, whose answer does not continue the prompt: leave it out.",
                param="echo",
                code="unsupported_value",
            )
        whole = encode_prompts(parsed, self._tokenizer, self.card)
        room = Room(self.card, parsed.max_tokens, DEFAULT_COMPLETION_TOKENS, "prompt")
        prompts = [room.cut(ids, parsed.truncate_prompt_tokens) for ids in whole]
        budgets = [room.beside(len(ids)) for ids in prompts]
        echoes = prompt_logprobs = None
        if parsed.echo:
            decoder = cast(Decoder, self._tokenizer)
            echoes = [
                Echo.of(given if ids == uncut else ids, ids, decoder)
                for given, uncut, ids in zip(parsed.prompt, whole, prompts, strict=True)
            ]
            # Without a new token the engine has only this to do; it is reported if it was asked for.
            prompt_logprobs = 0 if parsed.logprobs is None and parsed.max_tokens == 0 else parsed.logprobs
        return self._generate(
            CompletionGeneration,
            f"cmpl-{reply_id}",
            parsed,
            prompts,
            budgets,
            logprobs=parsed.logprobs,
            prompt_logprobs=prompt_logprobs,
            sequences=sequences,
            echoes=echoes,
        )

    def _chat(self, reply_id: str, body: bytes) -> Generation:
        parsed = parse_body(ChatBody, self._addressed(body))
        self._check_count(1, parsed.n)
        ids = encode_chat(parsed, self._tokenizer, self.card.prompt_limit)
        asked = parsed.max_completion_tokens if parsed.max_tokens is None else parsed.max_tokens
        budget = Room(self.card, asked, DEFAULT_CHAT_TOKENS, "messages").beside(len(ids))
        logprobs = (parsed.top_logprobs or 0) if parsed.logprobs else None
        return self._generate(
            ChatGeneration,
            f"chatcmpl-{reply_id}",
            parsed,
            [ids],
            [budget],
            logprobs=logprobs,
            prompt_logprobs=None,
            sequences=parsed.n,
            echoes=None,
        )

    def _generate(
        self,
        kind: type[CompletionGeneration] | type[ChatGeneration],
        answer_id: str,
        body: GenerationBody,
        prompts: list[list[int]],
        budgets: list[int],
        *,
        logprobs: int | None,
        prompt_logprobs: int | None,
        sequences: int,
        echoes: list[Echo] | None,
    ) -> Generation:
        """Submits `sequences` requests for each prompt, all of them or none; `budgets` are their most new tokens."""
        # The best of several are those that the model finds most likely, so it is asked how likely each is.
        ranked = sequences > body.n
        samplings = [
            sampling_params(body, self.card, budget, 0 if ranked and logprobs is None else logprobs, prompt_logprobs)
            for budget in budgets
        ]
        exits = self._adapt(self._exit_options(body.offramp))
        read = [prompt_and_source(ids, self.card.decoder_start_token_id) for ids in prompts]
        requests = [
            Request(
                request_id=f"{answer_id}-{index * sequences + sequence}",
                prompt_token_ids=prompt,
                source_token_ids=source,
                sampling=dataclasses.replace(sampling, sequence=sequence),
                exits=exits,
                eos_token_ids=self.card.eos_token_ids,
                priority=body.offramp.priority,
                client=body.user,
            )
            for index, ((prompt, source), sampling) in enumerate(zip(read, samplings, strict=True))
            for sequence in range(sequences)
        ]
        try:
            for request in requests[::sequences]:  # those of one prompt differ in nothing that is checked
                self._check(request)
        except OfframpError as fault:
            raise bad_request(str(fault), param=field_at_fault(fault, body)) from fault
        reply = kind(
            answer_id,
            self.card.name,
            [request.request_id for request in requests],
            stream=body.stream,
            report=Report(
                usage=body.stream_options is not None and body.stream_options.include_usage,
                logprobs=logprobs is not None,
                exit_layers=body.offramp.return_exit_layers,
                confidences=body.offramp.return_confidences,
            ),
            token_text=self._token_text,
            sequences=sequences,
            kept=body.n,
            echoes=echoes,
            error_of=lambda cause: self._error_of(cause, body),
        )
        try:
            self._thread.submit_all(requests, reply)
        except QueueFullError as error:
            raise queue_full(self._thread.max_requests) from error
        except EngineStoppedError as error:
            raise engine_dead(str(error)) from error
        except OfframpError as fault:
            raise bad_request(str(fault), param=field_at_fault(fault, body)) from fault
        return reply

    def _error_of(self, cause: Exception, body: GenerationBody) -> ApiError:
        """What a client is told when the engine has ended its request without an answer."""
        if self._thread.failure is not None:  # it need not be this request that stopped it
            return engine_dead(str(cause) or type(cause).__name__)
        if isinstance(cause, QueueFullError):
            return busy(str(cause))
        if isinstance(cause, OfframpError):
            return bad_request(str(cause), param=field_at_fault(cause, body))
        return internal_error(cause)

    def _exit_options(self, options: OfframpOptions) -> ExitOptions:
        try:
            card = self.card
            return exit_options(
                options.overrides,
                card.exit_layers,
                card.policy,
                card.points,
                lambda field: f"'offramp.{field}'",
                card.default_kv_policy,
            )
        except ExitOverrideError as fault:
            raise bad_request(str(fault), param=f"offramp.{fault.field}") from fault
        except OfframpError as fault:
            raise bad_request(str(fault), param="offramp") from fault

    def _addressed(self, body: bytes) -> object:
        """A body, decoded, that asks this model. Who is asked is looked at before what, as a gateway does it."""
        decoded = decode_body(body)
        model = model_of(decoded)
        if model not in (self.card.name, self.card.name_and_version):
            raise unknown_model(model, self.card.name)
        return decoded

    def _check_count(self, num_prompts: int, sequences: int) -> None:
        """Before anything is tokenized, which takes much longer than to send it."""
        together = num_prompts * sequences
        if together > self._thread.max_requests:
            raise bad_request(
                f"{num_prompts} prompts with {sequences} choices each are {together} requests, more than the "
                f"{self._thread.max_requests} that this server takes together; send fewer at once.",
                param="prompt" if num_prompts > 1 else "n",
            )

    def _token_text(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))


def decode_body(body: bytes) -> object:
    """JSON to Python, with the words of JSON alone: no NaN, no infinity.

    Raises:
        ApiError: 400 for what is not JSON.
    """
    if not body:
        raise bad_request("The request has no body; send a JSON object with content-type: application/json.")
    try:
        text = body.decode("utf-8")
        value = json.loads(
            text, parse_constant=_no_constant, parse_float=_finite, parse_int=_whole, object_pairs_hook=_object
        )
        if _SURROGATE.search(body):
            # No tokenizer takes half a character. Checked only where it can be: escapes like these are rare.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except RecursionError:
        raise bad_request("The request body is nested too deeply.") from None
    except UnicodeError:
        raise bad_request("The request body holds bytes or escapes that are no Unicode characters.") from None
    except ValueError as error:
        raise bad_request(f"The request body cannot be read as JSON: {error}") from None


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object. Which of two fields of the same name counts is not for readers of JSON to agree on."""
    if len(pairs) > MAX_FIELDS:
        raise ValueError(f"an object has {len(pairs)} fields, more than {MAX_FIELDS}")
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has two fields of the same name")
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _whole(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number has {len(text)} digits, more than {MAX_DIGITS}")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number is too large")
    # JSON has numbers, not kinds of them: 8.0 is a whole one, and some clients can write no other.
    return int(value) if value.is_integer() and abs(value) < _EXACT else value
