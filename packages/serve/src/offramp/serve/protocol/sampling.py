"""From the sampling fields of a body to `SamplingParams`, with every refusal under the name of its field."""

from __future__ import annotations

from offramp.common.errors import OfframpError
from offramp.serve.protocol.card import ModelCard
from offramp.serve.protocol.errors import bad_request
from offramp.serve.protocol.requests import GenerationBody
from offramp.serve.request.sampling_params import SamplingParams


def sampling_params(
    body: GenerationBody, card: ModelCard, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """How the tokens of a request are chosen.

    Args:
        body: What was asked for.
        card: The model.
        max_tokens: Most tokens to generate.
        logprobs: Alternatives to report for each token; None reports nothing.
        prompt_logprobs: The same for the prompt.

    Raises:
        ApiError: 400 for a token outside the vocabulary, for fields that contradict each other, and for what the
            engine does not allow.
    """
    for token in body.logit_bias:
        if not 0 <= token < card.vocab_size:
            raise bad_request(
                f"Invalid value for 'logit_bias': token id {token} is outside 0..{card.vocab_size - 1}.",
                param="logit_bias",
            )
    if body.min_tokens > max_tokens:
        raise bad_request(
            f"Invalid value for 'min_tokens': {body.min_tokens} is more than the {max_tokens} tokens that are "
            "generated at most; lower it or raise max_tokens.",
            param="min_tokens",
        )
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=body.min_tokens,
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
            seed=body.seed,
            stop=tuple(body.stop),
            stop_token_ids=tuple(body.stop_token_ids),
            ignore_eos=body.ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias=tuple(body.logit_bias.items()),
            constraint=body.constraint,
        )
    except OfframpError as error:
        raise bad_request(str(error), param=field_at_fault(error, body)) from error


def field_at_fault(error: OfframpError, body: GenerationBody) -> str | None:
    """The field that an error of the engine's is about, if that is known.

    Its messages begin with the name of what is at fault; those about a language name the language.
    """
    name = str(error).partition(" ")[0]
    if name in type(body).model_fields:
        return name
    if name in type(body.offramp).model_fields:
        return f"offramp.{name}"
    if body.constraint is None:
        return None
    return "response_format" if body.structured_outputs is None else "structured_outputs"
