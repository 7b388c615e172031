"""What real stages have alive, tensor by tensor: exits change no peak, and the plan says the same.

Legend: V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from benchmarks.live_bytes import LiveBytes
from torch import Tensor

from helpers.processes import run_processes
from helpers.tiny import tiny_model
from offramp.common.exits.config import ExitConfig

V, SIZE, INNER, LAYERS, ROWS, TIME = 997, 64, 160, 9, 2, 192
BOUNDS, MICRO_BATCHES = [3, 6], 4
EXITS = (3, 4, 5)
"""The middle stage's first state, and two within it."""


class Peaks(NamedTuple):
    """Bytes that a stage has alive at most in one step, beyond weights and gradients; planned and counted."""

    counted: int
    planned: float
    logits: int


class LiveLogits(LiveBytes):
    """Counts only what has a row of the vocabulary for some tokens, be it logits, probabilities or gradients."""

    def _add(self, tensor: Tensor) -> None:
        if tensor.dim() == 2 and tensor.shape[1] == V:
            super()._add(tensor)


def peaks(cases: list[tuple[int, ...]]) -> list[Peaks]:
    """In each process: of its stage, for each choice of exits."""
    from offramp.train.pipeline.engine import deepspeed_config, make_engine
    from offramp.train.pipeline.stage_module import StageModule

    # isort: split
    import deepspeed
    import torch

    from offramp.train.data.batch import TokenBatch
    from offramp.train.losses import MicroBatch, Objective
    from offramp.train.pipeline.costs import MicroBatchShape
    from offramp.train.pipeline.estimate import Estimator
    from offramp.train.pipeline.stages import plan_stages
    from offramp.train.pipeline.times import estimated

    deepspeed.init_distributed("gloo", verbose=False)
    answers = []
    for layers in cases:
        exits = ExitConfig(layers, head="norm", tied=False)
        model = tiny_model(
            exits, vocab_size=V, hidden_size=SIZE, intermediate_size=INNER, num_hidden_layers=LAYERS
        ).train()
        plan = plan_stages(model.config, exits, 3, BOUNDS)
        shape = MicroBatchShape(ROWS, TIME)
        estimator = Estimator(plan, model, shape, estimated(model.config, exits, shape, 1e12, ""), MICRO_BATCHES)
        module = StageModule(model, plan)
        engine = make_engine(module, deepspeed_config(), torch.optim.SGD(module.parameters(), lr=0.0))
        engine.objective = Objective({**dict.fromkeys(layers, 0.3), LAYERS: 1.0})
        ids = torch.arange(MICRO_BATCHES * ROWS * TIME).view(-1, TIME) * 7 % V
        batch = MicroBatch(TokenBatch(ids, ids, torch.zeros_like(ids)))
        queue, counts, run = batch.split(MICRO_BATCHES), engine.objective.counts(batch), engine._run
        found: dict[type, int] = {}

        def counted(micro_batches: Any, schedule: Any, found: dict[type, int] = found, run: Any = run) -> Any:
            with LiveBytes() as live, LiveLogits() as logits:
                sums = run(micro_batches, schedule)
            for one in (live, logits):
                found[type(one)] = one.peak - one.now  # what is left are gradients
            return sums

        engine._run = counted
        engine.train_batch(queue, counts)
        planned = estimator.run(estimator.works()).peaks[engine.stage_id].bytes
        answers.append(Peaks(found[LiveBytes], planned, found[LiveLogits]))
        engine.destroy()
    return answers


@pytest.mark.slow
def test_exits_in_the_middle_change_no_peak_and_have_a_few_rows_of_logits_alive() -> None:
    from offramp.train.linear_cross_entropy import CHUNK_ROWS

    stages = run_processes(peaks, 3, [(), EXITS], timeout_s=300)
    chunk = CHUNK_ROWS * V * 4
    for stage, (plain, early) in enumerate(stages):
        assert early.counted == pytest.approx(plain.counted, rel=0.02)
        assert early.planned == pytest.approx(plain.planned, rel=0.02)
        for peak in (plain, early):
            assert peak.counted == pytest.approx(peak.planned, rel=0.04)
        # Logits and log-probabilities of one chunk, whose place their gradient takes, whatever the number of exits.
        assert plain.logits == (2 * chunk if stage == 2 else 0)
        assert early.logits == (0 if stage == 0 else 2 * chunk)
