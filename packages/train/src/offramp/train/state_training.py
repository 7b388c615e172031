"""`StateTrainingModule`: parts of exits are trained on cached states of a frozen backbone.

The backbone runs once over the training data; what the exits read, and the final state, are kept for every target
token. Then parts of exits are trained alone, at hundreds of steps per second, and the full model does not change by a
bit. What is trained, and for what, is said by `offramp.train.priming` (heads) and `offramp.train.confidence_training`
(classifiers).

States are kept in memory, or on disk (`cache`), where they are found again by the next run and outlive a kill; there
the full model's distribution is kept as its most probable tokens and a rest, see `offramp.train.state_cache`.

Legend: N target tokens, X early exits, D model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from offramp.common.checkpoint import EXITS_WEIGHTS
from offramp.common.errors import OfframpError
from offramp.train.data.batch import IGNORED_LABEL, AnyBatch
from offramp.train.freezing import BACKBONE
from offramp.train.losses import MicroBatch
from offramp.train.model_input import enter
from offramp.train.module import MultiExitModule
from offramp.train.optim import OptimizerConfig
from offramp.train.state_cache import CachedStates, StateCache, gigabytes, survey
from offramp.train.training_record import plain


class StateBatch(NamedTuple):
    """States of some target tokens.

    Attributes:
        exits: [N, X, D] after each early exit's layer.
        final: [N, D] as the unembedding reads it.
    """

    exits: Tensor
    final: Tensor


CachedBatch = StateBatch | CachedStates
"""States from memory or from disk."""

Take = Callable[[Tensor], Any]
"""What a step takes, by the numbers [N] of its tokens."""


class StateLoader:
    """Cached states in a new order every epoch; a resumed run goes on with the batch after its last.

    Args:
        take: the states of some tokens, by number.
        count: tokens of this rank.
        batch_size: N of a step.
        num_batches: of an epoch, the same on all ranks.
        seed: of the order.
    """

    def __init__(self, take: Take, count: int, batch_size: int, num_batches: int, seed: int) -> None:
        self.take, self.count = take, count
        self.batch_size, self.num_batches, self.seed = batch_size, num_batches, seed
        self._epoch = self._batch = 0  # of the batch that comes next

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Any]:
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
                    f"cannot resume on these states: {key} was {state.get(key)} and is {value}; restore the data "
                    "settings, or start a new run from what was exported."
                )
        self._epoch, self._batch = state["epoch"], state["batch"]

    def _identity(self) -> dict[str, int]:
        return {"states": self.count, "batch_size": self.batch_size, "seed": self.seed}


class StateTrainingModule(MultiExitModule):
    """What all training on cached states has in common: making the states, and reports. In one process or under DDP.

    Args:
        checkpoint: directory to start from.
        max_states: target tokens per rank that are cached; (X + 1) * D floats each.
        cache: folder for caches on disk; None keeps states in memory. On disk they are bf16.
        top: most probable tokens of the full model that are kept on disk, K.
        seed: of the order.
        optimizer: learning rates, weight decay and schedule.
    """

    reads_all_targets: ClassVar[bool] = False
    """Whether training data are read to their end, for their targets, when there are states enough."""

    def __init__(
        self,
        checkpoint: str,
        max_states: int,
        cache: str | None,
        top: int,
        seed: int,
        optimizer: OptimizerConfig,
    ) -> None:
        super().__init__(checkpoint, freeze=[BACKBONE], seed=seed, optimizer=optimizer)
        self.max_states = max_states
        self.cache, self.top = None if cache is None else Path(cache).expanduser(), top
        if max_states < 1 or top < 1:
            raise OfframpError(f"max_states is {max_states} and top {top}; both must be at least 1.")

    def on_targets(self, seen: Tensor) -> None:
        """Called before training, with [V] 1 for tokens that are targets of this rank."""

    def on_states(self, take: Callable[[Tensor], CachedBatch], count: int) -> Take:
        """Called once states are there; what it returns gives a step what it trains on.

        Args:
            take: states of tokens by their numbers; those from disk are in the order of the numbers.
            count: tokens of this rank.
        """
        return take

    @torch.no_grad()
    def cache_states(self, batches: Callable[[], Iterable[AnyBatch]], batch_size: int) -> StateLoader:
        """Run the backbone over `batches()` and keep what exits read, for up to `max_states` target tokens.

        Raises:
            OfframpError: there are no target tokens, or the disk has no room.
        """
        take, count = self._in_memory(batches()) if self.cache is None else self._on_disk(batches, self.cache)
        fewest = int(self._least_over_ranks(count))
        batch_size = min(batch_size, fewest)
        return StateLoader(self.on_states(take, count), count, batch_size, fewest // batch_size, self.seed)

    def _on_disk(
        self, batches: Callable[[], Iterable[AnyBatch]], root: Path
    ) -> tuple[Callable[[Tensor], CachedBatch], int]:
        model = self.model
        assert model is not None
        layers, size = model.exit_config.layers, model.config.hidden_size
        found = survey(batches(), model.config.vocab_size, self.max_states)
        self._check_any(sum(found.counts))
        self.on_targets(found.seen.to(self.device))
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

        def states(batch: AnyBatch) -> CachedStates:
            tokens = type(batch)(*(tensor.to(self.device) for tensor in batch))
            kept = self.states_of(tokens, tokens.labels != IGNORED_LABEL)
            with self.trainer.precision_plugin.forward_context():
                return CachedStates.of(kept.exits, kept.final, model.unembedding(), self.top)

        cache.fill(batches(), states, self.trainer.num_devices)
        cache.open()
        return cache.take, cache.count

    def _in_memory(self, batches: Iterable[AnyBatch]) -> tuple[Callable[[Tensor], CachedBatch], int]:
        assert self.model is not None
        seen = torch.zeros(self.model.config.vocab_size, device=self.device)
        kept: list[StateBatch] = []
        count = 0
        for batch in batches:
            tokens = type(batch)(*(tensor.to(self.device) for tensor in batch))
            mask = tokens.labels != IGNORED_LABEL
            seen[tokens.labels[mask]] = 1.0
            if count < self.max_states:
                kept.append(self.states_of(tokens, mask))
                count += len(kept[-1].final)
            elif not self.reads_all_targets:
                break
        self._check_any(count)
        states = StateBatch(*(torch.cat(parts)[: self.max_states] for parts in zip(*kept, strict=True)))
        self.on_targets(seen)
        return lambda rows: StateBatch(states.exits[rows], states.final[rows]), len(states.final)

    def _check_any(self, count: int) -> None:
        if self._least_over_ranks(count) == 0:
            raise OfframpError("the training data hold no target tokens, so there are no states to train on.")

    def states_of(self, tokens: AnyBatch, mask: Tensor) -> StateBatch:
        """States of the N tokens [B, T] that the mask selects."""
        model = self.model
        assert model is not None
        with self.trainer.precision_plugin.forward_context():
            h, layout = enter(model, MicroBatch(tokens))
            depth, states = 0, []
            for layer in model.exit_layers:
                h, depth = model.run_layers(h, depth, layer, cast("Any", layout)), layer
                states.append(h[mask])
            final = model.exit_state(states[-1], model.config.num_layers)
            return StateBatch(torch.stack(states[:-1], dim=1), final)

    def _least_over_ranks(self, value: int) -> float:
        counts = torch.zeros(self.trainer.world_size, device=self.device)
        counts[self.trainer.global_rank] = value
        return float(self.sum_over_ranks(counts).min())

    @property
    def logs_now(self) -> bool:
        """Whether this step is one of those that are logged."""
        # Steps are so short that logging every one of them would take longer.
        interval = int(getattr(self.trainer, "log_every_n_steps"))  # noqa: B009 - made known at run time
        return (self.global_step + 1) % interval == 0

    def log_exits(self, values: Tensor, tokens: int) -> None:
        """Log a step.

        Args:
            values: [2, X] the loss of each exit, and how often it agrees with the final one.
            tokens: N.
        """
        losses, agreements = (self.sum_over_ranks(values) / self.trainer.world_size).tolist()
        metrics = {"train/lr": self.trainer.optimizers[0].param_groups[0]["lr"]}
        for layer, loss, agreement in zip(self.source.exits.layers, losses, agreements, strict=True):
            metrics[f"train/loss_exit_{layer:02d}"] = loss
            metrics[f"train/agreement_exit_{layer:02d}"] = agreement
            self.losses_of_step[f"loss_exit_{layer:02d}"] = loss
        self.log("train/loss", sum(losses), on_step=True, on_epoch=False, prog_bar=True, batch_size=tokens)
        self.log_dict(metrics, on_step=True, on_epoch=False, batch_size=tokens)

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Log the gradient norm before clipping."""
        if self.logs_now:
            super().on_before_optimizer_step(optimizer)
