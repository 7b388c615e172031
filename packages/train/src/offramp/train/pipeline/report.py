"""A plan in words, tables and JSON.

Legend: S stages, M micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from offramp.train.pipeline.estimate import Estimator, Variant

GIB = 2.0**30


class StageReport(NamedTuple):
    """What the stages of a run are.

    Attributes:
        text: in words and a table.
        stages: [S] see `stage_records`.
    """

    text: str
    stages: list[dict[str, Any]]


def stage_table(estimator: Estimator) -> str:
    """The stage plan: layers, exits, parameters, time per micro-batch and memory of each stage."""
    rows = [
        [
            str(stage["stage"]),
            *("{}-{}".format(*span) if span else "none" for span in _spans(stage)),
            ", ".join(map(str, stage["exits"])) or "none",
            f"{stage['parameters'] / 1e6:,.1f}",
            milliseconds(stage["forward_s"]),
            milliseconds(stage["backward_s"]),
            *(
                size(stage[key])
                for key in ("weights_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes", "total_bytes")
            ),
            str(stage["in_flight"]),
        ]
        for stage in stage_records(estimator)
    ]
    layers = ["encoder layers", "decoder layers"] if estimator.plan.encoder_bounds else ["layers"]
    head = ["stage", *layers, "exits", "params, M", "fwd, ms", "bwd, ms", "weights", "grads", "optimizer"]
    return table([*head, "activations", "total, GiB", "in flight"], rows)


def stage_records(estimator: Estimator) -> list[dict[str, Any]]:
    """[S] the numbers of `stage_table`, in seconds and bytes; `layers` are the first and the last, if there are any."""
    works, filling, records = estimator.works(), estimator.filling(), []
    encoder_bounds = estimator.plan.encoder_bounds
    timeline = estimator.run(works, None if filling is None else filling.timeline.schedule)
    for index, (work, memory, peak) in enumerate(zip(works, estimator.memory(), timeline.peaks, strict=True)):
        records.append(
            {
                "stage": index,
                **({"encoder_layers": _span(encoder_bounds, index)} if encoder_bounds else {}),
                "layers": _span(estimator.plan.bounds, index),
                "exits": list(estimator.plan.exits_of(index)),
                "parameters": memory.parameters,
                "trained_parameters": memory.trained,
                "forward_s": work.seconds("forward"),
                "backward_s": work.seconds("backward"),
                "weights_bytes": memory.weights,
                "gradients_bytes": memory.gradients,
                "optimizer_bytes": memory.optimizer,
                "activations_bytes": peak.bytes,
                "exit_bytes": max((head.working for head in work.heads), default=0.0),
                "total_bytes": memory.total + peak.bytes,
                "in_flight": peak.in_flight,
            }
        )
    return records


def _span(bounds: Sequence[int], index: int) -> list[int]:
    """First and last layer of a stage, counted from 1; empty if it has none."""
    start, stop = bounds[index], bounds[index + 1]
    return [start + 1, stop] if start < stop else []


def _spans(stage: dict[str, Any]) -> list[list[int]]:
    return [stage[key] for key in ("encoder_layers", "layers") if key in stage]


def comparison_table(variants: Sequence[Variant]) -> str:
    """Step time, bubble, bound and peak activations of each variant."""
    plain = variants[0].timeline.seconds
    rows = [
        [
            variant.name,
            milliseconds(variant.timeline.seconds),
            f"{100 * (variant.timeline.seconds / plain - 1):+.2f}%" if plain else "",
            "" if variant.bound is None else milliseconds(variant.bound),
            f"{100 * variant.timeline.bubble_share:.1f}%",
            " ".join(f"{peak.bytes / GIB:.2f}" for peak in variant.timeline.peaks),
            " ".join(str(peak.logits) for peak in variant.timeline.peaks),
            "what fit runs" if variant.runs else variant.note,
        ]
        for variant in variants
    ]
    head = ["", "step, ms", "change", "bound, ms", "bubble", "activations by stage, GiB", "logits alive", ""]
    return table(head, rows)


def variant_records(variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """The numbers of `comparison_table`, in seconds and bytes."""
    return [
        {
            "name": variant.name,
            "runs": variant.runs,
            "step_s": variant.timeline.seconds,
            "bound_s": variant.bound,
            "bubble_share": variant.timeline.bubble_share,
            "busy_s": list(variant.timeline.busy),
            "activations_bytes": [peak.bytes for peak in variant.timeline.peaks],
            "in_flight": [peak.in_flight for peak in variant.timeline.peaks],
            "logits_alive": [peak.logits for peak in variant.timeline.peaks],
            "inserted": None if variant.filling is None else [variant.filling.warmup, variant.filling.cooldown],
            "note": variant.note,
        }
        for variant in variants
    ]


def milliseconds(seconds: float) -> str:
    """With three digits or more."""
    value = 1e3 * seconds
    return f"{value:,.1f}" if value >= 100 else f"{value:.3g}"


def size(count: float) -> str:
    """Bytes in GiB."""
    value = count / GIB
    return f"{value:,.2f}" if value >= 0.095 or not value else f"{value:.2g}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns under their names: numbers to the right, the words of the first and the last column to the left."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = []
    for row in (head, *rows):
        cells = [
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        if not head[-1]:
            cells[-1] = row[-1]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
