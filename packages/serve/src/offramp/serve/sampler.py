"""Logits to tokens. Every row is chosen by its own logits, its own settings and its own numbers alone.

A row's token is bitwise the same alone and in any batch. Maxima and the k largest are exact; what is added up are whole
numbers in float64 (`distribution.mass`), whose sum does not depend on the order; a softmax runs over one row in one
shape. So rows may be computed together where that pays, on an accelerator, and one by one where it does not: on a CPU a
row stays in the cache from one operation to the next, and many rows together do not.

Legend: N rows, M rows that are computed together, V vocabulary, C candidates (tokens that may be drawn).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offramp.serve.constraint import ConstraintState
from offramp.serve.distribution import ONE, Distribution, draw, mass
from offramp.serve.draws import Purpose, fresh_seed, uniform
from offramp.serve.logit_processors import LogitProcessors, TokenCounts
from offramp.serve.request import Request, SamplingParams, TokenLogprobs


@dataclass(frozen=True)
class Sample:
    """The token chosen for one row.

    Attributes:
        token_id: the token.
        logprobs: None unless asked for.
    """

    token_id: int
    logprobs: TokenLogprobs | None


class SamplingState:
    """What the sampler knows of one request beside its settings. The engine keeps one for as long as the request lives.

    Nothing has to be told to it: it reads the request's output and drafts when a row of it is sampled, and takes back
    what it read of drafts that are gone. The tokens of the output itself never change.

    Attributes:
        request: whose.
        seed: its own, or a fresh one.
    """

    def __init__(self, request: Request, constraint: ConstraintState | None = None) -> None:
        """Begin before the first token.

        Args:
            request: not yet run.
            constraint: `Constraints.start(request)`, for this request alone.
        """
        params = request.sampling
        assert (params.constraint is None) == (constraint is None), "a constraint and its state belong together"
        self.request = request
        self.seed = fresh_seed() if params.seed is None else params.seed
        self._counts = TokenCounts(request.prompt_token_ids) if params.has_penalties else None
        self._constraint = constraint
        self._readers = [reader for reader in (self._counts, constraint) if reader is not None]
        self._read: list[int] = []  # generated tokens that the readers know
        self._num_final = 0  # of these, the first ones that are output and not drafts

    @property
    def next_index(self) -> int:
        """Index of the token that the newest row predicts: output and drafts come before it."""
        return len(self.request.output_token_ids) + len(self.request.drafts)

    @property
    def needs_logits(self) -> bool:
        """Whether the next token takes more than the largest raw logit."""
        params = self.request.sampling
        return (
            not params.is_greedy
            or params.logprobs is not None
            or bool(params.logit_bias)
            or bool(self._readers)
            or self.next_index < params.min_tokens
        )

    @property
    def fault(self) -> str | None:
        """Why the last row had no token to choose, if the reason is the request's constraint; one sentence."""
        return None if self._constraint is None else self._constraint.fault

    def uniform(self, index: int, purpose: Purpose) -> float:
        """The number in [0, 1) for the output token `index`."""
        return uniform(self.seed, self.request.sampling.sequence, index, purpose)

    def process(self, processors: LogitProcessors, row: int, index: int) -> None:
        """Ask for what the settings do to the logits of a row that predicts the output token `index`."""
        params = self.request.sampling
        if self._readers:
            self._seek(index)
        if self._counts is not None:
            processors.penalize(row, params, self._counts)
        if params.logit_bias:
            processors.bias(row, params.logit_bias)
        if index < params.min_tokens and self.request.stop_ids:
            processors.rule_out(row, self.request.stop_ids)
        if self._constraint is not None:
            processors.allow_only(row, self._constraint.allowed())

    def _seek(self, index: int) -> None:
        """Let the readers know exactly the first `index` generated tokens."""
        output, drafts = self.request.output_token_ids, self.request.drafts
        assert index <= len(output) + len(drafts), f"token {index} comes after one that nobody has said"
        known = min(self._num_final, index)
        while known < min(len(self._read), index):
            token = output[known] if known < len(output) else drafts[known - len(output)].token_id
            if token != self._read[known]:
                break
            known += 1
        for token in reversed(self._read[known:]):
            for reader in self._readers:
                reader.remove(token)
        del self._read[known:]
        for place in range(known, index):
            token = output[place] if place < len(output) else drafts[place - len(output)].token_id
            for reader in self._readers:
                reader.add(token)
            self._read.append(token)
        self._num_final = min(len(output), index)


def sample(logits: Tensor, rows: Sequence[SamplingState]) -> list[Sample | None]:
    """Choose the next token of each request; None where no logit is finite, or a larger one is not.

    Args:
        logits: [N, V], raw, of the exit that each row leaves at.
        rows: N, of different requests.
    """
    logits = logits.float()
    allowed = process(logits, [(state, state.next_index) for state in rows])
    best = allowed.amax(dim=-1)
    is_sound = best.isfinite().tolist()
    token_ids = [0] * len(rows)
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for row, state in enumerate(rows):
        if is_sound[row]:
            params = state.request.sampling
            groups[(True,) if params.is_greedy else (False, params.top_k, params.top_p < 1)].append(row)
    for (is_greedy, *_), members in groups.items():
        for chunk in _chunks(members, logits.device):
            x = allowed[chunk[0] : chunk[0] + 1] if len(chunk) == 1 else allowed[chunk]
            if is_greedy:
                # max() gives the first of equal values, which is the lowest token id.
                chosen = x.max(dim=-1).indices
            else:
                candidates, p = _candidates(x, [rows[row].request.sampling for row in chunk])
                points = [rows[row].uniform(rows[row].next_index, Purpose.TOKEN) for row in chunk]
                chosen = draw(p, points)
                if candidates is not None:
                    chosen = candidates.gather(-1, chosen[:, None])[:, 0]
            for row, token_id in zip(chunk, chosen.tolist(), strict=True):
                token_ids[row] = token_id
    return [
        Sample(token_id, None if number is None else logprobs(logits[row], token_id, number)) if is_sound[row] else None
        for row, (token_id, number) in enumerate(
            zip(token_ids, (state.request.sampling.logprobs for state in rows), strict=True)
        )
    ]


def process(logits: Tensor, rows: Sequence[tuple[SamplingState, int]]) -> Tensor:
    """Logits after penalties, bias and the tokens that are ruled out.

    Args:
        logits: [N, V] float32, raw.
        rows: N pairs: a request, and the index in its output of the token that the row predicts. All tokens before it
            must be in the request's output or drafts.

    Returns:
        A copy [N, V], or the same tensor if no row asks for anything.
    """
    processors = LogitProcessors()
    for row, (state, index) in enumerate(rows):
        state.process(processors, row, index)
    return processors.apply(logits)


def distribution(logits: Tensor, state: SamplingState, index: int | None = None) -> Distribution | None:
    """What `sample` draws a row's token from, after everything that changes it.

    A greedy request has one candidate with probability 1; so a rule on distributions covers it too.

    Args:
        logits: [V], raw.
        state: of the row's request.
        index: in its output, of the token that the row predicts; None is the next one.

    Returns:
        None where `sample` gives None.
    """
    (allowed,) = process(logits.float()[None], [(state, state.next_index if index is None else index)])
    if not bool(allowed.amax().isfinite()):
        return None
    return distribution_of(allowed, state.request.sampling)


def distribution_of(allowed: Tensor, params: SamplingParams) -> Distribution:
    """As `distribution`, of logits [V] that `process` gave and whose largest is finite."""
    if params.is_greedy:
        token_ids = allowed.max(dim=-1, keepdim=True).indices
        return Distribution(token_ids, torch.ones(1, dtype=torch.float64, device=allowed.device))
    candidates, p = _candidates(allowed[None], [params])
    p = mass(p[0])
    kept = p.nonzero()[:, 0]
    return Distribution(kept if candidates is None else candidates[0, kept], p[kept] / p.sum())


def logprobs(logits: Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """Log-probability of a token, and the `num_top` most probable ones, from raw logits [V].

    Raw: before temperature, penalties and masks, so that they say what the model thinks and not what was asked for.
    """
    log_p = logits.float().log_softmax(dim=-1)
    if num_top == 0:
        return TokenLogprobs(token_id, float(log_p[token_id]))
    top = log_p.topk(min(num_top, log_p.numel()))
    pairs = sorted(zip(top.indices.tolist(), top.values.tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))
    return TokenLogprobs(token_id, float(log_p[token_id]), tuple(pairs))


def prompt_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: int) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of tokens of a prompt.

    Args:
        logits: [N, V], raw, of the final exit, of the rows in front of the tokens: row `t` predicts token `t + 1`.
        token_ids: N.
        num_top: number of alternatives for each.
    """
    return tuple(logprobs(row, token_id, num_top) for row, token_id in zip(logits, token_ids, strict=True))


def _chunks(rows: list[int], device: torch.device) -> Iterable[list[int]]:
    """Rows that are computed together."""
    size = 1 if device.type == "cpu" else 64
    return (rows[start : start + size] for start in range(0, len(rows), size))


def _candidates(x: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor | None, Tensor]:
    """Probabilities after top-k, temperature, top-p and min-p.

    Args:
        x: [M, V], whose largest are finite.
        params: M, with temperatures above 0 and one top-k, and all or none with a top-p.

    Returns:
        Token ids [M, C], ascending in each row, or None for all in order; and probabilities [M, C], 0 for those that
        top-p and min-p leave out.
    """
    token_ids, top_k = None, params[0].top_k
    if top_k is not None and top_k < x.shape[-1]:
        token_ids = _largest(x, top_k)
        x = x.gather(-1, token_ids)
    # The largest becomes 0 before the division, and float32 knows no smaller temperature: so none makes a NaN.
    temperature = _column([max(one.temperature, 1e-30) for one in params], x)
    p = x.sub(x.amax(dim=-1, keepdim=True)).div_(temperature).softmax(dim=-1)
    is_in = None
    if params[0].top_p < 1:
        is_in = _nucleus(p, _column([one.top_p for one in params], x, torch.float64))
    if any(one.min_p > 0 for one in params):
        is_probable = p >= _column([one.min_p for one in params], x) * p.amax(dim=-1, keepdim=True)
        is_in = is_probable if is_in is None else is_in & is_probable
    return token_ids, p if is_in is None else p * is_in


def _column(numbers: list[float], like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device=like.device)[:, None]


def _nucleus(p: Tensor, top_p: Tensor) -> Tensor:
    """Which are among the fewest most probable of [M, C] that reach `top_p` [M, 1] together (Holtzman et al. 2020).

    The lowest token ids win ties.
    """
    width = min(64, p.shape[-1])  # A nucleus is small as a rule, and sorting a vocabulary is the dearest thing here.
    largest = p.topk(width).values
    count = _num_needed(largest, top_p)
    if width < p.shape[-1] and bool((count == width).any()):
        largest = _descending(p)
        count = _num_needed(largest, top_p)
    least = largest.gather(-1, count - 1)
    is_in = p >= least
    if bool((is_in.sum(dim=-1, keepdim=True) == count).all()):
        return is_in
    is_tie = p == least
    surplus = is_in.sum(dim=-1, keepdim=True) - count
    return is_in & (~is_tie | (is_tie.cumsum(dim=-1) <= is_tie.sum(dim=-1, keepdim=True) - surplus))


def _num_needed(largest: Tensor, top_p: Tensor) -> Tensor:
    """How many of [M, C], descending, reach `top_p` [M, 1] together; all if they do not. [M, 1]."""
    weights = mass(largest)
    # One belongs to the nucleus if those before it do not reach top_p yet; so the first always does.
    return (weights.cumsum(dim=-1) - weights < top_p * ONE).sum(dim=-1, keepdim=True)


def _descending(p: Tensor) -> Tensor:
    if p.device.type == "cpu":  # where numpy sorts a vocabulary fifty times as fast as torch
        p = torch.from_numpy(p.neg().numpy().copy())
        p.numpy().sort(axis=-1)
        return p.neg_()
    return p.sort(dim=-1, descending=True).values


def _largest(x: Tensor, count: int) -> Tensor:
    """Indices [M, C] of the `count` < V largest of [M, V], ascending; lower indices win ties."""
    top = x.topk(count + 1)
    indices = top.indices[:, :count].sort(dim=-1).values
    for row in (top.values[:, count - 1] == top.values[:, count]).nonzero()[:, 0].tolist():
        least = top.values[row, count]
        above, ties = (x[row] > least).nonzero()[:, 0], (x[row] == least).nonzero()[:, 0]
        indices[row] = torch.cat((above, ties[: count - above.numel()])).sort().values
    return indices
