"""Results as a table to read, and as CSV and lines of JSON to work with."""

from __future__ import annotations

import csv
import json
import platform
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers

from offramp.serve.bench.gap import STEPS
from offramp.serve.bench.measure import Measured, Note, Spread
from offramp.serve.bench.quality import Quality
from offramp.serve.measures.iteration_clock import PARTS

_SHOWN_SHARE = 0.005


def machine() -> dict[str, Any]:
    """Where and with what the figures were measured."""
    return {
        "cpu": _cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
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
    sizes = f"prompts of {load.prompt_tokens}, {load.new_tokens} new{hard}"
    if load.requests is None:
        return f"[{measured.experiment}] batch {load.batch}, {sizes}"
    return f"[{measured.experiment}] closed loop, {load.batch} in flight, {load.requests} in all, {sizes}"


def lines(measured: Measured, baseline: Measured) -> list[str]:
    """What a table says of one contestant.

    Args:
        measured: the contestant.
        baseline: whom it is compared with: the first of its workload.
    """
    rate, prefill, requests = map(Spread.of, (measured.rates, measured.prefill, measured.request_rates))
    base = Spread.of(baseline.rates)
    text = f"  {measured.who.name:36} {measured.who.dtype:4} {measured.who.kernels or '':6}"
    if rate is not None and base is not None:
        text += f" {rate.median:8.1f} ({rate.low:.1f}..{rate.high:.1f}) x{rate.median / base.median:.2f}"
    if prefill is not None:
        text += f"  prefill {prefill.median:.0f}"
    if requests is not None:
        text += f"  {requests.median:.2f} requests/s"
    if measured.mean_layers is not None:
        text += f"  {measured.mean_layers:.1f} layers"
    found = [text]
    if waits := _waits(measured):
        found.append("      " + ", ".join(waits))
    if measured.exit_layers and len(measured.exit_layers) > 1:
        found.append("      tokens by layers run: " + _by_layer(measured.exit_layers))
    found += _speedups(measured)
    part_us = measured.part_us
    total = sum(part_us.values())
    shares = [
        f"{part} {part_us[part] / total:.1%}" for part in PARTS if total and part_us[part] / total >= _SHOWN_SHARE
    ]
    if shares:
        found.append(f"      {total:.0f} us per token, decoding alone: " + ", ".join(shares))
    if measured.gap is not None:
        gap = measured.gap
        steps = ", ".join(f"{step} {gap.steps[step]:+.0f}" for step in STEPS if abs(gap.steps[step]) >= 0.5)
        found.append(
            f"      full depth {gap.full_depth_us:.0f} us; by layers {gap.by_layers_us:.0f}; {steps}; "
            f"realised {gap.realised_us:.0f}"
        )
    if measured.quality is not None:
        found.append("      " + _quality(measured.quality))
    return found


def _waits(measured: Measured) -> list[str]:
    found: list[str] = []
    first, between = Spread.of(measured.first_token_s), Spread.of(measured.gaps)
    if first is not None:
        found.append(f"first token {1e3 * first.median:.0f} ms")
    if between is not None:
        found.append(f"between tokens {1e3 * between.median:.1f} ms")
    if measured.workload.requests is not None and measured.in_flight:
        found.append(f"{sum(measured.in_flight) / len(measured.in_flight):.1f} in flight")
    if measured.rows_per_iteration is not None and measured.rows_per_layer is not None:
        found.append(f"{measured.rows_per_iteration:.1f} rows enter, {measured.rows_per_layer:.1f} in a layer")
    if measured.workload.requests is not None and measured.prefill_share is not None:
        found.append(f"{measured.prefill_share:.0%} of the time in prefill")
    return found


def _speedups(measured: Measured) -> list[str]:
    found: list[str] = []
    if measured.speedup is not None:
        over = measured.speedup_over_shortlist_head
        beside = "" if over is None else f", {over.median:.2f} over full depth with a shortlist head"
        found.append(f"      speed-up {measured.speedup.median:.2f}{beside}")
    if measured.decode_speedup and measured.ideal and measured.proportional and measured.realised:
        found.append(
            f"      decoding alone {measured.decode_speedup.median:.2f}; ideal {measured.ideal.median:.2f}, "
            f"by layers {measured.proportional.median:.2f}; {measured.realised.median:.0%} of the ideal is realised"
        )
    return found


def _quality(found: Quality) -> str:
    return (
        f"ROUGE-L {found.rouge_l:.4f} of {found.prompts} texts, {found.ratio:.3f} ({found.ratio_low:.3f}.."
        f"{found.ratio_high:.3f}) of full depth; {found.same_texts:.0%} identical to full depth; tokens by layers run: "
        + _by_layer(found.exit_layers)
    )


def _by_layer(counts: Counter[int]) -> str:
    total = counts.total() or 1
    return ", ".join(f"{layer}: {counts[layer] / total:.0%}" for layer in sorted(counts))


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
