"""Stages of an experiment: each leaves its result and a fingerprint of its inputs, and is skipped while that holds.

    OUT/<stage>/result.json     {"fingerprint": .., "result": .., "wall_s": .., "cpu_s": ..}

A stage that is cut off has no result, and starts again from an empty folder.
"""

from __future__ import annotations

import hashlib
import json
import resource
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from offramp.common.errors import OfframpError

DISTRIBUTIONS = ("offramp-common", "offramp-train", "offramp-serve", "offramp-evaluate")
_RESULT = "result.json"


@dataclass(frozen=True)
class Stage:
    """One step of an experiment.

    Attributes:
        name: of its folder.
        run: does it in that folder, and returns its result as plain containers.
        needs: stages whose results it reads.
        settings: all that its result depends on beside them, as plain containers.
    """

    name: str
    run: Callable[[Path], Any]
    needs: tuple[str, ...]
    settings: Any


def run_stages(
    stages: Sequence[Stage], out: Path, selected: Collection[str] = (), tell: Callable[[str], None] = print
) -> None:
    """Run the stages whose result is missing or out of date.

    Args:
        stages: in order.
        out: folder of the experiment.
        selected: names of those to run; none: all.
        tell: is given a sentence about each.

    Raises:
        OfframpError: a name is unknown, or a stage that is not selected has no result that holds.
    """
    if unknown := sorted(set(selected) - {stage.name for stage in stages}):
        known = ", ".join(stage.name for stage in stages)
        raise OfframpError(f"--stages names {', '.join(unknown)}; the stages are {known}.")
    fingerprints: dict[str, str] = {}
    last = max((i for i, stage in enumerate(stages) if stage.name in selected), default=len(stages) - 1)
    for stage in stages[: last + 1]:
        fingerprint = _fingerprint(stage, fingerprints)
        fingerprints[stage.name] = fingerprint
        folder = out / stage.name
        if _holds(folder, fingerprint):
            tell(f"{stage.name}: done before")
        elif selected and stage.name not in selected:
            raise OfframpError(f"{folder} has no result of these settings; let --stages name {stage.name}, too.")
        else:
            tell(f"{stage.name}: running")
            _run(stage, folder, fingerprint)


def result_of(out: Path, name: str) -> Any:
    """What a stage returned."""
    return record_of(out, name)["result"]


def record_of(out: Path, name: str) -> dict[str, Any]:
    """Result, fingerprint, and seconds of a stage."""
    return json.loads((out / name / _RESULT).read_text(encoding="utf-8"))


def versions() -> dict[str, str]:
    """Of Offramp's own distributions."""
    return {name: version(name) for name in DISTRIBUTIONS}


def _fingerprint(stage: Stage, others: Mapping[str, str]) -> str:
    inputs = [stage.name, stage.settings, [others[name] for name in stage.needs], versions()]
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def _holds(folder: Path, fingerprint: str) -> bool:
    try:
        return json.loads((folder / _RESULT).read_text(encoding="utf-8"))["fingerprint"] == fingerprint
    except (OSError, ValueError, KeyError):
        return False


def _run(stage: Stage, folder: Path, fingerprint: str) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    wall, cpu = time.perf_counter(), _cpu_s()
    result = stage.run(folder)
    record = {
        "fingerprint": fingerprint,
        "wall_s": time.perf_counter() - wall,
        "cpu_s": _cpu_s() - cpu,
        "result": result,
    }
    partial = folder / f".{_RESULT}"
    partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    partial.replace(folder / _RESULT)


def _cpu_s() -> float:
    """Seconds of all cores, of this process with its threads and of processes that it has waited for."""
    uses = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in uses)
