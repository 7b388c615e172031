from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from helpers.tiny import tiny_tokenizer
from offramp.common.errors import OfframpError
from offramp.train.data.batch import AnyBatch, TokenBatch
from offramp.train.data.datamodule import TextDataModule
from offramp.train.data.loader import MapLoader, Share
from offramp.train.data.sources import SourceConfig


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save_pretrained(str(path))
    return str(path)


MakeData = Callable[..., TextDataModule]


@pytest.fixture
def make(tokenizer_path: str, tmp_path: Path) -> MakeData:
    def build(count: int = 23, streaming: bool = False, **overrides: Any) -> TextDataModule:
        train = SourceConfig(
            kind="generator", path="helpers.rows:counted", options={"count": count}, streaming=streaming
        )
        arguments: dict[str, Any] = {"sequence_length": 48, "batch_size": 2, "cache_directory": str(tmp_path / "cache")}
        return TextDataModule(tokenizer_path, **{"train": train, **arguments, **overrides})

    return build


def as_rank(data: TextDataModule, rank: int, num_replicas: int) -> TextDataModule:
    kwargs = {"num_replicas": num_replicas, "rank": rank}
    data.trainer = SimpleNamespace(distributed_sampler_kwargs=kwargs, training=False, lightning_module=None)  # pyright: ignore[reportAttributeAccessIssue]
    return data


def examples_in(batches: list[AnyBatch]) -> Counter[str]:
    """Texts of all segments with a label."""
    found: Counter[str] = Counter()
    for batch in batches:
        for ids, labels, segments in zip(*batch, strict=True):
            for segment in segments.unique():
                here = segments == segment
                if (labels[here] != -100).any():
                    found[str(tiny_tokenizer().decode(ids[here]))] += 1
    return found


def all_texts(count: int) -> set[str]:
    from helpers.rows import counted

    return {row["text"] for row in counted(count)}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("pack", [False, True])
def test_ranks_share_out_validation_rows_each_exactly_once(make: MakeData, streaming: bool, pack: bool) -> None:
    source = SourceConfig(kind="generator", path="helpers.rows:counted", options={"count": 23}, streaming=streaming)
    per_rank: list[list[AnyBatch]] = []
    for rank in range(3):
        data = as_rank(make(validation=source, pack=pack), rank, 3)
        data.setup("validate")
        per_rank.append(list(data.val_dataloader()))
    assert len({len(batches) for batches in per_rank}) == 1
    assert {batch.input_ids.shape for batches in per_rank for batch in batches} == {(2, 48)}
    found = sum((examples_in(batches) for batches in per_rank), Counter())
    assert found == Counter(dict.fromkeys(all_texts(23), 1))


@pytest.mark.parametrize("streaming", [False, True])
def test_train_epochs_differ_and_seeds_repeat(make: MakeData, streaming: bool) -> None:
    def epochs(seed: int) -> list[list[AnyBatch]]:
        data = make(streaming=streaming, seed=seed)
        data.setup("fit")
        loader = data.train_dataloader()
        return [list(loader), list(loader)]

    first, second = epochs(1), epochs(1)
    for left, right in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True))
    assert not torch.equal(torch.cat([b.input_ids for b in first[0]]), torch.cat([b.input_ids for b in first[1]]))
    assert not torch.equal(first[0][0].input_ids, epochs(2)[0][0].input_ids)


@given(
    rows=st.integers(1, 60),
    batch_size=st.integers(1, 4),
    ranks=st.integers(1, 4),
    epoch=st.integers(0, 3),
    drop_last=st.booleans(),
)
@settings(deadline=None)
def test_ranks_never_overlap_and_miss_nothing(
    rows: int, batch_size: int, ranks: int, epoch: int, drop_last: bool
) -> None:
    def loader(batch_size: int, ranks: int, rank: int) -> MapLoader:
        return MapLoader(
            None,
            [1] * rows,
            Share(batch_size, ranks, rank),
            capacity=1,
            pack=False,
            pad_id=0,
            shuffle=True,
            drop_last=drop_last,
            seed=5,
        )

    if drop_last and rows < batch_size * ranks:
        with pytest.raises(OfframpError, match=f"fill {rows} rows, but one step takes {batch_size * ranks}"):
            loader(batch_size, ranks, 0)
        return
    numbers = [loader(batch_size, ranks, rank).row_numbers(epoch) for rank in range(ranks)]
    assert {len(batches) for batches in numbers} == {len(loader(batch_size, ranks, 0))}
    flat = [row for batches in numbers for batch in batches for row in batch if row >= 0]
    assert len(set(flat)) == len(flat)
    assert len(flat) == (rows // (batch_size * ranks) * (batch_size * ranks) if drop_last else rows)
    # Steps hold the same rows on any number of ranks, as long as the step has the same size.
    alone = loader(batch_size * ranks, 1, 0).row_numbers(epoch)
    assert alone == [[*chain(*step)] for step in zip(*numbers, strict=True)]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_state_continues_at_the_next_batch(make: MakeData, streaming: bool, workers: int) -> None:
    def loader() -> Any:
        data = make(streaming=streaming, num_workers=workers)
        data.setup("fit")
        return data.train_dataloader()

    whole = loader()
    whole.set_epoch(1)
    batches = list(whole)
    broken = loader()
    broken.set_epoch(1)
    iterator = iter(broken)
    for _ in range(2):
        next(iterator)
    state = broken.state_dict()
    assert all(isinstance(value, str | int | bool) for value in state.values())
    del iterator
    resumed = loader()
    resumed.load_state_dict(state)
    rest = list(resumed)
    assert len(rest) == len(batches) - 2
    for want, got in zip(batches[2:], rest, strict=True):
        assert torch.equal(want.input_ids, got.input_ids)
    assert resumed.state_dict()["epoch"] == 2
    assert resumed.state_dict()["batch"] == 0


def test_resuming_over_other_data_is_refused_in_the_middle_of_an_epoch_only(make: MakeData) -> None:
    data = make()
    data.setup("fit")
    loader = data.train_dataloader()
    next(iter(loader))
    state = loader.state_dict()
    other = make(batch_size=3)
    other.setup("fit")
    with pytest.raises(OfframpError, match="step_size was 2 and is 3"):
        other.train_dataloader().load_state_dict(state)
    other.train_dataloader().load_state_dict({**state, "batch": 0})
    half = as_rank(make(batch_size=1), 1, 2)
    half.setup("fit")
    half.train_dataloader().load_state_dict(state)  # 1 x 2 ranks takes the same steps as 2 x 1


def test_held_out_share_is_disjoint_and_tokenised_after_the_split(make: MakeData) -> None:
    data = make(validation_share=0.25, batch_size=1)
    data.setup("fit")
    train, validation = examples_in(list(data.train_dataloader())), examples_in(list(data.val_dataloader()))
    assert not set(train) & set(validation)
    assert set(train) | set(validation) == all_texts(23)
    assert 5 <= len(validation) <= 6


def test_skipped_rows_are_counted_and_said(make: MakeData, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('q,a\nwhy,so\n"",no\nwhat,\n' + "long" * 40 + ",yes\n")
    source = SourceConfig(path=str(tmp_path / "a.csv"), prompt="q", completion="a")
    data = make(train=source, batch_size=1)
    with pytest.warns(UserWarning, match=r"skipped 3 of 4 rows \(2 blank, 1 with a prompt longer"):
        data.setup("fit")
    assert data.skipped["train"] == {"blank": 2, "prompt_too_long": 1}
    (batch,) = list(data.train_dataloader())
    assert int(batch.num_trained_tokens()) > 0


@pytest.mark.parametrize("streaming", [False, True])
def test_a_source_without_examples_is_an_error_that_says_why(make: MakeData, tmp_path: Path, streaming: bool) -> None:
    (tmp_path / "a.txt").write_text(" \n  \n")
    data = make(train=SourceConfig(path=str(tmp_path / "a.txt"), streaming=streaming))

    def read() -> None:
        data.setup("fit")
        list(data.train_dataloader())

    with pytest.raises(OfframpError, match="no row"):
        read()


def test_tokens_are_cached_by_content(make: MakeData, tmp_path: Path) -> None:
    for _ in range(2):
        make().setup("fit")
    files = [name for name in os.listdir(tmp_path / "cache") if name.startswith("tokens-")]
    assert len(files) == 1
    make(sequence_length=32).setup("fit")
    assert len([name for name in os.listdir(tmp_path / "cache") if name.startswith("tokens-")]) == 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"validation_share": 1.0}, r"in \[0, 1\)"),
        ({"validation_share": 0.1, "validation": SourceConfig(path="a")}, "keep one"),
        ({"validation_share": 0.1, "streaming": True}, "stream"),
    ],
)
def test_contradictory_settings(make: MakeData, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(OfframpError, match=words):
        make(**settings)


def test_nothing_to_validate_is_said(make: MakeData) -> None:
    with pytest.raises(OfframpError, match=r"nothing to validate: set data\.validation"):
        make().setup("validate")


class Recorder(pl.LightningModule):
    """Remembers the first tokens of every batch it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen: list[list[int]] = []

    def training_step(self, batch: AnyBatch) -> torch.Tensor:
        self.seen.append(batch.input_ids.flatten().tolist())
        return self.weight * batch.input_ids.float().mean()

    def validation_step(self, batch: AnyBatch) -> None:
        assert isinstance(batch, TokenBatch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("stop", range(1, 12))
def test_a_resumed_fit_sees_the_batches_of_an_uninterrupted_one(
    make: MakeData, tmp_path: Path, streaming: bool, stop: int
) -> None:
    def fit(steps: int, checkpoint: str | None, save: bool) -> Recorder:
        data = make(streaming=streaming, pack=False, batch_size=6, validation=SourceConfig(path=str(text)))
        module = Recorder()
        callbacks = [ModelCheckpoint(dirpath=tmp_path / "ck", every_n_train_steps=1, save_top_k=-1, filename="s{step}")]
        trainer = pl.Trainer(
            max_steps=steps,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=callbacks if save else [],  # pyright: ignore[reportArgumentType]
            enable_checkpointing=save,
            default_root_dir=tmp_path,
        )
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
        return module

    text = tmp_path / "validation.txt"
    text.write_text("to be validated\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = fit(11, None, False).seen  # 3 batches an epoch
        first = fit(stop, None, True).seen
        second = fit(11, str(tmp_path / "ck" / f"sstep={stop}.ckpt"), False).seen
    assert len(whole) == 11
    assert first == whole[:stop]
    assert second == whole[stop:]
