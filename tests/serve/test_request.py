from __future__ import annotations

import math

import pytest

from helpers.requests import make_request
from offramp.common.errors import OfframpError
from offramp.common.exits.policy import ExitPolicy
from offramp.serve.request import (
    ExitOptions,
    RequestOutput,
    RequestStatus,
    SamplingParams,
    TokenLogprobs,
    Usage,
)


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
        ({"logprobs": -1}, "logprobs -1"),
    ],
)
def test_sampling_params_are_checked(fields: dict[str, object], words: str) -> None:
    with pytest.raises(OfframpError, match=words):
        SamplingParams(**fields)  # pyright: ignore[reportArgumentType]


def test_exit_options() -> None:
    assert ExitOptions().enabled
    assert not ExitOptions(kv_policy="full").enabled
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


def test_all_stop_tokens_are_forbidden_until_min_tokens() -> None:
    request = make_request(eos=(1,), stop_token_ids=(5,), min_tokens=2)
    assert request.forbidden_ids == {1, 5}
    request.output_token_ids.append(9)
    assert request.forbidden_ids == {1, 5}
    request.output_token_ids.append(9)
    assert request.forbidden_ids == frozenset()


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
