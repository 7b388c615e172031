from __future__ import annotations

import itertools
import math

import pytest
import torch

from offramp.serve.sampling.distribution import Distribution, draw
from offramp.serve.sampling.draws import Purpose, fresh_seed, uniform


def test_a_number_is_a_function_of_its_four_names() -> None:
    names = list(itertools.product((0, 1, -1, 2**63 - 1, -(2**63)), (0, 1, 7), (0, 1, 1000), Purpose))
    numbers = [uniform(*name) for name in names]
    assert len(set(numbers)) == len(names)
    assert [uniform(*name) for name in reversed(names)] == numbers[::-1]


def test_numbers_are_spread_evenly() -> None:
    for vary in (
        [uniform(3, 0, index, Purpose.TOKEN) for index in range(4000)],
        [uniform(seed, 0, 0, Purpose.TOKEN) for seed in range(4000)],
        [uniform(3, sequence, 0, Purpose.ACCEPT) for sequence in range(4000)],
    ):
        assert all(0 <= number < 1 for number in vary)
        counts = torch.histc(torch.tensor(vary, dtype=torch.float64), bins=20, min=0, max=1)
        # Five standard deviations of a binomial count: a correct source fails once in a hundred thousand.
        assert ((counts - 200).abs() <= 5 * math.sqrt(4000 * 0.05 * 0.95)).all()


def test_seeds_of_requests_that_give_none_differ() -> None:
    assert len({fresh_seed() for _ in range(100)}) == 100


@pytest.mark.parametrize("num_candidates", [7, 256, 1000])
def test_draws_follow_the_distribution(num_candidates: int) -> None:
    p = torch.zeros(num_candidates)
    places = [num_candidates // 7 * step for step in range(5)]
    p[places] = torch.tensor([0.1, 0.4, 0.3, 0.15, 0.05])
    n = 5_000
    drawn = draw(p.expand(n, -1), [uniform(0, 0, index, Purpose.TOKEN) for index in range(n)])
    counts = torch.bincount(torch.tensor(drawn), minlength=num_candidates)
    assert counts[p == 0].sum() == 0
    # Five standard deviations of a binomial count: a correct draw fails once in a million, a biased one always.
    assert ((counts - n * p).abs() <= 5 * (n * p * (1 - p)).sqrt()).all()


@pytest.mark.parametrize("num_after", [1, 600])
@pytest.mark.parametrize("scale", [1.0, 0.7, 1 / 3, 1e-30, 1 + 2**-23])
def test_the_ends_of_the_range_draw_what_can_be_drawn(scale: float, num_after: int) -> None:
    p = scale * torch.tensor([0.0, 0.5, 0.5] + [0.0] * num_after)
    found = Distribution(torch.arange(len(p)), p)
    assert found.draw(1 - 2**-53) == 2
    assert found.draw(0.0) == 1
    assert found.draw(0.5) == 2
    assert found.draw(0.5 - 2**-40) == 1
