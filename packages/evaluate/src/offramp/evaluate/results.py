"""`results.json`: what was measured, and all that one must know to measure it again. One file for each folder.

    schema_version, kind     what reads it
    command, made_at         how and when
    versions, machine        with what and on what
    ...                      by kind: see `offramp.evaluate.evaluation` and `offramp.evaluate.study`

Numbers that are none (NaN, infinity) are null.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from offramp.common.errors import OfframpError

SCHEMA_VERSION = 1
RESULTS = "results.json"
_NAMED = ("offramp-common", "offramp-train", "offramp-serve", "offramp-evaluate", "torch", "transformers", "numpy")


def circumstances(command: Sequence[str]) -> dict[str, Any]:
    """How, when, with what and on what something is measured.

    Args:
        command: words as they were typed, `offramp` first.
    """
    from offramp.serve.bench.report import machine

    found = machine()
    made_at = found.pop("measured_at", None) or datetime.now(timezone.utc).isoformat(timespec="seconds")
    versions: dict[str, str] = {"python": found.pop("python")}
    for name in _NAMED:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    machine_only = {name: value for name, value in found.items() if name not in versions}
    return {"command": shlex.join(command), "made_at": made_at, "versions": versions, "machine": machine_only}


def write_results(folder: Path, kind: str, results: Mapping[str, Any]) -> Path:
    """Write `results.json` into a folder, which is made.

    Raises:
        OfframpError: that cannot be.
    """
    text = json.dumps(plain({"schema_version": SCHEMA_VERSION, "kind": kind, **results}), indent=1, allow_nan=False)
    path = folder / RESULTS
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as fault:
        raise OfframpError(f"{path} cannot be written: {fault.strerror}.") from fault
    return path


def read_results(path: Path, kinds: Sequence[str]) -> dict[str, Any]:
    """The results in a folder, or in a file.

    Args:
        path: of either.
        kinds: those that the reader knows.

    Raises:
        OfframpError: there are none, or of another kind or version.
    """
    file = path / RESULTS if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        raise OfframpError(f"{file} cannot be read as results: {fault}.") from None
    if not isinstance(found, dict) or found.get("schema_version") != SCHEMA_VERSION or found.get("kind") not in kinds:
        version, kind = (found.get("schema_version"), found.get("kind")) if isinstance(found, dict) else (None, None)
        raise OfframpError(
            f"{file} holds results of kind {kind!r} in version {version!r}, and this reads {', '.join(kinds)} in "
            f"version {SCHEMA_VERSION}; measure again with this Offramp."
        )
    return found


def plain(value: Any) -> Any:
    """The same in what JSON has; tuples with names become objects."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value
