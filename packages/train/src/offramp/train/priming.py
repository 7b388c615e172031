"""`ExitPrimingModule`: train exit heads on cached states of a frozen backbone, by divergence to the full model.

Minutes of joint training become seconds, see `offramp.train.state_training`. Joint training (`MultiExitModule`) may
follow from the exported checkpoint.

The divergence is taken over a *shortlist*: the tokens that training targets contain. Serving measures confidence over
the same shortlist, so it goes into the exit policy of the exported checkpoint.

    trainer.fit(ExitPrimingModule(directory), PrimingDataModule(data))

Legend: N target tokens, X early exits, D model, V vocabulary or shortlist.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from offramp.common.errors import OfframpError
from offramp.common.exits.policy import ExitPolicy
from offramp.train.optim import OptimizerConfig
from offramp.train.state_cache import CachedStates, divergence
from offramp.train.state_training import CachedBatch, StateBatch, StateLoader, StateTrainingModule, Take

TRAINABLE_HEADS = ("norm", "adapter", "mlp")
"""Heads that have weights of their own and need one token at a time."""


class ExitPrimingModule(StateTrainingModule):
    """Trains exit heads `norm`, `adapter` or `mlp` in one process or under DDP; see the module for data and purpose.

    Validation is that of `MultiExitModule`, on tokens.

    Args:
        checkpoint: directory to start from.
        shortlist: `targets`, or `all` for the whole vocabulary, which is far slower.
        max_states: target tokens per rank that are cached; (X + 1) * D floats each.
        cache: folder for caches on disk; None keeps states in memory. On disk they are bf16, heads are trained in fp32,
            and the shortlist is made of the targets among the cached tokens.
        top: most probable tokens of the full model that are kept on disk, K.
        seed: of the order.
        optimizer: learning rates, weight decay and schedule.
    """

    kind_of_losses = "KL divergence from the full model"
    reads_all_targets = True  # they lengthen the shortlist

    def __init__(
        self,
        checkpoint: str,
        shortlist: Literal["targets", "all"] = "targets",
        max_states: int = 50_000,
        cache: str | None = None,
        top: int = 64,
        seed: int = 0,
        optimizer: OptimizerConfig | None = None,
    ) -> None:
        super().__init__(checkpoint, max_states, cache, top, seed, optimizer or OptimizerConfig(lr=1e-3))
        self.shortlist_kind: Literal["targets", "all"] = shortlist
        self.shortlist: Tensor | None = None  # [V]
        self._unembedding: Tensor | None = None  # [V, D], tied exits
        self._position: Tensor | None = None  # [vocabulary] in the shortlist, -1 outside

    @override
    def configure_model(self) -> None:
        """Load the weights and check that there is something to prime."""
        super().configure_model()
        exits = self.source.exits
        if not exits.layers or exits.head not in TRAINABLE_HEADS:
            raise OfframpError(
                f"{self.checkpoint} has exits at {list(exits.layers)} with head {exits.head!r}; priming trains heads "
                f"{', '.join(TRAINABLE_HEADS)}, add them with 'offramp import'."
            )

    @property
    @override
    def exported_policy(self) -> ExitPolicy | None:
        """The policy of the start, with the new shortlist."""
        policy = self.source.policy or ExitPolicy()
        if self.shortlist_kind == "all":
            return replace(policy, shortlist=None)
        return policy if self.shortlist is None else replace(policy, shortlist=tuple(self.shortlist.tolist()))

    @override
    def on_targets(self, seen: Tensor) -> None:
        """Make the shortlist."""
        assert self.model is not None
        if self.shortlist_kind == "targets":
            seen[list(self.source.eos_token_ids)] = 1.0
            self.shortlist = self.sum_over_ranks(seen).nonzero()[:, 0]
            if len(self.shortlist) < 2:
                raise OfframpError("the training targets hold a single token; there is nothing to choose from.")
        weight = self.model.unembedding()
        self._unembedding = (weight if self.shortlist is None else weight[self.shortlist]).detach()
        if self.shortlist is not None:
            self._position = torch.full_like(seen, -1, dtype=torch.long)
            self._position[self.shortlist] = torch.arange(len(self.shortlist), device=seen.device)

    @override
    def on_states(self, take: Callable[[Tensor], CachedBatch], count: int) -> Take:
        """Nothing is added to them."""
        rank_zero_info(
            f"priming on {count} cached states, shortlist of "
            f"{'all' if self.shortlist is None else len(self.shortlist)} tokens"
        )
        return take

    @override
    def training_step(self, batch: CachedBatch, batch_idx: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The sum over exits of the divergence to the full model, in nats per token."""
        if isinstance(batch, StateBatch):
            assert self._unembedding is not None
            teacher = F.linear(batch.final, self._unembedding).float().log_softmax(dim=-1)
            best = teacher.argmax(dim=-1)
            losses, right = self._losses_of(
                batch.exits,
                best,
                lambda logits: F.kl_div(logits.log_softmax(dim=-1), teacher, reduction="batchmean", log_target=True),
            )
        elif isinstance(batch, CachedStates):
            best = batch.tokens[:, 0].long()
            best = best if self._position is None else self._position[best]
            with torch.autocast(self.device.type, enabled=False):
                losses, right = self._losses_of(
                    batch.exits.float(), best, lambda logits: divergence(logits, batch, self._position)
                )
        else:
            raise OfframpError("ExitPrimingModule trains on cached states; wrap the data in PrimingDataModule.")
        if self.logs_now:
            self.log_exits(torch.stack((torch.stack(losses).detach(), torch.stack(right))), len(batch.exits))
        return torch.stack(losses).sum()

    def _losses_of(
        self, states: Tensor, best: Tensor, loss: Callable[[Tensor], Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Of each exit: the loss of its logits [N, V], and how often it says what is `best` [N], if that is logged.

        Args:
            states: [N, X, D].
            best: places in V, -1 outside.
            loss: of fp32 logits [N, V].
        """
        model = self.model
        assert model is not None
        assert self._unembedding is not None
        losses, right = [], []
        for index, layer in enumerate(model.exit_config.layers):
            weight = self._unembedding
            if not model.exit_config.tied:
                weight = model.unembedding(layer)
                weight = weight if self.shortlist is None else weight[self.shortlist]
            logits = F.linear(model.exit_state(states[:, index], layer), weight).float()
            losses.append(loss(logits))
            if self.logs_now:
                right.append((logits.argmax(dim=-1) == best).float().mean())
        return losses, right


class PrimingDataModule(pl.LightningDataModule):
    """Feeds a `StateTrainingModule`: trains on cached states of `data`, validates on its tokens.

    Args:
        data: batches of tokens.
        batch_size: target tokens per step and rank.
    """

    def __init__(self, data: pl.LightningDataModule, batch_size: int = 256) -> None:
        super().__init__()
        self.data, self.batch_size = data, batch_size

    @override
    def prepare_data(self) -> None:
        """As `data` does."""
        self.data.trainer = self.trainer
        self.data.prepare_data()

    @override
    def setup(self, stage: str) -> None:
        """As `data` does."""
        self.data.trainer = self.trainer
        self.data.setup(stage)

    @property
    def tokenizer(self) -> Any:
        """That of `data`, None if it has none."""
        return getattr(self.data, "tokenizer", None)

    def describe(self) -> dict[str, Any] | None:
        """What `data` says of itself."""
        describe = getattr(self.data, "describe", None)
        return None if describe is None else describe()

    @override
    def train_dataloader(self) -> StateLoader:
        """States of the training data, made when Lightning asks for them."""
        module = self.trainer.lightning_module if self.trainer is not None else None
        if not isinstance(module, StateTrainingModule):
            raise OfframpError(
                "PrimingDataModule feeds an ExitPrimingModule or a ConfidenceTrainingModule, not "
                f"{type(module).__name__}."
            )
        return module.cache_states(self.data.train_dataloader, self.batch_size)

    @override
    def val_dataloader(self) -> Any:
        """Tokens."""
        return self.data.val_dataloader()

    @override
    def test_dataloader(self) -> Any:
        """Tokens."""
        return self.data.test_dataloader()
