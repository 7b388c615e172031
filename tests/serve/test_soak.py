from __future__ import annotations

from pathlib import Path

from benchmarks.soak import soak

from helpers.tiny import tiny_checkpoint
from offramp.common.exits.config import ExitConfig


def test_after_random_load_nothing_is_left_and_answers_are_those_of_the_same_requests_alone(tmp_path: Path) -> None:
    outcome = soak(tiny_checkpoint(tmp_path / "model", ExitConfig((1, 2), "norm")), seconds=5, seed=0)
    assert outcome.faults == []
    # It was a load: requests came, went, lost their blocks and shared them.
    assert outcome.finished["length"] > 20
    assert outcome.finished["cancelled"] > 0
    assert outcome.totals.preemptions > 0
    assert outcome.totals.prefix_hit_tokens > 0
    assert outcome.totals.filled_rows > 0
    assert outcome.totals.pending_rows > 0
