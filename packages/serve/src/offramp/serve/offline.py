"""Text for a list of prompts, without a server: the engine's offline front."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from offramp.common.errors import OfframpError
from offramp.serve.engine import Engine
from offramp.serve.request import (
    ExitOptions,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
    Usage,
)

Prompt = str | Sequence[int]
"""Text, encoded as the tokenizer encodes plain text (its own rule for BOS, once); or token ids, taken as they are."""

_numbers = itertools.count()
_T = TypeVar("_T")


@dataclass
class Completion:
    """What was generated for one prompt.

    Attributes:
        text: without stop strings and special tokens; empty without a tokenizer.
        token_ids: tokens generated, the one that ended the text included.
        exit_layers: for each of them, the number of layers run.
        logprobs: for each of them, if asked for; otherwise empty.
        finish_reason: why it ended; `error` if it failed.
        usage: tokens of prompt and completion.
        error: why it failed.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    exit_layers: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    usage: Usage = field(default_factory=lambda: Usage(0, 0))
    error: str | None = None

    def append(self, output: RequestOutput) -> None:
        """Add what one iteration gave."""
        self.text += output.text
        self.token_ids += output.new_token_ids
        self.exit_layers += output.exit_layers
        self.logprobs += output.logprobs
        self.finish_reason, self.usage, self.error = output.finish_reason, output.usage, output.error


def generate(
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams],
    exits: ExitOptions | Sequence[ExitOptions] | None = None,
    *,
    on_output: Callable[[int, RequestOutput], None] = lambda index, output: None,
) -> list[Completion]:
    """Generate for every prompt, as many at a time as the engine has seats.

    Args:
        engine: an idle engine.
        prompts: text or token ids.
        sampling: for all prompts, or one for each.
        exits: for all prompts, or one for each; None takes the checkpoint's policy.
        on_output: told the prompt's index and every output, as it comes (for a progress bar).

    Returns:
        One completion for each prompt, in order.

    Raises:
        OfframpError: a prompt can never run; nothing was generated then.
    """
    if engine.has_unfinished:
        raise ValueError("the engine is in use; its other requests would lose their outputs")
    requests = [
        Request(
            request_id=f"offline-{next(_numbers)}",
            prompt_token_ids=tuple(encode(engine, prompt)),
            sampling=params,
            exits=options,
            eos_token_ids=frozenset(engine.checkpoint.eos_token_ids),
        )
        for prompt, params, options in zip(
            prompts, _one_each(sampling, len(prompts)), _one_each(exits or ExitOptions(), len(prompts)), strict=True
        )
    ]
    for index, request in enumerate(requests):
        try:
            engine.check(request)
        except OfframpError as fault:
            raise OfframpError(f"prompt {index}: {fault}" if len(requests) > 1 else str(fault)) from None
    completions = [Completion() for _ in requests]
    indices = {request.request_id: index for index, request in enumerate(requests)}
    waiting = iter(requests)
    try:
        while True:
            for request in itertools.islice(waiting, engine.config.max_waiting - engine.num_waiting):
                engine.add_request(request)
            if not engine.has_unfinished:
                return completions
            for output in engine.step():
                index = indices[output.request_id]
                completions[index].append(output)
                on_output(index, output)
    finally:
        for request in requests:
            engine.cancel(request.request_id)


def encode(engine: Engine, prompt: Prompt) -> list[int]:
    """Token ids of a prompt.

    Raises:
        OfframpError: the text holds half a character, which no tokenizer takes.
    """
    if not isinstance(prompt, str):
        return list(prompt)
    try:
        prompt.encode()
    except UnicodeEncodeError as fault:
        raise OfframpError(
            f"the prompt is not Unicode text: character {fault.start} is {prompt[fault.start]!r}; give it in UTF-8."
        ) from None
    encoding: Any = engine.tokenizer(prompt, verbose=False)
    return list(encoding["input_ids"])


def _one_each(value: _T | Sequence[_T], count: int) -> Sequence[_T]:
    return value if isinstance(value, Sequence) else [value] * count
