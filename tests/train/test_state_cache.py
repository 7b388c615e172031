"""Caches of states on disk: what is in them, that they outlive a kill, and that nobody takes a stale one."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch

from helpers.fitting import Memory, Numbers, make_batch
from helpers.tiny import tiny_checkpoint
from offramp.common.checkpoint import load_checkpoint
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.importing import NewExits, import_model
from offramp.train import state_cache
from offramp.train.data.batch import AnyBatch, TokenBatch
from offramp.train.export import export_checkpoint
from offramp.train.optim import OptimizerConfig
from offramp.train.priming import ExitPrimingModule, PrimingDataModule
from offramp.train.state_cache import CachedStates, StateCache, divergence, survey


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    exits = ExitConfig((1, 2), head="adapter")
    return tiny_checkpoint(tmp_path_factory.mktemp("start") / "model", exits, tie_word_embeddings=True)


def prime(checkpoint: Path, out: Path, max_steps: int = 40, **arguments: Any) -> dict[tuple[int, str], float]:
    memory = Memory()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=max_steps,
        logger=memory,
        log_every_n_steps=1,
        check_val_every_n_epoch=None,
        val_check_interval=max_steps,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    arguments = {"optimizer": OptimizerConfig(lr=5e-3), **arguments}
    trainer.fit(ExitPrimingModule(str(checkpoint), **arguments), PrimingDataModule(Numbers(), batch_size=64))
    trainer.save_checkpoint(out)
    return memory.metrics


def test_heads_learn_from_the_disk_what_they_learn_from_memory(checkpoint: Path, tmp_path: Path) -> None:
    """With every token kept, nothing but the rounding of states differs."""
    near = prime(checkpoint, tmp_path / "memory.ckpt", shortlist="all")
    far = prime(checkpoint, tmp_path / "disk.ckpt", shortlist="all", cache=str(tmp_path / "cache"), top=299)
    for layer in ("01", "02"):
        for step in (0, 39):
            name = f"train/loss_exit_{layer}"
            assert far[step, name] == pytest.approx(near[step, name], rel=0.02)
        assert far[39, f"train/loss_exit_{layer}"] < 0.8 * far[0, f"train/loss_exit_{layer}"]
        assert far[39, f"train/agreement_exit_{layer}"] == pytest.approx(
            near[39, f"train/agreement_exit_{layer}"], abs=0.05
        )
    assert (39, "val/loss_exit_02") in far


def test_a_few_tokens_and_a_shortlist_are_enough(checkpoint: Path, tmp_path: Path) -> None:
    metrics = prime(checkpoint, tmp_path / "disk.ckpt", cache=str(tmp_path / "cache"), top=8)
    assert metrics[39, "train/loss_exit_02"] < metrics[0, "train/loss_exit_02"]
    primed = load_checkpoint(export_checkpoint(tmp_path / "disk.ckpt", tmp_path / "primed"))
    assert primed.policy is not None
    assert primed.policy.shortlist == (1, *range(10, 60))
    assert (tmp_path / "primed/model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()


def test_the_next_run_finds_them_and_another_model_does_not(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    of = CachedStates.of

    def counted(*arguments: Any) -> CachedStates:
        asked.append(1)
        return of(*arguments)

    monkeypatch.setattr(CachedStates, "of", staticmethod(counted))
    cache = str(tmp_path / "cache")
    first = prime(checkpoint, tmp_path / "a.ckpt", 3, cache=cache)
    assert len(asked) == 6, "batches of 24 rows"
    assert prime(checkpoint, tmp_path / "b.ckpt", 3, cache=cache) == first
    assert len(asked) == 6, "nothing was computed again"
    prime(checkpoint, tmp_path / "c.ckpt", 3, cache=cache, max_states=100)
    assert len(asked) == 10, "as many batches as have a hundred target tokens"
    # Other heads read the same states.
    import_model(str(checkpoint), tmp_path / "heads", exits=NewExits(ExitConfig((1, 2), "mlp")), replace_exits=True)
    shutil.copy(checkpoint / "tokenizer.json", tmp_path / "heads")
    prime(tmp_path / "heads", tmp_path / "d.ckpt", 3, cache=cache)
    assert len(asked) == 10
    other = tiny_checkpoint(tmp_path / "other", ExitConfig((1, 2)), seed=1, tie_word_embeddings=True)
    prime(other, tmp_path / "e.ckpt", 3, cache=cache)
    assert len(asked) == 16
    assert len(list(Path(cache).iterdir())) == 3


class Killed(Exception):
    pass


class Made(NamedTuple):
    cache: StateCache
    asked: list[int]
    batches: list[TokenBatch]


def make(root: Path, kill_at: int | None = None, rows: int = 7) -> Made:
    """A cache of eight batches whose states say which token they are of."""
    batches = [make_batch([(10 * number, number % 3), (10 * number + 3, 0)], rows) for number in range(8)]
    found = survey(batches, 300, 10_000)
    cache, asked = StateCache(root, {"tokens": found.digest}, found.counts, 10_000, 60), []

    def states(batch: AnyBatch) -> CachedStates:
        number = next(i for i, other in enumerate(batches) if other is batch)
        if number == kill_at:
            raise Killed
        asked.append(number)
        label = batch.labels[batch.labels >= 0]
        return CachedStates(
            label[:, None, None].bfloat16(), label[:, None].int(), label[:, None].float(), label.float()
        )

    with contextlib.suppress(Killed):
        cache.fill(iter(batches), states)
    return Made(cache, asked, batches)


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_cache, "SHARD_BYTES", 60 * 30)  # three batches


@pytest.mark.usefixtures("small_shards")
def test_a_killed_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    assert make(tmp_path, kill_at=4).asked == [0, 1, 2, 3]
    made = make(tmp_path)
    assert made.asked == [3, 4, 5, 6, 7], "the first shard was there"
    assert made.cache.missing == []
    files = sorted(made.cache.directory.glob("states_*"))
    assert len(files) == 3
    assert not [file for file in made.cache.directory.iterdir() if file.name.startswith(".")]
    files[1].write_bytes(files[1].read_bytes()[:-5])  # a disk that lost the end of it
    assert make(tmp_path).asked == [3, 4, 5]


@pytest.mark.usefixtures("small_shards")
def test_rows_come_from_their_places(tmp_path: Path) -> None:
    made = make(tmp_path)
    made.cache.open()
    expected = torch.cat([batch.labels[batch.labels >= 0] for batch in made.batches])
    assert made.cache.count == len(expected)
    rows = torch.randperm(len(expected), generator=torch.Generator().manual_seed(0))[:40]
    taken = made.cache.take(rows)
    assert torch.equal(taken.log_rest, expected[rows.sort().values].float())
    assert torch.equal(taken.exits[:, 0, 0].float(), taken.log_rest)


def test_too_small_a_disk_is_refused_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(OfframpError, match=r"states of \d+ tokens need 0\.01 MB more in .* room for 0\.00 MB"):
        make(tmp_path)


def test_other_tokens_are_another_cache(tmp_path: Path) -> None:
    assert make(tmp_path).cache.directory != make(tmp_path, rows=6).cache.directory


def test_divergence_is_that_of_the_events_that_are_told_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    teacher = torch.randn(5, 30, generator=generator)
    states = CachedStates.of(torch.zeros(5, 1, 2), teacher, torch.eye(30), 4)
    p = teacher.softmax(-1)
    assert torch.equal(states.tokens.long(), p.topk(4).indices)
    torch.testing.assert_close(states.log_rest.exp(), 1 - p.topk(4).values.sum(-1))
    for listed in (None, [0, 3, 4, 7, 11, 12, 20, 29]):
        tokens = list(range(30)) if listed is None else listed
        logits = torch.randn(5, len(tokens), generator=generator, requires_grad=True)
        position = None
        if listed is not None:
            position = torch.full((30,), -1)
            position[listed] = torch.arange(len(listed))
        total = 0.0
        for row in range(5):
            q = logits[row].softmax(-1)
            inside = [token for token in states.tokens[row].tolist() if token in tokens]
            known_p, known_q = p[row, inside], q[[tokens.index(token) for token in inside]]
            all_p, all_q = (torch.cat((part, 1 - part.sum(0, keepdim=True))) for part in (known_p, known_q))
            total += float((all_p * (all_p.log() - all_q.log())).sum())
        loss = divergence(logits, states, position)
        assert float(loss.detach()) == pytest.approx(total / 5, rel=1e-4)
        loss.backward()
        assert logits.grad is not None
        assert torch.isfinite(logits.grad).all()
    with torch.no_grad():
        assert float(divergence(teacher, states, None)) == pytest.approx(0.0, abs=1e-6)
