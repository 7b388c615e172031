"""`ExitPrimingModule`: train exit heads on cached states of a frozen backbone, by divergence to the full model.

The backbone runs once over the training data; what the exits read, and the final state, are kept for every target
token. Then only heads are trained, at hundreds of steps per second, so minutes of joint training become seconds, and
the full model does not change by a bit. Joint training (`MultiExitModule`) may follow from the exported checkpoint.

States are kept in memory, or on disk (`cache`), where they are found again by the next run and outlive a kill; there
the full model's distribution is kept as its most probable tokens and a rest, see `offramp.train.state_cache`.

The divergence is taken over a *shortlist*: the tokens that training targets contain. Serving measures confidence over
the same shortlist, so it goes into the exit policy of the exported checkpoint.

    trainer.fit(ExitPrimingModule(directory), PrimingDataModule(data))

Legend: N target tokens, X early exits, D model, V vocabulary or shortlist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from offramp.common.checkpoint import EXITS_WEIGHTS
from offramp.common.errors import OfframpError
from offramp.common.exits.policy import ExitPolicy
from offramp.train.data.batch import IGNORED_LABEL, TokenBatch
from offramp.train.freezing import BACKBONE
from offramp.train.module import MultiExitModule
from offramp.train.optim import OptimizerConfig
from offramp.train.state_cache import CachedStates, StateCache, divergence, gigabytes, survey
from offramp.train.training_record import plain

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


CachedBatch = StateBatch | CachedStates
"""What a step takes, from memory or from disk."""


class StateLoader:
    """Cached states in a new order every epoch; a resumed run goes on with the batch after its last.

    Args:
        take: the states of some tokens, by number.
        count: tokens of this rank.
        batch_size: N of a step.
        num_batches: of an epoch, the same on all ranks.
        seed: of the order.
    """

    def __init__(
        self, take: Callable[[Tensor], CachedBatch], count: int, batch_size: int, num_batches: int, seed: int
    ) -> None:
        self.take, self.count = take, count
        self.batch_size, self.num_batches, self.seed = batch_size, num_batches, seed
        self._epoch = self._batch = 0  # of the batch that comes next

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[CachedBatch]:
        if self._batch == self.num_batches:
            self._epoch, self._batch = self._epoch + 1, 0
        generator = torch.Generator().manual_seed(self.seed + self._epoch)
        order = torch.randperm(self.count, generator=generator)
        for batch in range(self._batch, self.num_batches):
            self._batch = batch + 1
            yield self.take(order[batch * self.batch_size : (batch + 1) * self.batch_size])

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
        return {"states": self.count, "batch_size": self.batch_size, "seed": self.seed}


class ExitPrimingModule(MultiExitModule):
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
        super().__init__(checkpoint, freeze=[BACKBONE], seed=seed, optimizer=optimizer or OptimizerConfig(lr=1e-3))
        self.shortlist_kind, self.max_states = shortlist, max_states
        self.cache, self.top = None if cache is None else Path(cache).expanduser(), top
        if max_states < 1 or top < 1:
            raise OfframpError(f"max_states is {max_states} and top {top}; both must be at least 1.")
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

    @torch.no_grad()
    def cache_states(self, batches: Callable[[], Iterable[TokenBatch]], batch_size: int) -> StateLoader:
        """Run the backbone over `batches()` and keep what exits read, for up to `max_states` target tokens.

        Raises:
            OfframpError: there are no target tokens, or the disk has no room.
        """
        take, count = self._in_memory(batches()) if self.cache is None else self._on_disk(batches, self.cache)
        fewest = int(self._least_over_ranks(count))
        batch_size = min(batch_size, fewest)
        rank_zero_info(
            f"priming on {count} cached states, shortlist of "
            f"{'all' if self.shortlist is None else len(self.shortlist)} tokens"
        )
        return StateLoader(take, count, batch_size, fewest // batch_size, self.seed)

    def _on_disk(
        self, batches: Callable[[], Iterable[TokenBatch]], root: Path
    ) -> tuple[Callable[[Tensor], CachedBatch], int]:
        model = self.model
        assert model is not None
        layers, size = model.exit_config.layers, model.config.hidden_size
        found = survey(batches(), model.config.vocab_size, self.max_states)
        self._check_any(sum(found.counts))
        self._take_shortlist(found.seen.to(self.device))
        identity = {
            "weights": {name: value for name, value in self.source.sha256.items() if name != EXITS_WEIGHTS},
            "config": plain(self.source.hf_config),
            "tokens": found.digest,
            "exits": list(layers),
            "top": self.top,
            "precision": str(self.trainer.precision),
            "rank": [self.trainer.global_rank, self.trainer.world_size],
        }
        row_bytes = 2 * len(layers) * size + 8 * self.top + 4
        cache = StateCache(root, identity, found.counts, self.max_states, row_bytes)
        missing = len(cache.missing)
        rank_zero_info(
            f"states of {cache.count:,} target tokens, {gigabytes(cache.size)}, in {cache.directory}: "
            + ("they are there" if not missing else f"{missing} shards to be written")
        )

        def states(batch: TokenBatch) -> CachedStates:
            tokens = TokenBatch(*(tensor.to(self.device) for tensor in batch))
            kept = self._states(tokens, tokens.labels != IGNORED_LABEL)
            with self.trainer.precision_plugin.forward_context():
                return CachedStates.of(kept.exits, kept.final, model.unembedding(), self.top)

        cache.fill(batches(), states, self.trainer.num_devices)
        cache.open()
        return cache.take, cache.count

    def _in_memory(self, batches: Iterable[TokenBatch]) -> tuple[Callable[[Tensor], CachedBatch], int]:
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
        self._check_any(count)
        states = StateBatch(*(torch.cat(parts)[: self.max_states] for parts in zip(*kept, strict=True)))
        self._take_shortlist(seen)
        return lambda rows: StateBatch(states.exits[rows], states.final[rows]), len(states.final)

    def _check_any(self, count: int) -> None:
        if self._least_over_ranks(count) == 0:
            raise OfframpError("the training data hold no target tokens to prime exits on.")

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
        if self.shortlist is not None:
            self._position = torch.full_like(seen, -1, dtype=torch.long)
            self._position[self.shortlist] = torch.arange(len(self.shortlist), device=seen.device)

    def _least_over_ranks(self, value: int) -> float:
        counts = torch.zeros(self.trainer.world_size, device=self.device)
        counts[self.trainer.global_rank] = value
        return float(self.sum_over_ranks(counts).min())

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
        if self._logs_now:
            self._log(torch.stack((torch.stack(losses).detach(), torch.stack(right))), len(batch.exits))
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
            if self._logs_now:
                right.append((logits.argmax(dim=-1) == best).float().mean())
        return losses, right

    @property
    def _logs_now(self) -> bool:
        # Steps are so short that logging every one of them would take longer.
        interval = int(getattr(self.trainer, "log_every_n_steps"))  # noqa: B009 - made known at run time
        return (self.global_step + 1) % interval == 0

    def _log(self, values: Tensor, tokens: int) -> None:
        divergences, agreements = (self.sum_over_ranks(values) / self.trainer.world_size).tolist()
        metrics = {"train/lr": self.trainer.optimizers[0].param_groups[0]["lr"]}
        for layer, loss, agreement in zip(self.source.exits.layers, divergences, agreements, strict=True):
            metrics[f"train/loss_exit_{layer:02d}"] = loss
            metrics[f"train/agreement_exit_{layer:02d}"] = agreement
            self.losses_of_step[f"loss_exit_{layer:02d}"] = loss
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
        if not isinstance(module, ExitPrimingModule):
            raise OfframpError(f"PrimingDataModule feeds an ExitPrimingModule, not {type(module).__name__}.")
        return module.cache_states(self.data.train_dataloader, self.batch_size)

    @override
    def val_dataloader(self) -> Any:
        """Tokens."""
        return self.data.val_dataloader()

    @override
    def test_dataloader(self) -> Any:
        """Tokens."""
        return self.data.test_dataloader()
