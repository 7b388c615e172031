"""Choosing thresholds: the arithmetic, and the promise on the calibration texts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from demo.calibrate import _threshold, calibrate

from demo import calibrate as module
from helpers.tiny import tiny_checkpoint
from offramp.common.checkpoint import load_checkpoint
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy
from offramp.serve.engine import Engine
from offramp.serve.offline import generate
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.sampling_params import SamplingParams


def test_threshold_is_the_lowest_that_keeps_the_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_TOKENS", 2)
    sure = torch.tensor([0.1, 0.9, 0.5, 0.7, 0.3])
    right = torch.tensor([False, True, True, True, False])
    assert _threshold(sure, right, 1.0) == pytest.approx(0.4)  # lets 0.9, 0.7 and 0.5 through, all right
    assert _threshold(sure, right, 0.75) == pytest.approx(0.2)  # and 0.3, which is wrong: 3 of 4
    assert _threshold(sure, right, 0.6) == pytest.approx(0.05)  # everything: 3 of 5


def test_an_exit_that_is_never_right_or_hardly_used_stays_closed() -> None:
    sure = torch.linspace(0, 1, 100)
    assert _threshold(sure, torch.zeros(100, dtype=torch.bool), 0.9) is None
    assert _threshold(sure, sure > 0.95, 1.0) is None  # right for 5 tokens only


def test_points_keep_their_promise_on_the_calibration_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_TOKENS", 1)
    path = tiny_checkpoint(tmp_path / "tiny", exits=ExitConfig((1, 3), "norm"))
    engine, prompts = Engine.from_checkpoint(path), ["one", "two", "a third prompt"]
    phases: set[str] = set()
    found = calibrate(
        load_checkpoint(path),
        engine,
        prompts,
        {"safe": 1.0, "any": 0.0},
        8,
        lambda phase, done, total: phases.add(phase),
    )
    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    full = generate(engine, prompts, sampling, ExitOptions("full"))
    safe = found.points["safe"]
    again = generate(engine, prompts, sampling, ExitOptions("fill", safe))
    assert [one.token_ids for one in again] == [one.token_ids for one in full]
    assert found.record["targets"] == {"safe": 1.0, "any": 0.0}
    assert len(phases) >= 2


def test_tokens_outside_the_shortlist_say_nothing_about_thresholds(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "tiny", exits=ExitConfig((1, 3), "norm", classifier=True))
    engine, checkpoint = Engine.from_checkpoint(path), load_checkpoint(path)
    prompts, sampling = ["one", "two", "a third prompt"], SamplingParams(max_tokens=20, temperature=0.0)
    full = generate(engine, prompts, sampling, ExitOptions("full"))

    def right(policy: ExitPolicy) -> dict[int, list[bool]]:
        scores = module._teacher_forced(checkpoint, engine, policy, prompts, full, lambda *_: None)
        assert all(len(sure) == len(said) for sure, said in scores.values())
        return {layer: said.tolist() for layer, (_, said) in scores.items()}

    everything = right(ExitPolicy("margin"))
    assert {layer: len(rows) for layer, rows in everything.items()} == {1: 57, 3: 57}
    vocabulary = tuple(range(engine.checkpoint.model.config.vocab_size))
    assert right(ExitPolicy("margin", shortlist=vocabulary)) == everything
    halved = right(ExitPolicy("margin", shortlist=vocabulary[::2]))
    other = right(ExitPolicy("margin", shortlist=vocabulary[1::2]))
    assert all(halved[layer] and other[layer] for layer in (1, 3))
    assert {layer: len(halved[layer]) + len(other[layer]) for layer in (1, 3)} == {1: 57, 3: 57}
    for measure in ("cosine", "classifier"):
        assert right(ExitPolicy(measure, shortlist=vocabulary[::2])) == everything
