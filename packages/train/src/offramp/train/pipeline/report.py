"""A plan in words, tables and JSON.

Legend: S stages, M micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from offramp.common.families import AnyModel
from offramp.train.pipeline.estimate import Estimator, Variant
from offramp.train.pipeline.stages import StagePlan
from offramp.train.pipeline.t5_stages import make_stage

GIB = 2.0**30


class StageReport(NamedTuple):
    """What the stages of a run are.

    Attributes:
        text: in words and a table.
        stages: [S] see `stage_records`.
    """

    text: str
    stages: list[dict[str, Any]]


def layers_only(plan: StagePlan, model: AnyModel) -> StageReport:
    """Layers, exits and parameters of each stage: what is known of an encoder-decoder model."""
    records, rows = [], []
    for index in range(plan.num_stages):
        parameters = dict(make_stage(model, plan, index).named_parameters()).values()
        encoder, decoder = ([bounds[index] + 1, bounds[index + 1]] for bounds in (plan.encoder_bounds, plan.bounds))
        record = {
            "stage": index,
            "encoder_layers": encoder if encoder[0] <= encoder[1] else [],
            "layers": decoder if decoder[0] <= decoder[1] else [],
            "exits": list(plan.exits_of(index)),
            "parameters": sum(parameter.numel() for parameter in parameters),
            "trained_parameters": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        }
        records.append(record)
        spans = ["{}-{}".format(*span) if span else "none" for span in (record["encoder_layers"], record["layers"])]
        exits = ", ".join(map(str, record["exits"])) or "none"
        rows.append([str(index), *spans, exits, f"{record['parameters'] / 1e6:,.1f}"])
    head = ["stage", "encoder layers", "decoder layers", "exits", "params, M"]
    return StageReport(f"stage plan:\n{table(head, rows)}", records)


def stage_table(estimator: Estimator) -> str:
    """The stage plan: layers, exits, parameters, time per micro-batch and memory of each stage."""
    rows = [
        [
            str(stage["stage"]),
            "{}-{}".format(*stage["layers"]),
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
    head = ["stage", "layers", "exits", "params, M", "fwd, ms", "bwd, ms", "weights", "grads", "optimizer"]
    return table([*head, "activations", "total, GiB", "in flight"], rows)


def stage_records(estimator: Estimator) -> list[dict[str, Any]]:
    """[S] the numbers of `stage_table`, in seconds and bytes; `layers` are the first and the last."""
    works, filling, records = estimator.works(), estimator.filling(), []
    timeline = estimator.run(works, None if filling is None else filling.timeline.schedule)
    for index, (work, memory, peak) in enumerate(zip(works, estimator.memory(), timeline.peaks, strict=True)):
        records.append(
            {
                "stage": index,
                "layers": [estimator.plan.bounds[index] + 1, estimator.plan.bounds[index + 1]],
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
