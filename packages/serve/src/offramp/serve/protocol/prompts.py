"""From the words of a request to token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offramp.common.tokenizer import encode_text
from offramp.serve.protocol.errors import ApiError, bad_request
from offramp.serve.protocol.requests import ChatBody, CompletionBody, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_prompts(body: CompletionBody, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> list[list[int]]:
    """Token ids of every prompt: text as the tokenizer encodes plain text (its own rule for BOS, once), ids as given.

    Args:
        body: The request.
        tokenizer: The model's tokenizer.
        vocab_size: Number of rows of the model's embedding.

    Raises:
        ApiError: 400 for a prompt without tokens and for an id outside the vocabulary.
    """
    encoded: list[list[int]] = []
    for index, prompt in enumerate(body.prompt):
        ids = encode_text(tokenizer, prompt) if isinstance(prompt, str) else prompt
        where = "prompt" if len(body.prompt) == 1 else f"prompt[{index}]"
        if not ids:
            raise bad_request(f"Invalid value for '{where}': it has no tokens.", param=where)
        for token in ids:
            if not 0 <= token < vocab_size:
                raise bad_request(
                    f"Invalid value for '{where}': token id {token} is outside 0..{vocab_size - 1}.", param=where
                )
        encoded.append(ids)
    return encoded


def encode_chat(body: ChatBody, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a conversation.

    The template writes the model's special tokens itself, so its text is encoded without added ones: two BOS tokens
    are not what any model was trained on.

    Raises:
        ApiError: 400 without a template, and with the template's own message when it refuses the conversation.
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
    ids = encode_text(tokenizer, str(text), add_special_tokens=False)
    if not ids:
        raise _refused("The chat template made no tokens of these messages.")
    return ids


def _template_message(message: Message) -> dict[str, str]:
    # Templates know the older word only.
    role = "system" if message.role == "developer" else message.role
    named = {} if message.name is None else {"name": message.name}
    return {"role": role, "content": message.content, **named}


def _refused(message: str) -> ApiError:
    return bad_request(message, param="messages")
