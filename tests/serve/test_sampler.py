from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from offramp.serve.request import SamplingParams
from offramp.serve.sampler import Sample, distribution, draw, make_generator, sample

GREEDY = SamplingParams(temperature=0)


def tokens(samples: list[Sample | None]) -> list[int | None]:
    return [None if one is None else one.token_id for one in samples]


def sequence(logits: Tensor, params: SamplingParams, steps: int = 20) -> list[int | None]:
    """Tokens of one request that sees the same logits [1, V] at every step."""
    generator = make_generator(params)
    return [token for _ in range(steps) for token in tokens(sample(logits, [params], [generator]))]


@pytest.fixture
def logits() -> Tensor:
    return torch.randn(8, 1000, generator=torch.Generator().manual_seed(0)) * 3


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    logits = torch.zeros(3, 300)
    logits[0, [7, 200]] = 1.0
    logits[1, [299, 5, 6]] = 2.0
    assert tokens(sample(logits, [GREEDY] * 3, [None] * 3)) == [7, 5, 0]
    assert tokens(sample(logits.bfloat16(), [GREEDY] * 3, [None] * 3)) == [7, 5, 0]


def test_a_row_is_chosen_the_same_alone_and_in_any_batch(logits: Tensor) -> None:
    params = [
        SamplingParams(temperature=0, logprobs=2),
        SamplingParams(seed=1, logprobs=3),
        SamplingParams(seed=2, top_k=5),
        SamplingParams(seed=3, top_p=0.7),
        SamplingParams(seed=4, temperature=0.5, top_k=50, top_p=0.9),
        SamplingParams(temperature=2.0, seed=5),
        SamplingParams(seed=1),
        SamplingParams(temperature=0),
    ]
    alone = []
    for row, one in enumerate(params):
        generator = make_generator(one)
        alone.append([sample(logits[row : row + 1], [one], [generator])[0] for _ in range(10)])
    order = [5, 2, 7, 0, 1, 6, 3, 4]
    generators = {row: make_generator(params[row]) for row in order}
    for step in range(10):
        rows = [row for row in order if (row + step) % 3]  # rows come and go
        together = sample(logits[rows], [params[row] for row in rows], [generators[row] for row in rows])
        for row, one in zip(rows, together, strict=True):
            assert one == alone[row].pop(0)


def test_seeds_and_generators() -> None:
    flat = torch.zeros(1, 1000)
    first = sequence(flat, SamplingParams(seed=11))
    assert len(set(first)) > 10  # the state moves on within a request
    assert sequence(flat, SamplingParams(seed=11)) == first  # and starts anew with the next
    assert sequence(flat, SamplingParams(seed=12)) != first
    torch.manual_seed(0)
    unseeded = sequence(flat, SamplingParams())
    torch.manual_seed(0)
    assert sequence(flat, SamplingParams()) != unseeded
    assert make_generator(GREEDY) is None
    assert make_generator(SamplingParams(seed=-1)) is not None


def test_draws_follow_the_distribution() -> None:
    p = torch.tensor([0.1, 0.0, 0.4, 0.0, 0.3, 0.2, 0.0], dtype=torch.float64)
    generator = make_generator(SamplingParams(seed=0))
    assert generator is not None
    n = 5_000
    counts = torch.bincount(torch.stack([draw(p, generator) for _ in range(n)]), minlength=len(p))
    assert counts[p == 0].sum() == 0
    # Five standard deviations of a binomial count: a correct draw fails once in a million, a biased one always.
    assert ((counts - n * p).abs() <= 5 * (n * p * (1 - p)).sqrt()).all()


@pytest.mark.parametrize("scale", [1.0, 0.7, 1 / 3, 1e-30, 1 + 2**-23])
def test_the_ends_of_the_generators_range_draw_what_can_be_drawn(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    generator = make_generator(SamplingParams(seed=0))
    assert generator is not None
    p = scale * torch.tensor([0.0, 0.5, 0.5, 0.0])
    for u, expected in ((1 - 2**-53, 2), (0.0, 1)):
        monkeypatch.setattr(torch, "rand", lambda *_, u=u, **__: torch.tensor(u, dtype=torch.float64))
        assert int(draw(p, generator)) == expected


def test_top_k_keeps_k_even_among_ties() -> None:
    token_ids, p = distribution(torch.tensor([1.0, 3.0, 3.0, 0.0, 3.0, 3.0]), SamplingParams(top_k=3))
    assert token_ids.tolist() == [1, 2, 4]
    assert p.tolist() == pytest.approx([1 / 3] * 3)
    assert distribution(torch.zeros(4), SamplingParams(top_k=9))[0].tolist() == [0, 1, 2, 3]


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    for top_p, kept in ((0.05, [1]), (0.39, [1]), (0.41, [1, 3]), (0.71, [1, 2, 3]), (0.95, [0, 1, 2, 3])):
        assert distribution(logits, SamplingParams(top_p=top_p))[0].tolist() == kept
    assert distribution(torch.zeros(4), SamplingParams(top_p=0.5))[0].tolist() == [0, 1]
    # After top-k: of 4/7 and 3/7, the first reaches one half alone.
    assert distribution(logits, SamplingParams(top_k=2, top_p=0.5))[0].tolist() == [1]


def test_top_p_on_a_flat_distribution_over_many_tokens() -> None:
    token_ids, p = distribution(torch.zeros(20_000), SamplingParams(top_p=0.89999))
    assert token_ids.tolist() == list(range(18_000))
    assert float(p.sum()) == pytest.approx(0.9, abs=1e-4)


def test_extreme_temperatures_and_logits(logits: Tensor) -> None:
    best = logits.argmax(dim=-1).tolist()
    cold = SamplingParams(temperature=1e-300, seed=0)
    assert tokens(sample(logits * 1e30, [cold] * 8, [make_generator(cold)] * 8)) == best
    token_ids, p = distribution(logits[0], SamplingParams(temperature=1e30))
    assert p.tolist() == pytest.approx([1 / len(token_ids)] * len(token_ids))


def test_forbidden_tokens_are_never_chosen(logits: Tensor) -> None:
    best = logits.argmax(dim=-1)
    ask = SamplingParams(temperature=0, logprobs=1)
    forbidden = [{int(best[0]), 10**6}, set()]
    first, second = sample(logits[:2], [ask, ask], [None, None], forbidden)
    assert first is not None
    assert second is not None
    assert (first.token_id, second.token_id) == (int(logits[0].topk(2).indices[1]), int(best[1]))
    assert first.logprobs is not None
    assert first.logprobs.top[0][0] == int(best[0])  # log-probabilities are those of the raw logits
    drawn = SamplingParams(seed=0)
    flat = torch.zeros(1, 3)
    generator = make_generator(drawn)
    seen = {token for _ in range(100) for token in tokens(sample(flat, [drawn], [generator], [{0, 2}]))}
    assert seen == {1}
    assert sample(flat, [GREEDY], [None], [{0, 1, 2}]) == [None]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_is_not_finite_says_nothing_and_harms_nobody(logits: Tensor, value: float) -> None:
    params = [SamplingParams(seed=row, logprobs=1) if row % 2 else GREEDY for row in range(8)]
    expected = sample(logits, params, [make_generator(one) for one in params])
    logits[3, 500] = value
    logits[4, 500] = value
    expected[3:5] = [None, None]
    assert sample(logits, params, [make_generator(one) for one in params]) == expected


def test_logprobs(logits: Tensor) -> None:
    num_tokens = logits.shape[-1]
    for temperature in (0.0, 0.5, 4.0):
        params = SamplingParams(temperature=temperature, seed=3, top_k=20, logprobs=num_tokens + 5)
        (one,) = sample(logits[:1], [params], [make_generator(params)])
        assert one is not None
        assert one.logprobs is not None
        top = dict(one.logprobs.top)
        assert one.logprobs.token_id == one.token_id
        assert one.logprobs.logprob == top[one.token_id] <= 0
        assert max(top.values()) <= 0
        assert math.fsum(map(math.exp, top.values())) == pytest.approx(1, abs=1e-5)
        assert [pair[1] for pair in one.logprobs.top] == sorted(top.values(), reverse=True)
        expected = logits[0].log_softmax(-1)
        assert [top[token] for token in range(num_tokens)] == expected.tolist()  # raw, whatever the temperature


def test_no_alternatives_is_not_no_logprobs(logits: Tensor) -> None:
    asked = SamplingParams(temperature=0, logprobs=0)
    first, second = sample(logits[:2], [asked, GREEDY], [None, None])
    assert first is not None
    assert first.logprobs is not None
    assert first.logprobs.top == ()
    assert second == Sample(int(logits[1].argmax()), None)


def test_the_chosen_token_is_not_replaced_by_the_most_probable_one() -> None:
    params = SamplingParams(seed=0, logprobs=1)
    logits = torch.tensor([[0.0, 0.5, 0.0, 0.0]])
    generator = make_generator(params)
    drawn = [sample(logits, [params], [generator])[0] for _ in range(30)]
    others = [one for one in drawn if one is not None and one.token_id != 1]
    assert others
    for one in others:
        assert one.logprobs is not None
        assert one.logprobs.token_id == one.token_id
        assert [token for token, _ in one.logprobs.top] == [1]
        assert one.logprobs.logprob < one.logprobs.top[0][1]
