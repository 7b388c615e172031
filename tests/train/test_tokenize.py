from __future__ import annotations

import copy
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from helpers.tiny import BOS_ID, EOS_ID, tiny_tokenizer
from offramp.common.errors import OfframpError
from offramp.train.data.sources import SourceConfig
from offramp.train.data.tokenize import Example, RowEncoder, describe_skipped, encode_rows, tokenize_chat

GENERATION_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
)


def encoder(max_length: int = 64, **source: Any) -> RowEncoder:
    return RowEncoder(tiny_tokenizer(), SourceConfig(path="unused", **source), max_length)


def encode(row: dict[str, Any], max_length: int = 64, **source: Any) -> list[Example]:
    result = encoder(max_length, **source).encode(row)
    assert isinstance(result, list), result
    return result


def ids(text: str) -> list[int]:
    return tiny_tokenizer()(text)["input_ids"]


def trained(example: Example) -> str:
    return str(tiny_tokenizer().decode([label for label in example.labels if label != -100]))


def test_text_predicts_every_token_after_the_first_and_then_ends() -> None:
    (example,) = encode({"text": "hello world"})
    tokens = [*ids("hello world"), EOS_ID]
    assert example == Example(tokens[:-1], tokens[1:])
    (without,) = encode({"text": "hello world"}, append_eos=False)
    assert without.labels == tokens[1:-1]


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9, 50])
def test_long_text_is_cut_so_that_each_token_is_predicted_once(length: int) -> None:
    tokens = [*ids("the quick brown fox jumps over it"), EOS_ID]
    examples = encode({"text": "the quick brown fox jumps over it"}, max_length=length)
    assert [label for example in examples for label in example.labels] == tokens[1:]
    assert [token for example in examples for token in example.input_ids] == tokens[:-1]
    assert all(0 < len(example.input_ids) == len(example.labels) <= length for example in examples)


def test_prompt_is_masked_and_completion_ends() -> None:
    pair: dict[str, Any] = {"prompt": "{q}\nAnswer:", "completion": " {a}"}
    (example,) = encode({"q": "why", "a": "so"}, **pair)
    prompt = ids("why\nAnswer:")
    assert example.input_ids == [*prompt, *ids(" so")]
    assert example.labels == [-100] * (len(prompt) - 1) + [*ids(" so"), EOS_ID]


def test_column_names_and_escaped_braces() -> None:
    (plain,) = encode({"q": "a", "a": "b"}, prompt="q", completion="a")
    assert plain.input_ids == [*ids("a"), *ids("b")]
    (braces,) = encode({"q": "x"}, text="{{{q}}}", append_eos=False)
    assert braces.input_ids == ids("{x}")[:-1]


def test_prompt_longer_than_the_sequence_is_skipped_never_a_row_without_labels() -> None:
    pair: dict[str, Any] = {"prompt": "q", "completion": "a"}
    length = len(ids("a long prompt"))
    assert encoder(length - 1, **pair).encode({"q": "a long prompt", "a": "yes"}) == "prompt_too_long"
    (just,) = encode({"q": "a long prompt", "a": "yes"}, max_length=length, **pair)
    assert len(just.input_ids) == length
    assert [label for label in just.labels if label != -100] == ids("yes")[:1]


@pytest.mark.parametrize("blank", ["", "  \n\t", None])
def test_blank_rows_are_recognised(blank: str | None) -> None:
    assert encoder().encode({"text": blank}) == "blank"
    pair: dict[str, Any] = {"prompt": "Q: {q}\nA:", "completion": " {a}"}
    assert encoder(**pair).encode({"q": blank, "a": "yes"}) == "blank"
    assert encoder(**pair).encode({"q": "why", "a": blank}) == "blank"


def test_text_of_one_token_has_nothing_to_train() -> None:
    assert encoder(append_eos=False).encode({"text": "a"}) == "nothing_to_train"


def test_missing_column_is_named() -> None:
    with pytest.raises(OfframpError, match=r"no column 'q'; its columns are 'text', 'other'"):
        encoder(prompt="{q}", completion="text").encode({"text": "a", "other": "b"})


def test_given_labels_are_kept_and_shifted() -> None:
    row = {"input_ids": [7, 8, 9, 10], "labels": [-100, -100, 9, -100]}
    (example,) = encode(row, input_ids="input_ids", labels="labels")
    assert example == Example([7, 8, 9], [-100, 9, -100])
    (all_of_them,) = encode(row, input_ids="input_ids")
    assert all_of_them == Example([7, 8, 9], [8, 9, 10])
    with pytest.raises(OfframpError, match="4 input_ids but 1 labels"):
        encoder(input_ids="input_ids", labels="labels").encode({"input_ids": [1, 2, 3, 4], "labels": [1]})


def test_pad_and_eos_tokens_inside_a_text_are_trained_on() -> None:
    (example,) = encode({"input_ids": [EOS_ID, 8, EOS_ID, EOS_ID]}, input_ids="input_ids")
    assert example.labels == [8, EOS_ID, EOS_ID]


def test_a_tokenizer_that_adds_its_own_special_tokens_gives_one_bos_and_one_eos() -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A <|eos|>", special_tokens=[("<|bos|>", BOS_ID), ("<|eos|>", EOS_ID)]
    )
    pair = SourceConfig(path="unused", prompt="q", completion="a")
    result = RowEncoder(tokenizer, pair, 64).encode({"q": "why", "a": "so"})
    assert result == [Example([BOS_ID, *ids("why"), *ids("so")], [-100] * len(ids("why")) + [*ids("so"), EOS_ID])]
    result = RowEncoder(tokenizer, SourceConfig(path="unused"), 64).encode({"text": "why"})
    assert result == [Example([BOS_ID, *ids("why")], [*ids("why"), EOS_ID])]


CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "nothing more"},
]


def test_every_assistant_turn_is_trained_and_no_other() -> None:
    (example,) = encode({"chat": CHAT}, max_length=256, messages="chat")
    assert trained(example) == "hello<|im_end|>nothing more<|im_end|>"
    text = str(tiny_tokenizer().decode([*example.input_ids]))
    assert text.startswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello")


def test_generation_marks_of_a_template_give_the_same() -> None:
    marked = copy.deepcopy(tiny_tokenizer())
    marked.chat_template = GENERATION_TEMPLATE
    assert tokenize_chat(marked, CHAT) == tokenize_chat(tiny_tokenizer(), CHAT)


def test_conversations_without_a_trainable_turn() -> None:
    chat = encoder(max_length=256, messages="chat")
    assert chat.encode({"chat": CHAT[:1]}) == "nothing_to_train"
    assert chat.encode({"chat": []}) == "blank"
    assert encoder(max_length=5, messages="chat").encode({"chat": CHAT}) == "prompt_too_long"


def test_template_faults_are_the_users_to_mend() -> None:
    with pytest.raises(OfframpError, match="no chat template"):
        RowEncoder(tiny_tokenizer(chat_template=False), SourceConfig(path="unused", messages="chat"), 8)
    fussy = copy.deepcopy(tiny_tokenizer())
    fussy.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(OfframpError, match="roles must alternate"):
        tokenize_chat(fussy, CHAT)


def test_batches_carry_the_reason_why_a_row_gave_nothing() -> None:
    out = encode_rows(encoder(max_length=4, append_eos=False), {"text": ["abcdefgh", " ", "a"]})
    assert out["skipped"] == ["", "", "blank", "nothing_to_train"]
    assert out["input_ids"][2] == []
    message = describe_skipped({"blank": 1, "nothing_to_train": 2}, 9, "train")
    assert message == "train: skipped 3 of 9 rows (1 blank, 2 without a token to train on)"
    assert describe_skipped({}, 9, "train") == ""


def test_fingerprint_changes_with_everything_that_changes_examples() -> None:
    base = encoder(text="a").fingerprint
    assert base == encoder(text="a").fingerprint
    assert base != encoder(text="b").fingerprint
    assert base != encoder(text="a", max_length=65).fingerprint
    assert base != encoder(text="a", append_eos=False).fingerprint
    other = RowEncoder(tiny_tokenizer(chat_template=False), SourceConfig(path="unused", text="a"), 64)
    assert base != other.fingerprint
