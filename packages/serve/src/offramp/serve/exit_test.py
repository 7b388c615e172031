"""The exit test: which decode rows are sure at an exit. Policies differ between the requests of one batch.

Legend: M decode rows, N rows tested, D model, V vocabulary (or a shortlist of it).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offramp.common.exits.confidence import confidence
from offramp.common.exits.policy import ExitPolicy, Measure
from offramp.serve.model.linear import PackedLinear
from offramp.serve.model.packed import PackedModel
from offramp.serve.request import Request

_NEVER = 1.0
"""A threshold that no confidence exceeds: confidences are at most 1."""

_MAX_RULES = 8


@dataclass(frozen=True, eq=False)
class ExitRule:
    """How confidence is computed. Requests with the same measure and shortlist share one rule and are tested at once.

    Attributes:
        measure: confidence measure.
        heads: exit layer -> D -> V; the rows of that exit's unembedding which the measure looks at, the very
            `PackedExit.unembed` if it is all of them. Empty for `cosine`, which looks at states.
    """

    measure: Measure
    heads: dict[int, PackedLinear]


@dataclass(frozen=True, eq=False)
class RequestExits:
    """The exits that one request may take.

    Attributes:
        policy: thresholds.
        rule: measure and shortlist of it, compiled.
    """

    policy: ExitPolicy
    rule: ExitRule

    def thresholds(self, request: Request, layers: Sequence[int]) -> list[float]:
        """What the confidence of the request's next token must exceed at each of `layers`."""
        step, max_steps = len(request.output_token_ids), request.sampling.max_tokens
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
            rule = self._rules[key] = ExitRule(policy.measure, self._heads(policy, layers))
            if len(self._rules) > _MAX_RULES:
                self._rules.popitem(last=False)
        self._rules.move_to_end(key)
        return RequestExits(policy, rule)

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
                shared[weight.data_ptr()] = PackedLinear(weight[tokens], pack=exits[layer].unembed.is_packed)
            heads[layer] = shared[weight.data_ptr()]
        return heads


class IterationExits:
    """Exits of the decode rows of one iteration.

    Attributes:
        layers: exit layers at which some row is tested, ascending.
        eligible: [M] bool, rows that are tested at some exit.
    """

    def __init__(self, model: PackedModel, requests: Sequence[Request], exits: Sequence[RequestExits | None]) -> None:
        """Collect thresholds.

        Args:
            model: whose exits.
            requests: of the decode rows, [M].
            exits: which exits each may take, [M].
        """
        self._model = model
        candidates = [layer for layer in model.exits if layer != model.config.num_layers]
        never = [_NEVER] * len(candidates)
        thresholds = torch.tensor(
            [
                never if allowed is None else allowed.thresholds(request, candidates)
                for request, allowed in zip(requests, exits, strict=True)
            ],
            # A confidence is compared as the Python float that naive generation compares.
            dtype=torch.float64,
        ).view(len(requests), len(candidates))
        used = thresholds < _NEVER
        self.eligible = used.any(dim=1)
        by_exit = used.any(dim=0).tolist()
        self.layers = [layer for layer, is_used in zip(candidates, by_exit, strict=True) if is_used]
        self._thresholds = dict(zip(candidates, thresholds.unbind(1), strict=True))
        rules = [None if allowed is None else allowed.rule for allowed in exits]
        self._rules = list(dict.fromkeys(rule for rule in rules if rule is not None))
        self._rule_numbers: Tensor | None = None
        if len(self._rules) > 1:
            numbers = {rule: number for number, rule in enumerate(self._rules)}
            self._rule_numbers = torch.tensor([-1 if rule is None else numbers[rule] for rule in rules])

    def is_tested(self, layer: int) -> Tensor:
        """Rows with a threshold at `layer`, [M] bool."""
        return self._thresholds[layer] < _NEVER

    @property
    def needs_states(self) -> bool:
        """Whether some measure looks at logits, which need the exit head's state."""
        return any(rule.measure != "cosine" for rule in self._rules)

    def test(
        self, layer: int, rows: Tensor, x: Tensor, previous: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Whether rows are sure at an exit.

        Args:
            layer: exit layer.
            rows: [N] which decode rows are tested.
            x: [N, D] their states after the layer.
            previous: [N, D] their states before the layer.
            state: [N, D] what the exit's unembedding reads; None unless `needs_states`.

        Returns:
            [N] bool; and the logits [N, V] over the whole vocabulary if they were computed for all rows.
        """
        thresholds = self._thresholds[layer][rows]
        if self._rule_numbers is None:
            logits = self._logits(self._rules[0], layer, state)
            sure = confidence(self._rules[0].measure, logits, x, previous).double() > thresholds
            whole = logits is not None and self._rules[0].heads[layer] is self._model.exits[layer].unembed
            return sure, logits if whole else None
        numbers = self._rule_numbers[rows]
        sure = torch.zeros(len(rows), dtype=torch.bool)
        for number, rule in enumerate(self._rules):
            mine = (numbers == number).nonzero()[:, 0]
            if len(mine):
                logits = self._logits(rule, layer, None if state is None else state[mine])
                values = confidence(rule.measure, logits, x[mine], previous[mine])
                sure[mine] = values.double() > thresholds[mine]
        return sure, None

    def _logits(self, rule: ExitRule, layer: int, state: Tensor | None) -> Tensor | None:
        if rule.measure == "cosine":
            return None
        assert state is not None
        return rule.heads[layer](state).float()
