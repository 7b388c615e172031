"""Results as a table to read, and as CSV and lines of JSON to work with."""

from __future__ import annotations

import csv
import json
import platform
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers

from offramp.serve.bench.measure import Measured, Note, Spread
from offramp.serve.measures.iteration_clock import PARTS

_SHOWN_SHARE = 0.005


def machine() -> dict[str, Any]:
    """Where and with what the figures were measured."""
    return {
        "cpu": _cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "measured_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def header(measured: Measured) -> str:
    """The line above a workload's contestants."""
    load = measured.workload
    hard = f", {load.hard_share:.0%} of the sequences at full depth" if load.hard_share else ""
    return f"[{measured.experiment}] batch {load.batch}, prompts of {load.prompt_tokens}, {load.new_tokens} new{hard}"


def lines(measured: Measured, baseline: Measured) -> list[str]:
    """What a table says of one contestant.

    Args:
        measured: the contestant.
        baseline: whom it is compared with: the first of its workload.
    """
    decode, prefill = Spread.of(measured.decode), Spread.of(measured.prefill)
    base = Spread.of(baseline.decode)
    text = f"  {measured.name:30} {measured.dtype:4} {measured.kernels or '':6}"
    if decode is not None and base is not None:
        text += f" {decode.median:8.1f} ({decode.low:.1f}..{decode.high:.1f}) x{decode.median / base.median:.2f}"
    if prefill is not None:
        text += f"  prefill {prefill.median:.0f}"
    if measured.mean_layers is not None:
        text += f"  {measured.mean_layers:.1f} layers"
    found = [text]
    if measured.speedup and measured.ideal and measured.proportional and measured.realised:
        found.append(
            f"      speed-up {measured.speedup.median:.2f}; ideal {measured.ideal.median:.2f}, "
            f"by layers {measured.proportional.median:.2f}; {measured.realised.median:.0%} of the ideal is realised"
        )
    part_us = measured.part_us
    total = sum(part_us.values())
    shares = [
        f"{part} {part_us[part] / total:.1%}" for part in PARTS if total and part_us[part] / total >= _SHOWN_SHARE
    ]
    if shares:
        found.append(f"      {total:.0f} us per token: " + ", ".join(shares))
    return found


def note_line(note: Note) -> str:
    """What a table says of somebody who is missing."""
    return f"  {note.name}: not measured: {note.reason}"


def write(directory: Path, results: Sequence[Measured], notes: Sequence[Note], facts: dict[str, Any]) -> list[Path]:
    """Write `results.csv` (one row for each contestant and workload) and `results.jsonl` (the same and the details).

    Returns:
        The files.
    """
    directory.mkdir(parents=True, exist_ok=True)
    rows = [measured.to_json() for measured in results]
    table, details = directory / "results.csv", directory / "results.jsonl"
    flat = [{name: value for name, value in row.items() if not isinstance(value, (dict, list))} for row in rows]
    with table.open("w", newline="", encoding="utf-8") as file:
        if flat:
            writer = csv.DictWriter(file, list(flat[0]))
            writer.writeheader()
            writer.writerows(flat)
    with details.open("w", encoding="utf-8") as file:
        for row in [facts, *rows, *({"missing": note.name, "reason": note.reason} for note in notes)]:
            print(json.dumps(row), file=file)
    return [table, details]


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
