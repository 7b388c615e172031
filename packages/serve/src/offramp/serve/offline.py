"""Text for a list of prompts, without a server: the engine's offline front."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from offramp.common.errors import OfframpError
from offramp.common.tokenizer import encode_text
from offramp.serve.engine import Engine
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.iteration_result import TokenLogprobs
from offramp.serve.request.output import RequestOutput, Usage
from offramp.serve.request.request import FinishReason, Request, prompt_and_source
from offramp.serve.request.sampling_params import SamplingParams

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
        confidences: for each of them, what the exit test measured; None at the final exit.
        logprobs: for each of them, if asked for; otherwise empty.
        prompt_logprobs: for every token of the prompt but the first, if asked for.
        finish_reason: why it ended; `error` if it failed.
        usage: tokens of prompt and completion.
        error: why it failed.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    exit_layers: list[int] = field(default_factory=list)
    confidences: list[float | None] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    usage: Usage = field(default_factory=lambda: Usage(0, 0))
    error: str | None = None

    def append(self, output: RequestOutput) -> None:
        """Add what one iteration gave."""
        self.text += output.text
        self.token_ids += output.new_token_ids
        self.exit_layers += output.exit_layers
        self.confidences += output.confidences
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.finish_reason, self.usage, self.error = output.finish_reason, output.usage, output.error


def generate(
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams],
    exits: ExitOptions | Sequence[ExitOptions] | None = None,
    *,
    n: int = 1,
    on_output: Callable[[int, RequestOutput], None] = lambda index, output: None,
) -> list[Completion]:
    """Generate for every prompt, as many at a time as the engine has seats.

    Args:
        engine: an idle engine.
        prompts: text or token ids.
        sampling: for all prompts, or one for each.
        exits: for all prompts, or one for each; None takes the checkpoint's policy.
        n: sequences for each prompt, which draw differently also where they share a seed.
        on_output: told the completion's index and every output, as it comes (for a progress bar).

    Returns:
        `n` completions for each prompt, in order: sequence j of prompt i at index i * n + j.

    Raises:
        OfframpError: a prompt can never run, or `n` is no number of sequences; nothing was generated then.
    """
    if n < 1:
        raise OfframpError(f"n {n} must be at least 1 sequence for each prompt.")
    if engine.has_unfinished:
        raise ValueError("the engine is in use; its other requests would lose their outputs")
    start = engine.decoder_start_token_id
    requests = [
        Request(
            request_id=f"offline-{next(_numbers)}",
            prompt_token_ids=prompt,
            source_token_ids=source,
            sampling=dataclasses.replace(params, sequence=sequence),
            exits=options,
            eos_token_ids=frozenset(engine.checkpoint.eos_token_ids),
        )
        for (prompt, source), params, options in zip(
            (prompt_and_source(encode(engine, prompt), start) for prompt in prompts),
            _one_each(sampling, len(prompts)),
            _one_each(exits or ExitOptions(engine.config.default_kv_policy), len(prompts)),
            strict=True,
        )
        for sequence in range(n)
    ]
    for index, request in enumerate(requests[::n]):
        try:
            engine.check(request)
            engine.prepare(request)
        except OfframpError as fault:
            raise OfframpError(f"prompt {index}: {fault}" if len(prompts) > 1 else str(fault)) from None
    completions = [Completion() for _ in requests]
    indices = {request.request_id: index for index, request in enumerate(requests)}
    waiting = iter(requests)
    try:
        while True:
            room = max(0, engine.config.max_waiting - engine.num_waiting)  # who has lost its blocks waits as well
            for request in itertools.islice(waiting, room):
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
    """Token ids of a prompt; see `encode_text`."""
    return encode_text(engine.tokenizer, prompt) if isinstance(prompt, str) else list(prompt)


def _one_each(value: _T | Sequence[_T], count: int) -> Sequence[_T]:
    return value if isinstance(value, Sequence) else [value] * count
