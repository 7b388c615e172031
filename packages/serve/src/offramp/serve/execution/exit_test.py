"""The exit test: which rows are sure at an exit. Policies differ between the requests of one batch.

Decisions are made on the host, where the executor needs them, so they are numpy arrays; what is measured are tensors.

Legend: I requests of one iteration, N rows tested, D model, V vocabulary (or a shortlist of it).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offramp.common.exits.confidence import confidence, cosine
from offramp.common.exits.policy import ExitPolicy, Measure
from offramp.serve.model.head_output import HeadOutput
from offramp.serve.model.linear import PackedLinear
from offramp.serve.model.packed import PackedModel
from offramp.serve.request.request import Request

_NEVER = 1.0
"""A threshold that no confidence exceeds: confidences are at most 1."""

_MAX_RULES = 8


Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class ExitRule:
    """How confidence is computed. Requests with the same measure and shortlist share one rule and are tested at once.

    Attributes:
        measure: confidence measure.
        heads: exit layer -> D -> V; the rows of that exit's unembedding which the measure looks at, the very
            `PackedExit.unembed` if it is all of them. Empty for `cosine`, which looks at states.
        on_shortlist: [vocabulary] bool: a row that is sure stays inside if its best token of all is not on the
            shortlist. None: there is none.
    """

    measure: Measure
    heads: dict[int, PackedLinear]
    on_shortlist: Tensor | None = None


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
        self._rules: OrderedDict[tuple[Measure, tuple[int, ...] | None], ExitRule] = OrderedDict()

    def compile(self, policy: ExitPolicy) -> RequestExits | None:
        """Exits of a request; None if it can take none.

        Raises:
            OfframpError: a threshold names a layer without an exit, or the shortlist a token that does not exist.
        """
        layers = [layer for layer in self._model.exits if layer != self._model.config.num_layers]
        policy.check(layers, self._model.config.vocab_size)
        if all(value >= _NEVER or layer < policy.min_layer for layer, value in policy.thresholds.items()):
            return None
        key = (policy.measure, policy.shortlist)
        rule = self._rules.get(key)
        if rule is None:
            rule = self._rules[key] = ExitRule(policy.measure, self._heads(policy, layers), self._on_shortlist(policy))
            if len(self._rules) > _MAX_RULES:
                self._rules.popitem(last=False)
        self._rules.move_to_end(key)
        constant = policy.decay is None
        return RequestExits(
            policy, rule, tuple(policy.threshold(layer, 0, 1) for layer in layers) if constant else None
        )

    def _on_shortlist(self, policy: ExitPolicy) -> Tensor | None:
        if policy.shortlist is None or policy.measure == "cosine":
            return None
        on_shortlist = torch.zeros(self._model.config.vocab_size, dtype=torch.bool)
        on_shortlist[list(policy.shortlist)] = True
        return on_shortlist

    def _heads(self, policy: ExitPolicy, layers: Sequence[int]) -> dict[int, PackedLinear]:
        exits = self._model.exits
        if policy.measure == "cosine":
            return {}
        if policy.shortlist is None:
            return {layer: exits[layer].unembed for layer in layers}
        tokens = torch.tensor(policy.shortlist)
        shared: dict[int, PackedLinear] = {}  # tied exits gather the same rows
        heads: dict[int, PackedLinear] = {}
        for layer in layers:
            weight = exits[layer].unembedding
            if weight.data_ptr() not in shared:
                shared[weight.data_ptr()] = self._model.linear(weight[tokens])
            heads[layer] = shared[weight.data_ptr()]
        return heads


@dataclass(frozen=True)
class Scored:
    """Rows of one test that were measured in the same way, and what of it can be used again if they leave.

    Attributes:
        places: [n] which of the tested rows.
        state: [n, D] what the exit's unembedding reads; None if the measure needs none.
        head: best tokens of the whole vocabulary; None if not computed.
        logits: [n, V] fp32 of the whole vocabulary; None if not computed.
    """

    places: npt.NDArray[np.intp]
    state: Tensor | None = None
    head: HeadOutput | None = None
    logits: Tensor | None = None

    def select(self, wanted: Mask) -> Scored | None:
        """The part whose rows are `wanted` [rows tested], renumbered as places among these; None if it is empty."""
        mine = wanted[self.places]
        if not mine.any():
            return None
        places = (np.cumsum(wanted) - 1)[self.places[mine]]
        if mine.all():
            return Scored(places, self.state, self.head, self.logits)
        index = torch.from_numpy(np.flatnonzero(mine))
        return Scored(
            places,
            None if self.state is None else self.state[index],
            None if self.head is None else self.head.select(index),
            None if self.logits is None else self.logits[index],
        )


class IterationExits:
    """Exits that the newest rows of one iteration's requests may take, and how sure they have become.

    Attributes:
        layers: exit layers at which some row is tested, ascending.
        asked: [I] requests whose newest row is tested at some exit.
        sure: [I] of them, those whose confidence exceeded a threshold in this pass.
        confidence: [I] what was measured last, float64; NaN if nothing.
    """

    def __init__(
        self,
        model: PackedModel,
        requests: Sequence[Request],
        exits: Sequence[RequestExits | None],
        needs_logits: Mask,
    ) -> None:
        """Collect thresholds.

        Args:
            model: whose exits.
            requests: I.
            exits: which exits the newest row of each may take; None takes none.
            needs_logits: [I] whose next token takes more than the largest logit.
        """
        self._needs_logits = needs_logits
        self._unembeds = {layer: point.unembed for layer, point in model.exits.items()}
        self.sure: Mask = np.zeros(len(requests), dtype=np.bool_)
        self.confidence = np.full(len(requests), np.nan)
        self._exits = exits
        if not any(exits):
            self.asked: Mask = self.sure
            self.layers: list[int] = []
            return
        candidates = [layer for layer in model.exits if layer != model.config.num_layers]
        never = [_NEVER] * len(candidates)
        # A confidence is compared as the Python float that naive generation compares.
        levels = np.array(
            [
                never if allowed is None else allowed.thresholds(request, candidates)
                for request, allowed in zip(requests, exits, strict=True)
            ],
            dtype=np.float64,
        ).reshape(len(requests), len(candidates))
        used = levels < _NEVER
        self.asked = np.logical_or.reduce(used, axis=1)
        by_exit: list[bool] = np.logical_or.reduce(used, axis=0).tolist()
        self.layers = [layer for layer, is_used in zip(candidates, by_exit, strict=True) if is_used]
        self._levels = dict(zip(candidates, levels.T, strict=True))
        self._rules = list(dict.fromkeys(allowed.rule for allowed in exits if allowed is not None))
        numbers = {rule: number for number, rule in enumerate(self._rules)}
        self._rule_numbers = np.array([-1 if allowed is None else numbers[allowed.rule] for allowed in exits])

    def is_tested(self, layer: int) -> Mask:
        """[I] requests with a threshold at `layer` that are not sure yet."""
        return (self._levels[layer] < _NEVER) & ~self.sure

    def may_leave(self, layer: int) -> Mask:
        """[I] requests that `layer` is open to, or that were sure already at an exit before it."""
        return (self._levels[layer] < _NEVER) | self.sure

    def on_shortlist(self, item: int) -> Tensor | None:
        """The shortlist of a request; see `ExitRule`."""
        allowed = self._exits[item]
        return None if allowed is None else allowed.rule.on_shortlist

    def test(
        self,
        layer: int,
        items: npt.NDArray[np.intp],
        x: Tensor,
        previous: Tensor,
        exit_state: Callable[[npt.NDArray[np.intp]], Tensor],
    ) -> list[Scored]:
        """Measure rows at an exit; `sure` and `confidence` of their requests are set.

        Args:
            layer: exit layer.
            items: [N] whose newest rows they are.
            x: [N, D] their states after the layer.
            previous: [N, D] their states before the layer.
            exit_state: gives the states [n, D] that the exit's unembedding reads, for n of the N.

        Returns:
            All N rows, in parts.
        """
        measured = np.empty(len(items))
        scored: list[Scored] = []
        numbers = self._rule_numbers[items]
        for number, rule in enumerate(self._rules):
            mine = np.flatnonzero(numbers == number)
            if rule.measure in ("max_probability", "margin") and rule.on_shortlist is None:
                # A row goes one way or the other by its own needs, never by its neighbours'.
                whole = self._needs_logits[items[mine]]
                parts = [mine[whole], mine[~whole]]
            else:
                parts = [mine]
            for part in parts:
                if len(part):
                    values, result = self._measure(rule, layer, part, items, x, previous, exit_state)
                    measured[part] = values.numpy(force=True)
                    scored.append(result)
        self.confidence[items] = measured
        self.sure[items] = measured > self._levels[layer][items]  # false for NaN
        return scored

    def _measure(
        self,
        rule: ExitRule,
        layer: int,
        part: npt.NDArray[np.intp],
        items: npt.NDArray[np.intp],
        x: Tensor,
        previous: Tensor,
        exit_state: Callable[[npt.NDArray[np.intp]], Tensor],
    ) -> tuple[Tensor, Scored]:
        """Confidences [n] of the rows `part`, and what else became known of them."""
        if rule.measure == "cosine":
            if len(part) < len(x):
                index = torch.from_numpy(part)
                x, previous = x[index], previous[index]
            return cosine(x, previous), Scored(part)
        state, head = exit_state(part), rule.heads[layer]
        whole = head is self._unembeds[layer]
        if rule.measure != "entropy" and not (whole and self._needs_logits[items[part[0]]]):
            best = head.head(state)
            values = best.margin if rule.measure == "margin" else best.max_probability
            return values, Scored(part, state, best if whole else None)
        logits = head.logits(state)
        return confidence(rule.measure, logits, x, previous), Scored(part, state, None, logits if whole else None)
