"""One stage: a slice of the layers with its part of the KV cache. It runs every iteration's rows through all of them.

An exit test is a side output here: the first exit at which a newest row is sure says its token, and the row goes on for
the sake of its keys and values alone, which are therefore exact. Nothing is filled in or run again later. The final
exit's head runs for rows that nobody has said yet.

**Order.** A stage runs iterations in the order in which they were scheduled, each of them to its end. All that the
first stage does at once in its books (`Scheduler`) rests on that.

Legend: I requests of the iteration, N rows, D model, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from offramp.common.exits.policy import ExitPolicy
from offramp.serve.execution.departures import Departure, LogitsUses, unembed
from offramp.serve.execution.exit_test import ExitRules, IterationExits, OpenExits
from offramp.serve.execution.leaving import note_left, note_untested
from offramp.serve.execution.sweep import Sweep
from offramp.serve.kv_cache.storage import KVStorage
from offramp.serve.measures.iteration_clock import IterationClock
from offramp.serve.measures.records import SegmentRun, Trace
from offramp.serve.model.packed import PackedModel
from offramp.serve.pipeline.plan import NO_RULE, NOBODY, StagePlan
from offramp.serve.request.logits_use import LogitsUse

Answer = Callable[[Sequence[Departure]], None]
"""Takes what newest rows have predicted at an exit."""


class Stage:
    """Runs a slice of the layers.

    Attributes:
        model: the slice.
        layers: indices of its layers.
        context: what rows share.
        cache: keys and values of its layers.
        trace: what ran in the last iteration.
    """

    def __init__(
        self,
        model: PackedModel,
        layers: range,
        cache: KVStorage,
        max_model_len: int,
        clock: IterationClock | None = None,
    ) -> None:
        """Set up.

        Args:
            model: packed weights of the slice.
            layers: indices of its layers.
            cache: with `model.num_cache_layers` layers.
            max_model_len: most tokens of one sequence.
            clock: told what time is spent on; None: a clock of its own.
        """
        self.model, self.layers, self.cache = model, layers, cache
        self.context = model.row_context(max_model_len, cache.block_size)
        self.rules = ExitRules(model)
        self.trace = Trace()
        self._clock = clock or IterationClock()
        self._policies: dict[int, ExitPolicy] = {}
        # Which columns of `StagePlan.levels` are those of its own exits.
        self._columns = [number for number, layer in enumerate(model.early_exits) if layer in model.exits]
        self._exits = [model.early_exits[number] for number in self._columns]

    def learn(self, number: int, policy: ExitPolicy) -> None:
        """A number stands for a policy's measure and shortlist from now on."""
        self._policies[number] = policy

    @torch.inference_mode()
    def run(self, plan: StagePlan, x: Tensor, answer: Answer) -> tuple[StagePlan, Tensor]:
        """Run one iteration's rows through the layers of this stage.

        Args:
            plan: the rows, and who asks for a token.
            x: [N, D] their states before.
            answer: told the tokens that are said at exits of this stage, exit by exit, as soon as they are known.

        Returns:
            The plan for the next stage, which knows whose token was said, and the states [N, D] afterwards.
        """
        self.trace = Trace()
        if len(plan.copies):
            self.cache.copy_blocks(map(tuple, plan.copies.tolist()))
        rows = plan.rows(self.context)
        newest = plan.newest.copy()
        predicts = np.zeros(len(rows), dtype=np.bool_)
        predicts[newest[newest != NOBODY]] = True
        sweep = Sweep(
            *(x, x, rows, rows.sequences.numpy().astype(np.intp), predicts),
            bound=np.full(len(rows), self.model.config.num_layers),
            depth=self.layers.start,
        )
        rules = [
            None if number == NO_RULE else self.rules.rule(self._policies[number])
            for number in np.where(newest == NOBODY, NO_RULE, plan.rules).tolist()
        ]
        uses = list(map(LogitsUse, plan.uses.tolist()))
        exits = IterationExits(self.model, OpenExits(self._exits, rules, plan.levels[:, self._columns], uses))
        # The block of an exit's head attends over the sequence, so every row leaves keys and values there.
        for layer in self._exits if self.model.has_exit_blocks else exits.open_exits.layers:
            self._run_layers(sweep, layer)
            self._test(sweep, exits, layer)
            self._say(sweep, exits, plan, newest, answer)
        self._run_layers(sweep, self.layers.stop)
        if self.layers.stop == self.model.config.num_layers:
            places = sweep.newest
            if len(places):
                note_untested(self.model, self.cache, sweep, self.layers.stop, places)
                self._say(sweep, exits, plan, newest, answer)
        self._clock.lap("other")
        return replace(plan, newest=newest), sweep.x

    def _run_layers(self, sweep: Sweep, stop: int) -> None:
        if sweep.depth == stop:
            return
        self._clock.lap("other")
        sweep.x, sweep.previous = self.model.run_layers(sweep.x, sweep.rows, self.cache, sweep.depth, stop)
        seconds = self._clock.lap("layers")
        self.trace.segments.append(SegmentRun(sweep.depth, stop, len(sweep), seconds))
        sweep.depth = stop

    def _test(self, sweep: Sweep, exits: IterationExits, layer: int) -> None:
        """Test newest rows that have no token yet at an exit; those that are sure are noted as if they left."""
        block = self.model.exits[layer].block
        if block is not None:
            block.write(sweep.x, sweep.rows, self.cache)
        places = sweep.newest
        tested = places[exits.is_tested(layer)[sweep.items[places]]]
        if not len(tested):
            return
        scored = exits.test(layer, sweep, tested, self.cache)
        said = np.zeros(len(sweep), dtype=np.bool_)
        said[tested] = exits.sure[sweep.items[tested]]
        self._clock.lap("exit_test")
        if said.any():
            note_left(self.model, self.cache, sweep, layer, said, scored)

    def _say(
        self,
        sweep: Sweep,
        exits: IterationExits,
        plan: StagePlan,
        newest: np.ndarray[tuple[int], np.dtype[np.int64]],
        answer: Answer,
    ) -> None:
        """Make tokens of the rows noted, and hand them out; a row that must not say its token stays as it was."""
        if not sweep.left:
            return
        found = unembed(self.model, exits, LogitsUses(plan.uses, plan.uses), sweep.left)
        sweep.left = []
        for vetoed in found.vetoed:
            self.trace.vetoed_rows += len(vetoed.items)
            exits.sure[vetoed.items] = False
        for departure in found.final:
            sweep.predicts[newest[departure.items]] = False
            newest[departure.items] = NOBODY
        self._clock.lap("head")
        if found.final:
            answer(found.final)
