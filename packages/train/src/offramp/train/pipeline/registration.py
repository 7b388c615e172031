"""Makes `trainer.strategy: deepspeed_pipeline` known to Lightning, without importing DeepSpeed until it is chosen."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

NAME = "deepspeed_pipeline"


def register_strategy() -> None:
    """Register the strategy under its name; more than once is fine."""
    if NAME not in StrategyRegistry:
        StrategyRegistry.register(NAME, _make, description="DeepSpeed pipeline with early exits")


def _make(**settings: Any) -> Any:
    from offramp.train.pipeline.strategy import DeepSpeedPipelineStrategy

    return DeepSpeedPipelineStrategy(**settings)
