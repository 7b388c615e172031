"""Judging drafts: the full model reads what early exits said, keeps what it would have said, and adds a token.

Greedily, it keeps the longest beginning of the drafts that it agrees with. Where tokens are drawn, a draft x stays with
probability min(1, p(x) / q(x)), for the full model's distribution p and the exit's q after the same text; the first
draft that does not stay is replaced by a draw from max(p - q, 0), normalised; and when all stay, the token after them
is drawn from p. Then every token has the distribution p, whatever q is (speculative sampling: Leviathan et al. 2023,
section 2.3 and appendix A.1; Chen et al. 2023, algorithm 2).

Penalties, biases, constraints and forbidden tokens are part of p and of q, each for the text before its own token; so
are temperature, top-k, top-p and min-p. What is drafted after a draft that does not stay is forgotten before anything
depends on it, so its random numbers may be used again.

Legend: V vocabulary, C candidates (tokens that may be drawn), P drafts of one request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offramp.serve.request.iteration_result import SampledToken
from offramp.serve.request.logits_use import LogitsUse
from offramp.serve.sampling.distribution import Distribution
from offramp.serve.sampling.draws import Purpose
from offramp.serve.sampling.sampler import SamplingState, distribution, logprobs


@dataclass(frozen=True)
class Verdict:
    """What the full model makes of drafts in a row.

    Attributes:
        num_kept: how many of the first drafts stay.
        token_id: the full model's own token after these.
    """

    num_kept: int
    token_id: int


def judge_greedily(drafts: Sequence[int], choices: Sequence[int]) -> Verdict:
    """Keep what the full model says itself.

    Args:
        drafts: P tokens said by exits, in order.
        choices: P + 1, what the full model says in place of each of them, and after the last.
    """
    assert len(choices) == len(drafts) + 1
    for index, (draft, choice) in enumerate(zip(drafts, choices, strict=False)):
        if draft != choice:
            return Verdict(index, choice)
    return Verdict(len(drafts), choices[-1])


def judge_by_chance(
    drafts: Sequence[int],
    proposals: Sequence[Distribution],
    target: Callable[[int], Distribution],
    uniform: Callable[[int, Purpose], float],
) -> Verdict:
    """Keep each draft with the probability that makes the answer the full model's.

    Args:
        drafts: P tokens drawn by exits, in order.
        proposals: for each of them, what it was drawn from.
        target: the full model's distribution in place of draft `index`, after all drafts before it; and after the last.
            Asked in order, and no further than a draft that does not stay.
        uniform: a number in [0, 1) for draft `index`, independent for each purpose.
    """
    for index, (draft, proposal) in enumerate(zip(drafts, proposals, strict=True)):
        wanted = target(index)
        p, q = _shares(wanted, wanted.token_ids), _shares(proposal, wanted.token_ids)
        (place,), (is_candidate,) = wanted.find(torch.tensor([draft], device=p.device))
        if is_candidate and uniform(index, Purpose.ACCEPT) * float(q[place]) < float(p[place]):
            continue
        rest = (p - q).clamp(min=0)
        # Where p and q differ by rounding alone nothing may be left, and then p is as good.
        left = Distribution(wanted.token_ids, rest if float(rest.sum()) > 0 else p)
        return Verdict(index, left.draw(uniform(index, Purpose.RESIDUAL)))
    return Verdict(len(drafts), target(len(drafts)).draw(uniform(len(drafts), Purpose.TOKEN)))


def _shares(of: Distribution, token_ids: Tensor) -> Tensor:
    """Probabilities [C] of tokens [C], in float64."""
    places, is_candidate = of.find(token_ids)
    return of.normalised()[places] * is_candidate


class NoTokenError(Exception):
    """No token can be chosen from logits: none is finite, or a larger one is not."""


class Drafting:
    """Drafts of one request under the KV policy `verify`: says them, and has them judged.

    What a draft was drawn from is kept until it is judged: 16 bytes for each token that it could have been, so next to
    nothing under top-k, top-p or min-p, and 0.8 MB for a vocabulary of 50,000 without any of them. Greedy drafts need
    none of it.
    """

    def __init__(self, sampling: SamplingState, num_layers: int) -> None:
        """Begin.

        Args:
            sampling: of the request, whose drafts are read where they are kept (`Request.drafts`).
            num_layers: of the model.
        """
        self._sampling = sampling
        self._request = sampling.request
        self._num_layers = num_layers
        self._proposals: list[Distribution] = []

    @property
    def logits_use(self) -> LogitsUse:
        """What judging the drafts there are asks of the logits."""
        request = self._request
        if len(request.output_token_ids) < request.sampling.min_tokens:
            return LogitsUse.CHOICE
        return self._sampling.logits_use

    def draft(self, logits: Tensor, exit_layer: int, confidence: float | None) -> SampledToken:
        """Choose the next draft.

        Args:
            logits: [V], raw, of the exit that the newest row leaves at.
            exit_layer: which.
            confidence: how sure it was.

        Raises:
            NoTokenError: see there.
        """
        index = self._sampling.next_index
        proposal = self._distribution(logits, index)
        if not self._request.sampling.is_greedy:
            del self._proposals[len(self._request.drafts) :]  # of drafts that were dropped without a verdict
            self._proposals.append(proposal)
        token_id = proposal.draw(self._sampling.uniform(index, Purpose.TOKEN))
        return SampledToken(token_id, exit_layer, confidence)

    def judge(self, logits: Tensor) -> tuple[SampledToken, ...]:
        """Judge all drafts of the request.

        Args:
            logits: [P + 1, V], raw, of the full model's rows that predict them, and of the newest row.

        Returns:
            New tokens of the answer, at least one; log-probabilities are the full model's.

        Raises:
            NoTokenError: see there.
        """
        params, sampling = self._request.sampling, self._sampling
        drafts, first = [draft.token_id for draft in self._request.drafts], len(self._request.output_token_ids)
        proposals = self._proposals[: len(drafts)]
        if params.is_greedy:
            proposals = [_certain(draft, logits.device) for draft in drafts]
        verdict = judge_by_chance(
            drafts,
            proposals,
            lambda index: self._distribution(logits[index], first + index),
            lambda index, purpose: sampling.uniform(first + index, purpose),
        )
        self._proposals.clear()
        accepted = self._accepted(verdict)
        number = params.logprobs
        if number is None:
            return accepted
        return tuple(
            token._replace(logprobs=logprobs(row, token.token_id, number))
            for row, token in zip(logits, accepted, strict=False)
        )

    def judge_choices(self, choices: Sequence[int]) -> tuple[SampledToken, ...]:
        """Judge all drafts of a request that needs no logits.

        Args:
            choices: P + 1, the tokens of the largest raw logits of the full model's rows, as for `judge`.
        """
        return self._accepted(judge_greedily([draft.token_id for draft in self._request.drafts], choices))

    def _distribution(self, logits: Tensor, index: int) -> Distribution:
        found = distribution(logits, self._sampling, index)
        if found is None:
            raise NoTokenError
        return found

    def _accepted(self, verdict: Verdict) -> tuple[SampledToken, ...]:
        """A draft that stays counts as said by its exit, the full model's own token as said by the last layer."""
        return (*self._request.drafts[: verdict.num_kept], SampledToken(verdict.token_id, self._num_layers))


def _certain(token_id: int, device: torch.device) -> Distribution:
    return Distribution(torch.tensor([token_id], device=device), torch.ones(1, dtype=torch.float64, device=device))
