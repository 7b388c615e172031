"""Thresholds from held-out text: simple, honest, and without a guarantee (that takes a statistical test).

Two things are kept apart that are easily confused. *Where* the thresholds of the exits stand relative to each other is
chosen by teacher forcing: along the full model's own texts, each exit gets the lowest threshold above which it says
what the full model says in at least a share `precision` of the tokens. *How strict* they all are is chosen by really
generating with them, through the engine and with the keys and values that serving will use, since one early token
changes every token after it.

Legend: T time, V vocabulary or shortlist.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from offramp.common.checkpoint import Checkpoint
from offramp.common.exits.confidence import confidence
from offramp.common.exits.policy import STATE_MEASURES, ExitPolicy
from offramp.serve.engine import Engine
from offramp.serve.offline import Completion, generate
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.output import RequestOutput
from offramp.serve.request.sampling_params import SamplingParams

PRECISIONS = (1.0, 0.999, 0.995, 0.99, 0.98, 0.97, 0.95, 0.92, 0.88)
MIN_TOKENS = 30  # an exit that fewer calibration tokens would use is left closed


@dataclass(frozen=True)
class Candidate:
    """One setting of all thresholds, and what generating with it gave.

    Attributes:
        precision: share of tokens above each threshold that must agree under teacher forcing.
        thresholds: exit layer -> threshold.
        identical: share of calibration texts that equal the full model's.
        mean_layers: layers per generated token.
    """

    precision: float
    thresholds: dict[int, float]
    identical: float
    mean_layers: float


@dataclass(frozen=True)
class Calibration:
    """Operating points by name, each the fastest candidate that keeps its promise on the calibration texts.

    Attributes:
        points: name -> policy.
        record: everything that was tried, as plain containers.
    """

    points: dict[str, ExitPolicy]
    record: dict[str, object]


def calibrate(
    checkpoint: Checkpoint,
    engine: Engine,
    prompts: Sequence[str],
    targets: Mapping[str, float],
    max_tokens: int,
    on_progress: Callable[[str, int, int], None],
) -> Calibration:
    """Find one policy for each target share of texts identical to the full model's.

    Args:
        checkpoint: the model, with the measure and shortlist to use in its policy.
        engine: serves `checkpoint`.
        prompts: calibration prompts, not seen in training.
        targets: name -> least share of identical texts.
        max_tokens: most tokens per text.
        on_progress: told the phase, how much is done and out of how much.
    """
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    template = checkpoint.policy or ExitPolicy()
    full = _generate(engine, prompts, sampling, ExitOptions("full"), "full-depth texts", on_progress)
    scores = _teacher_forced(checkpoint, engine, template, prompts, full, on_progress)
    candidates: list[Candidate] = []
    for precision in PRECISIONS:
        thresholds = {
            layer: value for layer, pair in scores.items() if (value := _threshold(*pair, precision)) is not None
        }
        if not thresholds or (candidates and thresholds == candidates[-1].thresholds):
            continue
        exits = ExitOptions("fill", replace(template, thresholds=thresholds))
        phase = f"early-exit texts, {len(candidates) + 1} of at most {len(PRECISIONS)}"
        early = _generate(engine, prompts, sampling, exits, phase, on_progress)
        same = [ours.token_ids == theirs.token_ids for ours, theirs in zip(early, full, strict=True)]
        layers = [layer for completion in early for layer in completion.exit_layers]
        candidates.append(Candidate(precision, thresholds, sum(same) / len(same), sum(layers) / len(layers)))
        if candidates[-1].identical < min(targets.values()):
            break  # looser ones only get worse
    points = {}
    for name, target in targets.items():
        kept = [candidate for candidate in candidates if candidate.identical >= target]
        best = min(kept, key=lambda candidate: candidate.mean_layers, default=None)
        # Nothing keeps the promise: no exit is used, which is full depth.
        points[name] = replace(template, thresholds={} if best is None else best.thresholds)
    record: dict[str, object] = {
        "method": "held-out search, no statistical guarantee",
        "prompts": len(prompts),
        "targets": dict(targets),
        "candidates": [
            {**asdict(candidate), "thresholds": {str(k): v for k, v in candidate.thresholds.items()}}
            for candidate in candidates
        ],
        "points": {name: policy.to_json()["thresholds"] for name, policy in points.items()},
    }
    return Calibration(points, record)


def _generate(
    engine: Engine,
    prompts: Sequence[str],
    sampling: SamplingParams,
    exits: ExitOptions,
    phase: str,
    on_progress: Callable[[str, int, int], None],
) -> list[Completion]:
    finished = 0

    def count(index: int, output: RequestOutput) -> None:
        nonlocal finished
        if output.finish_reason is not None:
            finished += 1
            on_progress(phase, finished, len(prompts))

    return generate(engine, prompts, sampling, exits, on_output=count)


@torch.inference_mode()
def _teacher_forced(
    checkpoint: Checkpoint,
    engine: Engine,
    template: ExitPolicy,
    prompts: Sequence[str],
    full: Sequence[Completion],
    on_progress: Callable[[str, int, int], None],
) -> dict[int, tuple[Tensor, Tensor]]:
    """For each exit: confidences, and agreement with the full model, of the tokens that it may say along the texts.

    These are all but the first of each text, which the prompt says, and those that are not on the shortlist.
    """
    model, shortlist = checkpoint.model, template.shortlist
    found: dict[int, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in checkpoint.exits.layers}
    for number, (prompt, completion) in enumerate(zip(prompts, full, strict=True)):
        prompt_ids = engine.tokenizer(prompt)["input_ids"]
        ids = torch.tensor([[*prompt_ids, *completion.token_ids[:-1]]])
        layout, h, depth = model.layout(ids), model.embed(ids), 0
        said = torch.tensor(completion.token_ids[1:])
        for layer, rows in found.items():
            before = model.run_layers(h, depth, layer - 1, layout)
            h, depth = model.run_layers(before, layer - 1, layer, layout), layer
            # The first token of a text comes from the prompt, which never exits.
            where = slice(len(prompt_ids), None)
            state = model.exit_state(h, layer, layout)[0, where]
            logits = F.linear(state, model.unembedding(layer))
            best = logits.float().argmax(dim=-1)
            measured, may_leave = logits, torch.ones_like(best, dtype=torch.bool)
            if shortlist is not None and template.measure not in STATE_MEASURES:
                measured = logits[:, list(shortlist)]
                # A token that is not on the shortlist never leaves, so it says nothing about a threshold.
                may_leave = torch.tensor(shortlist)[measured.float().argmax(dim=-1)] == best
            sure = confidence(template.measure, measured, h[0, where], before[0, where], model.exit_classifier(layer))
            rows.append((sure[may_leave], (best == said)[may_leave]))
        on_progress("exits along the full-depth texts", number + 1, len(prompts))
    return {
        layer: (torch.cat([sure for sure, _ in rows]), torch.cat([right for _, right in rows]))
        for layer, rows in found.items()
    }


def _threshold(sure: Tensor, right: Tensor, precision: float) -> float | None:
    """The lowest threshold above which a share `precision` of the tokens agrees; None if too few would leave."""
    order = sure.argsort(descending=True)
    share = right[order].double().cumsum(0) / torch.arange(1, len(order) + 1)
    enough = (share >= precision).nonzero()
    if not len(enough) or int(enough[-1]) + 1 < MIN_TOKENS:
        return None
    last = int(enough[-1])
    # Between the last token let through and the next, so that equal confidences fall on one side.
    following = float(sure[order[last + 1]]) if last + 1 < len(order) else 0.0
    return (float(sure[order[last]]) + following) / 2
