"""What every exit would have said, everywhere: one pass of all layers over a text, beside whatever the engine does.

It runs on a cache of its own, so it changes no answer. What an exit reads here has seen the full model's keys and
values, as under the KV policies `recompute` and `verify`; under `fill` a text with early exits has seen others.

Legend: N rows, T tokens, D model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from offramp.common.errors import OfframpError
from offramp.common.exits.confidence import confidence
from offramp.common.exits.policy import ExitPolicy, Measure
from offramp.serve.kv_cache.storage import KVStorage
from offramp.serve.model.packed import PackedModel
from offramp.serve.model.rows import Rows

SLICE = 64
"""Rows that are run at once; their logits are in memory together."""

_BLOCK_SIZE = 16


@dataclass(frozen=True)
class ExitReading:
    """What one exit makes of one position.

    Attributes:
        top: (token id, probability) of the most probable next tokens, best first, the lower id first among equals.
        confidence: every measure over the whole vocabulary; `classifier` where the exit has one.
        tested: what the exit test compares with the threshold there: the policy's measure over its shortlist. None
            without a policy, and at the final exit, which asks nothing.
    """

    top: tuple[tuple[int, float], ...]
    confidence: dict[Measure, float]
    tested: float | None


@dataclass(frozen=True)
class PositionReading:
    """What is made of one position by all exits.

    Attributes:
        position: from 0.
        token_id: the token there; what the exits say comes after it.
        exits: exit layer -> reading, ascending; the final exit is the last.
    """

    position: int
    token_id: int
    exits: dict[int, ExitReading]


@torch.inference_mode()
def probe(
    model: PackedModel,
    token_ids: Sequence[int],
    *,
    max_model_len: int,
    top: int = 5,
    policy: ExitPolicy | None = None,
) -> list[PositionReading]:
    """Read a text with every exit.

    Args:
        model: packed weights.
        token_ids: T, prompt and answer in a row.
        max_model_len: what rotary frequencies of `dynamic` scaling are made for.
        top: tokens to report for each exit and position.
        policy: whose measure and shortlist `ExitReading.tested` is.

    Returns:
        One reading for each position.

    Raises:
        OfframpError: there is no token, one outside the vocabulary, or more than `max_model_len`; `top` is below 1.
    """
    _check(token_ids, model.config.vocab_size, max_model_len, top)
    num_tokens, config = len(token_ids), model.config
    blocks = torch.arange(-(-num_tokens // _BLOCK_SIZE), dtype=torch.int32)[None]
    cache = KVStorage(
        *(model.num_cache_layers, blocks.numel(), _BLOCK_SIZE, config.num_kv_heads, config.head_dim, model.dtype),
        device=model.device,
    )
    context = model.row_context(max_model_len, _BLOCK_SIZE)
    readings = [PositionReading(position, token, {}) for position, token in enumerate(token_ids)]
    for start in range(0, num_tokens, SLICE):
        part = readings[start : start + SLICE]
        positions = torch.arange(start, start + len(part))  # and slots: blocks lie in order
        rows = Rows(positions, positions, torch.zeros(len(part), dtype=torch.int32), blocks, context)
        x, depth = model.embed(torch.tensor([one.token_id for one in part], device=model.device)), 0
        for layer in model.exits:
            x, previous = model.run_layers(x, rows, cache, depth, layer)
            depth = layer
            logits = model.exits[layer].unembed.logits(model.exit_state(layer, x, rows, cache))
            asked = None if layer == config.num_layers else policy
            read = _read(logits, x, previous, model.exits[layer].classifier, top, asked)
            for one, reading in zip(part, read, strict=True):
                one.exits[layer] = reading
    return readings


def _check(token_ids: Sequence[int], vocab_size: int, max_model_len: int, top: int) -> None:
    if top < 1:
        raise OfframpError(f"top {top} must be at least 1 token.")
    if not token_ids:
        raise OfframpError("there is no token to probe; give at least one.")
    if len(token_ids) > max_model_len:
        raise OfframpError(f"{len(token_ids)} tokens are more than the {max_model_len} that the model takes at once.")
    if wrong := [token for token in token_ids if not 0 <= token < vocab_size]:
        raise OfframpError(f"the text holds token {wrong[0]}, outside the vocabulary of {vocab_size}.")


def _read(
    logits: Tensor,
    x: Tensor,
    previous: Tensor,
    classifier: Callable[[Tensor], Tensor] | None,
    top: int,
    policy: ExitPolicy | None,
) -> list[ExitReading]:
    """Readings of N rows.

    Args:
        logits: [N, V] fp32.
        x: [N, D] states after the exit layer.
        previous: [N, D] states before it.
        classifier: of the exit; None if it has none.
        top: tokens to report.
        policy: of the exit test; None if there is no test.
    """
    measured: dict[Measure, list[float]] = {
        measure: confidence(measure, logits, x, previous, classifier).tolist()
        for measure in get_args(Measure)
        if measure != "classifier" or classifier is not None
    }
    tested: list[float | None] = [None] * len(x)
    if policy is not None:
        seen = logits if policy.shortlist is None else logits[:, list(policy.shortlist)]
        tested = confidence(policy.measure, seen, x, previous, classifier).tolist()
    best = logits.softmax(dim=-1).topk(min(top, logits.shape[-1]))
    pairs = [
        tuple(sorted(zip(ids, shares, strict=True), key=lambda pair: (-pair[1], pair[0])))
        for ids, shares in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    return [
        ExitReading(pairs[row], {measure: values[row] for measure, values in measured.items()}, tested[row])
        for row in range(len(x))
    ]
