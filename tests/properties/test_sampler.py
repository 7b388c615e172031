from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.requests import make_request
from offramp.serve.request.iteration_result import SampledToken
from offramp.serve.request.sampling_params import SamplingParams
from offramp.serve.sampling.sampler import SamplingState, _softened, distribution_of, process, sample

# Halves make ties common, which is where a choice of the k largest goes wrong.
logit_rows = st.lists(st.integers(-12, 12).map(lambda n: n / 2), min_size=1, max_size=100)
sampling = st.builds(
    SamplingParams,
    temperature=st.floats(0.05, 5),
    top_k=st.none() | st.integers(1, 100),
    top_p=st.floats(0.01, 1),
    min_p=st.just(0.0) | st.floats(0, 1),
    seed=st.integers(0, 10),
)


@settings(max_examples=100, deadline=None)
@given(logit_rows, sampling)
def test_the_distribution_is_the_one_written_down_slowly(row: list[float], params: SamplingParams) -> None:
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))[: params.top_k]
    weights = [math.exp((row[token] - max(row)) / params.temperature) for token in order]
    shares = [weight / math.fsum(weights) for weight in weights]

    found = distribution_of(torch.tensor(row), params)

    kept = found.token_ids.tolist()
    assert kept == sorted(order[: len(kept)])  # the most probable ones, lower ids first among equals
    expected = dict(zip(order, shares, strict=True))
    total = math.fsum(shares[: len(kept)])
    for token, value in zip(kept, found.probabilities.tolist(), strict=True):
        assert abs(value - expected[token] / total) < 1e-6
    # They are probable enough; and they reach top_p, or the next is not probable enough. A rounding apart.
    assert shares[len(kept) - 1] >= params.min_p * shares[0] - 1e-6
    if len(kept) < len(order):
        assert total > params.top_p - 1e-6 or shares[len(kept)] < params.min_p * shares[0] + 1e-6
    assert math.fsum(shares[: len(kept) - 1]) < params.top_p + 1e-6


@settings(max_examples=50, deadline=None)
@given(logit_rows, sampling)
def test_only_tokens_of_the_distribution_are_drawn(row: list[float], params: SamplingParams) -> None:
    logits = torch.tensor([row])
    state = SamplingState(make_request())
    state.request.sampling = params
    allowed = set(distribution_of(logits[0], params).token_ids.tolist())
    for _ in range(5):
        (one,) = sample(logits, [state])
        assert one is not None
        assert one.token_id in allowed
        state.request.output_token_ids.append(one.token_id)


@settings(max_examples=50, deadline=None)
@given(st.lists(sampling, min_size=2, max_size=12), st.sampled_from([33, 64, 300, 515]), st.integers(0, 99))
def test_a_row_is_bitwise_the_same_alone_and_in_any_batch(params: list[SamplingParams], size: int, seed: int) -> None:
    logits = torch.randn(len(params), size, generator=torch.Generator().manual_seed(seed)) * 3
    states = [SamplingState(make_request()) for _ in params]
    for state, one in zip(states, params, strict=True):
        state.request.sampling = replace(one, logprobs=3)
        state.seed = 1
    together = sample(logits, states)
    for row, state in enumerate(states):
        assert sample(logits[row : row + 1], [state]) == [together[row]]
    same = [replace(params[0], logprobs=None)] * len(params)  # these are computed together
    softened = _softened(logits, same)[1]
    for row in range(len(params)):
        assert torch.equal(softened[row], _softened(logits[row : row + 1], same[:1])[1][0])


tokens = st.integers(0, 7)
changes = st.builds(
    dict,
    repetition_penalty=st.sampled_from([1.0, 1.5, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -1.0]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, 0.5, 3.0]), max_size=3).map(
        lambda bias: tuple(bias.items())
    ),
    min_tokens=st.integers(0, 4),
    stop_token_ids=st.lists(tokens, max_size=2).map(tuple),
)


def naive(row: list[float], params: SamplingParams, prompt: list[int], said: list[int]) -> list[float]:
    """The formulas, counting everything anew."""
    result = []
    for token, value in enumerate(row):
        if token in prompt or token in said:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.presence_penalty * (token in said) + params.frequency_penalty * said.count(token)
        value += dict(params.logit_bias).get(token, 0.0)
        is_early = len(said) < params.min_tokens and token in params.stop_token_ids
        result.append(-math.inf if is_early else value)
    return result


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_processed_logits_are_the_naive_formulas_for_whatever_was_said(data: st.DataObject) -> None:
    """Requests whose outputs grow and whose drafts come and go; rows are asked for in any order of their tokens."""
    states = []
    for number in range(3):
        prompt = tuple(data.draw(st.lists(tokens, min_size=1, max_size=5)))
        states.append(SamplingState(make_request(str(number), prompt, **data.draw(changes))))
    for _ in range(4):
        for state in states:
            request = state.request
            request.output_token_ids += data.draw(st.lists(tokens, max_size=2))
            request.drafts[:] = [SampledToken(token, 1) for token in data.draw(st.lists(tokens, max_size=3))]
        rows = []
        for state in data.draw(st.permutations(states)):
            first = len(state.request.output_token_ids)
            rows += [(state, index) for index in data.draw(st.permutations(range(first, state.next_index + 1)))]
        source = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
        logits = torch.randint(-3, 4, (len(rows), 8), generator=source).float()
        before = logits.clone()
        found = process(logits, rows)
        assert torch.equal(logits, before)
        for row, (state, index) in enumerate(rows):
            request = state.request
            said = [*request.output_token_ids, *(draft.token_id for draft in request.drafts)][:index]
            expected = naive(before[row].tolist(), request.sampling, list(request.prompt_token_ids), said)
            assert torch.allclose(found[row], torch.tensor(expected), atol=1e-5)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(changes, st.lists(tokens, max_size=3)), min_size=1, max_size=5), st.data())
def test_a_row_is_not_touched_by_its_neighbours(
    asked: list[tuple[dict[str, Any], list[int]]], data: st.DataObject
) -> None:
    plain = data.draw(st.integers(0, len(asked)))
    rows = []
    for number, (fields, said) in enumerate(asked):
        state = SamplingState(make_request(str(number), (1, 2), **fields))
        state.request.output_token_ids += said
        rows.append((state, len(said)))
    rows.insert(plain, (SamplingState(make_request("plain")), 0))
    logits = torch.randn(len(rows), 8, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    found = process(logits, rows)
    assert torch.equal(found[plain], logits[plain])
    for row, pair in enumerate(rows):
        assert torch.equal(found[row], process(logits[row : row + 1], [pair])[0])
