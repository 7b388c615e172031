"""Figures 1 and 2, and what they leave out: throughput against batch size, the shallow model served, where time goes.

All contestants answer the same sources until their answers end. They take turns, each round beginning with another
one; a figure is the median over rounds, and a speed-up the median of ratios within rounds.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offramp.evaluate.answering import Answerer, Setting
from offramp.evaluate.reproduce.answers import FULL, Questions, early, engine_config, exit_rate, to_label
from offramp.evaluate.reproduce.paper import TECHNIQUES, policy
from offramp.evaluate.reproduce.sizes import Size
from offramp.serve.config import EngineConfig
from offramp.serve.measures.iteration_clock import PARTS
from offramp.serve.request.exit_options import ExitOptions

PROMPTS_PER_SEAT = 8


@dataclass
class Contestant:
    """One model under one setting, and what it did in every round.

    Attributes:
        answerer: its engine.
        setting: see `Setting`.
        num_layers: decoder layers of the full model, of which it skips some.
        rates: tokens per second of each round.
        latencies: inner-token latency in seconds of each round.
        parts: seconds of the engine's iterations by part, over all rounds.
        wall_s: seconds from the first question to the last token, over all rounds.
        tokens: that came, over all rounds.
    """

    answerer: Answerer
    setting: Setting
    num_layers: int
    rates: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    wall_s: float = 0.0
    tokens: int = 0
    exit_rate: float = 0.0
    to_label: float = 0.0

    def run(self, questions: Questions, max_tokens: int) -> None:
        """One round."""
        engine = self.answerer.engine(self.setting.engine)
        before = dict(engine.metrics.totals.parts)
        answers = self.answerer.answer(self.setting, questions.prompts, max_tokens)
        for part in PARTS:
            self.parts[part] += engine.metrics.totals.parts[part] - before[part]
        self.rates.append(answers.tokens_per_second)
        self.latencies.append(answers.inner_token_latency_s)
        self.wall_s += answers.seconds
        self.tokens += answers.num_tokens
        self.exit_rate = exit_rate(answers, self.num_layers)
        self.to_label = statistics.fmean(to_label(answers, questions))

    def report(self, base: Contestant) -> dict[str, Any]:
        """Figures, beside those of the full model in the same rounds."""
        return {
            "tokens_per_second": _spread(self.rates),
            "latency_s": _spread(self.latencies),
            "speedup": _spread([a / b for a, b in zip(self.rates, base.rates, strict=True)]),
            "latency_ratio": _spread([b / a for a, b in zip(self.latencies, base.latencies, strict=True)]),
            "exit_rate": self.exit_rate,
            "to_label": self.to_label,
            "parts_us_per_token": {part: 1e6 * seconds / self.tokens for part, seconds in self.parts.items()},
            "wall_us_per_token": 1e6 * self.wall_s / self.tokens,
        }


def measure_speed(
    model: Path, shallow: Path, calibration: Any, questions: Questions, max_tokens: int, size: Size, device: str
) -> Any:
    """All contestants at all batch sizes; see the module."""
    found: dict[str, Any] = {}
    kernels = ""
    for batch in size.batch_sizes:
        asked = questions.first(min(size.speed_prompts, PROMPTS_PER_SEAT * batch))
        contestants = _contestants(model, shallow, calibration, engine_config(device, batch=batch), device)
        for one in contestants.values():  # the first calls choose kernels and fault memory in
            one.answerer.answer(one.setting, asked.prompts[:batch], 2)
        order: Sequence[Contestant] = list(contestants.values())
        for number in range(size.rounds):
            turn = number % len(order)
            for one in [*order[turn:], *order[:turn]]:
                one.run(asked, max_tokens)
        full = contestants["full"]
        kernels = full.answerer.engine(full.setting.engine).kernels
        figures = {name: one.report(full) for name, one in contestants.items()}
        found[str(batch)] = {"prompts": len(asked.prompts), "contestants": figures}
    return {"rounds": size.rounds, "kernels": kernels, "figure_batch": size.figure_batch, "batches": found}


def _contestants(
    model: Path, shallow: Path, calibration: Any, regroup: EngineConfig, device: str
) -> dict[str, Contestant]:
    deep, together, half_model = Answerer(model), Answerer(model), Answerer(shallow)
    every = engine_config(device, "all", regroup.max_num_seqs)
    checkpoint = deep.engine(regroup).checkpoint
    layers, depth = tuple(checkpoint.exits.layers), checkpoint.model.config.num_layers
    static = Setting("static half", ExitOptions("static", static_layer=depth // 2), regroup)
    found = {
        "full": Contestant(deep, Setting("full", FULL, regroup), depth),
        "static half": Contestant(deep, static, depth),
        "shallow model": Contestant(half_model, Setting("shallow model", FULL, regroup), depth),
    }
    for technique in TECHNIQUES:
        chosen = policy(technique, calibration["techniques"][technique]["threshold"], layers)
        found[technique] = Contestant(together, early(technique, chosen, every), depth)
        found[f"{technique}, regroup"] = Contestant(deep, early(technique, chosen, regroup), depth)
    return found


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"value": statistics.median(values), "low": min(values), "high": max(values)}
