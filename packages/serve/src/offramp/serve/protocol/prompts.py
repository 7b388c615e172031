"""From the words of a request to token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from offramp.common.tokenizer import encode_text
from offramp.serve.protocol.card import ModelCard
from offramp.serve.protocol.errors import ApiError, bad_request, prompt_far_too_long
from offramp.serve.protocol.requests import ChatBody, CompletionBody, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHARACTERS_PER_TOKEN = 8
"""More than most texts have; how much of a long one is encoded before all of it is."""


def encode_prompts(body: CompletionBody, tokenizer: PreTrainedTokenizerBase, card: ModelCard) -> list[list[int]]:
    """Token ids of every prompt: text as the tokenizer encodes plain text (its own rule for BOS, once), ids as given.

    Args:
        body: The request.
        tokenizer: The model's tokenizer.
        card: The model and its limits.

    Returns:
        The token ids; where the prompt will be cut, more than are kept of it, but it need not be all.

    Raises:
        ApiError: 400 for a prompt without tokens, for an id outside the vocabulary, and for a text that is so much
            too long that nobody need know how long.
    """
    vocab_size, encoded = card.vocab_size, list[list[int]]()
    keeps: Literal["first", "last"] | None = None
    if body.truncate_prompt_tokens is not None:
        keeps = "last" if card.max_source_len is None else "first"
    for index, prompt in enumerate(body.prompt):
        where = "prompt" if len(body.prompt) == 1 else f"prompt[{index}]"
        ids = _encode(tokenizer, prompt, card.prompt_limit, where, keeps) if isinstance(prompt, str) else prompt
        if not ids:
            raise bad_request(f"Invalid value for '{where}': it has no tokens.", param=where)
        for token in ids:
            if not 0 <= token < vocab_size:
                raise bad_request(
                    f"Invalid value for '{where}': token id {token} is outside 0..{vocab_size - 1}.", param=where
                )
        encoded.append(ids)
    return encoded


def encode_chat(body: ChatBody, tokenizer: PreTrainedTokenizerBase, limit: int) -> list[int]:
    """Token ids of a conversation, which may have `limit` of them.

    The template writes the model's special tokens itself, so its text is encoded without added ones: two BOS tokens
    are not what any model was trained on.

    Raises:
        ApiError: 400 without a template, with the template's own message when it refuses the conversation, and for one
            that is far too long.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise _refused(
            "This model's tokenizer has no chat template: use /v1/completions, "
            "or put a chat_template.jinja into the checkpoint directory."
        )
    messages = [_template_message(message) for message in body.messages]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program: it may raise anything, and only this request is at fault
        raise _refused(f"The chat template refuses these messages: {error}") from error
    ids = _encode(tokenizer, str(text), limit, "messages", None, add_special_tokens=False)
    if not ids:
        raise _refused("The chat template made no tokens of these messages.")
    return ids


def _encode(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    limit: int,
    where: str,
    keeps: Literal["first", "last"] | None,
    *,
    add_special_tokens: bool = True,
) -> list[int]:
    """Token ids of a text, or of as much of it as is needed to keep its first or last ones.

    A body's four megabytes take a tokenizer seconds, and others wait meanwhile. So the beginning of a long text is
    encoded first: where that alone has twice as many tokens as there may be, the whole has too many, or there are
    enough to keep some: the other half has seen to it that these are the whole text's.
    """
    characters = CHARACTERS_PER_TOKEN * limit
    while characters < len(text):
        part = text[-characters:] if keeps == "last" else text[:characters]
        ids = encode_text(tokenizer, part, add_special_tokens=add_special_tokens)
        if len(ids) > 2 * limit:
            if keeps is not None:
                return ids
            raise prompt_far_too_long(len(ids), limit, where)
        characters *= 4  # long runs of one character are few tokens
    return encode_text(tokenizer, text, add_special_tokens=add_special_tokens)


def _template_message(message: Message) -> dict[str, str]:
    # Templates know the older word only.
    role = "system" if message.role == "developer" else message.role
    named = {} if message.name is None else {"name": message.name}
    return {"role": role, "content": message.content, **named}


def _refused(message: str) -> ApiError:
    return bad_request(message, param="messages")
