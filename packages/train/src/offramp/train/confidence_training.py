"""`ConfidenceTrainingModule`: train the exits' classifiers on cached states of a frozen model (CALM, section 3.5).

The second phase: the model and its exit heads are trained, and stay as they are to the bit. A classifier learns from
the state at its exit whether the exit says what the final exit would say, see `offramp.train.classifier_objective`.
CALM trains one classifier for all layers; here each exit has its own.

    trainer.fit(ConfidenceTrainingModule(directory), PrimingDataModule(data))

Numbers of a state differ in size by orders of magnitude. So a classifier is trained on states that are centred and
scaled number by number over the training tokens, and written into checkpoints as what does the same to plain states:
it remains one linear map.

Legend: N tokens, X early exits, D model, V vocabulary or shortlist.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, get_args

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from offramp.common.errors import OfframpError
from offramp.common.exits.policy import ExitPolicy
from offramp.train.classifier_objective import (
    ClassifierObjective,
    area_under_curve,
    balanced_accuracy,
    classifier_losses,
)
from offramp.train.data.batch import IGNORED_LABEL, AnyBatch
from offramp.train.optim import OptimizerConfig
from offramp.train.state_cache import CachedStates
from offramp.train.state_training import CachedBatch, StateTrainingModule, Take

_TRAINED = "classifiers"
"""Key in a training checkpoint of what a resumed run goes on with."""
_SLICE = 1024
"""Tokens whose states are labelled at a time."""
_LEAST_VARIANCE = 1e-4
"""Of a number of the state, as a share of what is usual: what hardly ever varies must not be blown up."""


class LabelledStates(NamedTuple):
    """What a step trains on.

    Attributes:
        exits: [N, X, D] after each early exit's layer.
        agrees: [N, X] bool: whether the exit says what the final exit says.
    """

    exits: Tensor
    agrees: Tensor


class Standard(NamedTuple):
    """How states are centred and scaled before classifiers are trained on them.

    Attributes:
        centre: [X, D] fp32, the mean.
        spread: [X, D] fp32, the standard deviation.
    """

    centre: Tensor
    spread: Tensor

    @classmethod
    def of(cls, sums: Tensor, count: float) -> Standard:
        """From sums [2, X, D] fp64 of states and of their squares, over `count` tokens."""
        centre, squares = sums / count
        variance = (squares - centre.square()).clamp_min(0.0)
        variance = variance.clamp_min(_LEAST_VARIANCE * variance.median(dim=-1, keepdim=True).values)
        spread = torch.where(variance > 0.0, variance.sqrt(), 1.0)
        return cls(centre.float(), spread.float())

    def __call__(self, states: Tensor) -> Tensor:
        """[N, X, D] -> [N, X, D] fp32."""
        return (states.float() - self.centre.to(states.device)) / self.spread.to(states.device)

    def fold(self, index: int, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Weight [1, D] and bias [1] that do to plain states at an exit what the given ones do to standard states."""
        exact = weight.double() / self.spread[index].to(weight.device).double()
        shift = (exact * self.centre[index].to(weight.device).double()).sum(dim=-1)
        return exact.to(weight.dtype), (bias.double() - shift).to(bias.dtype)


class ConfidenceTrainingModule(StateTrainingModule):
    """Trains a classifier for every exit, anew if there are some; in one process or under DDP.

    Exits may have any head but `block`. The exit policy of the exported checkpoint names the measure `classifier`. If
    it takes tokens from its shortlist alone (`shortlist_only`), what an exit says is the best of the shortlist here,
    too.

    Validation measures classifiers only: the model does not change. `agreement_exit_06` is the share of tokens at which
    the exit agrees with the final one, so what a classifier that always says yes gets right.

    Args:
        checkpoint: directory to start from.
        classifier_objective: `independent` or `geometric`, see `offramp.train.classifier_objective`.
        max_states: target tokens per rank that are cached; (X + 1) * D floats each.
        cache: folder for caches on disk, of which those of `ExitPrimingModule` are used too; None keeps states in
            memory.
        top: most probable tokens of the full model that are kept on disk; the first of them is needed here.
        seed: of the order.
        optimizer: learning rates, weight decay and schedule.
    """

    kind_of_losses = "binary cross-entropy of the classifiers"

    def __init__(
        self,
        checkpoint: str,
        classifier_objective: ClassifierObjective = "independent",
        max_states: int = 50_000,
        cache: str | None = None,
        top: int = 64,
        seed: int = 0,
        optimizer: OptimizerConfig | None = None,
    ) -> None:
        super().__init__(checkpoint, max_states, cache, top, seed, optimizer or OptimizerConfig(lr=1e-2))
        if classifier_objective not in get_args(ClassifierObjective):
            raise OfframpError(
                f"classifier_objective {classifier_objective!r} is unknown; choose one of "
                f"{', '.join(get_args(ClassifierObjective))}."
            )
        self.classifier_objective: ClassifierObjective = classifier_objective
        self._standard: Standard | None = None
        self._shares: Tensor | None = None  # [X] of training tokens at which the exit agrees
        self._scores: list[tuple[Tensor, Tensor]] = []  # of a validation: logits and labels [N, X] of its batches

    @override
    def configure_model(self) -> None:
        """Load the weights, freeze them all, and add classifiers."""
        if self._source is not None:
            return
        super().configure_model()
        exits = self.source.exits
        if not exits.layers or exits.head == "block":
            raise OfframpError(
                f"{self.checkpoint} has exits at {list(exits.layers)} with head {exits.head!r}; classifiers are "
                "trained on single tokens, so there must be exits, and none with a block."
            )
        if self.model is None:
            raise OfframpError(
                "ConfidenceTrainingModule runs in one process or under DDP; set another trainer.strategy."
            )
        self.model.requires_grad_(False)
        self.model.add_classifiers()

    @property
    @override
    def exported_policy(self) -> ExitPolicy | None:
        """The policy of the start, with the new measure."""
        return replace(self.source.policy or ExitPolicy(), measure="classifier")

    @override
    def on_states(self, take: Callable[[Tensor], CachedBatch], count: int) -> Take:
        """Find the labels, and how states are scaled."""
        agrees: list[Tensor] = []
        sums = torch.zeros(0)
        for rows in torch.arange(count).split(_SLICE):
            batch = take(rows)
            agrees.append(self._agrees(batch))
            exits = batch.exits.to(self.device, torch.float64)
            part = torch.stack((exits.sum(dim=0), exits.square().sum(dim=0)))
            sums = part if len(agrees) == 1 else sums + part
        labels = torch.cat(agrees)
        counts = self.sum_over_ranks(torch.cat((labels.sum(dim=0), labels.new_tensor([count], dtype=torch.long))))
        total = float(counts[-1])
        self._standard = Standard.of(self.sum_over_ranks(sums), total)
        self._shares = counts[:-1].double().div(total).float()
        rank_zero_info(
            f"training classifiers on {count:,} cached states; exits agree with the final one at "
            + ", ".join(f"{share:.1%}" for share in self._shares.tolist())
            + " of the tokens"
        )

        def labelled(rows: Tensor) -> LabelledStates:
            rows = rows.sort().values  # the order in which they come from disk
            return LabelledStates(take(rows).exits, labels[rows.to(labels.device)])

        return labelled

    @torch.no_grad()
    def _agrees(self, batch: CachedBatch) -> Tensor:
        """[N, X] bool: whether each exit says what the final one says."""
        model, policy = self.model, self.source.policy
        assert model is not None
        shortlist = None
        if policy is not None and policy.shortlist_only:
            shortlist = torch.tensor(policy.shortlist, device=self.device)
        with self.trainer.precision_plugin.forward_context():
            if isinstance(batch, CachedStates):
                best = batch.tokens[:, 0].long().to(self.device)
            else:
                best = F.linear(batch.final, model.unembedding()).argmax(dim=-1)
            found = []
            for index, layer in enumerate(model.exit_config.layers):
                weight = model.unembedding(layer)
                weight = weight if shortlist is None else weight[shortlist]
                state = model.exit_state(batch.exits[:, index].to(self.device).float(), layer)
                said = F.linear(state, weight).argmax(dim=-1)
                found.append((said if shortlist is None else shortlist[said]) == best)
        return torch.stack(found, dim=1)

    def _logits(self, states: Tensor) -> Tensor:
        """[N, X] fp32 of leaving, from states [N, X, D]."""
        model = self.model
        assert model is not None
        standard = states.float() if self._standard is None else self._standard(states)
        logits = []
        with torch.autocast(self.device.type, enabled=False):
            for index, layer in enumerate(model.exit_config.layers):
                classifier = model.exit_classifier(layer)
                assert classifier is not None
                logits.append(F.linear(standard[:, index], classifier.weight, classifier.bias)[:, 0])
        return torch.stack(logits, dim=1)

    @override
    def training_step(self, batch: LabelledStates, batch_idx: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The sum of the classifiers' losses, in nats per token."""
        if not isinstance(batch, LabelledStates):
            raise OfframpError("ConfidenceTrainingModule trains on cached states; wrap the data in PrimingDataModule.")
        assert self._shares is not None
        logits = self._logits(batch.exits)
        losses = classifier_losses(logits, batch.agrees, self.classifier_objective, self._shares)
        if self.logs_now:
            self.log_exits(torch.stack((losses.detach(), batch.agrees.float().mean(dim=0))), len(logits))
        return losses.sum()

    # ---- validation

    @override
    def validation_step(self, batch: AnyBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Keep what the classifiers say of a batch, and what would have been right."""
        tokens = self.prepare(batch, training=False).tokens
        states = self.states_of(tokens, tokens.labels != IGNORED_LABEL)
        self._scores.append((self._logits(states.exits), self._agrees(states)))

    @override
    def on_validation_epoch_start(self) -> None:
        """Forget the last one."""
        self._scores = []

    @override
    def on_validation_epoch_end(self) -> None:
        """Log how good classifiers are under `val/`."""
        self._log_scores("val")

    @override
    def on_test_epoch_start(self) -> None:
        """Forget the last one."""
        self._scores = []

    @override
    def on_test_epoch_end(self) -> None:
        """Log how good classifiers are under `test/`."""
        self._log_scores("test")

    def _log_scores(self, prefix: str) -> None:
        if not self._scores:
            return
        logits, labels = (self._of_all_ranks(torch.cat(parts).float()) for parts in zip(*self._scores, strict=True))
        self._scores = []
        agrees = labels > 0.5
        shares = agrees.float().mean(dim=0)
        losses = classifier_losses(logits, agrees, self.classifier_objective, shares).tolist()
        metrics: dict[str, float] = {"loss": sum(losses)}
        for index, layer in enumerate(self.source.exits.layers):
            of_exit = logits[:, index], agrees[:, index]
            metrics[f"loss_exit_{layer:02d}"] = losses[index]
            metrics[f"agreement_exit_{layer:02d}"] = float(shares[index])
            if 0.0 < shares[index] < 1.0:  # there is nothing to tell apart otherwise
                metrics[f"balanced_accuracy_exit_{layer:02d}"] = balanced_accuracy(*of_exit)
                metrics[f"auc_exit_{layer:02d}"] = area_under_curve(*of_exit)
        for name, value in metrics.items():
            # Equal on all ranks already; sync_dist only tells Lightning that this was thought of.
            self.log(f"{prefix}/{name}", value, prog_bar=name == "loss", sync_dist=True, batch_size=1)

    def _of_all_ranks(self, values: Tensor) -> Tensor:
        """Rows [N, X] of all ranks, one rank after the other."""
        ranks, rank = self.trainer.world_size, self.trainer.global_rank
        counts = torch.zeros(ranks, dtype=torch.long, device=self.device)
        counts[rank] = len(values)
        starts = self.sum_over_ranks(counts).cumsum(0).tolist()
        rows = values.new_zeros(starts[-1], values.shape[1])
        rows[starts[rank] - len(values) : starts[rank]] = values
        return self.sum_over_ranks(rows)

    # ---- checkpoints

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Write classifiers of plain states, and beside them what training goes on with."""
        super().on_save_checkpoint(checkpoint)
        if self._standard is None:
            return
        weights, trained = checkpoint["state_dict"], {}
        for index, layer in enumerate(self.source.exits.layers):
            names = [f"model.exits.{layer}.classifier.{part}" for part in ("weight", "bias")]
            trained |= {name: weights[name] for name in names}
            folded = self._standard.fold(index, *(weights[name] for name in names))
            weights.update(zip(names, folded, strict=True))
        checkpoint[_TRAINED] = {"weights": trained, **self._standard._asdict()}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take up what training goes on with."""
        super().on_load_checkpoint(checkpoint)
        if _TRAINED not in checkpoint:
            return
        found = checkpoint[_TRAINED]
        checkpoint["state_dict"].update(found["weights"])
        self._standard = Standard(found["centre"], found["spread"])
