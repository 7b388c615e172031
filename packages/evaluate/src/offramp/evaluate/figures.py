"""What is made of answers and readings: figures with 95% intervals, paired with full depth where they are ratios."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from offramp.evaluate import bootstrap
from offramp.evaluate.answering import Answers
from offramp.evaluate.bootstrap import Interval
from offramp.evaluate.reading import Read
from offramp.evaluate.rouge import rouge
from offramp.evaluate.scores import calibration_gaps, likeliest
from offramp.evaluate.tasks import Scores

Figures = dict[str, Interval]


def of_answers(mine: Answers, scored: Scores, full: Answers, full_scored: Scores, num_layers: int) -> Figures:
    """Quality and cost of answers beside those of full depth to the same prompts.

    Args:
        mine: answers.
        scored: what they are worth.
        full: answers at full depth.
        full_scored: what those are worth.
        num_layers: of the model that gave `mine`.

    Returns:
        Every score, and as `NAME_ratio` over that of full depth; `same_texts` and `same_tokens` (the share of an answer
        before the first difference from full depth), `rougeL_to_full`; `layers_per_token` and `early_tokens` (the share
        that left early), both of tokens that could; `layers_run`, the same with what was made up for later, without an
        interval; `tokens_per_second`, `speedup`, `inner_token_latency_s`, `latency_ratio` (full depth over this);
        `cut_off`, the share of answers that met the limit of tokens.
    """
    given, theirs = mine.given, full.given
    figures: Figures = {}
    for name, values in scored.items():
        figures[name] = bootstrap.mean(values)
        figures[f"{name}_ratio"] = bootstrap.ratio(values, full_scored[name])
    pairs = list(zip(given, theirs, strict=True))
    figures["same_texts"] = bootstrap.mean([float(a.text == b.text) for a, b in pairs])
    figures["same_tokens"] = bootstrap.mean([same_share(a.token_ids, b.token_ids) for a, b in pairs])
    figures["rougeL_to_full"] = bootstrap.mean(rouge(mine.texts, [[text] for text in full.texts])["rougeL"])
    deep = [answer.deep_layers for answer in given]
    counts = [float(len(layers)) for layers in deep]
    figures["layers_per_token"] = bootstrap.ratio([float(sum(layers)) for layers in deep], counts)
    figures["early_tokens"] = bootstrap.ratio(
        [float(sum(layer < num_layers for layer in layers)) for layers in deep], counts
    )
    # Of the whole run: what was made up for one answer's tokens ran in passes of another's.
    figures["layers_run"] = Interval(mine.layers_per_token, math.nan, math.nan)
    tokens, costs = [float(len(answer.token_ids)) for answer in given], [answer.cost_s for answer in given]
    full_tokens, full_costs = [float(len(one.token_ids)) for one in theirs], [one.cost_s for one in theirs]
    waits, full_waits = [answer.decoding_s for answer in given], [one.decoding_s for one in theirs]
    figures["tokens_per_second"] = bootstrap.ratio(tokens, costs)
    figures["inner_token_latency_s"] = bootstrap.ratio(waits, tokens)
    figures["speedup"] = bootstrap.of_means(_rate_over_rate, tokens, costs, full_tokens, full_costs)
    figures["latency_ratio"] = bootstrap.of_means(_rate_over_rate, tokens, waits, full_tokens, full_waits)
    figures["cut_off"] = bootstrap.mean([float(answer.finish_reason == "length") for answer in given])
    return figures


def _rate_over_rate(tokens: Any, seconds: Any, full_tokens: Any, full_seconds: Any) -> Any:
    return (tokens / seconds) / (full_tokens / full_seconds)


def same_share(mine: Sequence[int], full: Sequence[int]) -> float:
    """Share of the longer of two sequences of tokens that comes before their first difference; 1 if they are equal."""
    longest = max(len(mine), len(full))
    same = next(
        (step for step, (a, b) in enumerate(zip(mine, full, strict=False)) if a != b), min(len(mine), len(full))
    )
    return same / longest if longest else 1.0


def of_texts(mine: Sequence[Read], full: Sequence[Read], num_layers: int) -> Figures:
    """How likely texts are to exits, beside what they are to the full model.

    Returns:
        `perplexity` (of a token), `byte_perplexity`, `bits_per_byte`, `perplexity_ratio`; `agreement` with what the
        last exit would say, over all tokens; `calibration_error` of the confidence at the exit against that agreement,
        of tokens that leave early by a measure from 0 to 1; `layers_per_token`, `early_tokens`.
    """
    lost, tokens = [one.nats for one in mine], [float(len(one.layers)) for one in mine]
    sizes, full_lost = [float(one.num_bytes) for one in mine], [one.nats for one in full]
    of = bootstrap.of_means
    figures: Figures = {
        "perplexity": of(lambda a, b: np.exp(a / b), lost, tokens),
        "byte_perplexity": of(lambda a, b: np.exp(a / b), lost, sizes),
        "bits_per_byte": of(lambda a, b: a / b / math.log(2), lost, sizes),
        "perplexity_ratio": of(lambda a, b, c: np.exp((a - b) / c), lost, full_lost, tokens),
    }
    return {**figures, **of_reading(mine, num_layers)}


def of_choices(
    mine: Sequence[Sequence[Read]],
    full: Sequence[Sequence[Read]],
    choices: Sequence[Sequence[str]],
    right: Sequence[int],
    num_layers: int,
) -> Figures:
    """How often the likeliest of several answers is the right one.

    Args:
        mine: for each question, its choices as they were read.
        full: the same by the full model.
        choices: their texts.
        right: index of the right one.
        num_layers: of the model.

    Returns:
        `accuracy` by whole log-probabilities, `accuracy_per_character` by those divided by the length, each also as
        `NAME_ratio`; `same_choice` as the full model, by whole log-probabilities; and as for texts.
    """
    picks, full_picks = (
        [likeliest([-read.nats for read in reads], words) for reads, words in zip(all_reads, choices, strict=True)]
        for all_reads in (mine, full)
    )
    figures: Figures = {}
    for name, index in (("accuracy", 0), ("accuracy_per_character", 1)):
        hits, full_hits = (
            [float(pick[index] == answer) for pick, answer in zip(some, right, strict=True)]
            for some in (picks, full_picks)
        )
        figures[name] = bootstrap.mean(hits)
        figures[f"{name}_ratio"] = bootstrap.ratio(hits, full_hits)
    figures["same_choice"] = bootstrap.mean([float(a.raw == b.raw) for a, b in zip(picks, full_picks, strict=True)])
    return {**figures, **of_reading([read for reads in mine for read in reads], num_layers)}


def of_reading(mine: Sequence[Read], num_layers: int) -> Figures:
    """Agreement with the last exit, calibration and depth; see `of_texts`."""
    tokens = [float(len(one.layers)) for one in mine]
    figures: Figures = {
        "agreement": bootstrap.ratio([float(sum(one.agrees)) for one in mine], tokens),
        "layers_per_token": bootstrap.ratio([float(sum(one.layers)) for one in mine], tokens),
        "early_tokens": bootstrap.ratio(
            [float(sum(layer < num_layers for layer in one.layers)) for one in mine], tokens
        ),
    }
    early = [
        [
            (sure, hit)
            for sure, hit, layer in zip(one.confidences, one.agrees, one.layers, strict=True)
            if layer < num_layers
        ]
        for one in mine
    ]
    said = [pair for pairs in early for pair in pairs]
    if said and all(0 <= sure <= 1 for sure, _ in said):
        gaps = [calibration_gaps([sure for sure, _ in pairs], [hit for _, hit in pairs]) for pairs in early]
        figures["calibration_error"] = bootstrap.of_means(
            lambda count, *sums: sum(map(np.abs, sums)) / count,
            [float(len(pairs)) for pairs in early],
            *zip(*gaps, strict=True),
        )
    return figures
