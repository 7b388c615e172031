"""Where the gap between skipped layers and realised speed goes: from the time per token that the layers run would
suggest to the one that was measured, step by step.

Every figure is of iterations that only decode, in microseconds per token, so the steps add up to the difference:

    by layers         full depth, its time in the layers scaled by the layers that tokens run
    + carried_on      layers run for tokens that had left early (recompute, verify), and for drafts that were rejected
    + smaller_batches what a row of a layer costs more than at full depth: fewer rows share the reading of a weight
    + exit_test, fill, head, rest     what these parts take more than at full depth; `rest` is sampling, scheduling,
                                      detokenising, regrouping
    = realised
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from offramp.serve.measures.iteration_clock import PARTS
from offramp.serve.measures.records import Totals

Step = Literal["carried_on", "smaller_batches", "exit_test", "fill", "head", "rest"]

STEPS: Final[tuple[Step, ...]] = get_args(Step)


@dataclass(frozen=True)
class Gap:
    """Microseconds per token.

    Attributes:
        full_depth_us: at full depth.
        by_layers_us: if time in the layers were in proportion to the layers that tokens run.
        steps: what comes on top of that; a step that saves time is negative.
        realised_us: what it took.
    """

    full_depth_us: float
    by_layers_us: float
    steps: dict[Step, float]
    realised_us: float

    @classmethod
    def between(cls, mine: Totals, base: Totals) -> Gap | None:
        """The gap between iterations of a variant and those at full depth; None if either has no tokens or layers."""
        if not mine.new_tokens or not base.new_tokens or not base.row_layers:
            return None

        def us(totals: Totals, seconds: float) -> float:
            return 1e6 * seconds / totals.new_tokens

        full_depth, realised = us(base, base.seconds), us(mine, mine.seconds)
        row_layer_s = base.parts["layers"] / base.row_layers
        wanted = us(mine, mine.token_layers * row_layer_s)
        run = us(mine, mine.row_layers * row_layer_s)
        # At full depth every row that is run is a token's, so `wanted` would be its time in the layers.
        by_layers = full_depth - us(base, base.parts["layers"]) + wanted
        more = {part: us(mine, mine.parts[part]) - us(base, base.parts[part]) for part in PARTS if part != "layers"}
        steps: dict[Step, float] = {
            "carried_on": run - wanted,
            "smaller_batches": us(mine, mine.parts["layers"]) - run,
            "exit_test": more.pop("exit_test"),
            "fill": more.pop("fill"),
            "head": more.pop("head"),
            "rest": 0.0,
        }
        steps["rest"] = sum(more.values())
        return cls(full_depth, by_layers, steps, realised)
