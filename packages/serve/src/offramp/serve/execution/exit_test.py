"""The exit test: which rows are sure at an exit. Policies differ between the requests of one batch.

Decisions are made on the host, where the executor needs them, so they are numpy arrays; what is measured are tensors.
Between two segments every step comes from a cold cache, so what can be known before the first one is computed there.

Legend: I requests of one iteration, N rows tested, D model, V vocabulary (or a shortlist of it).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from offramp.common.exits.confidence import confidence
from offramp.common.exits.policy import STATE_MEASURES, ExitPolicy, Measure
from offramp.serve.execution.sweep import BestTokens, LeftRows, Mask, PickedRows, Places, Sweep
from offramp.serve.kv_cache.storage import KVStorage
from offramp.serve.model.head_output import HeadOutput
from offramp.serve.model.packed import PackedModel
from offramp.serve.model.unembedding import Unembedding
from offramp.serve.request.logits_use import LogitsUse
from offramp.serve.request.request import Request

NEVER = 1.0
"""A threshold that no confidence exceeds: confidences are at most 1."""

_MAX_RULES = 8


@dataclass(frozen=True, eq=False)
class ExitRule:
    """How confidence is computed. Requests with the same measure and shortlist share one rule and are tested at once.

    Attributes:
        measure: confidence measure.
        heads: exit layer that is here -> what the measure looks at: that exit's unembedding, the very
            `PackedExit.unembed`, or its shortlist. Not used by measures of states.
        on_shortlist: [vocabulary] bool: a row that is sure stays inside if its best token of all is not on the
            shortlist. None: it never has to.
        shortlist_only: whether the best token of the shortlist is the exit's; see `ExitPolicy`.
    """

    measure: Measure
    heads: dict[int, Unembedding]
    on_shortlist: Mask | None = None
    shortlist_only: bool = False


@dataclass(frozen=True, eq=False)
class RequestExits:
    """The exits that one request may take.

    Attributes:
        policy: thresholds.
        rule: measure and shortlist of it, compiled.
        levels: what the confidence must exceed at each early exit of the model, as long as it does not change; None if
            it does (`ExitPolicy.decay`).
    """

    policy: ExitPolicy
    rule: ExitRule
    levels: tuple[float, ...] | None

    def thresholds(self, request: Request, layers: Sequence[int]) -> Sequence[float]:
        """What the confidence of the request's next token must exceed at each of `layers`, the model's early exits."""
        if self.levels is not None:
            return self.levels
        # Drafts count: the token would follow them.
        step, max_steps = request.num_tokens - request.num_prompt_tokens, request.sampling.max_tokens
        return [self.policy.threshold(layer, step, max_steps) for layer in layers]


class ExitRules:
    """Compiles exit policies for one model; shortlisted rows of the unembeddings are gathered once and kept."""

    def __init__(self, model: PackedModel) -> None:
        self._model = model
        self._rules: OrderedDict[tuple[Measure, tuple[int, ...] | None, bool], ExitRule] = OrderedDict()

    def compile(self, policy: ExitPolicy) -> RequestExits | None:
        """Exits of a request; None if it can take none.

        Raises:
            OfframpError: a threshold names a layer without an exit, the shortlist a token that does not exist, or the
                measure asks classifiers that are not there.
        """
        layers = self._model.early_exits
        policy.check(layers, self._model.config.vocab_size)
        policy.check_measure(has_classifiers=self._model.has_exit_classifiers)
        if all(value >= NEVER or layer < policy.min_layer for layer, value in policy.thresholds.items()):
            return None
        constant = policy.decay is None
        levels = tuple(policy.threshold(layer, 0, 1) for layer in layers) if constant else None
        return RequestExits(policy, self.rule(policy), levels)

    def rule(self, policy: ExitPolicy) -> ExitRule:
        """Measure and shortlist of a policy, whatever its thresholds are."""
        key = (policy.measure, policy.shortlist, policy.shortlist_only)
        rule = self._rules.get(key)
        if rule is None:
            rule = self._rules[key] = ExitRule(
                policy.measure,
                self._heads(policy),
                self._on_shortlist(policy),
                policy.shortlist_only,
            )
            if len(self._rules) > _MAX_RULES:
                self._rules.popitem(last=False)
        self._rules.move_to_end(key)
        return rule

    def _on_shortlist(self, policy: ExitPolicy) -> Mask | None:
        if policy.shortlist is None or policy.measure in STATE_MEASURES:
            return None
        on_shortlist = np.zeros(self._model.config.vocab_size, dtype=np.bool_)
        on_shortlist[list(policy.shortlist)] = True
        return on_shortlist

    def _heads(self, policy: ExitPolicy) -> dict[int, Unembedding]:
        exits = self._model.exits
        layers = [layer for layer in self._model.early_exits if layer in exits]
        if policy.measure in STATE_MEASURES and not policy.shortlist_only:
            return {}
        if policy.shortlist is None:
            return {layer: exits[layer].unembed for layer in layers}
        shared: dict[Unembedding, Unembedding] = {}  # tied exits gather the same rows
        for layer in layers:
            if exits[layer].unembed not in shared:
                shared[exits[layer].unembed] = self._model.unembedding(exits[layer].weight, policy.shortlist)
        return {layer: shared[exits[layer].unembed] for layer in layers}


@dataclass(frozen=True)
class Scored:
    """Rows of one test that were measured in the same way, and what of it can be used again if they leave.

    Attributes:
        places: [n] which of the rows inside.
        state: [n, D] what the exit's unembedding reads; None if the measure needs none.
        best: best tokens that are the exit's; None if not known.
        logits: [n, V] fp32 of the whole vocabulary; None if not computed.
    """

    places: Places
    state: Tensor | None = None
    best: BestTokens | None = None
    logits: Tensor | None = None

    def left(self, layer: int, items: Places) -> LeftRows | None:
        """All of these rows as rows that leave; None if what they predict has to be computed from the start.

        Args:
            layer: exit layer.
            items: [rows inside] whose.
        """
        if self.state is None:
            return None
        logits = None if self.logits is None else PickedRows(self.logits)
        return LeftRows(items[self.places], layer, PickedRows(self.state), self.best, logits)


class _Group(NamedTuple):
    """Rows that are measured in the same way.

    Attributes:
        rule: how.
        takes_logits: whether what is measured on the whole vocabulary is measured on logits, from which tokens are
            chosen anyway.
    """

    rule: ExitRule
    takes_logits: bool


def exit_levels(
    exits: Sequence[RequestExits | None], requests: Sequence[Request], candidates: Sequence[int]
) -> npt.NDArray[np.float64]:
    """What the confidence of each request's newest row must exceed at each of `candidates`, [I, candidates] float64."""
    never = (NEVER,) * len(candidates)
    # A confidence is compared as the Python float that naive generation compares.
    levels = [
        never if allowed is None else allowed.thresholds(request, candidates)
        for request, allowed in zip(requests, exits, strict=True)
    ]
    return np.array(levels, dtype=np.float64).reshape(len(requests), len(candidates))


class OpenExits:
    """Exits that the newest rows of some requests may take, and how they are measured there.

    Attributes:
        layers: exit layers at which some row is tested, ascending.
        asked: [I] requests whose newest row is tested at some exit.
        any_veto: whether tokens of some of them must be on a shortlist.
        group_numbers: [I] who is measured in the same way has the same number; -1 is not tested.
        groups: by number.
        levels: exit layer -> [I] what the confidence must exceed, float64.
    """

    def __init__(
        self,
        candidates: Sequence[int],
        rules: Sequence[ExitRule | None],
        levels: npt.NDArray[np.float64],
        uses: Sequence[LogitsUse],
    ) -> None:
        """Sort thresholds.

        Args:
            candidates: early exits of the model, ascending.
            rules: for the newest row of each request, how it is measured; None is not tested.
            levels: [I, candidates] what its confidence must exceed; see `exit_levels`.
            uses: for each of them, what its next token asks of the logits.
        """
        self._nobody: Mask = np.zeros(len(rules), dtype=np.bool_)
        self._is_open: dict[int, Mask] = {}
        self._open_to_all: set[int] = set()
        self.layers: list[int] = []
        self.levels: dict[int, npt.NDArray[np.float64]] = {}
        groups: dict[_Group, int] = {}
        # A row goes one way or the other by its own needs, never by its neighbours'. What is only reported is no need
        # here: it must not change by a bit how sure a row is.
        numbers = [
            -1 if rule is None else groups.setdefault(_Group(rule, use is LogitsUse.CHOICE), len(groups))
            for rule, use in zip(rules, uses, strict=True)
        ]
        self.groups = list(groups)
        self.group_numbers = np.array(numbers)
        self.any_veto = any(group.rule.on_shortlist is not None for group in groups)
        self.asked = self._nobody
        if not groups:
            return
        used = levels < NEVER
        for number, layer in enumerate(candidates):
            self.levels[layer], is_open = levels[:, number], used[:, number]
            count = np.count_nonzero(is_open)
            if not count:
                continue
            self.layers.append(layer)
            self._is_open[layer] = is_open
            if count == len(rules):
                self._open_to_all.add(layer)
            self.asked = self.asked | is_open

    def to(self, layer: int) -> Mask:
        """[I] requests that may leave at `layer`."""
        return self._is_open.get(layer, self._nobody)

    def to_all(self, layer: int) -> bool:
        """Whether every request may leave at `layer`."""
        return layer in self._open_to_all


class IterationExits:
    """How sure the newest rows of one iteration's requests have become.

    Attributes:
        open_exits: what they may take.
        sure: [I] requests whose confidence exceeded a threshold in this pass.
        confidence: [I] what was measured last, float64; NaN if nothing.
    """

    def __init__(self, model: PackedModel, open_exits: OpenExits) -> None:
        """Start with nobody sure.

        Args:
            model: whose exits.
            open_exits: what the rows may take.
        """
        self._model = model
        self.open_exits = open_exits
        self.sure: Mask = np.zeros(len(open_exits.asked), dtype=np.bool_)
        self.confidence = np.full(len(open_exits.asked), np.nan)

    def is_tested(self, layer: int) -> Mask:
        """[I] requests with a threshold at `layer` that are not sure yet."""
        return self.open_exits.to(layer) & ~self.sure

    def may_leave(self, layer: int) -> Mask:
        """[I] requests that `layer` is open to, or that were sure already at an exit before it."""
        return self.open_exits.to(layer) | self.sure

    def off_shortlist(self, items: Places, token_ids: npt.NDArray[np.int64]) -> Mask:
        """[n] requests whose token [n] must be on their shortlist and is not; see `ExitRule`."""
        stays = np.zeros(len(items), dtype=np.bool_)
        numbers = self.open_exits.group_numbers[items]
        for number, group in enumerate(self.open_exits.groups):
            if group.rule.on_shortlist is not None:
                mine = numbers == number
                stays[mine] = ~group.rule.on_shortlist[token_ids[mine]]
        return stays

    def unembedding(self, group_number: int, layer: int) -> Unembedding:
        """What gives the best tokens of a group's requests at an exit."""
        rule = None if group_number < 0 else self.open_exits.groups[group_number].rule
        if rule is not None and rule.shortlist_only and layer in self.open_exits.levels:
            return rule.heads[layer]
        return self._model.exits[layer].unembed

    def test(self, layer: int, sweep: Sweep, tested: Places, cache: KVStorage) -> list[Scored]:
        """Measure rows at an exit; `sure` and `confidence` of their requests are set.

        Args:
            layer: exit layer.
            sweep: the rows inside, that have just been through the layer.
            tested: [N] which of them; newest rows of requests that are tested here.
            cache: of the model.

        Returns:
            All N rows, in parts.
        """
        items = sweep.items if len(tested) == len(sweep) else sweep.items[tested]
        groups = self.open_exits.groups
        if len(groups) == 1:
            values, result = self._measure(groups[0], layer, sweep, tested, cache)
            measured, scored = values.numpy(force=True).astype(np.float64), [result]
        else:
            measured, scored = np.empty(len(tested)), []
            numbers = self.open_exits.group_numbers[items]
            for number, group in enumerate(groups):
                mine = np.flatnonzero(numbers == number)
                if len(mine):
                    values, result = self._measure(group, layer, sweep, tested[mine], cache)
                    measured[mine] = values.numpy(force=True)
                    scored.append(result)
        self.confidence[items] = measured
        self.sure[items] = measured > self.open_exits.levels[layer][items]  # false for NaN
        return scored

    def _measure(
        self, group: _Group, layer: int, sweep: Sweep, places: Places, cache: KVStorage
    ) -> tuple[Tensor, Scored]:
        """Confidences [n] of the rows at `places`, and what else became known of them."""
        rule = group.rule
        x = sweep.select(sweep.x, places)
        if rule.measure == "cosine":
            return self._model.cosine(x, sweep.select(sweep.previous, places)), Scored(places)
        if rule.measure == "classifier":
            return self._model.classify(layer, x), Scored(places)
        rows, head = sweep.rows, rule.heads[layer]
        if self._model.has_exit_blocks:
            rows = sweep.select_rows(places)
        whole = head is self._model.exits[layer].unembed
        if rule.measure != "entropy" and not (whole and group.takes_logits):
            state, best, values = self._model.test_exit(layer, x, rows, cache, head, rule.measure)
            if not (whole or rule.shortlist_only):
                return values, Scored(places, state)
            found, values = BestTokens.measured(best, values)
            return values, Scored(places, state, found)
        state = self._model.exit_state(layer, x, rows, cache)
        logits = head.linear.logits(state)
        values = confidence(rule.measure, logits, state, state)
        if whole:
            return values, Scored(places, state, logits=logits)
        if not rule.shortlist_only:
            return values, Scored(places, state)
        found, values = BestTokens.measured(head.named(HeadOutput.of(logits)), values)
        return values, Scored(places, state, found)
