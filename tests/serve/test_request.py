from __future__ import annotations

import math
from typing import Any

import pytest

from helpers.requests import make_request
from offramp.common.errors import OfframpError
from offramp.common.exits.policy import ExitPolicy
from offramp.serve.request.constraint import Constraint
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.iteration_result import TokenLogprobs
from offramp.serve.request.output import RequestOutput, Usage
from offramp.serve.request.request import RequestStatus
from offramp.serve.request.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 0}, "max_tokens 0 must be at least 1"),
        ({"max_tokens": 2.0}, "max_tokens 2.0 must be a whole number"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens 5 is above max_tokens 4"),
        ({"temperature": -0.1}, "temperature -0.1"),
        ({"temperature": math.nan}, "temperature nan"),
        ({"temperature": math.inf}, "temperature inf"),
        ({"temperature": True}, "temperature True must be a number"),
        ({"top_k": 0}, "top_k 0 must be at least 1"),
        ({"top_p": 0.0}, "top_p 0.0"),
        ({"top_p": 1.5}, "top_p 1.5"),
        ({"top_p": math.nan}, "top_p nan"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ("x", "")}, "empty string"),
        ({"stop": "xy"}, "must be a tuple of strings"),
        ({"stop_token_ids": (-1,)}, "stop token id -1"),
        ({"stop_token_ids": (2**63,)}, "stop token id 9223372036854775808 must be in 0..9223372036854775807"),
        ({"logprobs": -1}, "logprobs -1"),
        ({"prompt_logprobs": -1}, "prompt_logprobs -1 must be at least 0"),
        ({"max_tokens": -1, "prompt_logprobs": 0}, "max_tokens -1 must be at least 0"),
        ({"min_p": 1.1}, "min_p 1.1 must be in 0..1"),
        ({"min_p": math.nan}, "min_p nan"),
        ({"min_p": None}, "min_p None must be a number"),
        ({"repetition_penalty": 0}, "repetition_penalty 0 must be in 0.01..100"),
        ({"repetition_penalty": math.inf}, "repetition_penalty inf"),
        ({"presence_penalty": 2.1}, "presence_penalty 2.1 must be in -2..2"),
        ({"frequency_penalty": -3}, "frequency_penalty -3 must be in -2..2"),
        ({"frequency_penalty": 10**400}, r"frequency_penalty \(a number of about 401 digits\) is too large"),
        ({"max_tokens": -(10**5000)}, r"max_tokens \(a number of about 5001 digits\) must be at least 1"),
        ({"seed": 10**5000}, r"seed \(a number of about 5001 digits\) must be in"),
        ({"logit_bias": {1: 2.0}}, "logit_bias .* must be a tuple of pairs"),
        ({"logit_bias": ((1, 2.0, 3.0),)}, "logit_bias .* must be a tuple of pairs"),
        ({"logit_bias": ((-1, 2.0),)}, "logit_bias of token -1 must be at least 0"),
        ({"logit_bias": ((5, 100.5),)}, "logit_bias of token 5 is 100.5; it must be in -100..100"),
        ({"logit_bias": ((5, math.nan),)}, "logit_bias of token 5 is nan"),
        ({"logit_bias": ((5, "x"),)}, "logit_bias of token 5 'x' must be a number"),
        ({"logit_bias": ((5, 1), (5, 2))}, "logit_bias names token 5 twice"),
        ({"sequence": -1}, "sequence -1"),
        ({"constraint": "json"}, "must be a Constraint"),
        ({"constraint": Constraint("json"), "min_tokens": 1}, "min_tokens 1 cannot be kept under a constraint"),
        ({"constraint": Constraint("json"), "ignore_eos": True}, "ignore_eos leaves a text under a constraint"),
    ],
)
def test_sampling_params_are_checked(fields: dict[str, object], words: str) -> None:
    with pytest.raises(OfframpError, match=words):
        SamplingParams(**fields)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (("xml",), "constraint 'xml' is unknown; choose one of json, json_schema, regex"),
        (("json", "{}"), "takes no grammar"),
        (("regex",), "constraint 'regex' has an empty grammar"),
        (("json_schema", {}), "is no text"),
    ],
)
def test_constraints_are_checked(fields: tuple[Any, ...], words: str) -> None:
    with pytest.raises(OfframpError, match=words):
        Constraint(*fields)


def test_a_vocabulary_must_have_the_biased_tokens() -> None:
    params = SamplingParams(logit_bias=((9, 1.0),), stop_token_ids=(1000,))
    params.check_vocabulary(10)
    with pytest.raises(OfframpError, match="logit_bias names token 9, outside the vocabulary of 9"):
        params.check_vocabulary(9)


def test_exit_options() -> None:
    with pytest.raises(OfframpError, match="choose one of full, fill"):
        ExitOptions(kv_policy="none")  # pyright: ignore[reportArgumentType]
    with pytest.raises(OfframpError, match="takes no exit policy"):
        ExitOptions(kv_policy="full", policy=ExitPolicy())


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(OfframpError, match="no token"):
        make_request(prompt=())


def test_every_listed_end_of_sequence_token_stops() -> None:
    request = make_request(eos=(128001, 128009), stop_token_ids=(5,))
    assert request.stop_ids == {128001, 128009, 5}


def test_ignore_eos_keeps_the_users_stop_tokens() -> None:
    assert make_request(eos=(1, 2), stop_token_ids=(2, 5), ignore_eos=True).stop_ids == {2, 5}


def test_a_request_may_stop_after_min_tokens() -> None:
    request = make_request(min_tokens=2)
    assert not request.may_stop
    request.output_token_ids.append(9)
    assert not request.may_stop
    request.output_token_ids.append(9)
    assert request.may_stop


def test_tokens_are_prompt_and_output_as_one_sequence() -> None:
    request = make_request(prompt=(10, 11, 12))
    request.output_token_ids.extend([20, 21])
    whole = [10, 11, 12, 20, 21]
    for start in range(6):
        for stop in range(start, 6):
            assert request.tokens(start, stop) == whole[start:stop]


def test_output_reports_what_is_new() -> None:
    request = make_request(prompt=3, logprobs=0)
    request.output_token_ids.extend([20, 21])
    request.exit_layers.extend([2, 6])
    request.logprobs.extend([TokenLogprobs(20, -0.5), TokenLogprobs(21, -0.25)])
    request.status = RequestStatus.FINISHED_LENGTH
    assert RequestOutput.of(request, first_token=1, text="x") == RequestOutput(
        "a", (21,), (6,), (TokenLogprobs(21, -0.25),), "x", "length", Usage(3, 2)
    )


def test_statuses_and_reasons() -> None:
    request = make_request()
    reasons = {}
    for status in RequestStatus:
        request.status = status
        assert status.is_finished == (request.finish_reason is not None)
        reasons[status.name] = request.finish_reason
    assert reasons == {
        "WAITING": None,
        "RUNNING": None,
        "FINISHED_STOP": "stop",
        "FINISHED_LENGTH": "length",
        "CANCELLED": "cancelled",
        "FAILED": "error",
    }


def test_a_grammar_that_would_take_seconds_to_compile_is_refused() -> None:
    with pytest.raises(OfframpError, match="has 65537 characters, more than 65536; shorten it"):
        Constraint("regex", "a" * 65_537)
