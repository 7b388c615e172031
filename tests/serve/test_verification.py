"""Judged drafts are the full model's text: greedily token by token, by chance in distribution."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch

from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.iteration_result import SampledToken
from offramp.serve.request.logits_use import LogitsUse
from offramp.serve.request.request import Request
from offramp.serve.request.sampling_params import SamplingParams
from offramp.serve.sampling.distribution import Distribution
from offramp.serve.sampling.draws import Purpose, uniform
from offramp.serve.sampling.sampler import SamplingState, distribution, logprobs, sample
from offramp.serve.sampling.verification import Drafting, NoTokenError, Verdict, judge_by_chance, judge_greedily

Judge = Callable[
    [Sequence[int], Sequence[Distribution], Callable[[int], Distribution], Callable[[int, Purpose], float]],
    Verdict,
]


def dist(**probabilities: float) -> Distribution:
    """`dist(t3=0.5, t7=0.5)`."""
    ids = sorted(int(name[1:]) for name in probabilities)
    return Distribution(torch.tensor(ids), torch.tensor([probabilities[f"t{token}"] for token in ids]))


@pytest.mark.parametrize(
    ("drafts", "choices", "verdict"),
    [
        ([], [7], Verdict(0, 7)),
        ([1, 2, 3], [1, 2, 3, 4], Verdict(3, 4)),
        ([1, 2, 3], [1, 9, 3, 4], Verdict(1, 9)),
        ([1], [0, 5], Verdict(0, 0)),
    ],
)
def test_greedily_the_longest_agreeing_beginning_stays(drafts: list[int], choices: list[int], verdict: Verdict) -> None:
    assert judge_greedily(drafts, choices) == verdict


def judge_one(p: Distribution, q: Distribution, draft: int, accept: float, residual: float) -> Verdict:
    numbers = {Purpose.ACCEPT: accept, Purpose.RESIDUAL: residual, Purpose.TOKEN: 0.0}
    targets = [p, dist(t99=1.0)]
    return judge_by_chance([draft], [q], lambda index: targets[index], lambda _, purpose: numbers[purpose])


def test_a_draft_stays_with_probability_p_over_q() -> None:
    p, q = dist(t1=0.25, t2=0.75), dist(t1=0.5, t2=0.5)
    assert judge_one(p, q, 1, 0.49, 0.0) == Verdict(1, 99)
    assert judge_one(p, q, 1, 0.51, 0.0) == Verdict(0, 2)
    assert judge_one(p, q, 2, 0.999999, 0.0) == Verdict(1, 99), "the full model thinks more of it than the exit"


def test_candidates_that_only_one_of_them_has() -> None:
    p, q = dist(t2=0.5, t4=0.25, t8=0.25), dist(t1=0.4, t4=0.6)
    assert judge_one(p, q, 1, 0.0, 0.0) == Verdict(0, 2), "the full model would never say 1"
    # What is left: 0.5 of token 2, nothing of token 4, 0.25 of token 8.
    assert judge_one(p, q, 1, 0.0, 0.66) == Verdict(0, 2)
    assert judge_one(p, q, 1, 0.0, 0.67) == Verdict(0, 8)


def test_probabilities_are_in_proportion() -> None:
    """What top-p leaves does not sum to 1."""
    p, q = dist(t1=0.1, t2=0.3), dist(t1=0.3, t2=0.3)
    assert judge_one(p, q, 1, 0.49, 0.0) == Verdict(1, 99)
    assert judge_one(p, q, 1, 0.51, 0.0) == Verdict(0, 2)


def test_one_candidate_each_is_the_greedy_rule() -> None:
    assert judge_one(dist(t5=1.0), dist(t5=1.0), 5, 0.999999, 0.5) == Verdict(1, 99)
    assert judge_one(dist(t5=1.0), dist(t6=1.0), 6, 0.0, 0.5) == Verdict(0, 5)


def test_nothing_is_asked_beyond_a_draft_that_does_not_stay() -> None:
    """What follows it is another text, in which a constraint may know no way on."""
    asked: list[int] = []

    def target(index: int) -> Distribution:
        asked.append(index)
        return dist(t1=1.0) if index == 0 else dist(t2=1.0)

    drafts, proposals = [1, 3, 3], [dist(t1=1.0), dist(t3=1.0), dist(t3=1.0)]
    assert judge_by_chance(drafts, proposals, target, lambda *_: 0.5) == Verdict(1, 2)
    assert asked == [0, 1]


# A language of four tokens whose next token hangs on the last one, and an exit that has another opinion of it. The exit
# never says token 3 after token 0, and says token 2 after token 1, which the full model never does.
NUM_TOKENS, LENGTH = 4, 3
FULL = torch.tensor([[0.4, 0.3, 0.1, 0.2], [0.1, 0.5, 0.0, 0.4], [0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.1, 0.1]])
EXIT = torch.tensor([[0.1, 0.6, 0.3, 0.0], [0.1, 0.5, 0.3, 0.1], [0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25]])


def _rows(table: torch.Tensor) -> list[Distribution]:
    """A distribution has no candidates of probability 0."""
    return [Distribution(row.nonzero()[:, 0], row[row > 0]) for row in table]


def say(seed: int, judge: Judge, num_drafts: int, full: list[Distribution], exit_: list[Distribution]) -> list[int]:
    """Tokens after token 0: the exit drafts, the full model judges, and so on, each draw by the rules of the engine."""
    text = [0]
    while len(text) <= LENGTH:
        said = len(text) - 1
        drafts: list[int] = []
        proposals: list[Distribution] = []
        for index in range(num_drafts):
            proposals.append(exit_[(text + drafts)[-1]])
            drafts.append(proposals[-1].draw(uniform(seed, 0, said + index, Purpose.TOKEN)))
        context = text[-1:] + drafts
        verdict = judge(
            drafts,
            proposals,
            lambda index, context=context: full[context[index]],
            lambda index, purpose, said=said: uniform(seed, 0, said + index, purpose),
        )
        text += [*drafts[: verdict.num_kept], verdict.token_id]
    return text[1 : LENGTH + 1]


def chi_squared(judge: Judge, num_drafts: int, num_seeds: int = 1500) -> float:
    """How far the texts of many seeds are from the full model's distribution of texts; about 55 if they are not."""
    full, exit_ = _rows(FULL), _rows(EXIT)
    counts = Counter(tuple(say(seed, judge, num_drafts, full, exit_)) for seed in range(num_seeds))
    total, num_texts = 0.0, 0
    for text in itertools.product(range(NUM_TOKENS), repeat=LENGTH):
        expected = num_seeds * float(torch.stack([FULL[a, b] for a, b in itertools.pairwise((0, *text))]).prod())
        if expected > 0:
            num_texts += 1
            total += (counts.pop(text, 0) - expected) ** 2 / expected
    assert num_texts == 56
    assert not counts, "texts that the full model never says"
    return total


# 56 texts are possible, so the statistic has 55 degrees of freedom and exceeds this once in ten thousand times.
LIMIT = 101.0


@pytest.mark.parametrize("num_drafts", [1, 2])
def test_texts_have_the_full_models_distribution(num_drafts: int) -> None:
    assert chi_squared(judge_by_chance, num_drafts) < LIMIT


def _keeps_too_much(
    drafts: Sequence[int],
    proposals: Sequence[Distribution],
    target: Callable[[int], Distribution],
    number: Callable[[int, Purpose], float],
) -> Verdict:
    """Keeps any draft that the full model might say."""
    return judge_by_chance(
        drafts, proposals, target, lambda index, purpose: 0.0 if purpose is Purpose.ACCEPT else number(index, purpose)
    )


def _draws_from_all(
    drafts: Sequence[int],
    proposals: Sequence[Distribution],
    target: Callable[[int], Distribution],
    number: Callable[[int, Purpose], float],
) -> Verdict:
    """Replaces a draft by a draw from p, and not from what q leaves of it."""
    verdict = judge_by_chance(drafts, proposals, target, number)
    if verdict.num_kept == len(drafts):
        return verdict
    at = verdict.num_kept
    return Verdict(at, target(at).draw(number(at, Purpose.RESIDUAL)))


def _draws_twice_with_one_number(
    drafts: Sequence[int],
    proposals: Sequence[Distribution],
    target: Callable[[int], Distribution],
    number: Callable[[int, Purpose], float],
) -> Verdict:
    """Decides with the number that chose the draft."""
    return judge_by_chance(drafts, proposals, target, lambda index, _: number(index, Purpose.TOKEN))


@pytest.mark.parametrize("wrong", [_keeps_too_much, _draws_from_all, _draws_twice_with_one_number])
def test_wrong_rules_show(wrong: Judge) -> None:
    assert chi_squared(wrong, 2) > 2 * LIMIT


NUM_LAYERS = 9
FULL_LOGITS, EXIT_LOGITS = FULL.add(1e-9).log(), EXIT.add(1e-9).log()


def begin(**sampling: object) -> tuple[Request, Drafting, SamplingState]:
    settings = {"max_tokens": 8, "seed": 0, **sampling}
    request = Request("a", (0,), SamplingParams(**settings), ExitOptions("verify"))
    state = SamplingState(request)
    return request, Drafting(state, NUM_LAYERS), state


def last(request: Request) -> int:
    (token,) = request.tokens(request.num_tokens - 1, request.num_tokens)
    return token


def draft(request: Request, drafting: Drafting, count: int, logits: torch.Tensor = EXIT_LOGITS) -> None:
    for _ in range(count):
        request.drafts.append(drafting.draft(logits[last(request)], 3, 0.5))


def judge(request: Request, drafting: Drafting) -> tuple[SampledToken, ...]:
    """As the scheduler takes a verdict in."""
    first = request.num_prompt_tokens - 1 + len(request.output_token_ids)
    said = drafting.judge(FULL_LOGITS[request.tokens(first, request.num_tokens)])
    request.drafts.clear()
    request.output_token_ids += [token.token_id for token in said]
    return said


SETTINGS = {
    "penalties, bias and a minimum": {
        "presence_penalty": 0.9,
        "repetition_penalty": 1.3,
        "logit_bias": ((1, 0.5),),
        "min_tokens": 2,
        "stop_token_ids": (3,),
    },
    "temperature, top-k and min-p": {"temperature": 0.8, "top_k": 3, "min_p": 0.15},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_whatever_changes_probabilities_changes_both_of_them(settings: dict[str, object]) -> None:
    """The texts of many seeds against the probabilities that the sampler gives the full model's, token by token."""
    num_seeds = 600
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(num_seeds):
        request, drafting, _ = begin(seed=seed, **settings)
        while len(request.output_token_ids) < LENGTH:
            draft(request, drafting, 2)
            judge(request, drafting)
        counts[tuple(request.output_token_ids[:LENGTH])] += 1
    total, num_texts = 0.0, 0
    for text in itertools.product(range(NUM_TOKENS), repeat=LENGTH):
        request, _, state = begin(**settings)
        expected = float(num_seeds)
        for token in text:
            wanted = distribution(FULL_LOGITS[last(request)], state)
            assert wanted is not None
            (place,), (is_candidate,) = wanted.find(torch.tensor([token]))
            expected *= float(wanted.normalised()[place] * is_candidate)
            request.output_token_ids.append(token)
        if expected > 0.5:  # rarer ones tell nothing
            num_texts += 1
            total += (counts.pop(text, 0) - expected) ** 2 / expected
        elif expected == 0:
            assert text not in counts
    assert num_texts > 10
    assert total < 3 * num_texts


def test_greedy_drafts_are_judged_with_all_that_changes_logits() -> None:
    settings = {"temperature": 0.0, "presence_penalty": 2.0, "logprobs": 2, "min_tokens": 3, "stop_token_ids": (1,)}
    alone, _, state = begin(**settings)
    expected = []
    for _ in range(8):
        row = FULL_LOGITS[last(alone)]
        (one,) = sample(row[None], [state])
        assert one is not None
        assert one.logprobs == logprobs(row, one.token_id, 2)
        expected.append(one)
        alone.output_token_ids.append(one.token_id)

    request, drafting, _ = begin(**settings)
    assert drafting.logits_use is not LogitsUse.BEST
    said: list[SampledToken] = []
    while len(said) < 8:
        draft(request, drafting, 3)
        said += judge(request, drafting)
    assert [token.token_id for token in said[:8]] == [one.token_id for one in expected]
    assert [token.logprobs for token in said[:8]] == [one.logprobs for one in expected]
    assert len(set(request.output_token_ids[:8])) > 2


def test_a_draft_that_stays_was_said_by_its_exit() -> None:
    request, drafting, _ = begin(temperature=0.0)
    assert drafting.logits_use is LogitsUse.BEST
    request.drafts += [SampledToken(7, 2, 0.9), SampledToken(8, 5, 0.8)]
    assert drafting.judge_choices([7, 8, 4]) == (
        SampledToken(7, 2, 0.9),
        SampledToken(8, 5, 0.8),
        SampledToken(4, NUM_LAYERS),
    )
    assert drafting.judge_choices([7, 6, 4]) == (SampledToken(7, 2, 0.9), SampledToken(6, NUM_LAYERS))


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_an_exit_that_thinks_like_the_full_model_is_always_right(settings: dict[str, object]) -> None:
    for seed in range(50):
        request, drafting, _ = begin(seed=seed, **settings)
        draft(request, drafting, 4, FULL_LOGITS)
        assert len(judge(request, drafting)) == 5


def test_drafts_dropped_without_a_verdict_leave_nothing_behind() -> None:
    """After a preemption drafts are said again, perhaps by another exit, and judged by what they are drawn from now."""
    for seed in range(20):
        request, drafting, _ = begin(seed=seed)
        draft(request, drafting, 3)
        request.drafts.clear()
        draft(request, drafting, 4, FULL_LOGITS)
        assert len(judge(request, drafting)) == 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_can_be_chosen_from_logits_that_are_no_numbers(temperature: float) -> None:
    request, drafting, _ = begin(temperature=temperature)
    broken = torch.full((NUM_TOKENS,), torch.nan)
    with pytest.raises(NoTokenError):
        drafting.draft(broken, 3, 0.5)
    draft(request, drafting, 1)
    with pytest.raises(NoTokenError):
        drafting.judge(torch.stack((broken, FULL_LOGITS[0])))
