"""Answers in a given language: JSON, a JSON schema, a regular expression. llguidance says which tokens may come next.

Every token is masked that cannot continue the text, and the tokens that end it wherever the text is not complete. So an
answer that ends by itself is in the language, and one that is cut off by `max_tokens` is the beginning of one that is.

Legend: V vocabulary.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING

import llguidance.hf
import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from offramp.common.errors import OfframpError
from offramp.serve.request.constraint import Constraint
from offramp.serve.request.request import Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NUM_KEPT = 16  # compiled grammars; many requests share a few, and a large one takes 200 MB
_NUM_PREPARED = 256  # requests whose grammar is kept for them alone until they start

_NUM_TRIED = 4
"""Tokens for which a language is followed before anybody is told that it can be: each is a step of the library's with a
limit of work of its own."""

_STOP_REASONS = ("NoExtension", "NoExtensionBias")  # in place of a message, for a language without any text

# How much work a grammar may be is the library's default; its messages are to be short.
_LIMITS = LLParserLimits(verbose_errors=False)

# JSON allows any amount of it, and a small model that may go on with blanks for ever sometimes does.
_JSON_BLANKS = r"\r?\n[ \t]{0,40}| "


class ConstraintState:
    """How far the answer of one request has come in its language.

    Attributes:
        fault: why no token may follow, one sentence; None if one may.
    """

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, vocab_size: int, stop_ids: frozenset[int]) -> None:
        """Begin with an empty answer; the matcher is this state's alone."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._stop_ids = stop_ids
        self._can_stop = [token for token in stop_ids if token < vocab_size]
        self._not_text = [token for token in (*tokenizer.eos_tokens, *self._can_stop) if token < vocab_size]
        self._bits = np.zeros(-(-tokenizer.vocab_size // 32), dtype=np.int32)
        self._num_beyond = 0  # of the newest tokens: stop tokens, and whatever comes after the language is left
        self.fault: str | None = None

    def add(self, token_id: int) -> None:
        """The answer grows by a token."""
        is_text = self._num_beyond == 0 and token_id not in self._stop_ids
        if not (is_text and self._matcher.try_consume_tokens([token_id]) == 1):
            self._num_beyond += 1

    def remove(self, token_id: int) -> None:
        """The answer loses its newest token."""
        if self._num_beyond:
            self._num_beyond -= 1
        else:
            self._matcher.rollback(1)

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Which tokens may come next, [V]; a new array."""
        self.fault = None
        allowed = np.zeros(self._vocab_size, dtype=bool)
        if self._num_beyond and not self._matcher.is_error():  # a token that is too much work is not taken either
            # Only after drafts that are judged together: what follows one that ends the answer, or that the full model
            # cannot agree with, is asked for and thrown away.
            allowed[:] = True
            return allowed
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if self._matcher.is_error():
            self.fault = f"the constraint cannot be followed any further: {_reason(self._matcher.get_error())}"
            return allowed
        found = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: len(allowed)]
        allowed[: len(found)] = found
        # The library knows one way to end; a request may have several, and stop tokens that are text elsewhere.
        allowed[self._not_text] = False
        if self._matcher.is_accepting():
            allowed[self._can_stop] = True
        if not allowed.any():
            self.fault = "no token of the vocabulary continues the answer within its constraint"
        return allowed


class Constraints:
    """Compiles languages for one tokenizer, one at a time: each may take seconds and hundreds of megabytes.

    Any thread may call. `start` only waits for a language to be compiled if nobody has called `prepare` before.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> None:
        """Nothing is done until the first request with a constraint, which then costs about a second more.

        Args:
            tokenizer: of the model; None refuses every constraint.
            vocab_size: V of the model's logits.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiling = threading.Lock()
        self._lookup = threading.Lock()
        self._known: OrderedDict[Constraint, LLMatcher | OfframpError] = OrderedDict()
        self._prepared: weakref.WeakKeyDictionary[Request, LLMatcher] = weakref.WeakKeyDictionary()

    def check(self, request: Request) -> None:
        """Raise `OfframpError` if a request's language needs what this model does not have; compiles nothing."""
        if request.sampling.constraint is None:
            return
        if self._tokenizer is None:
            raise OfframpError("a constraint needs a tokenizer, and this engine has none; leave it out.")
        if not any(token < self._vocab_size for token in request.stop_ids):
            raise OfframpError(
                "a constraint needs a token that ends the answer, and the model names none; give stop_token_ids."
            )

    def prepare(self, request: Request) -> None:
        """Compile a request's language, if it has one, so that `start` finds it; may take seconds.

        Raises:
            OfframpError: it cannot be compiled.
        """
        if request.sampling.constraint is not None:
            self._reserve(request, self._compiled(request.sampling.constraint))

    def prepare_known(self, request: Request) -> bool:
        """Do what `prepare` does, but never compile, nor wait for others that do; whether it is done.

        Raises:
            OfframpError: it is known that the language cannot be compiled.
        """
        constraint = request.sampling.constraint
        if constraint is None:
            return True
        found = self._find(constraint)
        if isinstance(found, OfframpError):
            raise OfframpError(str(found))
        return found is not None and self._reserve(request, found)

    def start(self, request: Request) -> ConstraintState | None:
        """The state of a new request; None if it may say anything.

        Raises:
            OfframpError: its language cannot be compiled, or needs what this model does not have.
        """
        self.check(request)
        constraint = request.sampling.constraint
        if constraint is None:
            return None
        with self._lookup:
            matcher = self._prepared.pop(request, None)
        if matcher is None:
            matcher = self._compiled(constraint)
        else:
            self._keep(constraint, matcher)  # others may come with the same
        return ConstraintState(matcher.deep_copy(), self._vocabulary, self._vocab_size, request.stop_ids)

    def _reserve(self, request: Request, matcher: LLMatcher) -> bool:
        """Keep a language for a request, whatever is compiled before it starts; whether there is room for that."""
        with self._lookup:
            if len(self._prepared) < _NUM_PREPARED:
                self._prepared[request] = matcher
            return request in self._prepared

    def _compiled(self, constraint: Constraint) -> LLMatcher:
        found = self._find(constraint)
        if found is None:
            with self._compiling:
                found = self._find(constraint)
                if found is None:
                    try:
                        found = self._compile(constraint)
                    except OfframpError as fault:
                        found = fault  # kept as well: finding it again may take as long
                    self._keep(constraint, found)
        if isinstance(found, OfframpError):
            raise OfframpError(str(found))
        return found

    def _find(self, constraint: Constraint) -> LLMatcher | OfframpError | None:
        with self._lookup:
            found = self._known.get(constraint)
            if found is not None:
                self._known.move_to_end(constraint)
            return found

    def _keep(self, constraint: Constraint, found: LLMatcher | OfframpError) -> None:
        with self._lookup:
            self._known[constraint] = found
            self._known.move_to_end(constraint)
            if len(self._known) > _NUM_KEPT:
                self._known.popitem(last=False)

    @functools.cached_property
    def _vocabulary(self) -> LLTokenizer:
        """What the library knows of the tokens: their bytes."""
        from transformers import PreTrainedTokenizerFast

        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            raise OfframpError("a constraint needs a fast tokenizer, and this model's is slow; add a tokenizer.json.")
        return llguidance.hf.from_tokenizer(self._tokenizer, n_vocab=max(self._vocab_size, len(self._tokenizer)))

    def _compile(self, constraint: Constraint) -> LLMatcher:
        tokenizer, name = self._vocabulary, constraint.kind.replace("_", " ")
        try:
            matcher = LLMatcher(tokenizer, _grammar(constraint), log_level=0, limits=_LIMITS)
        except ValueError as fault:
            raise OfframpError(f"the {name} cannot be read: {_reason(str(fault))}.") from None
        if not matcher.is_error():
            matcher.compute_bitmask()  # some are found too large only now
        fault = matcher.get_error() if matcher.is_error() else _fault_in_use(matcher, tokenizer)
        if fault:
            raise OfframpError(f"the {name} cannot be followed: {_reason(fault)}.")
        return matcher


def _fault_in_use(matcher: LLMatcher, tokenizer: LLTokenizer) -> str:
    """What the library says of too much work while one answer begins; empty if it says nothing.

    A sample: one of the many ways in, and a few tokens of it. A language may still be too much work on another way, or
    further on; the request then fails in that iteration (`ConstraintState.fault`).
    """
    trial = matcher.deep_copy()
    for _ in range(_NUM_TRIED):
        allowed = np.unpackbits(np.frombuffer(trial.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed[[token for token in tokenizer.eos_tokens if token < len(allowed)]] = 0
        tokens = np.flatnonzero(allowed)
        if not trial.is_error() and len(tokens):
            trial.try_consume_tokens([int(tokens[-1])])
        if trial.is_error():
            return "" if _words(trial.get_error()) in _STOP_REASONS else trial.get_error()
        if not len(tokens) or trial.is_stopped():
            break
    return ""


def _grammar(constraint: Constraint) -> str:
    if constraint.kind == "regex":
        return LLMatcher.grammar_from_regex(constraint.grammar)
    schema = constraint.grammar or '{"type": "object"}'
    if not schema.lstrip().startswith("{"):
        raise OfframpError(f"a JSON schema is an object, {{...}}, and this is {schema[:40]!r}.")
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _JSON_BLANKS})


def _reason(message: str) -> str:
    """What is to be said of a message."""
    words = _words(message)
    return "it leaves no text that could be said" if words in _STOP_REASONS else words


def _words(message: str) -> str:
    """Of a message that goes on for many lines its last `error: ...`, or else its beginning."""
    _, _, error = message.partition("<state>")[0].rpartition("error: ")
    return error.strip().partition("\n")[0].rstrip(". ")
