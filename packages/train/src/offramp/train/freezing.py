"""Which parameters stay as they are: those that a user names, and those that nothing trained would reach."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

from offramp.common.errors import OfframpError
from offramp.common.model.multi_exit import MultiExitDecoder
from offramp.train.losses import Objective

BACKBONE = "backbone"
"""In `freeze`: everything but the exits."""
_EXITS = "exits."


def freeze_parameters(model: MultiExitDecoder[Any, Any], patterns: Sequence[str]) -> None:
    """Stop training the parameters that `patterns` name; see `MultiExitModule`.

    Raises:
        OfframpError: a pattern names nothing.
    """
    for pattern in patterns:
        found = [parameter for name, parameter in model.named_parameters() if _names(pattern, name)]
        if not found:
            raise OfframpError(
                f"freeze: {pattern!r} names no parameter; use 'backbone', a name like 'embed_tokens', or a pattern "
                "like 'layers.*.mlp.*'."
            )
        for parameter in found:
            parameter.requires_grad_(False)


def untrained(model: MultiExitDecoder[Any, Any], objective: Objective) -> list[str]:
    """Names of modules that only exits without a weight would train; classifiers, which no loss of tokens reaches."""
    names = [f"layers.{layer}" for layer in range(objective.deepest, model.depth)]
    for layer in model.exit_config.layers:
        if (
            layer <= model.depth
            and not objective.weights[layer]
            and any(True for _ in model.exits[str(layer)].parameters())
        ):
            names.append(f"exits.{layer}")
    if model.exit_config.classifier:
        names += [f"exits.{layer}.classifier" for layer in model.exit_config.layers if layer <= model.depth]
    if not objective.weights[objective.final_layer]:
        names += ["norm"] if model.exit_config.head != "final" else []
        names += ["lm_head"] if model.lm_head is not None and not model.exit_config.tied else []
    return names


def _names(pattern: str, name: str) -> bool:
    if pattern == BACKBONE:
        return not name.startswith(_EXITS)
    return name.startswith(pattern + ".") or fnmatch.fnmatchcase(name, pattern)
