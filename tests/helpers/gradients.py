"""Gradients of the multi-exit objective: from pipeline stages, and from an oracle."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.tiny import tiny_model
from offramp.common.exits.config import ExitConfig
from offramp.common.model.attention import Layout
from offramp.common.model.transformer import MultiExitTransformer
from offramp.train.data.batch import IGNORED_LABEL, TokenBatch
from offramp.train.depth_spread import DepthSpread
from offramp.train.fill_aware import draw_exit_depths
from offramp.train.layer_dropout import LayerDropout
from offramp.train.losses import MicroBatch
from offramp.train.objective import ObjectiveConfig, RunObjective
from offramp.train.pipeline.filling import arrange
from offramp.train.pipeline.schedule import Schedule, one_f_one_b
from offramp.train.pipeline.stages import Stage, plan_stages

LAYERS = 4


@dataclass(frozen=True)
class Case:
    """One way to cut, tie and train a tiny model.

    `fill` are passes of partial micro-batches in the warm-up and in the cool-down, by stage. In a first step, with a
    `loss_scale` a gradient of rank `overflows` is made infinite, and a loss of rank `spoils`, but not its gradient.
    """

    exits: tuple[int, ...] = (1, 2)
    bounds: tuple[int, ...] | None = None
    exit_placement: Any = "next_stage"
    head: Any = "norm"
    tied_exits: bool = True
    tied_embeddings: bool = True
    fill_aware: dict[int, float] | None = None
    micro_batches: int = 3
    zero_stage: int = 0
    clip: float = 0.0
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    exit_weights: Any = "by depth"
    layer_dropout: LayerDropout | None = None
    step: int = 9
    checkpoint_activations: bool = False
    fill: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    loss_scale: float | None = None
    overflows: int | None = None
    spoils: int | None = None
    frozen: tuple[str, ...] = ()
    rows: int = 7
    tensor: int = 1
    double: bool = False
    overrides: dict[str, Any] = field(default_factory=dict)

    def run_objective(self) -> RunObjective:
        by_depth = self.exit_weights == "by depth"
        weights = [0.3 + 0.1 * layer for layer in self.exits] if by_depth else self.exit_weights
        return RunObjective(self.objective, weights, 0.3 + 0.1 * LAYERS if by_depth else None, self.exits, LAYERS)

    @property
    def weights(self) -> dict[int, float]:
        return self.run_objective().weights.at(self.step)

    def model(self) -> MultiExitTransformer:
        exits = ExitConfig(self.exits, head=self.head, tied=self.tied_exits)
        model = tiny_model(exits, num_hidden_layers=LAYERS, tie_word_embeddings=self.tied_embeddings, **self.overrides)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(self.frozen))
        return model.double() if self.double else model

    def batch(self, replica: int) -> MicroBatch:
        """Rows of one data-parallel rank: prompts of different length, so the numbers of targets are uneven."""
        generator = torch.Generator().manual_seed(100 + replica)
        time = 12
        tokens = torch.randint(0, 300, (self.rows, time + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        for row in range(self.rows):
            labels[row, : (5 * row) % time] = IGNORED_LABEL
        labels[-1] = IGNORED_LABEL  # a row with nothing to learn
        segments = (torch.arange(time) >= 7).long().expand(self.rows, time)
        batch = TokenBatch(tokens[:, :-1].contiguous(), labels, segments.contiguous())
        depths = draw_exit_depths(batch, self.fill_aware, LAYERS, seed=3, step=self.step) if self.fill_aware else None
        dropout = self.layer_dropout
        return MicroBatch(batch, depths, None if dropout is None else dropout.draw(batch, LAYERS, 3, self.step))


def oracle(case: Case, replicas: int) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Single-process autograd of the objective, written down as plainly as possible: gradients and losses by name."""
    model = case.model()
    parts = [case.batch(replica) for replica in range(replicas)]
    ids, labels, segments = (torch.cat(tensors) for tensors in zip(*(part.tokens for part in parts), strict=True))
    depths = None
    if parts[0].exit_depths is not None:
        depths = torch.cat([part.exit_depths for part in parts if part.exit_depths is not None])
    skipped = None
    if case.layer_dropout is not None:
        skipped = torch.cat([part.skipped_layers for part in parts if part.skipped_layers is not None])
        assert skipped[:, 1:].any(), "nothing is skipped, so nothing is compared"
    logits = _logits(model, ids, model.layout(ids, segments, depths), skipped)
    total, losses = torch.zeros(()), {}
    settings, weights = case.objective, case.run_objective().weights.at(case.step)
    final_mask = labels != IGNORED_LABEL if depths is None else (labels != IGNORED_LABEL) & (depths >= LAYERS)
    for layer, weight in weights.items():
        mask = labels != IGNORED_LABEL
        if depths is not None:
            mask = mask & (depths >= layer)
        early = layer != LAYERS
        temperature = _setting(settings.temperature, layer, 1.0)
        smoothing = _setting(settings.label_smoothing, layer, 0.0)
        losses[f"loss_exit_{layer:02d}"] = float(F.cross_entropy(logits[layer][mask], labels[mask]).detach())
        if early:
            same = logits[layer].argmax(-1) == logits[LAYERS].argmax(-1)
            losses[f"agreement_exit_{layer:02d}"] = float(same[final_mask].double().mean())
        warm = logits[layer] / temperature
        loss = F.cross_entropy(warm[mask], labels[mask], label_smoothing=smoothing, reduction="none")
        if settings.token_weights == "confidence" and early:
            loss = loss * logits[layer][mask].softmax(-1).amax(-1).detach()
        loss = loss.mean()
        if settings.distill and early:
            heat = settings.distill_temperature
            teacher = (logits[LAYERS].detach()[final_mask] / heat).log_softmax(-1)
            student = (warm[final_mask] / heat).log_softmax(-1)
            divergence = heat**2 * (teacher.exp() * (teacher - student)).sum(-1).mean()
            loss = (1 - settings.distill) * loss + settings.distill * divergence
        total = total + weight * loss
    if settings.depth_spread is not None:
        total = total + settings.depth_spread.weight * _spread(settings.depth_spread, logits, labels, segments, case)
    total.backward()
    losses["loss"] = float(total.detach())
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    losses["norm"] = float(torch.stack([p.grad.norm() for p in trained.values() if p.grad is not None]).norm())
    return {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in trained.items()}, losses


def filled_schedule(case: Case, num_stages: int) -> Schedule:
    """1F1B with the bubbles of a case."""
    assert case.fill is not None
    return one_f_one_b(num_stages, case.micro_batches, *case.fill)


def filled_oracle(case: Case, num_stages: int, replicas: int) -> dict[str, Tensor]:
    """What filled stages accumulate, in one process: each micro-batch and exit alone, and rows counted by hand."""
    schedule, model = filled_schedule(case, num_stages), case.model()
    plan = plan_stages(model.config, model.exit_config, num_stages, case.bounds, exit_placement=case.exit_placement)
    home = {name: s for s in range(num_stages) for name in Stage(model, plan, s).state_dict()}
    exit_home = {layer: s for s in range(num_stages) for layer in plan.exits_of(s)}
    backs = [{one.micro_batch for one in own if one.kind == "backward"} for own in schedule.operations]
    parts = [case.batch(replica) for replica in range(replicas)]
    counts = {layer: sum(int(part.trained(layer).sum()) for part in parts) for layer in case.weights}
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters() if p.requires_grad}
    for part in parts:
        queue = arrange(part, schedule, seed=3, step=9)
        numbers = sorted({one.micro_batch for one in schedule.operations[0] if one.kind == "forward"})
        rows = {number: queue[number].tokens.num_rows for number in numbers}
        for number in numbers:
            tokens = queue[number].tokens
            ids, labels, segments = tokens.input_ids, tokens.labels, tokens.segment_ids
            logits = model(ids, model.layout(ids, segments, queue[number].exit_depths)).logits
            for layer, weight in case.weights.items():
                mask = queue[number].trained(layer)
                loss = weight * F.cross_entropy(logits[layer][mask], labels[mask], reduction="sum") / counts[layer]
                names = list(total)
                found = torch.autograd.grad(
                    loss, [model.get_parameter(name) for name in names], retain_graph=True, allow_unused=True
                )
                at = exit_home[layer]
                whole = sum(rows[n] for n in numbers if 0 <= n < case.micro_batches)
                met = sum(rows[n] for n in numbers if n < 0 and n in backs[at])
                for name, gradient in zip(names, found, strict=True):
                    stage = home[name]
                    if gradient is None or stage > at or any(number not in backs[s] for s in range(stage, at + 1)):
                        continue
                    back = sum(rows[n] for n in numbers if n >= case.micro_batches and n in backs[stage])
                    factor = sum(rows.values()) / (whole + met)
                    if number >= 0:
                        factor *= whole / (whole + back)
                    total[name] += factor * gradient
    return total


def _setting(value: float | dict[int, float], layer: int, default: float) -> float:
    if isinstance(value, dict):
        return value.get(layer, default)
    return value if layer != LAYERS else default


def _logits(model: MultiExitTransformer, ids: Tensor, layout: Layout, skipped: Tensor | None) -> dict[int, Tensor]:
    """Row by row where rows skip layers, so that those are really left out."""
    if skipped is None:
        return model(ids, layout).logits
    rows: list[dict[int, Tensor]] = []
    for row in range(len(ids)):
        mask, depths = (None if part is None else part[row : row + 1] for part in (layout.mask, layout.exit_depths))
        positions, cos, sin = (part[row : row + 1] for part in (layout.positions, layout.cos, layout.sin))
        own = Layout(positions, cos, sin, mask, depths)
        h, logits = model.embed(ids[row : row + 1]), {}
        for layer in range(1, LAYERS + 1):
            if not skipped[row, layer - 1]:
                h = model.run_layers(h, layer - 1, layer, own)
            if layer in model.exit_layers:
                logits[layer] = model.exit_logits(h, layer, own)
        rows.append(logits)
    return {layer: torch.cat([logits[layer] for logits in rows]) for layer in model.exit_layers}


def _spread(settings: DepthSpread, logits: dict[int, Tensor], labels: Tensor, segments: Tensor, case: Case) -> Tensor:
    """Token by token, for one micro-batch."""
    groups: dict[int, list[Tensor]] = {}
    for row in range(len(labels)):
        position = 0
        for t in range(1, labels.shape[1]):
            if segments[row, t] != segments[row, t - 1]:
                position = 0
                continue
            if labels[row, t] == IGNORED_LABEL or labels[row, t - 1] == IGNORED_LABEL:
                continue
            depth, stays = torch.zeros(()), torch.ones(())
            for layer in case.exits:
                sure = logits[layer][row, t].softmax(-1).max()
                leaves = torch.sigmoid((sure - settings.threshold) / settings.softness)
                depth = depth + stays * leaves * layer / LAYERS
                stays = stays * (1 - leaves)
            groups.setdefault(position, []).append(depth + stays)
            position += 1
    total = torch.zeros(())
    for group in groups.values():
        depths = torch.stack(group)
        power = torch.logsumexp(settings.sharpness * depths, 0) - math.log(len(group))
        total = total + len(group) * (power / settings.sharpness - depths.mean())
    return total / (labels != IGNORED_LABEL).sum()


def pipeline(cases: list[tuple[int, Case]]) -> list[dict[str, Any]]:
    """In each process: its gradients before the optimizer step, what they are slices of, and what the engine reports.

    Args:
        cases: number of stages, and what to train on them.
    """
    from offramp.train.pipeline.engine import EarlyExitPipelineEngine, deepspeed_config, make_engine
    from offramp.train.pipeline.loss_scale import LossScale
    from offramp.train.pipeline.stage_module import StageModule

    # isort: split
    import deepspeed
    from deepspeed import comm as dist
    from deepspeed.utils import safe_get_full_grad

    from offramp.train.losses import ExitSums

    deepspeed.init_distributed("gloo", verbose=False)
    answers = []
    for num_stages, case in cases:
        model = case.model()
        plan = plan_stages(model.config, model.exit_config, num_stages, case.bounds, exit_placement=case.exit_placement)
        module = StageModule(model, plan, case.tensor, case.checkpoint_activations)
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.0)
        engine = make_engine(module, deepspeed_config(case.zero_stage, case.clip), optimizer)
        engine.objective = case.run_objective().at(case.step)
        gradients: dict[str, Tensor] = {}

        def step(self: EarlyExitPipelineEngine, case: Case = case, gradients: dict[str, Tensor] = gradients) -> None:
            def read() -> None:
                for name, parameter in self.module.stage.named_parameters():
                    if parameter.requires_grad:
                        gradient = safe_get_full_grad(parameter) if case.zero_stage else parameter.grad
                        gradients[name] = torch.zeros_like(parameter) if gradient is None else gradient.clone()

            if case.zero_stage or not case.clip:
                read()
            if case.clip and not case.zero_stage:
                self._clip()
                read()
                self._exec_optimizer_step()
            else:
                EarlyExitPipelineEngine._step(self)

        engine._step = MethodType(step, engine)
        replicas = dist.get_world_size() // (num_stages * case.tensor)
        parts = [case.batch(replica) for replica in range(replicas)]
        counts = torch.stack([engine.objective.counts(part) for part in parts]).sum(0)
        micro = parts[engine.grid.data_parallel_id].split(case.micro_batches)
        before = engine.eval_batch(micro)
        if case.loss_scale is not None:
            engine.fp16_scale = LossScale(case.loss_scale)
        if case.overflows is not None:
            unscale = engine._unscale

            def overflow(engine: EarlyExitPipelineEngine = engine, case: Case = case, unscale: Any = unscale) -> bool:
                if dist.get_rank() == case.overflows:
                    next(p.grad for p in engine.module.parameters() if p.grad is not None).view(-1)[0] = float("inf")
                return unscale()

            engine._unscale = overflow
            engine.train_batch(micro, counts)
            assert not gradients, "no step is made"
            assert all(p.grad is None for p in engine.module.parameters())
            engine._unscale = unscale
        if case.spoils is not None:
            spread = engine._spread_the_word

            def spoil(engine: EarlyExitPipelineEngine = engine, case: Case = case, spread: Any = spread) -> None:
                if dist.get_rank() == case.spoils:
                    assert engine._sums is not None
                    engine._sums.values[0] = float("inf")
                spread()

            engine._spread_the_word = spoil
            engine.train_batch(micro, counts)
            assert not math.isfinite(engine.grad_norm), "every rank knows that no step may be made"
            assert all(p.grad is None for p in engine.module.parameters())
            gradients.clear()
            engine._spread_the_word = spread
        if case.fill is None:
            sums = engine.train_batch(micro, counts)
        else:
            filled = filled_schedule(case, num_stages)
            part = parts[engine.grid.data_parallel_id]
            sums = engine.train_batch(arrange(part, filled, seed=3, step=9), counts, filled)
        after = engine.eval_batch([*micro, *micro][: 2 * len(micro) - 1])
        reports = []
        for part in (before, sums):
            dist.all_reduce(part.values)
            reports.append(ExitSums(part.layers, part.values.device, part.values).report(engine.objective))
        answers.append(
            {
                "gradients": gradients,
                "slices": {} if module.sharding is None else module.sharding.slices,
                "train": reports[1],
                "eval": reports[0],
                "norm": engine.grad_norm,
                "exits": module.stage.exit_layers,
                "finite": bool(after.values.isfinite().all()),
                "idle": module.idle is not None,
                "backward_rows": engine.backward_rows,
                "skipped": engine.skipped_steps,
                "scale": None if engine.fp16_scale is None else engine.fp16_scale.value,
            }
        )
        engine.destroy()
    dist.barrier()
    return answers
