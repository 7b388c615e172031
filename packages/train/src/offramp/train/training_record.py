"""What a training checkpoint says beside its weights, in plain containers: enough to export a model from it."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from typing import Any

from offramp.common.checkpoint import AnyCheckpoint
from offramp.common.exits.policy import ExitPolicy

RECORD = "offramp"
"""Key of the record in a Lightning file."""


def make_record(
    source: AnyCheckpoint,
    policy: ExitPolicy | None,
    provenance: Mapping[str, Any],
    settings: Mapping[str, Any],
    depth: int,
) -> dict[str, Any]:
    """Everything but weights that a checkpoint directory needs, as plain containers.

    Args:
        source: the checkpoint that training started from.
        policy: to be exported. Its thresholds are dropped: those found for other weights say nothing about these.
        provenance: of the run: id, step, data.
        settings: hyper-parameters of the run.
        depth: layers that the run holds.
    """
    kept = None if policy is None else {**policy.to_json(), "thresholds": {}}
    text = json.dumps(plain(settings), sort_keys=True)
    return {
        "hf_config": plain(source.hf_config),
        "exits": source.exits.to_json(),
        "policy": kept,
        "source": None if source.path is None else str(source.path.resolve()),
        "source_sha256": dict(source.sha256),
        "depth": depth,
        "provenance": plain(
            {
                **provenance,
                "offramp_version": importlib.metadata.version("offramp-train"),
                "settings": settings,
                "settings_sha256": hashlib.sha256(text.encode()).hexdigest(),
                "started_from": source.provenance,
            }
        ),
    }


def plain(value: Any) -> Any:
    """Dictionaries, lists, numbers, strings and None only, so that files load without unpickling classes."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {key if isinstance(key, int | str) else str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [plain(item) for item in value]
    return str(value)
