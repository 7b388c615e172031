"""Calibration: which ways of answering keep a promise about quality, and the cheapest of them.

CALM (Schuster et al., 2022, section 4), by Learn-then-Test. Candidates are thresholds of a measure under a KV policy,
from strict to loose, which is from safe to cheap: a chain. They answer the calibration prompts one after the other, by
the engine that will serve them; each gives losses from 0 to 1, and the null hypothesis that its risk, the expected loss
on prompts like these, is above delta. The first that cannot be rejected ends the chain, so nothing looser is run.
Several chains share epsilon (Bonferroni), those of several sync policies too. What the candidates are, and their order,
is fixed before anything is asked.

With a probability of at least 1 - epsilon over the draw of the calibration prompts, every certified candidate of one
delta has a risk of at most delta, so the cheapest may be chosen. A sync policy is the engine's, so that of the cheapest
points together is chosen for all of them. Points for several deltas are made from the same
answers, and each of them has the guarantee for itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from offramp.common.errors import OfframpError
from offramp.common.exits.kv_policy import KVPolicy
from offramp.common.exits.operating_point import OperatingPoint
from offramp.common.exits.policy import ExitPolicy, Measure
from offramp.common.exits.profile import TokenProfile
from offramp.evaluate.answering import Answerer, Answers, Setting
from offramp.evaluate.learn_then_test import Bound, check_probability, p_value
from offramp.serve.config import EngineConfig, SyncPolicy
from offramp.serve.exit_overrides import point_options
from offramp.serve.request.exit_options import ExitOptions

Losses = Callable[[Sequence[str], Sequence[str]], Sequence[float]]
"""From early and full-depth texts for the same prompts to a loss from 0 to 1 for each; see `offramp.evaluate.risks`."""

THRESHOLDS = (0.999, 0.998, 0.995, 0.99, 0.98, 0.97, 0.95, 0.92, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
"""Of measures that are probabilities or differences of such, strict first."""

COSINES = (0.9999, 0.9995, 0.999, 0.998, 0.995, 0.99, 0.98, 0.97, 0.96, 0.95, 0.93, 0.9, 0.85, 0.8, 0.7, 0.5)
"""States of neighbouring layers resemble each other, so their cosines lie close to 1."""


@dataclass(frozen=True)
class Chain:
    """Candidates from safe to cheap.

    Attributes:
        name: what tables call it.
        candidates: see there.
        sync_policy: of the engine that answers.
    """

    name: str
    candidates: tuple[OperatingPoint, ...]
    sync_policy: SyncPolicy = EngineConfig.sync_policy


@dataclass(frozen=True)
class Tried:
    """A candidate and what its answers showed.

    Attributes:
        candidate: see there.
        losses: of each prompt.
        p_values: delta -> p-value.
        certified: deltas for which it is.
        layers: run for each token that could leave early, later passes for its sake included.
        tokens_per_second: of all of the run.
        profile: of its tokens.
        num_failed: prompts without an answer, its own or that of full depth; each of them is a loss of 1.
    """

    candidate: OperatingPoint
    losses: tuple[float, ...]
    p_values: Mapping[float, float]
    certified: frozenset[float]
    layers: float
    tokens_per_second: float
    profile: TokenProfile
    num_failed: int = 0

    @property
    def risk(self) -> float:
        """Mean loss."""
        return math.fsum(self.losses) / len(self.losses)

    def to_json(self) -> dict[str, Any]:
        """All but the profile, as plain containers."""
        point = {key: value for key, value in self.candidate.to_json().items() if key != "profile"}
        point["policy"] = {key: value for key, value in point["policy"].items() if key != "shortlist"}
        return {
            **point,
            "n": len(self.losses),
            "num_failed": self.num_failed,
            "total_loss": math.fsum(self.losses),
            "p_values": {str(delta): value for delta, value in self.p_values.items()},
            "certified": sorted(self.certified),
            "layers": self.layers,
            "tokens_per_second": self.tokens_per_second,
        }


@dataclass(frozen=True)
class Calibration:
    """What was tried, and what came of it.

    Attributes:
        full: answers at full depth.
        chains: with what was tried of each.
        engine: settings that the chosen are to be served with.
        chosen: delta -> the cheapest certified candidate; None where nothing is certified that saves a layer.
    """

    full: Answers
    chains: tuple[tuple[Chain, tuple[Tried, ...]], ...]
    engine: EngineConfig
    chosen: Mapping[float, Tried | None]


def make_chains(
    template: ExitPolicy,
    layers: Sequence[int],
    *,
    measures: Sequence[Measure],
    kv_policies: Sequence[KVPolicy],
    sync_policies: Sequence[SyncPolicy] = (EngineConfig.sync_policy,),
    decays: Sequence[float | None] = (None,),
    thresholds: Sequence[float] | None = None,
    each_exit: bool = False,
    max_pending: int = 8,
) -> list[Chain]:
    """One chain for every combination, with one threshold for all exits that are open.

    Args:
        template: its shortlist and least layer are those of all candidates.
        layers: the model's early exits.
        measures: confidence measures.
        kv_policies: under which tokens leave.
        sync_policies: of engines that answer.
        decays: of thresholds; see `ExitPolicy`.
        thresholds: strict first; None takes those that suit the measure.
        each_exit: beside all exits together, open those from each layer on.
        max_pending: see `OperatingPoint`.

    Raises:
        OfframpError: there are no exits, or the thresholds do not fall.
    """
    usable = [layer for layer in layers if layer >= template.min_layer]
    if not usable:
        raise OfframpError("the model has no early exit to calibrate; add some with `offramp import --exits`.")
    if thresholds is not None and any(a <= b for a, b in itertools.pairwise(thresholds)):
        raise OfframpError(f"thresholds {list(thresholds)} must fall from strict to loose.")
    opened = [tuple(usable[first:]) for first in range(len(usable) if each_exit else 1)]
    chains: list[Chain] = []
    # The engine changes with the sync policy, so that stays longest.
    for sync_policy, measure, kv_policy, decay, open_exits in itertools.product(
        sync_policies, measures, kv_policies, decays, opened
    ):
        base = replace(template, measure=measure, decay=decay)
        values = thresholds or (COSINES if measure == "cosine" else THRESHOLDS)
        points = (OperatingPoint(kv_policy, base.with_threshold(value, open_exits), max_pending) for value in values)
        name = f"{measure}, {kv_policy}" + ("" if decay is None else f", decay {decay:g}")
        if each_exit:
            name += f", exits {', '.join(map(str, open_exits))}"
        if len(sync_policies) > 1:
            name += f", {sync_policy}"
        chains.append(Chain(name, tuple(points), sync_policy))
    return chains


def calibrate(
    answerer: Answerer,
    engine: EngineConfig,
    prompts: Sequence[str | Sequence[int]],
    losses: Losses,
    chains: Sequence[Chain],
    deltas: Sequence[float],
    *,
    epsilon: float = 0.05,
    bound: Bound = "hoeffding_bentkus",
    max_tokens: int = 128,
    stop: Sequence[str] = (),
    on_answered: Callable[[str, Tried | None], None] = lambda name, tried: None,
) -> Calibration:
    """Try chains, and choose the cheapest certified candidate for each delta.

    Args:
        answerer: of the model.
        engine: settings that will serve, the sync policy apart, which is each chain's; an answer depends on them under
            the sync policies `all` and `quantile`.
        prompts: the calibration data, drawn from what will be asked.
        losses: what an early answer costs.
        chains: see `make_chains`.
        deltas: tolerated risks.
        epsilon: probability that a promise may be wrong.
        bound: see `Bound`.
        max_tokens: most tokens of an answer.
        stop: strings that end one.
        on_answered: told the name of the chain, and what was tried; None with full depth.

    Raises:
        OfframpError: a probability is none, all answers failed, or the bound is not for such losses.
    """
    for name, value in (("epsilon", epsilon), *(("delta", delta) for delta in deltas)):
        check_probability(name, value)

    def answered(name: str, exits: ExitOptions, sync_policy: SyncPolicy) -> Answers:
        setting = Setting(name, exits, replace(engine, sync_policy=sync_policy))
        return answerer.answer(setting, prompts, max_tokens, stop, may_fail=True)

    full = answered("full depth", ExitOptions("full"), chains[0].sync_policy)
    on_answered("full depth", None)
    tried: list[tuple[Chain, tuple[Tried, ...]]] = []
    for chain in chains:
        found: list[Tried] = []
        standing = frozenset(deltas)
        for candidate in chain.candidates:
            answers = answered(chain.name, point_options(candidate), chain.sync_policy)
            pairs = zip(answers.given, full.given, strict=True)
            failed = [own.error is not None or best.error is not None for own, best in pairs]
            given = tuple(
                1.0 if lost else loss for lost, loss in zip(failed, losses(answers.texts, full.texts), strict=True)
            )
            if bound == "binomial" and not set(given) <= {0.0, 1.0}:
                raise OfframpError(
                    "the bound 'binomial' is for losses of 0 or 1, and these lie between; take hoeffding_bentkus, or "
                    "the risk 'quality' on a task that is scored by exact match."
                )
            total = math.fsum(given)
            p_values = {delta: p_value(bound, total, len(given), delta) for delta in deltas}
            standing = frozenset(delta for delta in standing if p_values[delta] <= epsilon / len(chains))
            found.append(
                Tried(
                    candidate,
                    given,
                    p_values,
                    standing,
                    answers.layers_per_token,
                    answers.tokens_per_second,
                    _profile(answers),
                    sum(failed),
                )
            )
            on_answered(chain.name, found[-1])
            if not standing:
                break
        tried.append((chain, tuple(found)))
    sync_policy, chosen = _choose(tried, deltas, full.layers_per_token)
    return Calibration(full, tuple(tried), replace(engine, sync_policy=sync_policy), chosen)


def _choose(
    tried: Sequence[tuple[Chain, Sequence[Tried]]], deltas: Sequence[float], full_depth: float
) -> tuple[SyncPolicy, Mapping[float, Tried | None]]:
    """The sync policy whose points together run the fewest layers, and for each delta its cheapest certified one."""
    found: dict[SyncPolicy, dict[float, Tried | None]] = {}
    for sync_policy in dict.fromkeys(chain.sync_policy for chain, _ in tried):
        ours = [one for chain, some in tried if chain.sync_policy == sync_policy for one in some]
        found[sync_policy] = {delta: _cheapest(ours, delta, full_depth) for delta in deltas}

    def layers(sync_policy: SyncPolicy) -> float:
        return sum(full_depth if one is None else one.layers for one in found[sync_policy].values())

    best = min(found, key=layers)
    return best, found[best]


def _cheapest(tried: Sequence[Tried], delta: float, full_depth: float) -> Tried | None:
    certified = [one for one in tried if delta in one.certified and one.layers < full_depth]
    return min(certified, key=lambda one: one.layers, default=None)


def _profile(answers: Answers) -> TokenProfile:
    """Of all tokens but each answer's first."""
    layers = [layer for answer in answers.given for layer in answer.exit_layers[1:]]
    return TokenProfile.of(layers, [value for answer in answers.given for value in answer.confidences[1:]])
