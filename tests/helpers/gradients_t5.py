"""Gradients of the multi-exit objective of a T5: an oracle that takes pairs one by one, and stages in a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.gradients import LAYERS, Case
from offramp.common.exits.config import ExitConfig
from offramp.common.t5.config import T5Config
from offramp.common.t5.model import MultiExitT5
from offramp.train.data.batch import PairBatch
from offramp.train.data.packing import collate_pairs
from offramp.train.data.tokenize import Example
from offramp.train.fill_aware import draw_exit_depths
from offramp.train.losses import ExitLosses, ExitSums, MicroBatch
from offramp.train.pipeline.back_propagation import back_propagate
from offramp.train.pipeline.stages import plan_stages
from offramp.train.pipeline.t5_stages import make_stage

VOCAB, ENCODER_LAYERS, START = 61, 3, 2
SOURCE, TARGET = 14, 9


@dataclass(frozen=True)
class T5Case(Case):
    """`Case` for a T5 of 3 + 4 layers: plain and scaled where embeddings are tied, gated (v1.1) where they are not."""

    rows: int = 5
    bounds: tuple[int, ...] | None = (ENCODER_LAYERS,)

    def model(self) -> Any:
        config = T5Config(
            vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_encoder_layers=ENCODER_LAYERS,
            num_layers=LAYERS, num_heads=3, head_dim=5, feed_forward="relu" if self.tied_embeddings else "gated-gelu",
            rms_norm_eps=1e-6, relative_buckets=6, relative_max_distance=9, tie_word_embeddings=self.tied_embeddings,
            scale_outputs=self.tied_embeddings, decoder_start_token_id=START,
        )  # fmt: skip
        model = MultiExitT5(config, ExitConfig(self.exits, head=self.head, tied=self.tied_exits))
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                mean, spread = (1.0, 0.2) if parameter.dim() == 1 else (0.0, parameter.shape[1] ** -0.5)
                loud = name == "embed_tokens.weight" or "relative" in name
                parameter.normal_(mean, 1.0 if loud else spread, generator=generator)
                parameter.requires_grad_(not name.startswith(self.frozen))
        return model.double() if self.double else model

    def batch(self, replica: int) -> MicroBatch:
        """Up to three pairs in a row, padding on both sides, and a row with nothing in it."""
        generator = torch.Generator().manual_seed(40 + replica)
        rows = [[_pair(generator) for _ in range(1 + row % 3)] for row in range(self.rows - 1)]
        tokens = collate_pairs([*rows, []], TARGET, SOURCE, pad_id=0)
        depths = draw_exit_depths(tokens, self.fill_aware, LAYERS, 3, self.step) if self.fill_aware else None
        dropout = self.layer_dropout
        return MicroBatch(tokens, depths, None if dropout is None else dropout.draw(tokens, LAYERS, 3, self.step))


def _pair(generator: torch.Generator) -> Example:
    source, target = (int(torch.randint(1, most + 1, (), generator=generator)) for most in (SOURCE // 3, TARGET // 3))
    labels = torch.randint(3, VOCAB, (target,), generator=generator).tolist()
    return Example([START, *labels[:-1]], labels, torch.randint(3, VOCAB, (source,), generator=generator).tolist())


def t5_oracle(case: T5Case, replicas: int = 1) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Single-process autograd, pair by pair without packing or padding: gradients, and losses by name."""
    model: MultiExitT5 = case.model()
    logits: dict[int, list[Tensor]] = {layer: [] for layer in model.exit_layers}
    labels: dict[int, list[Tensor]] = {layer: [] for layer in model.exit_layers}
    for batch in (case.batch(replica) for replica in range(replicas)):
        tokens = batch.tokens
        assert isinstance(tokens, PairBatch)
        for row in range(tokens.num_rows):
            for segment in range(1, int(tokens.segment_ids[row].max()) + 1):
                source = tokens.source_ids[row][tokens.source_segment_ids[row] == segment][None]
                here = tokens.segment_ids[row] == segment
                depths = None if batch.exit_depths is None else batch.exit_depths[row][here][None]
                skipped = None if batch.skipped_layers is None else batch.skipped_layers[row]
                target = tokens.labels[row][here]
                inputs = tokens.input_ids[row][here][None]
                layout, h = model.layout(model.encode(source), inputs, None, depths), model.embed(inputs)
                for layer in range(1, LAYERS + 1):
                    if skipped is None or not skipped[layer - 1]:
                        h = model.run_layers(h, layer - 1, layer, layout)
                    if layer in model.exit_layers:
                        asked = torch.ones_like(target, dtype=torch.bool) if depths is None else depths[0] >= layer
                        logits[layer].append(model.exit_logits(h, layer)[0][asked])
                        labels[layer].append(target[asked])
    total, losses = torch.zeros(()), {}
    for layer, weight in case.weights.items():
        loss = F.cross_entropy(torch.cat(logits[layer]), torch.cat(labels[layer]))
        losses[f"loss_exit_{layer:02d}"] = float(loss.detach())
        total = total + weight * loss
    total.backward()
    losses["loss"] = float(total.detach())
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    losses["norm"] = float(torch.stack([p.grad.norm() for p in trained.values() if p.grad is not None]).norm())
    return {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in trained.items()}, losses


def in_a_row(case: T5Case, num_stages: int) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Stages one after the other in one process, as the engine runs them on each micro-batch."""
    model, whole = case.model(), case.batch(0)
    plan = plan_stages(model.config, model.exit_config, num_stages, case.bounds, exit_placement=case.exit_placement)
    stages = [make_stage(model, plan, index, case.checkpoint_activations) for index in range(num_stages)]
    objective = case.run_objective().at(case.step)
    counts, total = objective.counts(whole), ExitSums(objective.layers, torch.device("cpu"))
    for micro in whole.split(case.micro_batches):
        x, done = micro.tokens.input_ids, []
        for index, stage in enumerate(stages):
            trained = any(other.trains_backbone for other in stages[:index])
            received = x if index == 0 else x.detach().requires_grad_(trained)
            made = stage(received, stage.layout(micro))
            x = made.states
            if index < num_stages - 1:
                assert x.shape[1] == micro.tokens.row_length
            done.append((received, made))
        gradient = None
        for stage, (received, made) in zip(reversed(stages), reversed(done), strict=True):
            readers = {layer: stage.reader(layer) for layer in made.cuts}
            states = {layer: cut.above for layer, cut in made.cuts.items()}
            losses = ExitLosses(objective, readers, states, micro, stage.layout(micro), counts, total)
            back_propagate(made.states, gradient, made.cuts, losses.of, made.carried)
            gradient = received.grad if received.requires_grad else None
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return {n: gradients[n] for n, p in model.named_parameters() if p.requires_grad}, total.report(objective)


def worst(found: dict[str, Tensor], exact: dict[str, Tensor], norm: float) -> tuple[float, str]:
    """The largest error relative to a gradient's norm (of a tiny one to the whole), and whose it is."""
    assert found.keys() <= exact.keys()
    return max(
        (float((found[name].double() - exact[name]).norm() / exact[name].norm().clamp(min=1e-3 * norm)), name)
        for name in found
    )
