"""Open questions about filled keys and values, each a study of one model on the prompts of one task.

Results are of kind `study` (see `offramp.evaluate.results`): `question`, `about` (paragraphs), `tables` as they are
shown, and `curves` (see `offramp.evaluate.plots.curve_picture`).

Legend: T time, H query heads, K key/value heads, E head dim.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offramp.common.checkpoint import AnyCheckpoint, load_any_checkpoint
from offramp.common.errors import OfframpError
from offramp.common.exits.kv_policy import KVPolicy
from offramp.common.exits.policy import ExitPolicy
from offramp.common.model.attention import Layout
from offramp.common.model.block import Block
from offramp.common.model.rope import rotate
from offramp.common.model.transformer import MultiExitTransformer
from offramp.evaluate import bootstrap
from offramp.evaluate.answering import Answer, Answerer, Setting
from offramp.evaluate.bootstrap import Interval
from offramp.evaluate.reading import read
from offramp.evaluate.tables import cell
from offramp.serve.config import EngineConfig
from offramp.serve.request.exit_options import ExitOptions

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Asked:
    """What is studied.

    Attributes:
        model: checkpoint directory.
        prompts: token ids of each.
        policy: when tokens leave.
        max_tokens: most tokens of an answer.
        stop: strings that end it.
        engine: that answers.
    """

    model: Path
    prompts: Sequence[Sequence[int]]
    policy: ExitPolicy
    max_tokens: int
    stop: Sequence[str] = ()
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(prefix_caching=False))

    def answers(self, kv_policy: KVPolicy) -> list[Answer]:
        """What the engine says under a KV policy."""
        exits = ExitOptions("full") if kv_policy == "full" else ExitOptions(kv_policy, self.policy)
        setting = Setting(kv_policy, exits, self.engine)
        return Answerer(self.model).answer(setting, self.prompts, self.max_tokens, self.stop).given


def position(asked: Asked, tell: Tell = lambda what: None) -> dict[str, Any]:
    """Whether quality falls as an answer goes on, with exact, recomputed and filled keys and values.

    Every token of an answer is held against what the full model says after the same text, read with exact keys and
    values. So a difference counts once, where it is made, and not again in all that follows from it.
    """
    checkpoint = load_any_checkpoint(asked.model)
    curves: dict[str, list[dict[str, Any]]] = {"right": [], "nats": [], "same": []}
    rows: list[tuple[str, ...]] = []
    full: list[Answer] | None = None
    kinds: tuple[KVPolicy, ...] = ("full", "recompute", "fill")
    for kv_policy in kinds:
        tell(kv_policy)
        answers = asked.answers(kv_policy)
        full = full or answers
        found = [_against_full(checkpoint, asked, *pair) for pair in zip(asked.prompts, answers, strict=True)]
        same = [
            [float(a == b) for a, b in zip(mine.token_ids, theirs.token_ids, strict=False)]
            for mine, theirs in zip(answers, full, strict=True)
        ]
        columns = {"right": [one[0] for one in found], "nats": [one[1] for one in found], "same": same}
        name = "exact" if kv_policy == "full" else kv_policy
        for what, values in columns.items():
            curves[what].append(_by_bucket(name, values))
        # The first token comes from the prompt's pass and says nothing about policies.
        halves = [_part(columns["right"], *ends) for ends in ((1, 9), (9, 33), (33, None))]
        depth = [float(layer) for answer in answers for layer in answer.deep_layers]
        rows.append(
            (name, f"{sum(depth) / max(1, len(depth)):.2f}", *(cell(half._asdict(), "agreement") for half in halves))
        )
    titles = {
        "right": ("Tokens that the full model would say after the same text", "share"),
        "nats": ("How surprising the answer's tokens are to the full model", "nats per token"),
        "same": ("Tokens that are those of the full model's own answer at the same position", "share"),
    }
    return {
        "question": "Does quality fall as an answer goes on?",
        "about": [
            f"{len(asked.prompts)} answers of at most {asked.max_tokens} tokens by {_limits(asked.policy)}, with exact "
            "keys and values at full depth, recomputed ones, and filled ones. Bands are 95% intervals by bootstrap "
            "over answers."
        ],
        "tables": [
            {
                "title": "Tokens that the full model would say after the same text",
                "columns": ["keys and values", "layers per token", "tokens 2 to 9", "10 to 33", "after"],
                "rows": rows,
                "note": "With 95% intervals by bootstrap over answers.",
            }
        ],
        "curves": [
            {"title": title, "x": "position in the answer", "y": unit, "log": "x", "series": curves[what]}
            for what, (title, unit) in titles.items()
        ],
    }


def _limits(policy: ExitPolicy) -> str:
    values = sorted(set(policy.thresholds.values()))
    return f"{policy.measure} above {', '.join(f'{value:g}' for value in values)}"


def _against_full(
    checkpoint: AnyCheckpoint, asked: Asked, prompt: Sequence[int], answer: Answer
) -> tuple[list[float], list[float]]:
    """Of each token of an answer: whether the full model says it after the same text, and the nats of its surprise."""
    readings = read(checkpoint, prompt, answer.token_ids, asked.policy)
    final = readings[max(readings)]
    right = [float(said == best) for said, best in zip(answer.token_ids, final.best, strict=True)]
    return right, [-logprob for logprob in final.logprobs]


def _by_bucket(name: str, values: Sequence[Sequence[float]]) -> dict[str, Any]:
    """A curve over positions from 1 in powers of two: 1, 2, 3 to 4, 5 to 8, ...; x is the last of each."""
    series: dict[str, Any] = {"name": name, "x": [], "y": [], "low": [], "high": []}
    start, stop = 0, 1
    while any(len(row) > start for row in values):
        interval = _part(values, start, stop)
        for key, value in zip(("x", "y", "low", "high"), (stop, *interval), strict=True):
            series[key].append(value)
        start, stop = stop, stop * 2
    return series


def _part(values: Sequence[Sequence[float]], start: int, stop: int | None) -> Interval:
    """Mean over some positions of all answers."""
    parts = [row[start:stop] for row in values]
    return bootstrap.ratio([float(sum(part)) for part in parts], [float(len(part)) for part in parts])


def kv_error(asked: Asked, tell: Tell = lambda what: None) -> dict[str, Any]:
    """How far filled keys and values are from exact ones, and what that does to attention, by layer and by age.

    The engine's answers under `fill` are read twice by the plain forward: with every token's state frozen where it left
    (`Layout.exit_depths`), as the cache had it, and without. Errors are relative: the length of the difference over the
    length of the exact vector. Attention differs by half the sum of what all keys gain or lose (total variation).
    """
    checkpoint = load_any_checkpoint(asked.model)
    model = checkpoint.model
    if not isinstance(model, MultiExitTransformer):
        raise OfframpError(
            "the study of filled keys and values reads decoder-only models, and this one has an encoder."
        )
    tell("fill")
    answers = asked.answers("fill")
    sums: list[Mapping[_Key, tuple[float, int]]] = []
    for prompt, answer in zip(asked.prompts, answers, strict=True):
        if len(answer.token_ids) > 1:
            sums.append(_errors(model, prompt, answer))
    if not any(kind == "keys" for one in sums for kind, _, _ in one):
        raise OfframpError("no token left early, so no key was filled; lower --threshold.")
    tell("comparing")
    layers = range(1, model.config.num_layers + 1)
    exits = sorted({group for one in sums for kind, group, _ in one if kind == "keys"})
    curves = [
        {
            "title": f"Relative error of filled {kind}, by the exit where the token left",
            **{"x": "layer", "y": "relative error", "log": ""},
            "series": [_curve(sums, kind, exit_layer, layers, f"left after {exit_layer}") for exit_layer in exits],
        }
        for kind in ("keys", "values")
    ]
    curves.append(
        {
            "title": "Attention that goes elsewhere because keys are filled",
            **{"x": "layer", "y": "share of attention", "log": ""},
            "series": [_curve(sums, "attention", 0, layers, "all tokens that reach the layer")],
        }
    )
    ages = sorted({at for one in sums for kind, _, at in one if kind == "age"})
    shown = sorted({max(1, round(model.config.num_layers * part / 4)) for part in (1, 2, 3, 4)})
    curves.append(
        {
            "title": "Change of attention by the age of the key",
            **{"x": "age of the key in tokens, at most", "y": "share of attention gained or lost", "log": "x"},
            "series": [_curve(sums, "age", layer, ages, f"layer {layer}") for layer in shown],
        }
    )
    rows = [
        (str(layer), *(cell(_mean(sums, kind, None, layer)._asdict()) for kind in ("keys", "values", "attention")))
        for layer in layers
    ]
    early = [float(layer < model.config.num_layers) for answer in answers for layer in answer.deep_layers]
    return {
        "question": "How far are filled keys and values from exact ones?",
        "about": [
            f"{len(sums)} answers of at most {asked.max_tokens} tokens by {_limits(asked.policy)}; "
            f"{sum(early) / max(1, len(early)):.0%} of the tokens left early. Bands are 95% intervals by bootstrap "
            "over answers."
        ],
        "tables": [
            {
                "title": "Errors by layer",
                "columns": ["layer", "keys", "values", "attention"],
                "rows": rows,
                "note": "Relative errors of keys and values of tokens that left below the layer; total variation of "
                "the attention of tokens that reach it.",
            }
        ],
        "curves": curves,
    }


_Key = tuple[str, int, int]
"""What (`keys`, `values`, `attention`, `age`), its group (exit where the token left; layer for `age`), and the layer or
the age."""


@torch.inference_mode()
def _errors(model: MultiExitTransformer, prompt: Sequence[int], answer: Answer) -> Mapping[_Key, tuple[float, int]]:
    """Sums of errors of one answer, and how many each is of."""
    final = model.config.num_layers
    ids = torch.tensor([[*prompt, *answer.token_ids[:-1]]])
    # A token runs as deep as it takes to say the next one.
    depths = torch.tensor([[final] * len(prompt) + answer.exit_layers[1:]])
    filled, exact = model.layout(ids, exit_depths=depths), model.layout(ids)
    h_filled = h_exact = model.embed(ids)
    found: dict[_Key, tuple[float, int]] = defaultdict(lambda: (0.0, 0))

    def add(key: _Key, total: Tensor, count: int) -> None:
        before = found[key]
        found[key] = (before[0] + float(total), before[1] + count)

    time = ids.shape[1]
    ages = torch.arange(time)[:, None] - torch.arange(time)[None, :]  # [T, T], of a key to a query
    for layer in range(1, final + 1):
        block = model.layers[layer - 1]
        assert isinstance(block, Block)
        q, k_exact, v_exact = _projected(block, h_exact, exact)
        _, k_filled, v_filled = _projected(block, h_filled, filled)
        left = depths[0] < layer
        for kind, mine, theirs in (("keys", k_filled, k_exact), ("values", v_filled, v_exact)):
            error = ((mine - theirs).flatten(1).norm(dim=1) / theirs.flatten(1).norm(dim=1))[left]
            for exit_layer in depths[0][left].unique().tolist():
                some = error[depths[0][left] == exit_layer]
                add((kind, exit_layer, layer), some.sum(), len(some))
        # The query is the exact one, so that what changes is what keys from the filled cache do.
        asking = ~left & (torch.arange(time) >= len(prompt))
        if left.any() and asking.any():
            change = (_attention(q, k_filled, exact, block) - _attention(q, k_exact, exact, block)).abs()
            change = change.mean(dim=0)[asking] / 2  # [queries, T] over heads
            add(("attention", 0, layer), change.sum(), len(change))
            age = ages[asking].clamp(min=0)
            for power in range(time.bit_length() + 1):
                low, high = (0, 0) if power == 0 else (2 ** (power - 1), 2**power - 1)
                add(("age", layer, high), change[(age >= low) & (age <= high)].sum(), len(change))
        h_exact = model.run_layers(h_exact, layer - 1, layer, exact)
        h_filled = model.run_layers(h_filled, layer - 1, layer, filled)
    return dict(found)


def _projected(block: Block, h: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, H, E], keys and values [T, K, E] that a layer makes of states [1, T, D]."""
    attention, x = block.self_attn, block.input_layernorm(h)
    shape = (*x.shape[:2], -1, attention.head_dim)
    q, k, v = (project(x).view(shape) for project in (attention.q_proj, attention.k_proj, attention.v_proj))
    if attention.q_norm is not None and attention.k_norm is not None:
        q, k = attention.q_norm(q), attention.k_norm(k)
    return rotate(q, layout.cos, layout.sin)[0], rotate(k, layout.cos, layout.sin)[0], v[0]


def _attention(q: Tensor, k: Tensor, layout: Layout, block: Block) -> Tensor:
    """Attention weights [H, T, T] of queries [T, H, E] on keys [T, K, E]."""
    time = len(q)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    seen = torch.ones(time, time).tril().bool() if layout.mask is None else layout.mask[0, 0]
    scores = torch.einsum("the,she->hts", q, k) * block.self_attn.head_dim**-0.5
    return scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)


def _mean(sums: Sequence[Mapping[_Key, tuple[float, int]]], kind: str, group: int | None, at: int) -> Interval:
    """Mean over all answers of what lies at a layer or an age; of all groups if None."""
    parts = [
        [
            value
            for (what, which, where), value in one.items()
            if what == kind and where == at and group in (None, which)
        ]
        for one in sums
    ]
    return bootstrap.ratio(
        [sum(total for total, _ in part) for part in parts], [float(sum(count for _, count in part)) for part in parts]
    )


def _curve(
    sums: Sequence[Mapping[_Key, tuple[float, int]]], kind: str, group: int, places: Sequence[int], name: str
) -> dict[str, Any]:
    found = [(at, _mean(sums, kind, group, at)) for at in places]
    found = [(at, interval) for at, interval in found if not math.isnan(interval.value)]
    return {
        "name": name,
        "x": [max(1, at) if kind == "age" else at for at, _ in found],
        **{end: [getattr(interval, end) for _, interval in found] for end in ("low", "high")},
        "y": [interval.value for _, interval in found],
    }


STUDIES: dict[str, Callable[..., dict[str, Any]]] = {"position": position, "kv-error": kv_error}
