"""`ExitPrimingModule`: train exit heads on cached states of a frozen backbone, by divergence to the full model.

The backbone runs once over the training data; what the exits read, and the final state, are kept for every target
token. Then only heads are trained, at hundreds of steps per second, so minutes of joint training become seconds, and
the full model does not change by a bit. Joint training (`MultiExitModule`) may follow from the exported checkpoint.

The divergence is taken over a *shortlist*: the tokens that training targets contain. Serving measures confidence over
the same shortlist, so it goes into the exit policy of the exported checkpoint.

    trainer.fit(ExitPrimingModule(directory), PrimingDataModule(data))

Legend: N target tokens, X early exits, D model, V vocabulary or shortlist.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from offramp.common.errors import OfframpError
from offramp.common.exits.policy import ExitPolicy
from offramp.train.data.batch import IGNORED_LABEL, TokenBatch
from offramp.train.module import BACKBONE, MultiExitModule
from offramp.train.optim import OptimizerConfig

TRAINABLE_HEADS = ("norm", "adapter", "mlp")
"""Heads that have weights of their own and need one token at a time."""


class StateBatch(NamedTuple):
    """States of some target tokens.

    Attributes:
        exits: [N, X, D] after each early exit's layer.
        final: [N, D] as the unembedding reads it.
    """

    exits: Tensor
    final: Tensor


class StateLoader:
    """Cached states in a new order every epoch; a resumed run goes on with the batch after its last.

    Args:
        states: of all tokens of this rank.
        batch_size: N of a step.
        num_batches: of an epoch, the same on all ranks.
        seed: of the order.
    """

    def __init__(self, states: StateBatch, batch_size: int, num_batches: int, seed: int) -> None:
        self.states, self.batch_size, self.num_batches, self.seed = states, batch_size, num_batches, seed
        self._epoch = self._batch = 0  # of the batch that comes next

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[StateBatch]:
        if self._batch == self.num_batches:
            self._epoch, self._batch = self._epoch + 1, 0
        generator = torch.Generator().manual_seed(self.seed + self._epoch)
        order = torch.randperm(len(self.states.final), generator=generator)
        for batch in range(self._batch, self.num_batches):
            rows = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            self._batch = batch + 1
            yield StateBatch(self.states.exits[rows], self.states.final[rows])

    def state_dict(self) -> dict[str, int]:
        """The position, and what it was a position in."""
        return {"epoch": self._epoch, "batch": self._batch, **self._identity()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at a position.

        Raises:
            OfframpError: the states are others, or are cut into other batches.
        """
        for key, value in self._identity().items():
            if state.get(key) != value:
                raise OfframpError(
                    f"cannot resume priming: {key} was {state.get(key)} and is {value}; restore the data settings, or "
                    "start a new run from the exported heads."
                )
        self._epoch, self._batch = state["epoch"], state["batch"]

    def _identity(self) -> dict[str, int]:
        return {"states": len(self.states.final), "batch_size": self.batch_size, "seed": self.seed}


class ExitPrimingModule(MultiExitModule):
    """Trains exit heads `norm`, `adapter` or `mlp` in one process or under DDP; see the module for data and purpose.

    Validation is that of `MultiExitModule`, on tokens.

    Args:
        checkpoint: directory to start from.
        shortlist: `targets`, or `all` for the whole vocabulary, which is far slower.
        max_states: target tokens per rank that are cached; (X + 1) * D floats each.
        seed: of the order.
        optimizer: learning rates, weight decay and schedule.
    """

    def __init__(
        self,
        checkpoint: str,
        shortlist: Literal["targets", "all"] = "targets",
        max_states: int = 50_000,
        seed: int = 0,
        optimizer: OptimizerConfig | None = None,
    ) -> None:
        super().__init__(checkpoint, freeze=[BACKBONE], seed=seed, optimizer=optimizer or OptimizerConfig(lr=1e-3))
        self.shortlist_kind, self.max_states = shortlist, max_states
        self.shortlist: Tensor | None = None  # [V]
        self._unembedding: Tensor | None = None  # [V, D], tied exits

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

    @torch.no_grad()
    def cache_states(self, batches: Iterable[TokenBatch], batch_size: int) -> StateLoader:
        """Run the backbone over `batches` and keep what exits read, for up to `max_states` target tokens.

        Raises:
            OfframpError: there are no target tokens.
        """
        assert self.model is not None
        seen = torch.zeros(self.model.config.vocab_size, device=self.device)
        kept: list[StateBatch] = []
        count = 0
        for batch in batches:
            tokens = TokenBatch(*(tensor.to(self.device) for tensor in batch))
            mask = tokens.labels != IGNORED_LABEL
            seen[tokens.labels[mask]] = 1.0
            if count < self.max_states:  # further batches only lengthen the shortlist
                kept.append(self._states(tokens, mask))
                count += len(kept[-1].final)
        fewest = int(self._least_over_ranks(count))
        if fewest == 0:
            raise OfframpError("the training data hold no target tokens to prime exits on.")
        states = StateBatch(*(torch.cat(parts)[: self.max_states] for parts in zip(*kept, strict=True)))
        self._take_shortlist(seen)
        batch_size = min(batch_size, fewest, self.max_states)
        rank_zero_info(
            f"priming on {len(states.final)} cached states, shortlist of "
            f"{'all' if self.shortlist is None else len(self.shortlist)} tokens"
        )
        return StateLoader(states, batch_size, min(fewest, self.max_states) // batch_size, self.seed)

    def _states(self, tokens: TokenBatch, mask: Tensor) -> StateBatch:
        model = self.model
        assert model is not None
        with self.trainer.precision_plugin.forward_context():
            layout = model.layout(tokens.input_ids, tokens.segment_ids)
            h, depth, states = model.embed(tokens.input_ids), 0, []
            for layer in model.exit_layers:
                h, depth = model.run_layers(h, depth, layer, layout), layer
                states.append(h[mask])
            return StateBatch(torch.stack(states[:-1], dim=1), model.norm(states[-1]))

    def _take_shortlist(self, seen: Tensor) -> None:
        assert self.model is not None
        if self.shortlist_kind == "targets":
            seen[list(self.source.eos_token_ids)] = 1.0
            self.shortlist = self.sum_over_ranks(seen).nonzero()[:, 0]
            if len(self.shortlist) < 2:
                raise OfframpError("the training targets hold a single token; there is nothing to choose from.")
        weight = self.model.unembedding()
        self._unembedding = (weight if self.shortlist is None else weight[self.shortlist]).detach()

    def _least_over_ranks(self, value: int) -> float:
        counts = torch.zeros(self.trainer.world_size, device=self.device)
        counts[self.trainer.global_rank] = value
        return float(self.sum_over_ranks(counts).min())

    @override
    def training_step(self, batch: StateBatch, batch_idx: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The sum over exits of the divergence to the full model, in nats per token."""
        if not isinstance(batch, StateBatch):
            raise OfframpError("ExitPrimingModule trains on cached states; wrap the data in PrimingDataModule.")
        model = self.model
        assert model is not None
        assert self._unembedding is not None
        teacher = F.linear(batch.final, self._unembedding).float().log_softmax(dim=-1)
        losses, right = [], []
        for index, layer in enumerate(model.exit_config.layers):
            weight = self._unembedding
            if not model.exit_config.tied:
                weight = model.unembedding(layer)
                weight = weight if self.shortlist is None else weight[self.shortlist]
            student = F.linear(model.exit_state(batch.exits[:, index], layer), weight).float().log_softmax(dim=-1)
            losses.append(F.kl_div(student, teacher, reduction="batchmean", log_target=True))
            if self._logs_now:
                right.append((student.argmax(dim=-1) == teacher.argmax(dim=-1)).float().mean())
        if self._logs_now:
            self._log(torch.stack((torch.stack(losses).detach(), torch.stack(right))), len(batch.final))
        return torch.stack(losses).sum()

    @property
    def _logs_now(self) -> bool:
        # Steps are so short that logging every one of them would take longer.
        interval = int(getattr(self.trainer, "log_every_n_steps"))  # noqa: B009 - made known at run time
        return (self.global_step + 1) % interval == 0

    def _log(self, values: Tensor, tokens: int) -> None:
        divergences, agreements = (self.sum_over_ranks(values) / self.trainer.world_size).tolist()
        metrics = {"train/lr": self.trainer.optimizers[0].param_groups[0]["lr"]}
        for layer, divergence, agreement in zip(self.source.exits.layers, divergences, agreements, strict=True):
            metrics[f"train/loss_exit_{layer:02d}"] = divergence
            metrics[f"train/agreement_exit_{layer:02d}"] = agreement
        self.log("train/loss", sum(divergences), on_step=True, on_epoch=False, prog_bar=True, batch_size=tokens)
        self.log_dict(metrics, on_step=True, on_epoch=False, batch_size=tokens)

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Log the gradient norm before clipping."""
        if self._logs_now:
            super().on_before_optimizer_step(optimizer)


class PrimingDataModule(pl.LightningDataModule):
    """Feeds an `ExitPrimingModule`: trains on cached states of `data`, validates on its tokens.

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

    def describe(self) -> dict[str, Any] | None:
        """What `data` says of itself."""
        describe = getattr(self.data, "describe", None)
        return None if describe is None else describe()

    @override
    def train_dataloader(self) -> StateLoader:
        """States of the training data, made when Lightning asks for them."""
        module = self.trainer.lightning_module if self.trainer is not None else None
        if not isinstance(module, ExitPrimingModule):
            raise OfframpError(f"PrimingDataModule feeds an ExitPrimingModule, not {type(module).__name__}.")
        return module.cache_states(self.data.train_dataloader(), self.batch_size)

    @override
    def val_dataloader(self) -> Any:
        """Tokens."""
        return self.data.val_dataloader()

    @override
    def test_dataloader(self) -> Any:
        """Tokens."""
        return self.data.test_dataloader()
