"""Whatever the language, answers that end by themselves are in it, and others are the beginning of one that is."""

from __future__ import annotations

import json
import re
from typing import Any

import regex
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from helpers.requests import make_request
from helpers.tokenizers import byte_level
from offramp.serve.request.constraint import Constraint
from offramp.serve.sampling.constraint import Constraints
from offramp.serve.sampling.sampler import SamplingState, sample

TOKENIZER = byte_level()
COMPILED = Constraints(TOKENIZER, len(TOKENIZER))
MAX_TOKENS = 60


def decode(token_ids: list[int]) -> str:
    text = TOKENIZER.decode(token_ids, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def answer(constraint: Constraint, seed: int) -> tuple[str, bool]:
    request = make_request(eos=(0,), constraint=constraint, seed=seed)
    state = SamplingState(request, COMPILED.start(request))
    source = torch.Generator().manual_seed(seed)
    for _ in range(MAX_TOKENS):
        logits = torch.randn(1, len(TOKENIZER), generator=source)
        logits[0, 0] += 3
        (one,) = sample(logits, [state])
        assert one is not None, state.fault
        if one.token_id == 0:
            return decode(request.output_token_ids), True
        request.output_token_ids.append(one.token_id)
    return decode(request.output_token_ids), False


patterns = st.recursive(
    st.sampled_from(["a", "the", "é", "日本", " ", "[a-f]", "[^x]", r"\.", "!!"]),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: "(" + "|".join(parts) + ")"),
        st.builds("({}){}".format, inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}"])),
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(patterns, st.integers(0, 1000))
def test_answers_match_any_regex(pattern: str, seed: int) -> None:
    text, is_whole = answer(Constraint("regex", pattern), seed)
    if is_whole:
        assert re.fullmatch(pattern, text)
    else:
        text = text.rstrip("\N{REPLACEMENT CHARACTER}")  # cut inside a character
        assert regex.fullmatch(pattern, text, partial=True)


values = st.sampled_from([0, 1, -3, "a", "é\n", "", None, True, [], [1]])
schemas = st.recursive(
    st.one_of(
        st.builds(
            lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
            st.integers(-9, 9),
            st.integers(0, 30),
        ),
        st.builds(lambda size: {"type": "string", "maxLength": size}, st.integers(0, 4)),
        st.just({"type": "boolean"}),
        st.lists(values, min_size=1, max_size=3).map(lambda options: {"enum": options}),
    ),
    lambda inner: st.one_of(
        st.builds(lambda items, size: {"type": "array", "items": items, "maxItems": size}, inner, st.integers(0, 2)),
        st.builds(
            lambda properties, count: {
                "type": "object",
                "properties": properties,
                "required": sorted(properties)[:count],
                "additionalProperties": False,
            },
            st.dictionaries(st.sampled_from(["a", "b", "long name", "é"]), inner, max_size=3),
            st.integers(0, 3),
        ),
    ),
    max_leaves=4,
)


def follows(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is what a schema of these few kinds says."""
    if "enum" in schema:
        return any(type(value) is type(option) and value == option for option in schema["enum"])
    kind = schema["type"]
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    if kind == "boolean":
        return isinstance(value, bool)
    if kind == "array":
        return (
            isinstance(value, list)
            and len(value) <= schema["maxItems"]
            and all(follows(item, schema["items"]) for item in value)
        )
    return (
        isinstance(value, dict)
        and set(schema["required"]) <= set(value) <= set(schema["properties"])
        and all(follows(item, schema["properties"][name]) for name, item in value.items())
    )


@settings(max_examples=60, deadline=None)
@given(schemas, st.integers(0, 1000))
def test_answers_follow_any_schema(schema: dict[str, Any], seed: int) -> None:
    text, is_whole = answer(Constraint("json_schema", json.dumps(schema)), seed)
    assume(is_whole)
    assert follows(json.loads(text), schema)
