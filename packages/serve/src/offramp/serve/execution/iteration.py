"""What does not change while an iteration runs, and what does not from one to the next while its requests stay.

Legend: I requests of the iteration, L layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offramp.common.exits.kv_policy import KVPolicy
from offramp.serve.execution.departures import LogitsUses
from offramp.serve.execution.exit_test import IterationExits, OpenExits, RequestExits, exit_levels
from offramp.serve.execution.kept_tokens import KeptTokens
from offramp.serve.execution.kv_policy import keeps
from offramp.serve.execution.parked import Parking
from offramp.serve.execution.sweep import Mask
from offramp.serve.model.packed import PackedModel
from offramp.serve.request.logits_use import LogitsUse
from offramp.serve.request.request import Request
from offramp.serve.scheduling.scheduler_output import Phase, ScheduledRequest


class RequestSet:
    """The requests of an iteration, and what their rows may do.

    Attributes:
        decodes: requests that decode: id -> index.
        open_exits: of their newest rows.
        uses: what their tokens ask of logits. Log-probabilities of a draft are the full model's, which judges it.
        is_judged: [I] requests whose kept rows are judged by the full model.
        keeping: indices of requests of which states of early tokens may be kept.
        kv_policies: [I] of the requests.
        distinct_kv_policies: what there is among them.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        decoding: Sequence[bool],
        exits: Sequence[RequestExits | None],
        uses: Sequence[LogitsUse],
        candidates: Sequence[int],
    ) -> None:
        """Look at them.

        Args:
            requests: I.
            decoding: I, which of them decode.
            exits: which exits the newest row of each may take; None takes none.
            uses: for each of them, what its next token asks of the logits.
            candidates: early exits of the model.
        """
        self._made_of = (requests, decoding, exits, uses)
        self._is_constant = all(allowed is None or allowed.levels is not None for allowed in exits)
        self.decodes = {
            request.request_id: index
            for index, (request, decodes) in enumerate(zip(requests, decoding, strict=True))
            if decodes
        }
        rules = [None if allowed is None else allowed.rule for allowed in exits]
        self.open_exits = OpenExits(candidates, rules, exit_levels(exits, requests, candidates), uses)
        policies: list[KVPolicy] = [request.exits.kv_policy for request in requests]
        self.kv_policies = np.array(policies)
        self.distinct_kv_policies = tuple(dict.fromkeys(policies))
        self.keeping = [index for index, request in enumerate(requests) if keeps(request)]
        final = early = np.array(uses, dtype=np.int64)
        self.is_judged: Mask = np.zeros(len(requests), dtype=np.bool_)
        if "verify" in self.distinct_kv_policies:
            self.is_judged = np.array(decoding) & (self.kv_policies == "verify")
            early = np.where(self.is_judged & (final == LogitsUse.REPORT), LogitsUse.BEST, final)
        self.uses = LogitsUses(final, early)

    def is_of(
        self,
        requests: Sequence[Request],
        decoding: Sequence[bool],
        exits: Sequence[RequestExits | None],
        uses: Sequence[LogitsUse],
    ) -> bool:
        """Whether a set made of these would be this one: the very same requests, and thresholds that never change."""
        return self._is_constant and self._made_of == (requests, decoding, exits, uses)


@dataclass(frozen=True)
class Iteration:
    """One iteration.

    Attributes:
        scheduled: I.
        requests: the same, and what their rows may do.
        exits: of their newest rows.
        waited: [I] iterations that the newest row of each has waited at exits.
        is_idle: whether all of them wait: nothing new is run.
        pauses: exits at which something may happen, ascending.
    """

    scheduled: Sequence[ScheduledRequest]
    requests: RequestSet
    exits: IterationExits
    waited: npt.NDArray[np.int64]
    is_idle: bool
    pauses: list[int]

    def owner(self, item: int) -> str:
        """Id of a request."""
        return self.scheduled[item].request.request_id


class Planner:
    """Plans iterations. What it worked out for the requests of the last one holds for the next if they are the same."""

    def __init__(self, model: PackedModel, kept: KeptTokens, parking: Parking) -> None:
        """Start without an iteration.

        Args:
            model: whose exits.
            kept: tokens that wait for a deeper pass.
            parking: newest rows that wait for company. Those of an iteration's requests wait once more by its plan.
        """
        self._model, self._kept, self._parking = model, kept, parking
        self._candidates = [layer for layer in model.exits if layer != model.config.num_layers]
        self._last = RequestSet((), (), (), (), self._candidates)

    def plan(
        self,
        scheduled: Sequence[ScheduledRequest],
        exits: Sequence[RequestExits | None],
        uses: Sequence[LogitsUse],
        bounds: Iterable[int],
    ) -> Iteration:
        """Plan an iteration.

        Args:
            scheduled: I.
            exits: for each of them, the exits its generated tokens may take where they are sure; None: none.
            uses: for each of them, what its next token asks of the logits.
            bounds: layers at which some row leaves, whatever it is sure of.
        """
        requests = [item.request for item in scheduled]
        decoding = [item.phase is Phase.DECODE for item in scheduled]
        allowed = [
            exit_ if decodes and not request.runs_full_depth else None
            for exit_, decodes, request in zip(exits, decoding, requests, strict=True)
        ]
        if not self._last.is_of(requests, decoding, allowed, uses):
            self._last = RequestSet(requests, decoding, allowed, uses, self._candidates)
        known = self._last
        if self._model.has_exit_blocks:
            # The block of a head attends over the sequence, so every token that passes it leaves keys and values there,
            # whether it is tested or not, and for whichever request reads them later.
            pauses = set(self._model.exits)
        else:
            pauses = {*known.open_exits.layers, *bounds}
            for index in known.keeping:
                pauses.update(self._kept.depths(requests[index].request_id))
        waiting = self._parking.begin(known.decodes)
        waited = np.zeros(len(requests), dtype=np.int64)
        for name, rows in waiting.items():
            waited[known.decodes[name]] = rows.waited
            pauses.add(rows.exit_layer)
        pauses.discard(self._model.config.num_layers)
        return Iteration(
            scheduled,
            known,
            IterationExits(self._model, known.open_exits),
            waited,
            len(waiting) == len(scheduled),
            sorted(pauses),
        )
