"""The exit test: which rows are sure at an exit. Policies differ between the requests of one batch.

Decisions are made on the host, where the executor needs them, so they are numpy arrays; what is measured are tensors.
Between two segments every step comes from a cold cache, so what can be known before the first one is computed there.

Legend: I requests of one iteration, N rows tested, D model, V vocabulary (or a shortlist of it).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offramp.common.exits.confidence import confidence
from offramp.common.exits.policy import ExitPolicy, Measure
from offramp.serve.execution.sweep import Mask, Places, Sweep
from offramp.serve.kv_cache.storage import KVStorage
from offramp.serve.model.head_output import HeadOutput
from offramp.serve.model.linear import PackedLinear
from offramp.serve.model.packed import PackedModel
from offramp.serve.request.request import Request

_NEVER = 1.0
"""A threshold that no confidence exceeds: confidences are at most 1."""

_MAX_RULES = 8


@dataclass(frozen=True, eq=False)
class Unembedding:
    """What best tokens are taken from.

    Attributes:
        linear: D -> V.
        tokens: [V] int64 what its rows stand for; None: for themselves.
    """

    linear: PackedLinear
    tokens: Tensor | None = None

    def head(self, state: Tensor) -> HeadOutput:
        """Best tokens of rows [N, D]."""
        head = self.linear.head(state)
        return head if self.tokens is None else head.renumbered(self.tokens)

    def __hash__(self) -> int:
        return hash(self.linear)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unembedding) and self.linear is other.linear


@dataclass(frozen=True, eq=False)
class ExitRule:
    """How confidence is computed. Requests with the same measure and shortlist share one rule and are tested at once.

    Attributes:
        measure: confidence measure.
        heads: exit layer -> D -> V; the rows of that exit's unembedding which the measure looks at, the very
            `PackedExit.unembed` if it is all of them. Not used by `cosine`, which looks at states.
        on_shortlist: [vocabulary] bool: a row that is sure stays inside if its best token of all is not on the
            shortlist. None: it never has to.
        final_tokens: [V] int64, the shortlist, where the best token on it is the exit's (`ExitPolicy.shortlist_only`);
            else None.
    """

    measure: Measure
    heads: dict[int, PackedLinear]
    on_shortlist: Mask | None = None
    final_tokens: Tensor | None = None


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
            OfframpError: a threshold names a layer without an exit, or the shortlist a token that does not exist.
        """
        layers = [layer for layer in self._model.exits if layer != self._model.config.num_layers]
        policy.check(layers, self._model.config.vocab_size)
        if all(value >= _NEVER or layer < policy.min_layer for layer, value in policy.thresholds.items()):
            return None
        key = (policy.measure, policy.shortlist, policy.shortlist_only)
        rule = self._rules.get(key)
        if rule is None:
            rule = self._rules[key] = ExitRule(
                policy.measure,
                self._heads(policy, layers),
                self._on_shortlist(policy),
                torch.tensor(policy.shortlist) if policy.shortlist_only else None,
            )
            if len(self._rules) > _MAX_RULES:
                self._rules.popitem(last=False)
        self._rules.move_to_end(key)
        constant = policy.decay is None
        return RequestExits(
            policy, rule, tuple(policy.threshold(layer, 0, 1) for layer in layers) if constant else None
        )

    def _on_shortlist(self, policy: ExitPolicy) -> Mask | None:
        if policy.shortlist is None or policy.measure == "cosine":
            return None
        on_shortlist = np.zeros(self._model.config.vocab_size, dtype=np.bool_)
        on_shortlist[list(policy.shortlist)] = True
        return on_shortlist

    def _heads(self, policy: ExitPolicy, layers: Sequence[int]) -> dict[int, PackedLinear]:
        exits = self._model.exits
        if policy.measure == "cosine" and not policy.shortlist_only:
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
        places: [n] which of the rows inside.
        state: [n, D] what the exit's unembedding reads; None if the measure needs none.
        head: best tokens that are the exit's; None if not known.
        logits: [n, V] fp32 of the whole vocabulary; None if not computed.
        tokens: [V] what the token ids of `head` stand for; None: for themselves.
    """

    places: Places
    state: Tensor | None = None
    head: HeadOutput | None = None
    logits: Tensor | None = None
    tokens: Tensor | None = None

    def select(self, wanted: Mask) -> Scored | None:
        """The rows that are `wanted` [rows inside], with token ids that stand for themselves; None without any."""
        mine = wanted[self.places]
        if not mine.any():
            return None
        chosen = self
        if not mine.all():
            index = torch.from_numpy(np.flatnonzero(mine))
            chosen = Scored(
                self.places[mine],
                None if self.state is None else self.state[index],
                None if self.head is None else self.head.select(index),
                None if self.logits is None else self.logits[index],
                self.tokens,
            )
        if chosen.head is None or chosen.tokens is None:
            return chosen
        return replace(chosen, head=chosen.head.renumbered(chosen.tokens), tokens=None)


@dataclass(frozen=True)
class _Group:
    """Rows that are measured in the same way.

    Attributes:
        rule: how.
        takes_logits: whether what is measured on the whole vocabulary is measured on logits, which are needed anyway.
    """

    rule: ExitRule
    takes_logits: bool


class IterationExits:
    """Exits that the newest rows of one iteration's requests may take, and how sure they have become.

    Attributes:
        layers: exit layers at which some row is tested, ascending.
        asked: [I] requests whose newest row is tested at some exit.
        sure: [I] of them, those whose confidence exceeded a threshold in this pass.
        confidence: [I] what was measured last, float64; NaN if nothing.
        any_veto: whether tokens of some of them must be on a shortlist.
        any_shortlist_only: whether some of them take their tokens from a shortlist alone.
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
        self._model = model
        self.sure: Mask = np.zeros(len(requests), dtype=np.bool_)
        self.confidence = np.full(len(requests), np.nan)
        self.any_veto = self.any_shortlist_only = False
        self._exits = exits
        self._is_open: dict[int, Mask] = {}
        self._open_to_all: set[int] = set()
        if not any(exits):
            self.asked: Mask = self.sure
            self.layers: list[int] = []
            return
        candidates = [layer for layer in model.exits if layer != model.config.num_layers]
        never = (_NEVER,) * len(candidates)
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
        self._levels = dict(zip(candidates, levels.T.copy(), strict=True))
        self._is_open = dict(zip(candidates, used.T.copy(), strict=True))
        self._open_to_all.update(layer for layer in self.layers if self._is_open[layer].all())
        # A row goes one way or the other by its own needs, never by its neighbours'.
        groups: dict[tuple[ExitRule, bool], int] = {}
        numbers = [
            -1 if allowed is None else groups.setdefault((allowed.rule, needs), len(groups))
            for allowed, needs in zip(exits, needs_logits.tolist(), strict=True)
        ]
        self._groups = [_Group(rule, needs) for rule, needs in groups]
        self._group_numbers = np.array(numbers)
        self.any_veto = any(group.rule.on_shortlist is not None for group in self._groups)
        self.any_shortlist_only = any(group.rule.final_tokens is not None for group in self._groups)

    def is_open(self, layer: int) -> Mask:
        """[I] requests that may leave at `layer`."""
        return self._is_open.get(layer, np.zeros(len(self.sure), dtype=np.bool_))

    def is_open_to_all(self, layer: int) -> bool:
        """Whether every request may leave at `layer`."""
        return layer in self._open_to_all

    def is_tested(self, layer: int) -> Mask:
        """[I] requests with a threshold at `layer` that are not sure yet."""
        return self.is_open(layer) & ~self.sure

    def may_leave(self, layer: int) -> Mask:
        """[I] requests that `layer` is open to, or that were sure already at an exit before it."""
        return self.is_open(layer) | self.sure

    def off_shortlist(self, items: Places, token_ids: npt.NDArray[np.int64]) -> Mask:
        """[n] requests whose token [n] must be on their shortlist and is not; see `ExitRule`."""
        stays = np.zeros(len(items), dtype=np.bool_)
        numbers = self._group_numbers[items]
        for number, group in enumerate(self._groups):
            if group.rule.on_shortlist is not None:
                mine = numbers == number
                stays[mine] = ~group.rule.on_shortlist[token_ids[mine]]
        return stays

    def shortlist_only(self, item: int, layer: int) -> Unembedding | None:
        """What gives the best token of a request at an early exit, if not the whole vocabulary does."""
        allowed = self._exits[item]
        if allowed is None or allowed.rule.final_tokens is None:
            return None
        return Unembedding(allowed.rule.heads[layer], allowed.rule.final_tokens)

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
        if len(self._groups) == 1:
            values, result = self._measure(self._groups[0], layer, sweep, tested, cache)
            measured, scored = values.numpy(force=True).astype(np.float64), [result]
        else:
            measured, scored = np.empty(len(tested)), []
            numbers = self._group_numbers[items]
            for number, group in enumerate(self._groups):
                mine = np.flatnonzero(numbers == number)
                if len(mine):
                    values, result = self._measure(group, layer, sweep, tested[mine], cache)
                    measured[mine] = values.numpy(force=True)
                    scored.append(result)
        self.confidence[items] = measured
        self.sure[items] = measured > self._levels[layer][items]  # false for NaN
        return scored

    def _measure(
        self, group: _Group, layer: int, sweep: Sweep, places: Places, cache: KVStorage
    ) -> tuple[Tensor, Scored]:
        """Confidences [n] of the rows at `places`, and what else became known of them."""
        rule = group.rule
        if rule.measure == "cosine":
            values = self._model.cosine(sweep.select(sweep.x, places), sweep.select(sweep.previous, places))
            return values, Scored(places)
        x, rows, head = sweep.select(sweep.x, places), sweep.rows, rule.heads[layer]
        if self._model.has_exit_blocks:
            rows = sweep.select_rows(places)
        whole = head is self._model.exits[layer].unembed
        if rule.measure != "entropy" and not (whole and group.takes_logits):
            state, best, values = self._model.test_exit(layer, x, rows, cache, head, rule.measure)
            is_final = whole or rule.final_tokens is not None
            return values, Scored(places, state, best if is_final else None, tokens=rule.final_tokens)
        state = self._model.exit_state(layer, x, rows, cache)
        logits = head.logits(state)
        values = confidence(rule.measure, logits, state, state)
        if whole:
            return values, Scored(places, state, logits=logits)
        best = None if rule.final_tokens is None else HeadOutput.of(logits)
        return values, Scored(places, state, best, tokens=rule.final_tokens)
