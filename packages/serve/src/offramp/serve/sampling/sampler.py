"""Logits to tokens. Every row is chosen by its own logits, its own settings and its own numbers alone.

A row's token is bitwise the same alone and in any batch. Maxima and the k largest are exact; what is added up are whole
numbers in float64 (`distribution.mass`), whose sum does not depend on the order; a softmax runs over one row in one
shape. So rows may be computed together where that pays, and one by one where it does not: whole vocabularies on a CPU,
where one stays in the cache from one operation to the next and many do not.

Legend: N rows, M rows that are computed together, V vocabulary, C candidates (tokens that may be drawn).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offramp.serve.devices import rows_at
from offramp.serve.request.iteration_result import TokenLogprobs
from offramp.serve.request.logits_use import LogitsUse
from offramp.serve.request.request import Request
from offramp.serve.request.sampling_params import SamplingParams
from offramp.serve.sampling.constraint import ConstraintState
from offramp.serve.sampling.distribution import ONE, Distribution, Floats, draw, mass, pick
from offramp.serve.sampling.draws import Purpose, fresh_seed, uniform
from offramp.serve.sampling.logit_processors import LogitProcessors, TokenCounts


class Sample(NamedTuple):
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
        # Both may name the whole vocabulary, and rows are many: made into arrays once.
        self._biased = np.array([token for token, _ in params.logit_bias], dtype=np.int64)
        self._biases = np.array([number for _, number in params.logit_bias], dtype=np.float32)
        self._ends = np.array(sorted(request.stop_ids), dtype=np.int64)
        self._counts = TokenCounts(request.prompt_token_ids) if params.has_penalties else None
        self._constraint = constraint
        self._readers = [reader for reader in (self._counts, constraint) if reader is not None]
        is_chosen = not params.is_greedy or params.logit_bias or self._readers
        reported = LogitsUse.BEST if params.logprobs is None else LogitsUse.REPORT
        self._logits_use = LogitsUse.CHOICE if is_chosen else reported
        self._read: list[int] = []  # generated tokens that the readers know
        self._num_final = 0  # of these, the first ones that are output and not drafts

    @property
    def next_index(self) -> int:
        """Index of the token that the newest row predicts: output and drafts come before it."""
        return len(self.request.output_token_ids) + len(self.request.drafts)

    @property
    def logits_use(self) -> LogitsUse:
        """What the next token asks of the logits."""
        min_tokens = self.request.sampling.min_tokens  # until there are so many, some must not be chosen
        return LogitsUse.CHOICE if min_tokens and self.next_index < min_tokens else self._logits_use

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
            processors.bias(row, self._biased, self._biases)
        if index < params.min_tokens and self.request.stop_ids:
            processors.rule_out(row, self._ends)
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
    is_sound = allowed.amax(dim=-1).isfinite().tolist()
    token_ids = [0] * len(rows)
    if greedy := [row for row, state in enumerate(rows) if state.request.sampling.is_greedy]:
        # max() gives the first of equal values, which is the lowest token id; it is much dearer than amax().
        first = (allowed if len(greedy) == len(rows) else allowed[greedy]).max(dim=-1).indices
        for row, token_id in zip(greedy, first.tolist(), strict=True):
            token_ids[row] = token_id
    groups: dict[tuple[int | None, bool], list[int]] = defaultdict(list)
    for row, state in enumerate(rows):
        params = state.request.sampling
        if is_sound[row] and not params.is_greedy:
            groups[params.top_k, _is_narrowed(params)].append(row)
    for (top_k, _), members in groups.items():
        for chunk in _chunks(members, 1 if top_k is None and logits.device.type == "cpu" else 64):
            x = allowed[chunk[0] : chunk[0] + 1] if len(chunk) == 1 else allowed[chunk]
            for row, token_id in zip(chunk, _draw(x, [rows[row] for row in chunk]), strict=True):
                token_ids[row] = token_id
    samples: list[Sample | None] = []
    for row, state in enumerate(rows):
        number = state.request.sampling.logprobs
        reported = None if number is None or not is_sound[row] else logprobs(logits[row], token_ids[row], number)
        samples.append(Sample(token_ids[row], reported) if is_sound[row] else None)
    return samples


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
    token_ids, p = _softened(allowed[None], [params])
    if _is_narrowed(params):
        ((kept, weights),) = _narrowed(p, [params])
        places, p = torch.from_numpy(kept).to(p.device), torch.from_numpy(weights).to(p.device)
    else:
        p = mass(p[0]).double()
        places = p.nonzero()[:, 0]
        p = p[places]
    return Distribution(places if token_ids is None else token_ids[0, places], p / p.sum())


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


def _chunks(rows: list[int], size: int) -> Iterable[list[int]]:
    """Rows that are computed together."""
    return (rows[start : start + size] for start in range(0, len(rows), size))


def _draw(x: Tensor, rows: Sequence[SamplingState]) -> list[int]:
    """Tokens of rows [M, V] whose largest are finite: one top-k for all, and all are narrowed or none."""
    params = [state.request.sampling for state in rows]
    points = [state.uniform(state.next_index, Purpose.TOKEN) for state in rows]
    token_ids, p = _softened(x, params)
    if _is_narrowed(params[0]):
        kept = _narrowed(p, params)
        chosen = [int(places[pick(weights, point)]) for (places, weights), point in zip(kept, points, strict=True)]
    else:
        chosen = draw(p, points)
    if token_ids is None:
        return chosen
    return token_ids[torch.arange(len(chosen)), chosen].tolist()


def _softened(x: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor | None, Tensor]:
    """Probabilities after top-k and temperature.

    Args:
        x: [M, V], whose largest are finite.
        params: M, with temperatures above 0 and one top-k.

    Returns:
        Token ids [M, C], ascending in each row, or None for all in order; and their probabilities [M, C].
    """
    token_ids, top_k = None, params[0].top_k
    if top_k is not None and top_k < x.shape[-1]:
        token_ids = _largest(x, top_k)
        x = x.gather(-1, token_ids)
    # The largest becomes 0 before the division, and float32 knows no smaller temperature: so none makes a NaN.
    temperature = torch.tensor([max(one.temperature, 1e-30) for one in params], device=x.device)[:, None]
    return token_ids, x.sub(x.amax(dim=-1, keepdim=True)).div_(temperature).softmax(dim=-1)


def _is_narrowed(params: SamplingParams) -> bool:
    return params.top_p < 1 or params.min_p > 0


def _narrowed(p: Tensor, params: Sequence[SamplingParams]) -> list[tuple[npt.NDArray[np.int64], Floats]]:
    """What top-p and min-p leave of rows [M, C]: for each its places, ascending, and their `mass`."""
    largest = p.amax(dim=-1).tolist()
    least = [max(one.min_p * best, _improbable(one, p.shape[-1])) for one, best in zip(params, largest, strict=True)]
    bounds = torch.tensor(least, device=p.device)[:, None]
    rows: list[tuple[npt.NDArray[np.int64], Floats]] = []
    for one, values, is_in in zip(params, p, (p >= bounds).cpu().numpy(), strict=True):
        places = np.flatnonzero(is_in)
        weights = mass(rows_at(values, places)).double().cpu().numpy()
        if one.top_p < 1:
            kept = _nucleus(weights, one.top_p)
            places, weights = places[kept], weights[kept]
        rows.append((places, weights))
    return rows


def _improbable(params: SamplingParams, num_candidates: int) -> float:
    """A probability below which nothing is in the nucleus, so that few have to be sorted.

    All that lie below half of (1 - p) / C make up less than half of 1 - p together. The other half is for rounding in
    the softmax, next to nothing unless p is.
    """
    slack = 1 - params.top_p
    return 0.5 * slack / num_candidates if 1e-3 < slack < 1 else 0.0


def _nucleus(weights: Floats, top_p: float) -> npt.NDArray[np.int64]:
    """Indices of the fewest largest of [C] that reach `top_p` together, ascending (Holtzman et al. 2020).

    The first win ties.
    """
    largest = np.sort(weights)[::-1]
    # One belongs to the nucleus if those before it do not reach top_p yet; so the first always does.
    count = int(np.count_nonzero(largest.cumsum() - largest < top_p * ONE))
    kept = np.flatnonzero(weights >= largest[count - 1])
    if surplus := len(kept) - count:
        ties = np.flatnonzero(weights[kept] == largest[count - 1])
        kept = np.delete(kept, ties[len(ties) - surplus :])
    return kept


def _largest(x: Tensor, count: int) -> Tensor:
    """Indices [M, C] of the `count` < V largest of [M, V], ascending; lower indices win ties."""
    top = x.topk(count + 1)
    indices = top.indices[:, :count].sort(dim=-1).values
    for row in (top.values[:, count - 1] == top.values[:, count]).nonzero()[:, 0].tolist():
        least = top.values[row, count]
        above, ties = (x[row] > least).nonzero()[:, 0], (x[row] == least).nonzero()[:, 0]
        indices[row] = torch.cat((above, ties[: count - above.numel()])).sort().values
    return indices
