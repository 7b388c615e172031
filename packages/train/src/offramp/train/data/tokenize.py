"""Rows -> examples: token ids and shifted labels, and a count of the rows that gave none.

Prompt and completion are tokenised apart and joined, so that the prompt's tokens in training are exactly the tokens
that the same prompt has when the model is served. What is trained on is decided by lengths, never by token values: the
padding token is the end-of-sequence token in many models.

For an encoder-decoder model the prompt is the source, and the completion the target.

Legend: T time (tokens of an example, or of its target), M source tokens.
"""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from offramp.common.errors import OfframpError
from offramp.train.data.batch import IGNORED_LABEL
from offramp.train.data.sources import SourceConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Reason = Literal["blank", "prompt_too_long", "nothing_to_train"]
REASONS: dict[Reason, str] = {
    "blank": "blank",
    "prompt_too_long": "with a prompt longer than there is room for",
    "nothing_to_train": "without a token to train on",
}


class Example(NamedTuple):
    """One trainable sequence of at most `max_length` tokens.

    Attributes:
        input_ids: [T] token ids.
        labels: [T] the token each position should predict (already shifted), or -100.
        source_ids: [M] what an encoder reads; empty for a decoder-only model.
        truncated: the source was longer.
    """

    input_ids: Sequence[int]
    labels: Sequence[int]
    source_ids: Sequence[int] = ()
    truncated: bool = False


Encoded = list[Example] | Reason


class SourceRule(NamedTuple):
    """How an encoder-decoder model is given its sources and targets.

    Attributes:
        max_length: longest source, in tokens.
        truncate: cut longer ones at the end, before their end-of-sequence token; otherwise such rows give no example.
        start_token: what the decoder reads first.
        max_given: longest source before it is cut; rows with longer ones give no example. None: there is no limit.
    """

    max_length: int
    truncate: bool
    start_token: int
    max_given: int | None = None


class RowEncoder:
    """Turns rows of one source into examples.

    Args:
        tokenizer: of the model that is trained.
        source: says which columns to read.
        max_length: longest example, in tokens. Longer texts are cut into several examples that together predict every
            token once; longer completions are cut at the end.
        source_rule: for an encoder-decoder model; `max_length` is that of targets then.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        source: SourceConfig,
        max_length: int,
        source_rule: SourceRule | None = None,
    ) -> None:
        if source_rule is not None and source.prompt is None:
            raise OfframpError(
                f"the source {source.name} gives no pairs, which an encoder-decoder model is trained on; set 'prompt' "
                "(what the encoder reads) and 'completion' (what the decoder writes) in it"
            )
        if source.append_eos and tokenizer.eos_token_id is None and source.messages is None:
            raise OfframpError(
                "the tokenizer has no end-of-sequence token to append; set append_eos: false in the source, or "
                "eos_token in tokenizer_config.json"
            )
        self.tokenizer = tokenizer
        self.source = source
        self.max_length = max_length
        self.source_rule = source_rule
        self._eos = [int(tokenizer.eos_token_id)] if source.append_eos and source.input_ids is None else []  # pyright: ignore[reportArgumentType]
        if source.messages is not None and not tokenizer.chat_template:
            raise OfframpError(
                "the source reads chat messages, but the tokenizer has no chat template; add chat_template.jinja to "
                "the checkpoint directory"
            )

    @property
    def fingerprint(self) -> str:
        """Equal for encoders that give equal examples; names a cache."""
        settings = {key: value for key, value in asdict(self.source).items() if key not in ("limit", "options")}
        parts = ["1", repr(sorted(settings.items())), str(self.max_length), str(self.tokenizer.chat_template)]
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        parts.append(backend.to_str() if backend is not None else repr(sorted(self.tokenizer.get_vocab().items())))
        parts.append(repr(sorted(self.tokenizer.special_tokens_map.items())))
        if self.source_rule is not None:
            parts.append(repr(self.source_rule))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]

    def prompt(self, row: Mapping[str, Any]) -> str | None:
        """The text that is given in a row of prompt and completion; None if it is blank, or the row is none."""
        return None if self.source.prompt is None else self._fill(self.source.prompt, row)

    def encode(self, row: Mapping[str, Any]) -> Encoded:
        """The examples of one row, or why there are none.

        Raises:
            OfframpError: the row lacks a column that the source names, or is not what the column should hold.
        """
        source = self.source
        if source.input_ids is not None:
            return self._encode_ids(row, source.input_ids)
        if source.messages is not None:
            return self._encode_messages(row, source.messages)
        if source.prompt is not None and source.completion is not None:
            return self._encode_pair(row, source.prompt, source.completion)
        assert source.reads_text is not None
        text = self._fill(source.reads_text, row)
        if text is None:
            return "blank"
        ids = self._strip_eos(self._tokenize(text, special=True)) + self._eos
        return self._cut(ids, ids)

    def _encode_pair(self, row: Mapping[str, Any], prompt_template: str, completion_template: str) -> Encoded:
        prompt, completion = self._fill(prompt_template, row), self._fill(completion_template, row)
        if prompt is None or completion is None:
            return "blank"
        if self.source_rule is not None:
            return self._source_and_target(prompt, completion, self.source_rule)
        given = self._strip_eos(self._tokenize(prompt, special=True))
        wanted = self._tokenize(completion, special=False) + self._eos
        if len(given) > self.max_length:
            return "prompt_too_long"
        ids = (given + wanted)[: self.max_length + 1]
        return _examples([_shift(ids, [IGNORED_LABEL] * len(given) + ids[len(given) :])])

    def _source_and_target(self, source: str, target: str, rule: SourceRule) -> Encoded:
        given = self._tokenize(source, special=True)
        truncated = len(given) > rule.max_length
        if (truncated and not rule.truncate) or (rule.max_given is not None and len(given) > rule.max_given):
            return "prompt_too_long"
        if truncated:
            last = given[-1:] if given[-1] == self.tokenizer.eos_token_id else []
            given = given[: rule.max_length - len(last)] + last
        wanted = (self._tokenize(target, special=False) + self._eos)[: self.max_length]
        if not wanted:
            return "nothing_to_train"
        return [Example([rule.start_token, *wanted[:-1]], wanted, given, truncated)]

    def _encode_ids(self, row: Mapping[str, Any], column: str) -> Encoded:
        ids = [int(token) for token in self._column(row, column) or ()]
        if not ids:
            return "blank"
        if self.source.labels is None:
            return self._cut(ids, ids)
        labels = [int(label) for label in self._column(row, self.source.labels) or ()]
        if len(labels) != len(ids):
            raise OfframpError(
                f"a row of {self.source.name} has {len(ids)} input_ids but {len(labels)} labels; labels are aligned "
                "with input_ids, not shifted"
            )
        return self._cut(ids, labels)

    def _encode_messages(self, row: Mapping[str, Any], column: str) -> Encoded:
        messages = self._column(row, column)
        if not messages or not any(message.get("role") == "assistant" for message in messages):
            return "blank" if not messages else "nothing_to_train"
        ids, trained = tokenize_chat(self.tokenizer, messages)
        if not any(trained[: self.max_length + 1]):
            return "prompt_too_long" if any(trained) else "nothing_to_train"
        ids = ids[: self.max_length + 1]
        return _examples([_shift(ids, [i if on else IGNORED_LABEL for i, on in zip(ids, trained, strict=False)])])

    def _cut(self, ids: list[int], labels: list[int]) -> Encoded:
        """Pieces of `max_length` inputs; neighbours share one token, so that each label appears exactly once."""
        pieces = [slice(i, i + self.max_length + 1) for i in range(0, max(len(ids) - 1, 1), self.max_length)]
        return _examples([_shift(ids[piece], labels[piece]) for piece in pieces])

    def _fill(self, template: str, row: Mapping[str, Any]) -> str | None:
        """The text of a column or format string; None if everything it takes from the row is blank."""
        if "{" not in template:
            value = self._column(row, template)
            text = "" if value is None else str(value)
            return text if text.strip() else None
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
        values = {name: "" if (value := self._column(row, name)) is None else value for name in names}
        if names and not any(str(value).strip() for value in values.values()):
            return None
        return string.Formatter().vformat(template, (), values)

    def _column(self, row: Mapping[str, Any], name: str) -> Any:
        if name not in row:
            raise OfframpError(
                f"the source {self.source.name} has no column {name!r}; its columns are {', '.join(map(repr, row))}"
            )
        return row[name]

    def _tokenize(self, text: str, *, special: bool) -> list[int]:
        # Long documents are cut by us; the tokenizer's warning about its model's context does not apply.
        return list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    def _strip_eos(self, ids: list[int]) -> list[int]:
        """Some tokenizers end every text themselves; the end belongs after the completion, and once."""
        return ids[:-1] if ids and ids[-1] == self.tokenizer.eos_token_id and len(ids) > 1 else ids


def tokenize_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]
) -> tuple[list[int], list[bool]]:
    """Tokens of a conversation, and for each whether an assistant turn says it.

    The template's own `{% generation %}` marks are used where it has them. Otherwise the text up to an assistant turn
    (with the generation prompt) and the text with it are rendered, and what the second adds is the turn, its end marker
    included.
    """
    turns = [dict(message) for message in messages]
    try:
        if re.search(r"\{%-?\s*generation\b", str(tokenizer.chat_template)):
            both: Any = tokenizer.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
            return list(both["input_ids"]), [bool(mask) for mask in both["assistant_masks"]]
        return _tokenize_by_difference(tokenizer, turns)
    except OfframpError:
        raise
    except Exception as fault:  # jinja raises its own family, and templates raise what they like
        raise OfframpError(f"the chat template does not accept a conversation of the source: {fault}") from fault


def _tokenize_by_difference(
    tokenizer: PreTrainedTokenizerBase, turns: list[dict[str, Any]]
) -> tuple[list[int], list[bool]]:
    text = str(tokenizer.apply_chat_template(turns, tokenize=False))
    spans: list[tuple[int, int]] = []
    for index, turn in enumerate(turns):
        if turn.get("role") != "assistant":
            continue
        before = str(tokenizer.apply_chat_template(turns[:index], tokenize=False, add_generation_prompt=True))
        after = str(tokenizer.apply_chat_template(turns[: index + 1], tokenize=False))
        if not after.startswith(before) or not text.startswith(after.rstrip()):
            raise OfframpError(
                "the chat template rewrites earlier turns, so assistant turns cannot be found in its text; put "
                "{% generation %} marks into the template"
            )
        # The line break after the end marker belongs to the next turn's header; generation has ended by then.
        spans.append((len(before), len(after.rstrip())))
    # Template output carries its own special tokens.
    encoded: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    trained = [any(start <= a and b <= end and a < b for start, end in spans) for a, b in encoded["offset_mapping"]]
    return list(encoded["input_ids"]), trained


def _shift(ids: list[int], labels: list[int]) -> Example:
    return Example(ids[:-1], labels[1:])


def _examples(candidates: Iterable[Example]) -> Encoded:
    examples = [example for example in candidates if any(label != IGNORED_LABEL for label in example.labels)]
    return examples or "nothing_to_train"


def encode_rows(encoder: RowEncoder, rows: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """A batched map for `datasets`: columns in, columns `input_ids`, `labels` and `skipped` out.

    For an encoder-decoder model there are `source_ids` and `truncated`, too.

    A row without examples gives one row with empty tokens and the reason in `skipped`, so that the counts survive in
    the cache together with the examples.
    """
    out: dict[str, list[Any]] = {"input_ids": [], "labels": [], "skipped": []}
    if encoder.source_rule is not None:
        out |= {"source_ids": [], "truncated": []}
    names = list(rows)
    for values in zip(*rows.values(), strict=True):
        for example, reason in _flat(encoder.encode(dict(zip(names, values, strict=True)))):
            out["input_ids"].append(example.input_ids)
            out["labels"].append(example.labels)
            out["skipped"].append(reason)
            if encoder.source_rule is not None:
                out["source_ids"].append(example.source_ids)
                out["truncated"].append(example.truncated)
    return out


def _flat(result: Encoded) -> Iterator[tuple[Example, str]]:
    if isinstance(result, str):
        yield Example([], []), result
    else:
        for example in result:
            yield example, ""


def describe_skipped(counts: Mapping[str, int], total: int, name: str) -> str:
    """A sentence that says how many rows of a source gave no example, and why; empty when all did."""
    parts = [f"{counts[reason]} {text}" for reason, text in REASONS.items() if counts.get(reason)]
    return f"{name}: skipped {sum(counts.values())} of {total} rows ({', '.join(parts)})" if parts else ""


def describe_truncated(count: int, total: int, rule: SourceRule, name: str) -> str:
    """A sentence that says how many sources were cut; empty when none was."""
    return f"{name}: cut {count} of {total} sources to {rule.max_length} tokens" if count else ""
