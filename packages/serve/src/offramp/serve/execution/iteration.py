"""What does not change while an iteration runs.

Legend: I requests of the iteration, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offramp.common.exits.kv_policy import KVPolicy
from offramp.serve.execution.exit_test import IterationExits, RequestExits
from offramp.serve.execution.kept_tokens import KeptTokens
from offramp.serve.execution.kv_policy import keeps
from offramp.serve.execution.parked import Parking
from offramp.serve.execution.sweep import Mask
from offramp.serve.model.packed import PackedModel
from offramp.serve.request.logits_use import LogitsUse
from offramp.serve.scheduling.scheduler_output import Phase, ScheduledRequest


@dataclass(frozen=True)
class Iteration:
    """The requests of one iteration, and what their rows may do.

    Attributes:
        scheduled: I.
        exits: of their newest rows.
        uses: [I] what their tokens ask of the logits of the final exit (`LogitsUse`).
        early_uses: [I] the same of early exits: log-probabilities of a draft are the full model's, which judges it.
        is_judged: [I] requests whose kept rows are judged by the full model.
        decodes: requests that decode: id -> index.
        waited: [I] iterations that the newest row of each has waited at exits.
        is_idle: whether all of them wait: nothing new is run.
        keeping: indices of requests of which states of early tokens may be kept.
        kv_policies: [I] of the requests.
        distinct_kv_policies: what there is among them.
        pauses: exits at which something may happen, ascending.
        num_layers: L.
    """

    scheduled: Sequence[ScheduledRequest]
    exits: IterationExits
    uses: npt.NDArray[np.int64]
    early_uses: npt.NDArray[np.int64]
    is_judged: Mask
    decodes: dict[str, int]
    waited: npt.NDArray[np.int64]
    is_idle: bool
    keeping: list[int]
    kv_policies: npt.NDArray[np.str_]
    distinct_kv_policies: tuple[KVPolicy, ...]
    pauses: list[int]
    num_layers: int

    @classmethod
    def of(
        cls,
        scheduled: Sequence[ScheduledRequest],
        exits: Sequence[RequestExits | None],
        uses: Sequence[LogitsUse],
        bounds: Sequence[int],
        model: PackedModel,
        kept: KeptTokens,
        parking: Parking,
    ) -> Iteration:
        """Plan an iteration.

        Args:
            scheduled: I.
            exits: for each of them, the exits its generated tokens may take where they are sure; None: none.
            uses: for each of them, what its next token asks of the logits.
            bounds: layers at which some row leaves, whatever it is sure of.
            model: whose exits.
            kept: tokens that wait for a deeper pass.
            parking: newest rows that wait for company; those of `scheduled` have then waited once more.
        """
        requests = [item.request for item in scheduled]
        decodes: dict[str, int] = {}
        allowed: list[RequestExits | None] = [None] * len(requests)
        is_judged = [False] * len(requests)
        for index, (item, request) in enumerate(zip(scheduled, requests, strict=True)):
            if item.phase is Phase.PREFILL:
                continue
            decodes[request.request_id] = index
            if not request.runs_full_depth:
                allowed[index] = exits[index]
            is_judged[index] = request.exits.kv_policy == "verify"
        gate = IterationExits(model, requests, allowed, uses)
        keeping = [index for index, request in enumerate(requests) if keeps(request)]
        if model.has_exit_blocks:
            # The block of a head attends over the sequence, so every token that passes it leaves keys and values there,
            # whether it is tested or not, and for whichever request reads them later.
            pauses = set(model.exits)
        else:
            pauses = {*gate.layers, *bounds}
            for index in keeping:
                pauses.update(kept.depths(requests[index].request_id))
        waiting = parking.begin(decodes)
        waited = np.zeros(len(requests), dtype=np.int64)
        for name, rows in waiting.items():
            waited[decodes[name]] = rows.waited
            pauses.add(rows.exit_layer)
        kv_policies: list[KVPolicy] = [request.exits.kv_policy for request in requests]
        num_layers = model.config.num_layers
        judged, asked = np.array(is_judged), np.array(uses)
        return cls(
            scheduled,
            gate,
            asked,
            np.where(judged & (asked == LogitsUse.REPORT), LogitsUse.BEST, asked) if any(is_judged) else asked,
            judged,
            decodes,
            waited,
            len(waiting) == len(scheduled),
            keeping,
            np.array(kv_policies),
            tuple(dict.fromkeys(kv_policies)),
            sorted(pauses - {num_layers}),
            num_layers,
        )

    def owner(self, item: int) -> str:
        """Id of a request."""
        return self.scheduled[item].request.request_id
