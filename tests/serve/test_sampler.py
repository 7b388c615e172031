from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from helpers.requests import make_request
from offramp.serve.request.iteration_result import SampledToken
from offramp.serve.request.logits_use import LogitsUse
from offramp.serve.request.sampling_params import SamplingParams
from offramp.serve.sampling import sampler
from offramp.serve.sampling.draws import Purpose
from offramp.serve.sampling.sampler import (
    Sample,
    SamplingState,
    distribution,
    distribution_of,
    logprobs,
    prompt_logprobs,
    sample,
)

GREEDY = SamplingParams(temperature=0)


def state(params: SamplingParams = GREEDY, prompt: tuple[int, ...] = (0,), eos: tuple[int, ...] = ()) -> SamplingState:
    request = make_request(prompt=prompt, eos=eos)
    request.sampling = params
    request.__post_init__()
    return SamplingState(request)


def states(params: Sequence[SamplingParams]) -> list[SamplingState]:
    return [state(one) for one in params]


def tokens(samples: list[Sample | None]) -> list[int | None]:
    return [None if one is None else one.token_id for one in samples]


def say(row: SamplingState, one: Sample | None) -> int:
    assert one is not None
    row.request.output_token_ids.append(one.token_id)
    return one.token_id


def sequence(logits: Tensor, params: SamplingParams, steps: int = 20) -> list[int]:
    """Tokens of one request that sees the same logits [1, V] at every step."""
    row = state(params)
    return [say(row, sample(logits, [row])[0]) for _ in range(steps)]


@pytest.fixture
def logits() -> Tensor:
    return torch.randn(8, 1000, generator=torch.Generator().manual_seed(0)) * 3


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    logits = torch.zeros(3, 300)
    logits[0, [7, 200]] = 1.0
    logits[1, [299, 5, 6]] = 2.0
    assert tokens(sample(logits, states([GREEDY] * 3))) == [7, 5, 0]
    assert tokens(sample(logits.bfloat16(), states([GREEDY] * 3))) == [7, 5, 0]


MIXED = [
    SamplingParams(temperature=0, logprobs=2),
    SamplingParams(seed=1, logprobs=3),
    SamplingParams(seed=2, top_k=5),
    SamplingParams(seed=3, top_p=0.7),
    SamplingParams(seed=4, temperature=0.5, top_k=50, top_p=0.9),
    SamplingParams(temperature=2.0, seed=5, min_p=0.1, repetition_penalty=1.3, frequency_penalty=0.5),
    SamplingParams(seed=1, logit_bias=((3, 4.0), (999, -2.0)), presence_penalty=1.0),
    SamplingParams(temperature=0, repetition_penalty=0.8),
]


@pytest.mark.parametrize("together", [1, 64])
@pytest.mark.parametrize("num_tokens", [1000, 257, 37])
def test_a_row_is_chosen_the_same_alone_and_in_any_batch(
    logits: Tensor, monkeypatch: pytest.MonkeyPatch, together: int, num_tokens: int
) -> None:
    logits = logits[:, :num_tokens] if num_tokens < 1000 else logits
    params = [
        one if not one.logit_bias else SamplingParams(seed=1, logit_bias=((3, 4.0), (30, -2.0)), presence_penalty=1.0)
        for one in MIXED
    ]
    alone: list[list[Sample | None]] = []
    for row, one in enumerate(params):
        single = state(one)
        alone.append([])
        for _ in range(10):
            alone[-1] += sample(logits[row : row + 1], [single])
            say(single, alone[-1][-1])
    # Whether rows are computed one by one or together, as on an accelerator, they must come out the same.
    monkeypatch.setattr(
        sampler, "_chunks", lambda rows, _: [rows[i : i + together] for i in range(0, len(rows), together)]
    )
    order = [5, 2, 7, 0, 1, 6, 3, 4]
    live = states(params)
    for step in range(10):
        rows = [row for row in order if (row + step) % 3]  # rows come and go
        for row, one in zip(rows, sample(logits[rows], [live[row] for row in rows]), strict=True):
            assert one == alone[row].pop(0)
            say(live[row], one)


def test_seeds() -> None:
    flat = torch.zeros(1, 1000)
    first = sequence(flat, SamplingParams(seed=11))
    assert len(set(first)) > 10  # the numbers differ within a request
    assert sequence(flat, SamplingParams(seed=11)) == first  # and are the same for the next
    assert sequence(flat, SamplingParams(seed=12)) != first
    torch.manual_seed(0)
    unseeded = sequence(flat, SamplingParams())
    torch.manual_seed(0)
    assert sequence(flat, SamplingParams()) != unseeded
    assert sequence(flat, SamplingParams(seed=-1)) != first


def test_sequences_of_one_seed_differ_and_come_again() -> None:
    flat = torch.zeros(1, 1000)
    texts = [sequence(flat, SamplingParams(seed=5, sequence=index)) for index in range(4)]
    assert len(set(map(tuple, texts))) == 4
    assert texts == [sequence(flat, SamplingParams(seed=5, sequence=index)) for index in range(4)]


def test_a_draw_depends_on_the_place_of_the_token_and_not_on_how_it_was_reached() -> None:
    flat = torch.zeros(1, 1000)
    expected = sequence(flat, SamplingParams(seed=3))
    row = state(SamplingParams(seed=3))  # begins anew, as after a restart, with the tokens it had
    row.request.output_token_ids += expected[:7]
    row.request.drafts += [SampledToken(token, 1) for token in expected[7:9]]
    assert tokens(sample(flat, [row])) == [expected[9]]
    row.request.drafts.clear()
    assert tokens(sample(flat, [row])) == [expected[7]]


def test_top_k_keeps_k_even_among_ties() -> None:
    found = distribution_of(torch.tensor([1.0, 3.0, 3.0, 0.0, 3.0, 3.0]), SamplingParams(top_k=3))
    assert found.token_ids.tolist() == [1, 2, 4]
    assert found.probabilities.tolist() == pytest.approx([1 / 3] * 3)
    assert distribution_of(torch.zeros(4), SamplingParams(top_k=9)).token_ids.tolist() == [0, 1, 2, 3]


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    for top_p, kept in ((0.05, [1]), (0.39, [1]), (0.41, [1, 3]), (0.71, [1, 2, 3]), (0.95, [0, 1, 2, 3])):
        assert distribution_of(logits, SamplingParams(top_p=top_p)).token_ids.tolist() == kept
    assert distribution_of(torch.zeros(4), SamplingParams(top_p=0.5)).token_ids.tolist() == [0, 1]
    # After top-k: of 4/7 and 3/7, the first reaches one half alone.
    assert distribution_of(logits, SamplingParams(top_k=2, top_p=0.5)).token_ids.tolist() == [1]


def test_top_p_on_a_flat_distribution_over_many_tokens() -> None:
    found = distribution_of(torch.zeros(20_000), SamplingParams(top_p=0.89999))
    assert found.token_ids.tolist() == list(range(18_000))
    assert found.probabilities.tolist() == pytest.approx([1 / 18_000] * 18_000)


def test_min_p_keeps_what_is_probable_enough_beside_the_best() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    for min_p, kept in ((0.0, [0, 1, 2, 3]), (0.3, [1, 2, 3]), (0.6, [1, 3]), (1.0, [1])):
        assert distribution_of(logits, SamplingParams(min_p=min_p)).token_ids.tolist() == kept
    assert distribution_of(torch.zeros(3), SamplingParams(min_p=1.0)).token_ids.tolist() == [0, 1, 2]
    # After temperature: at one half, 0.1 is 1/16 as probable as 0.4.
    assert distribution_of(logits, SamplingParams(min_p=0.2, temperature=0.5)).token_ids.tolist() == [1, 2, 3]


def test_extreme_temperatures_and_logits(logits: Tensor) -> None:
    best = logits.argmax(dim=-1).tolist()
    cold = SamplingParams(temperature=1e-300, seed=0)
    assert tokens(sample(logits * 1e30, states([cold] * 8))) == best
    found = distribution_of(logits[0], SamplingParams(temperature=1e30))
    assert found.probabilities.tolist() == pytest.approx([1 / 1000] * 1000)


def test_a_greedy_distribution_has_one_token(logits: Tensor) -> None:
    found = distribution(logits[0], state(GREEDY))
    assert found is not None
    assert (found.token_ids.tolist(), found.probabilities.tolist()) == ([int(logits[0].argmax())], [1.0])


def test_what_is_sampled_is_drawn_from_the_distribution(logits: Tensor) -> None:
    for params in MIXED:
        row = state(params)
        for _ in range(10):
            found = distribution(logits[0], row)
            assert found is not None
            expected = found.draw(row.uniform(row.next_index, Purpose.TOKEN))
            assert say(row, sample(logits[:1], [row])[0]) == expected


def test_stop_tokens_cannot_be_chosen_before_min_tokens(logits: Tensor) -> None:
    best = logits.argmax(dim=-1)
    ask = SamplingParams(temperature=0, logprobs=1, min_tokens=1, stop_token_ids=(10**6,))
    early, free = state(ask, eos=(int(best[0]),)), state(ask)
    first, second = sample(logits[:2], [early, free])
    assert first is not None
    assert second is not None
    assert (first.token_id, second.token_id) == (int(logits[0].topk(2).indices[1]), int(best[1]))
    assert first.logprobs is not None
    assert first.logprobs.top[0][0] == int(best[0])  # log-probabilities are those of the raw logits
    say(early, first)
    assert tokens(sample(logits[:1], [early])) == [int(best[0])]
    flat = torch.zeros(1, 3)
    drawn = SamplingParams(min_tokens=16, stop_token_ids=(0, 2))
    assert {token for _ in range(100) for token in tokens(sample(flat, [state(drawn)]))} == {1}
    assert sample(flat, [state(SamplingParams(temperature=0, min_tokens=1, stop_token_ids=(0, 1, 2)))]) == [None]


def test_logits_are_needed_only_for_more_than_the_largest() -> None:
    assert state(GREEDY).logits_use is LogitsUse.BEST
    assert state(SamplingParams(temperature=0, logprobs=0)).logits_use is LogitsUse.REPORT
    for fields in (
        {"temperature": 1.0},
        {"temperature": 1.0, "logprobs": 0},
        {"logit_bias": ((1, 1.0),)},
        {"presence_penalty": 0.1},
        {"repetition_penalty": 1.1},
    ):
        assert state(SamplingParams(**{"temperature": 0, **fields})).logits_use is LogitsUse.CHOICE
    early = state(SamplingParams(temperature=0, min_tokens=1))
    assert early.logits_use is LogitsUse.CHOICE
    early.request.output_token_ids.append(1)
    assert early.logits_use is LogitsUse.BEST


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_is_not_finite_says_nothing_and_harms_nobody(logits: Tensor, value: float) -> None:
    params = [SamplingParams(seed=row, logprobs=1) if row % 2 else GREEDY for row in range(8)]
    expected = sample(logits, states(params))
    logits[3, 500] = value
    logits[4, 500] = value
    expected[3:5] = [None, None]
    assert sample(logits, states(params)) == expected
    assert distribution(logits[3], state(params[3])) is None


def test_logprobs(logits: Tensor) -> None:
    num_tokens = logits.shape[-1]
    for temperature in (0.0, 0.5, 4.0):
        params = SamplingParams(
            temperature=temperature, seed=3, top_k=20, logprobs=num_tokens + 5, logit_bias=((1, 9.0),)
        )
        (one,) = sample(logits[:1], [state(params)])
        assert one is not None
        assert one.logprobs is not None
        top = dict(one.logprobs.top)
        assert one.logprobs.token_id == one.token_id
        assert one.logprobs.logprob == top[one.token_id] <= 0
        assert max(top.values()) <= 0
        assert math.fsum(map(math.exp, top.values())) == pytest.approx(1, abs=1e-5)
        assert [pair[1] for pair in one.logprobs.top] == sorted(top.values(), reverse=True)
        expected = logits[0].log_softmax(-1)
        assert [top[token] for token in range(num_tokens)] == expected.tolist()  # raw, whatever is asked for


def test_no_alternatives_is_not_no_logprobs(logits: Tensor) -> None:
    asked = SamplingParams(temperature=0, logprobs=0)
    first, second = sample(logits[:2], states([asked, GREEDY]))
    assert first is not None
    assert first.logprobs is not None
    assert first.logprobs.top == ()
    assert second == Sample(int(logits[1].argmax()), None)


def test_the_chosen_token_is_not_replaced_by_the_most_probable_one() -> None:
    logits = torch.tensor([[0.0, 0.5, 0.0, 0.0]])
    row = state(SamplingParams(seed=0, logprobs=1))
    others = []
    for _ in range(30):
        (one,) = sample(logits, [row])
        if say(row, one) != 1:
            others.append(one)
    assert others
    for one in others:
        assert one.logprobs.token_id == one.token_id
        assert [token for token, _ in one.logprobs.top] == [1]
        assert one.logprobs.logprob < one.logprobs.top[0][1]


def test_prompt_logprobs_are_those_of_the_tokens_that_follow(logits: Tensor) -> None:
    prompt = [3, 1, 4, 1, 5]
    found = prompt_logprobs(logits[:4].bfloat16(), prompt[1:], 2)
    assert [one.token_id for one in found] == prompt[1:]
    assert found == tuple(logprobs(logits[row].bfloat16(), prompt[row + 1], 2) for row in range(4))
    assert found == (
        *prompt_logprobs(logits[:1].bfloat16(), [1], 2),
        *prompt_logprobs(logits[1:4].bfloat16(), prompt[2:], 2),
    )
