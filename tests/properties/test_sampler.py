from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offramp.serve.request import SamplingParams
from offramp.serve.sampler import distribution, make_generator, sample

# Halves make ties common, which is where a choice of the k largest goes wrong.
logit_rows = st.lists(st.integers(-12, 12).map(lambda n: n / 2), min_size=1, max_size=100)
sampling = st.builds(
    SamplingParams,
    temperature=st.floats(0.05, 5),
    top_k=st.none() | st.integers(1, 100),
    top_p=st.floats(0.01, 1),
    seed=st.integers(0, 10),
)


@settings(max_examples=100, deadline=None)
@given(logit_rows, sampling)
def test_the_distribution_is_the_one_written_down_slowly(row: list[float], params: SamplingParams) -> None:
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))[: params.top_k]
    weights = [math.exp((row[token] - max(row)) / params.temperature) for token in order]
    shares = [weight / math.fsum(weights) for weight in weights]

    token_ids, p = distribution(torch.tensor(row), params)

    kept = token_ids.tolist()
    assert kept == sorted(order[: len(kept)])  # the most probable ones, lower ids first among equals
    expected = dict(zip(order, shares, strict=True))
    assert all(abs(value - expected[token]) < 1e-6 for token, value in zip(kept, p.tolist(), strict=True))
    # They reach top_p, and one fewer would not; a rounding apart where a sum meets top_p exactly.
    assert math.fsum(shares[: len(kept)]) > params.top_p - 1e-6
    assert math.fsum(shares[: len(kept) - 1]) < params.top_p + 1e-6


@settings(max_examples=50, deadline=None)
@given(logit_rows, sampling)
def test_only_tokens_of_the_distribution_are_drawn(row: list[float], params: SamplingParams) -> None:
    logits = torch.tensor([row])
    generator = make_generator(params)
    allowed = set(distribution(logits[0], params)[0].tolist())
    for _ in range(5):
        (one,) = sample(logits, [params], [generator])
        assert one is not None
        assert one.token_id in allowed
