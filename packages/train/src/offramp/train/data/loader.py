"""Batches in an order that seed and epoch decide, that ranks share out, and that a checkpoint can resume.

The order of rows never depends on the number of data-parallel ranks: step s of an epoch takes the next
`batch_size * num_replicas` rows, and rank r the r-th part of them. So a run continues exactly on another number of
ranks as long as that product stays the same, and the ranks of one pipeline, which have one data-parallel rank, see
equal rows.

These loaders are deliberately not `torch.utils.data.DataLoader`s, although they use one inside: Lightning would replace
a DataLoader's sampler, which must not happen. What Lightning needs is here: an iterator, a length, `state_dict` and
`load_state_dict` (mid-epoch resume), and a `batch_sampler` that leads to `set_epoch`.

Legend: T time (tokens in a row, of targets for an encoder-decoder model), M source tokens in a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from offramp.common.errors import OfframpError
from offramp.train.data.batch import AnyBatch
from offramp.train.data.packing import FirstFit, collate, collate_pairs, plan_rows
from offramp.train.data.tokenize import Example

EMPTY_ROW = -1
"""Stands for a row without examples in a list of row numbers."""


@dataclass(frozen=True)
class Share:
    """The part of every step that belongs to one data-parallel rank.

    Attributes:
        batch_size: rows per rank and optimizer step.
        num_replicas: data-parallel ranks.
        rank: this one's number among them.
    """

    batch_size: int
    num_replicas: int = 1
    rank: int = 0

    @property
    def step_size(self) -> int:
        """Rows of one step over all ranks."""
        return self.batch_size * self.num_replicas

    def of(self, step_rows: Sequence[Any]) -> Sequence[Any]:
        """This rank's part of the rows of a step."""
        return step_rows[self.rank * self.batch_size : (self.rank + 1) * self.batch_size]


class _BatchSampler(NamedTuple):
    sampler: BatchLoader
    batch_size: int


class Taken(NamedTuple):
    """A batch that was handed out.

    Attributes:
        epoch: from 0.
        batch: number within the epoch, from 0.
        samples: of all data-parallel ranks, in the order of their rows: numbers of examples, or of rows since the epoch
            began where the data are streamed.
    """

    epoch: int
    batch: int
    samples: list[int]


class BatchLoader(ABC):
    """What both loaders have in common: the position.

    Args:
        share: this rank's part.
        identity: plain values that say which rows in which order; a position means nothing in another order.
    """

    def __init__(self, share: Share, identity: dict[str, Any]) -> None:
        self.share = share
        self._identity = identity
        self._epoch = 0
        self._resume_at = 0
        self._handed_out = 0
        self._ended = False

    @property
    def batch_sampler(self) -> _BatchSampler:
        """Where Lightning looks for `set_epoch`, and its DeepSpeed strategy for the batch size."""
        return _BatchSampler(self, self.share.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next iteration."""
        if epoch != self._epoch:
            self._start(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position as plain values: epoch, batches of it that were taken, and what they were taken from."""
        epoch, batch = self._epoch, self._taken()
        if self._at_end(batch):
            epoch, batch = epoch + 1, 0
        return {"epoch": epoch, "batch": batch, "step_size": self.share.step_size, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues at a position.

        Raises:
            OfframpError: the position lies within an epoch over other rows, or in steps of another size.
        """
        now = {"step_size": self.share.step_size, **self._identity}
        changed = [
            f"{key} was {state.get(key)!r} and is {value!r}" for key, value in now.items() if state.get(key) != value
        ]
        if changed and state["batch"] > 0:
            raise OfframpError(
                f"cannot resume in the middle of epoch {state['epoch']}: {'; '.join(changed)}; restore the data "
                "settings (batch_size x data-parallel ranks must stay equal), or start a new run from exported weights"
            )
        self._start(int(state["epoch"]), int(state["batch"]))

    def last_taken(self) -> Taken:
        """The batch that was taken last."""
        batch = self._taken() - 1
        return Taken(self._epoch, batch, self._samples(self._epoch, batch))

    def __iter__(self) -> Iterator[AnyBatch]:
        # A generator on purpose: Lightning calls iter() before set_epoch(), and nothing may be decided until then.
        if self._handed_out > self._resume_at:
            # Iterated again without set_epoch in between (plain loops): the next epoch if this one ended, else again.
            self._start(self._epoch + 1 if self._at_end(self._handed_out) else self._epoch)
        for batch in self._batches(self._epoch, self._resume_at):
            self._handed_out += 1
            yield batch
        self._ended = True

    def _start(self, epoch: int, batch: int = 0) -> None:
        self._epoch, self._resume_at, self._handed_out, self._ended = epoch, batch, batch, False

    def _taken(self) -> int:
        return self._handed_out

    @abstractmethod
    def _at_end(self, batch: int) -> bool:
        """Whether the epoch has no more than `batch` batches."""

    @abstractmethod
    def _samples(self, epoch: int, batch: int) -> list[int]:
        """Samples of a batch, see `Taken`."""

    @abstractmethod
    def _batches(self, epoch: int, start: int) -> Iterator[AnyBatch]:
        """This rank's batches of an epoch, from batch `start`."""


class _Rows(Dataset[list[Example]]):
    def __init__(self, examples: Any, plan: list[list[int]]) -> None:
        self.examples, self.plan = examples, plan

    def __getitem__(self, row: int) -> list[Example]:
        if row == EMPTY_ROW:
            return []
        found = self.examples[self.plan[row]]
        columns = [found[name] for name in ("input_ids", "labels", "source_ids") if name in found]
        return [Example(*parts) for parts in zip(*columns, strict=True)]


def _collate_with(capacity: int, source_capacity: int | None, pad_id: int) -> Callable[[Any], AnyBatch]:
    if source_capacity is None:
        return partial(collate, capacity=capacity, pad_id=pad_id)
    return partial(collate_pairs, capacity=capacity, source_capacity=source_capacity, pad_id=pad_id)


class MapLoader(BatchLoader):
    """Batches of examples that lie prepared; an epoch has a known length.

    Args:
        examples: a `datasets.Dataset` with the columns `input_ids` and `labels`, and for pairs `source_ids`.
        lengths: tokens of each example; of pairs [N, 2], targets first.
        share: this rank's part.
        capacity: T, tokens in a row.
        pack: several examples in a row.
        pad_id: see `collate`.
        shuffle: rows in a new order every epoch, otherwise in that of the examples.
        drop_last: leave out the rows that fill no whole step (other ones every epoch). Otherwise they come in a last
            step that is filled up with empty rows, so that every row is seen exactly once and all ranks take equally
            many batches of equal shape.
        seed: of packing and order.
        num_workers: processes that prepare batches; 0 is this one.
        fingerprint: names the examples.
        source_capacity: M of pairs; None: the model is decoder-only.
    """

    def __init__(
        self,
        examples: Any,
        lengths: Sequence[int] | np.ndarray,
        share: Share,
        *,
        capacity: int,
        pack: bool,
        pad_id: int,
        shuffle: bool,
        drop_last: bool,
        seed: int,
        num_workers: int = 0,
        fingerprint: str = "",
        source_capacity: int | None = None,
    ) -> None:
        count = len(lengths)
        order = np.random.default_rng(seed).permutation(count) if shuffle else np.arange(count)
        self._rows = _Rows(examples, plan_rows(lengths, order, capacity, pack, source_capacity))
        self.num_rows = len(self._rows.plan)
        identity = {"rows": self.num_rows, "seed": seed, "shuffle": shuffle, "examples": fingerprint}
        super().__init__(share, identity)
        self._order: tuple[int, np.ndarray] | None = None  # of one epoch
        self._collate = _collate_with(capacity, source_capacity, pad_id)
        self._shuffle, self._drop_last, self._seed, self._num_workers = shuffle, drop_last, seed, num_workers
        if drop_last and self.num_rows < share.step_size:
            raise OfframpError(
                f"the training data fill {self.num_rows} rows, but one step takes {share.step_size} (batch_size "
                f"{share.batch_size} x {share.num_replicas} data-parallel ranks); lower data.batch_size, or give more "
                "data"
            )

    def __len__(self) -> int:
        """Batches of one epoch, the same on every rank."""
        return self.num_rows // self.share.step_size if self._drop_last else -(-self.num_rows // self.share.step_size)

    def row_numbers(self, epoch: int) -> list[list[int]]:
        """For every batch of an epoch, this rank's rows (`EMPTY_ROW` where there is none)."""
        return [list(map(int, self.share.of(step))) for step in self._steps(epoch)]

    def _steps(self, epoch: int) -> np.ndarray:
        """[batches, rows of a step] the rows of all ranks."""
        if self._order is None or self._order[0] != epoch:
            rows = np.arange(self.num_rows)
            if self._shuffle:
                rows = np.random.default_rng([self._seed, epoch]).permutation(rows)
            padded = np.full(len(self) * self.share.step_size, EMPTY_ROW)
            used = min(len(rows), len(padded))
            padded[:used] = rows[:used]
            self._order = epoch, padded.reshape(len(self), self.share.step_size)
        return self._order[1]

    def _samples(self, epoch: int, batch: int) -> list[int]:
        rows = [int(row) for row in self._steps(epoch)[batch] if row != EMPTY_ROW]
        return [int(example) for row in rows for example in self._rows.plan[row]]

    def _at_end(self, batch: int) -> bool:
        return batch >= len(self)

    def _batches(self, epoch: int, start: int) -> Iterator[AnyBatch]:
        yield from DataLoader(
            self._rows,
            batch_sampler=self.row_numbers(epoch)[start:],
            collate_fn=self._collate,
            num_workers=self._num_workers,
            pin_memory=torch.cuda.is_available(),
            # It draws a seed for its workers. From the global generator, that would be once more in a resumed run.
            generator=torch.Generator().manual_seed(self._seed),
        )


class _StreamedBatches(IterableDataset[AnyBatch]):
    def __init__(self, make: Callable[[], Iterator[AnyBatch]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[AnyBatch]:
        return self.make()


class StreamLoader(BatchLoader):
    """Batches of a stream, whose length nobody knows.

    Every rank reads and tokenises the whole stream and takes its rows. That costs tokenisation per rank, and buys that
    all ranks end after the same step (nobody waits for ever in a collective), that no row is lost or seen twice, and
    that the order does not depend on the number of ranks. A resumed run reads again, and drops, what it had seen.

    Args:
        stream: the examples of an epoch, in its order.
        share: this rank's part.
        capacity: T, tokens in a row.
        pack: several examples in a row.
        pad_id: see `collate`.
        drop_last: see `MapLoader`.
        seed: only named in the position; `stream` applies it.
        num_workers: with 1 or more, one process reads ahead.
        count_taken: the position counts calls of `mark_taken` instead of batches handed out. Lightning fetches one
            batch ahead when a loader has no length, so what was handed out is not what was trained on.
        name: of the source, for the position.
        source_capacity: see `MapLoader`.
    """

    def __init__(
        self,
        stream: Callable[[int], Iterable[Example]],
        share: Share,
        *,
        capacity: int,
        pack: bool,
        pad_id: int,
        drop_last: bool,
        seed: int = 0,
        num_workers: int = 0,
        count_taken: bool = False,
        name: str = "",
        source_capacity: int | None = None,
    ) -> None:
        super().__init__(share, {"seed": seed, "stream": name})
        self._stream, self._pack = stream, pack
        self._capacities = (capacity,) if source_capacity is None else (capacity, source_capacity)
        self._collate = _collate_with(capacity, source_capacity, pad_id)
        self._drop_last, self._num_workers, self._count_taken = drop_last, num_workers, count_taken
        self._marked = 0

    def mark_taken(self) -> None:
        """Says that training begins with the next batch that was handed out."""
        self._marked += 1

    def _start(self, epoch: int, batch: int = 0) -> None:
        super()._start(epoch, batch)
        self._marked = batch

    def _taken(self) -> int:
        return self._marked if self._count_taken else self._handed_out

    def _samples(self, epoch: int, batch: int) -> list[int]:
        return list(range(batch * self.share.step_size, (batch + 1) * self.share.step_size))

    def _at_end(self, batch: int) -> bool:
        return self._ended and batch >= self._handed_out

    def _batches(self, epoch: int, start: int) -> Iterator[AnyBatch]:
        make = partial(self._read, epoch, start)
        if self._num_workers == 0:
            yield from make()
        else:
            generator = torch.Generator()  # see `MapLoader`
            yield from DataLoader(_StreamedBatches(make), batch_size=None, num_workers=1, generator=generator)

    def _read(self, epoch: int, start: int) -> Iterator[AnyBatch]:
        step: list[list[Example]] = []
        number = 0
        for row in self._pack_stream(self._stream(epoch)):
            step.append(row)
            if len(step) == self.share.step_size:
                if number >= start:
                    yield self._collate(self.share.of(step))
                step, number = [], number + 1
        if step and not self._drop_last and number >= start:
            step += [[]] * (self.share.step_size - len(step))
            yield self._collate(self.share.of(step))

    def _pack_stream(self, examples: Iterable[Example]) -> Iterator[list[Example]]:
        packer: FirstFit[Example] = FirstFit(*self._capacities)
        for example in examples:
            lengths = (len(example.input_ids), len(example.source_ids))[: len(self._capacities)]
            closed = packer.add(example, *lengths) if self._pack else [example]
            if closed is not None:
                yield closed
        yield from packer.flush()
