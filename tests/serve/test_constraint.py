from __future__ import annotations

import json
import random
import re
import threading
from typing import Any

import llguidance.hf
import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLParserLimits
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from helpers.requests import make_request
from helpers.tokenizers import byte_fallback, byte_level, ids_of
from offramp.common.errors import OfframpError
from offramp.serve.request.constraint import Constraint
from offramp.serve.request.iteration_result import SampledToken
from offramp.serve.request.request import Request
from offramp.serve.request.sampling_params import SamplingParams
from offramp.serve.sampling.constraint import Constraints, ConstraintState
from offramp.serve.sampling.sampler import SamplingState, distribution, sample

TOKENIZERS = {"byte_level": byte_level(), "byte_fallback": byte_fallback()}
COMPILED = {name: Constraints(tokenizer, len(tokenizer)) for name, tokenizer in TOKENIZERS.items()}

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "日本", None]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}

# The library finds out only when the first token is said.
TOO_LARGE = "(a{1000}){1000}"


def regex(pattern: str) -> Constraint:
    return Constraint("regex", pattern)


def begin(
    constraint: Constraint, tokenizer: str = "byte_level", request_id: str = "a", **sampling: Any
) -> tuple[Request, SamplingState]:
    end = {"byte_level": 0, "byte_fallback": 1}[tokenizer]
    request = make_request(request_id, (5,), (end,), constraint=constraint, **sampling)
    return request, SamplingState(request, COMPILED[tokenizer].start(request))


def answer(
    constraint: Constraint, seed: int, tokenizer: str = "byte_level", end: float = 2.0, max_tokens: int = 150
) -> tuple[str, bool]:
    """The answer of a model that says anything, and whether it ended by itself."""
    request, state = begin(constraint, tokenizer, seed=seed)
    source = torch.Generator().manual_seed(seed)
    while len(request.output_token_ids) < max_tokens:
        logits = torch.randn(1, len(TOKENIZERS[tokenizer]), generator=source)
        logits[0, list(request.stop_ids)] += end
        (one,) = sample(logits, [state])
        assert one is not None, state.fault
        if one.token_id in request.stop_ids:
            return decode(TOKENIZERS[tokenizer], request.output_token_ids), True
        request.output_token_ids.append(one.token_id)
    return decode(TOKENIZERS[tokenizer], request.output_token_ids), False


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> str:
    text = tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize(
    "pattern", [r"(yes|no)", r"[0-9]{4}-[01][0-9]", r"the( [a-f]{1,3}){1,4}!", r"日本?|é*x", r"[^a-z]{3,5}", r"a(bc)*"]
)
def test_every_answer_matches_the_regex(pattern: str, tokenizer: str) -> None:
    answers = [answer(regex(pattern), seed, tokenizer) for seed in range(12)]
    assert sum(is_whole for _, is_whole in answers) >= 10
    for text, is_whole in answers:
        assert not is_whole or re.fullmatch(pattern, text), text
    assert len(set(answers)) > 1


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_every_answer_follows_the_schema(tokenizer: str) -> None:
    whole = 0
    for seed in range(12):
        text, is_whole = answer(Constraint("json_schema", json.dumps(PERSON)), seed, tokenizer)
        if not is_whole:
            continue
        whole += 1
        value = json.loads(text)
        assert set(value) <= {"name", "age", "tags"}
        assert isinstance(value["name"], str)
        assert len(value["name"]) <= 8
        assert type(value["age"]) is int
        assert 0 <= value["age"] <= 120
        assert all(tag in ("a", "日本", None) for tag in value.get("tags", []))
    assert whole >= 6


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_any_json_is_an_object(tokenizer: str) -> None:
    def with_ends(seed: int) -> tuple[str, bool]:
        request, state = begin(Constraint("json"), tokenizer, seed=seed)
        vocabulary = TOKENIZERS[tokenizer].get_vocab()
        favoured = [*request.stop_ids, *(vocabulary[letter] for letter in '"}]' if letter in vocabulary)]
        source = torch.Generator().manual_seed(seed)
        for _ in range(200):
            logits = torch.randn(1, len(TOKENIZERS[tokenizer]), generator=source)
            logits[0, favoured] += 4
            (one,) = sample(logits, [state])
            assert one is not None, state.fault
            if one.token_id in request.stop_ids:
                return decode(TOKENIZERS[tokenizer], request.output_token_ids), True
            request.output_token_ids.append(one.token_id)
        return "", False

    answers = [with_ends(seed) for seed in range(8)]
    whole = [text for text, is_whole in answers if is_whole]
    assert len(whole) >= 4
    assert all(isinstance(json.loads(text), dict) for text in whole)
    assert any(json.loads(text) for text in whole)


def test_blanks_come_in_measure() -> None:
    request, state = begin(Constraint("json"), temperature=0)
    logits = torch.zeros(1, len(TOKENIZERS["byte_level"]))
    logits[0, ids_of(TOKENIZERS["byte_level"], "Ġ", "Ċ")] = 9.0  # a model that would go on with them for ever
    for _ in range(60):
        (one,) = sample(logits, [state])
        assert one is not None
        request.output_token_ids.append(one.token_id)
    text = decode(TOKENIZERS["byte_level"], request.output_token_ids)
    assert len(text.strip()) > 3


def test_an_end_is_possible_only_where_the_answer_is_whole() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    a, b, newline = ids_of(tokenizer, "a", "b", "Ċ")
    # Two ends of the model's, and a stop token that is text elsewhere.
    request = make_request(
        prompt=(5,), eos=(0, a + 20), constraint=regex("ab+\n?"), temperature=0, stop_token_ids=(newline, 10**6)
    )
    constraint = COMPILED["byte_level"].start(request)
    assert constraint is not None
    ends = {0, a + 20, newline}
    assert set(np.flatnonzero(constraint.allowed())) == {a}
    constraint.add(a)
    assert set(np.flatnonzero(constraint.allowed())) == {b}
    constraint.add(b)
    assert set(np.flatnonzero(constraint.allowed())) == ends | {b}
    assert constraint.fault is None


def test_logits_have_more_tokens_than_the_tokenizer_or_fewer() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    for size in (len(tokenizer) + 50, len(tokenizer) - 10):
        constraints = Constraints(tokenizer, size)
        request = make_request(eos=(0,), constraint=regex(r"[\s\S]*"), seed=0)
        state = SamplingState(request, constraints.start(request))
        logits = torch.zeros(1, size)
        logits[0, len(tokenizer) :] = 50.0  # what is there for the sake of a round number
        found = distribution(logits[0], state)
        assert found is not None
        assert len(found.token_ids) >= 190  # the bytes that UTF-8 begins with, and what is merged of them
        assert int(found.token_ids[-1]) < len(tokenizer)


def test_other_special_tokens_are_no_text() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level().backend_tokenizer, eos_token="<|end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|more|>"]})
    more = tokenizer.convert_tokens_to_ids("<|more|>")
    request = make_request(eos=(0,), constraint=regex(r"[\s\S]*"))
    constraint = Constraints(tokenizer, len(tokenizer)).start(request)
    assert constraint is not None
    assert not constraint.allowed()[more]
    assert constraint.allowed()[0]


def test_drafts_are_followed_and_taken_back() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    pattern = regex("(ab|ac+|the end)*")
    source = random.Random(0)
    request, state = begin(pattern, temperature=0)
    logits = torch.zeros(len(tokenizer))

    def candidates(index: int) -> set[int]:
        anew, fresh = begin(pattern, seed=0)
        anew.output_token_ids += [*request.output_token_ids, *(draft.token_id for draft in request.drafts)][:index]
        found, expected = fresh_ids(state, index), fresh_ids(fresh, index)
        assert found == expected
        return found

    def fresh_ids(one: SamplingState, index: int) -> set[int]:
        one.request.sampling = SamplingParams(constraint=pattern)
        found = distribution(logits, one, index)
        assert found is not None
        return set(found.token_ids.tolist())

    for _ in range(40):
        first = len(request.output_token_ids)
        request.drafts.clear()
        for _ in range(source.randrange(4)):
            token = source.choice(sorted(candidates(first + len(request.drafts)) - {0}))
            request.drafts.append(SampledToken(token, 1))
        for index in sorted(range(first, state.next_index + 1), key=lambda _: source.random()):
            candidates(index)
        num_kept = source.randint(0, len(request.drafts))
        request.output_token_ids += [draft.token_id for draft in request.drafts[:num_kept]]
    assert len(request.output_token_ids) > 20


def test_what_is_asked_for_after_a_draft_that_ends_the_answer_is_answered() -> None:
    (a,) = ids_of(TOKENIZERS["byte_level"], "a")
    request, state = begin(regex("a*"), temperature=0)
    request.drafts += [SampledToken(a, 1), SampledToken(0, 1)]
    logits = torch.zeros(len(TOKENIZERS["byte_level"]))
    assert distribution(logits, state, 2) is not None
    assert distribution(logits, state, 1) is not None
    request.drafts.pop()
    request.output_token_ids.append(a)
    request.drafts.clear()
    logits[a] = 1.0
    (one,) = sample(logits[None], [state])
    assert one is not None
    assert one.token_id == a


def test_a_row_without_a_constraint_is_not_touched() -> None:
    logits = torch.randn(2, len(TOKENIZERS["byte_level"]), generator=torch.Generator().manual_seed(0))
    _, bound = begin(regex("x+"), temperature=0)
    free = SamplingState(make_request("b", temperature=0))
    first, second = sample(logits, [bound, free])
    assert first is not None
    assert second is not None
    assert [first.token_id] == ids_of(TOKENIZERS["byte_level"], "x")
    assert second.token_id == int(logits[1].argmax())


def test_a_vocabulary_that_cannot_say_it_fails_with_the_reason() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    (z,) = ids_of(tokenizer, "z")
    size = z  # the model's vocabulary stops short of it
    request = make_request(eos=(0,), constraint=regex("z"), temperature=0)
    state = SamplingState(request, Constraints(tokenizer, size).start(request))
    assert sample(torch.zeros(1, size), [state]) == [None]
    assert state.fault is not None
    assert "no token of the vocabulary" in state.fault


def test_a_language_that_becomes_too_large_on_the_way_says_so() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    vocabulary = llguidance.hf.from_tokenizer(tokenizer, n_vocab=len(tokenizer))
    limits = LLParserLimits(step_lexer_fuel=200, verbose_errors=False)
    matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_regex(r"(\w+\s?){1,500}"), log_level=0, limits=limits)
    constraint = ConstraintState(matcher, vocabulary, len(tokenizer), frozenset({0}))
    allowed = constraint.allowed()
    for _ in range(50):
        if constraint.fault is not None:
            break
        constraint.add(int(np.flatnonzero(allowed)[-1]))
        allowed = constraint.allowed()
    assert constraint.fault is not None
    assert constraint.fault.startswith("the constraint cannot be followed any further: ")
    assert not allowed.any()


def test_a_language_that_becomes_too_large_in_taking_a_token_is_not_let_go() -> None:
    # The matcher fails while it consumes the token, and not in the mask that comes next.
    tokenizer = TOKENIZERS["byte_level"]
    vocabulary = llguidance.hf.from_tokenizer(tokenizer, n_vocab=len(tokenizer))
    grammar, limits = LLMatcher.grammar_from_regex(TOO_LARGE), LLParserLimits(verbose_errors=False)
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
    constraint = ConstraintState(matcher, vocabulary, len(tokenizer), frozenset({0}))
    constraint.add(int(np.flatnonzero(constraint.allowed())[-1]))
    assert not constraint.allowed().any()
    assert constraint.fault is not None
    assert constraint.fault.startswith("the constraint cannot be followed any further: ")


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        (regex("["), "the regex cannot be followed: unclosed character class."),
        (regex("a(?=b)"), "look-around"),
        (regex(r"a[^\s\S]"), "the regex cannot be followed: it leaves no text that could be said."),
        (regex(TOO_LARGE), "the regex cannot be followed: too many expressions constructed."),
        (Constraint("json_schema", "{"), "json schema cannot be"),
        (Constraint("json_schema", "[]"), "a JSON schema is an object"),
        (Constraint("json_schema", "true"), "a JSON schema is an object"),
        (Constraint("json_schema", '{"type": "text"}'), "json schema cannot be followed: Invalid type: text."),
        (Constraint("json_schema", '{"$ref": "http://localhost/x"}'), "http://localhost/x"),
        (Constraint("json_schema", '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (Constraint("json_schema", '{"a":' * 3000 + "1" + "}" * 3000), "recursion"),
    ],
)
def test_a_language_that_is_none_is_refused_in_one_sentence(constraint: Constraint, words: str) -> None:
    with pytest.raises(OfframpError, match=re.escape(words)) as caught:
        begin(constraint)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_constraint_needs_a_tokenizer_and_an_end() -> None:
    request = make_request(eos=(0,), constraint=regex("a"))
    with pytest.raises(OfframpError, match="needs a tokenizer"):
        Constraints(None, 300).start(request)
    with pytest.raises(OfframpError, match="token that ends the answer"):
        COMPILED["byte_level"].start(make_request(constraint=regex("a")))
    assert Constraints(None, 300).start(make_request()) is None


def test_a_language_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Constraint] = []
    compile_one = Constraints._compile
    monkeypatch.setattr(
        Constraints, "_compile", lambda self, constraint: compiled.append(constraint) or compile_one(self, constraint)
    )
    constraints = Constraints(TOKENIZERS["byte_level"], len(TOKENIZERS["byte_level"]))
    request = make_request(eos=(0,), constraint=regex("a+"))
    constraints.prepare(request)
    one, other = constraints.start(request), constraints.start(request)
    assert one is not None
    assert other is not None
    (a,) = ids_of(TOKENIZERS["byte_level"], "a")
    one.add(a)
    assert set(np.flatnonzero(other.allowed())) == {a}  # each goes its own way
    bad = make_request(eos=(0,), constraint=regex("(a"))
    for ask in (constraints.prepare, constraints.start):
        with pytest.raises(OfframpError, match="unclosed group"):
            ask(bad)
    assert compiled == [regex("a+"), regex("(a")]


def test_what_is_known_of_a_language_is_told_without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    constraints = Constraints(TOKENIZERS["byte_level"], len(TOKENIZERS["byte_level"]))
    assert constraints.prepare_known(make_request(eos=(0,)))
    request, bad = make_request(eos=(0,), constraint=regex("a+")), make_request(eos=(0,), constraint=regex("(a"))
    constraints.prepare(make_request("b", eos=(0,), constraint=regex("a+")))
    with pytest.raises(OfframpError, match="unclosed group"):
        constraints.prepare(bad)
    monkeypatch.setattr(constraints, "_compile", lambda constraint: pytest.fail("compiled"))
    assert not constraints.prepare_known(make_request(eos=(0,), constraint=regex("b+")))
    with constraints._compiling:  # while another one is compiled
        assert constraints.prepare_known(request)
        with pytest.raises(OfframpError, match="unclosed group"):
            constraints.prepare_known(bad)
    constraints._known.clear()  # what comes in between may push it out
    assert constraints.start(request) is not None


def test_what_was_prepared_is_there_at_the_start_whatever_is_compiled_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    constraints = Constraints(TOKENIZERS["byte_level"], len(TOKENIZERS["byte_level"]))
    request = make_request(eos=(0,), constraint=regex("a+"))
    constraints.prepare(request)
    for number in range(20):
        constraints.prepare(make_request(eos=(0,), constraint=regex(f"b{{{number + 1}}}")))
    busy, go_on = threading.Event(), threading.Event()

    def slow(constraint: Constraint) -> None:
        busy.set()
        go_on.wait(5)
        raise OfframpError("too slow")

    monkeypatch.setattr(constraints, "_compile", slow)

    def prepare_another() -> None:
        with pytest.raises(OfframpError, match="too slow"):
            constraints.prepare(make_request(eos=(0,), constraint=regex("c")))

    other = threading.Thread(target=prepare_another)
    other.start()
    assert busy.wait(5)
    assert constraints.start(request) is not None  # does not wait, and compiles nothing
    go_on.set()
    other.join()
