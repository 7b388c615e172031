"""Logits to tokens. Every row is chosen by its own logits, its own settings and its own generator alone.

Rows that draw are computed one by one, in the shape [V] that they have in any batch: so a request draws the same tokens
alone and among others, on any device, where a batched reduction may round differently with N.

Legend: N rows, V vocabulary, C candidates (tokens that may be drawn).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offramp.serve.request import SamplingParams, TokenLogprobs


@dataclass(frozen=True)
class Sample:
    """The token chosen for one row.

    Attributes:
        token_id: the token.
        logprobs: None unless asked for.
    """

    token_id: int
    logprobs: TokenLogprobs | None


def make_generator(params: SamplingParams, device: torch.device | str = "cpu") -> torch.Generator | None:
    """The source of a request's draws, for as long as it lives; None for a greedy one.

    Requests with the same seed start in the same state; without a seed every one starts elsewhere.
    """
    if params.is_greedy:
        return None
    generator = torch.Generator(device)
    if params.seed is None:
        generator.seed()
    else:
        generator.manual_seed(params.seed)
    return generator


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    generators: Sequence[torch.Generator | None],
    forbidden: Sequence[Collection[int]] = (),
) -> list[Sample | None]:
    """Choose one token per row; None for a row whose largest logit is not finite, for nothing can be chosen from it.

    Args:
        logits: [N, V], raw, of the exit that each row leaves at.
        params: N.
        generators: N, from `make_generator`; each that draws moves on by one number.
        forbidden: N collections of tokens that must not be chosen (`Request.forbidden_ids`); empty forbids nothing.
    """
    logits = logits.float()
    allowed = _without(logits, forbidden)
    # max() gives the first of equal values, which is the lowest token id, and lets a NaN through.
    best, token_ids = allowed.max(dim=-1)
    is_finite = best.isfinite().tolist()
    for row, (settings, generator) in enumerate(zip(params, generators, strict=True)):
        if is_finite[row] and not settings.is_greedy:
            assert generator is not None
            candidates, p = distribution(allowed[row], settings)
            token_ids[row] = candidates[draw(p, generator)]
    return [
        Sample(token_id, None if settings.logprobs is None else logprobs(logits[row], token_id, settings.logprobs))
        if is_finite[row]
        else None
        for row, (token_id, settings) in enumerate(zip(token_ids.tolist(), params, strict=True))
    ]


def distribution(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """What a row with a temperature is drawn from, after top-k, temperature and top-p.

    Args:
        logits: [V].
        params: with a temperature above 0.

    Returns:
        Token ids, ascending, and their probabilities; both [C] with C at most V. The probabilities sum to 1
        but for what top-p cut off.
    """
    token_ids = torch.arange(logits.numel(), device=logits.device)
    if params.top_k is not None and params.top_k < logits.numel():
        token_ids = _largest(logits, params.top_k, logits.topk(params.top_k).values[-1])
        logits = logits[token_ids]
    # The largest becomes 0 before the division, and float32 knows no smaller temperature: so none makes a NaN.
    p = ((logits - logits.max()) / max(params.temperature, 1e-30)).softmax(dim=-1)
    if params.top_p < 1:
        nucleus = _nucleus(p, params.top_p)
        token_ids, p = token_ids[nucleus], p[nucleus]
    return token_ids, p


def draw(p: Tensor, generator: torch.Generator) -> Tensor:
    """An index into probabilities [C] that need not sum to 1, by the inverse of their running sum."""
    running = p.cumsum(dim=-1, dtype=torch.float64)
    # Below the whole sum: a float64 in [0, 1) is at most 1 - 2**-53, and that much less is never rounded away.
    point = torch.rand((), dtype=torch.float64, device=p.device, generator=generator) * running[-1]
    # The first index whose running sum exceeds the point: never one of probability 0.
    return torch.searchsorted(running, point, right=True)


def logprobs(logits: Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """Log-probability of a token, and the `num_top` most probable ones, from raw logits [V]."""
    log_p = logits.float().log_softmax(dim=-1)
    top = log_p.topk(min(num_top, log_p.numel()))
    pairs = sorted(zip(top.indices.tolist(), top.values.tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))
    return TokenLogprobs(token_id, float(log_p[token_id]), tuple(pairs))


def _without(logits: Tensor, forbidden: Sequence[Collection[int]]) -> Tensor:
    """Logits [N, V] with minus infinity at forbidden tokens; the same tensor if there is none."""
    cells = [(row, token) for row, tokens in enumerate(forbidden) for token in tokens if token < logits.shape[-1]]
    if not cells:
        return logits
    rows, tokens = torch.tensor(cells, device=logits.device).unbind(dim=-1)
    return logits.index_put((rows, tokens), torch.full_like(rows, -torch.inf, dtype=logits.dtype))


def _nucleus(p: Tensor, top_p: float) -> Tensor:
    """Indices of the fewest most probable of [C] that reach `top_p` together, ascending (Holtzman et al. 2020)."""
    width = 64  # A nucleus is small as a rule, and sorting a vocabulary is the dearest thing here.
    while True:
        largest = p.topk(min(width, p.numel())).values
        # One belongs to the nucleus if those before it do not reach top_p yet; so the first always does.
        count = int((largest.cumsum(dim=-1, dtype=torch.float64) - largest < top_p).sum())
        if count < width or width >= p.numel():
            return _largest(p, count, largest[count - 1])
        width *= 16


def _largest(values: Tensor, count: int, least: Tensor) -> Tensor:
    """Indices of the `count` largest of [C], ascending; `least` is their smallest; lower indices win ties with it."""
    found = (values >= least).nonzero().squeeze(-1)
    if found.numel() == count:
        return found
    is_tie = values[found] == least
    surplus = found.numel() - count
    return found[~is_tie | (is_tie.cumsum(dim=-1) <= is_tie.sum() - surplus)]
