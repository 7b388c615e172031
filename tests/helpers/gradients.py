"""Gradients of the multi-exit objective: from pipeline stages, and from an oracle."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.tiny import tiny_model
from offramp.common.exits.config import ExitConfig
from offramp.common.model.transformer import MultiExitTransformer
from offramp.train.data.batch import IGNORED_LABEL, TokenBatch
from offramp.train.fill_aware import draw_exit_depths
from offramp.train.losses import MicroBatch

LAYERS = 4


@dataclass(frozen=True)
class Case:
    """One way to cut, tie and train a tiny model."""

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
    distill: float = 0.0
    checkpoint_activations: bool = False
    frozen: tuple[str, ...] = ()
    rows: int = 7
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def weights(self) -> dict[int, float]:
        return {layer: 0.3 + 0.1 * layer for layer in (*self.exits, LAYERS)}

    def model(self) -> MultiExitTransformer:
        exits = ExitConfig(self.exits, head=self.head, tied=self.tied_exits)
        model = tiny_model(exits, num_hidden_layers=LAYERS, tie_word_embeddings=self.tied_embeddings, **self.overrides)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(self.frozen))
        return model

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
        depths = draw_exit_depths(batch, self.fill_aware, LAYERS, seed=3, step=9) if self.fill_aware else None
        return MicroBatch(batch, depths)


def oracle(case: Case, replicas: int) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Single-process autograd of the objective, written down as plainly as possible: gradients and losses by name."""
    model = case.model()
    parts = [case.batch(replica) for replica in range(replicas)]
    ids, labels, segments = (torch.cat(tensors) for tensors in zip(*(part.tokens for part in parts), strict=True))
    depths = None
    if parts[0].exit_depths is not None:
        depths = torch.cat([part.exit_depths for part in parts if part.exit_depths is not None])
    logits = model(ids, model.layout(ids, segments, depths)).logits
    total, losses = torch.zeros(()), {}
    final_mask = labels != IGNORED_LABEL if depths is None else (labels != IGNORED_LABEL) & (depths >= LAYERS)
    for layer, weight in case.weights.items():
        mask = labels != IGNORED_LABEL
        if depths is not None:
            mask = mask & (depths >= layer)
        loss = F.cross_entropy(logits[layer][mask], labels[mask])
        losses[f"loss_exit_{layer:02d}"] = float(loss.detach())
        if layer != LAYERS:
            same = logits[layer].argmax(-1) == logits[LAYERS].argmax(-1)
            losses[f"agreement_exit_{layer:02d}"] = float(same[final_mask].double().mean())
        if case.distill and layer != LAYERS:
            teacher = logits[LAYERS].detach()[final_mask].log_softmax(-1)
            student = logits[layer][final_mask].log_softmax(-1)
            divergence = (teacher.exp() * (teacher - student)).sum(-1).mean()
            loss = (1 - case.distill) * loss + case.distill * divergence
        total = total + weight * loss
    total.backward()
    losses["loss"] = float(total.detach())
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    losses["norm"] = float(torch.stack([p.grad.norm() for p in trained.values() if p.grad is not None]).norm())
    return {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in trained.items()}, losses


def pipeline(cases: list[tuple[int, Case]]) -> list[dict[str, Any]]:
    """In each process: this stage's gradients before the optimizer step, and what the engine reports.

    Args:
        cases: number of stages, and what to train on them.
    """
    from offramp.train.pipeline.engine import EarlyExitPipelineEngine, StageModule, make_engine

    # isort: split
    import deepspeed
    from deepspeed import comm as dist
    from deepspeed.utils import safe_get_full_grad

    from offramp.train.losses import ExitSums, Objective
    from offramp.train.pipeline.stages import plan_stages

    deepspeed.init_distributed("gloo", verbose=False)
    answers = []
    for num_stages, case in cases:
        model = case.model()
        plan = plan_stages(model.config, model.exit_config, num_stages, case.bounds, exit_placement=case.exit_placement)
        module = StageModule(model, plan, case.checkpoint_activations)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": case.zero_stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": case.clip,
            "steps_per_print": None,
        }
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.0)
        engine = make_engine(module, config, optimizer)
        engine.objective = Objective(case.weights, case.distill)
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
        replicas = dist.get_world_size() // num_stages
        parts = [case.batch(replica) for replica in range(replicas)]
        counts = torch.stack([engine.objective.counts(part) for part in parts]).sum(0)
        micro = parts[engine.grid.data_parallel_id].split(case.micro_batches)
        before = engine.eval_batch(micro)
        sums = engine.train_batch(micro, counts)
        after = engine.eval_batch([*micro, *micro][: 2 * len(micro) - 1])
        reports = []
        for part in (before, sums):
            dist.all_reduce(part.values)
            reports.append(ExitSums(part.layers, part.values.device, part.values).report(engine.objective))
        answers.append(
            {
                "gradients": gradients,
                "train": reports[1],
                "eval": reports[0],
                "norm": engine.grad_norm,
                "exits": module.stage.exit_layers,
                "finite": bool(after.values.isfinite().all()),
                "idle": module.idle is not None,
            }
        )
        engine.destroy()
    dist.barrier()
    return answers
