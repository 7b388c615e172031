"""A divided vocabulary gives the losses of a whole one, a divided stage is put together from its files, and a rank
that others wait for in vain is said.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from helpers.gradients import Case
from helpers.processes import run_processes
from helpers.tiny import tiny_model
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.train.linear_confidence import linear_max_probability
from offramp.train.linear_cross_entropy import Teacher, TokenLoss, linear_cross_entropy
from offramp.train.pipeline.stages import Stage, plan_stages
from offramp.train.pipeline.tensor_parallel import check_tensor_parallel, slices
from offramp.train.stage_files import find_stages, rank_suffix, read_stages, slice_metadata
from offramp.train.tensor_group import TensorGroup, share_of
from offramp.train.vocabulary import VocabularyShard

VOCABULARIES = (2, 301, 33_001)
ROWS, SIZE = 150, 16  # more rows than a chunk of two ranks has


def case(vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(vocab)
    x = torch.randn(ROWS, SIZE, generator=generator, dtype=dtype)
    weight = 3 * torch.randn(vocab, SIZE, generator=generator, dtype=dtype)
    teacher = torch.randn(ROWS, SIZE, generator=generator, dtype=dtype)
    return x, weight, torch.randint(0, vocab, (ROWS,), generator=generator), teacher


KIND = TokenLoss(temperature=1.5, smoothing=0.1, by_confidence=True)
Found = list[tuple[list[dict[str, Tensor]], str, str]]
NAMES = ("loss", "x", "predicted", "taught x", "certainty", "certain x")


def measured(
    x: Tensor, weight: Tensor, labels: Tensor, teacher: Tensor, shard: VocabularyShard | None = None
) -> dict[str, Tensor]:
    x, weight = x.requires_grad_(), weight.clone().requires_grad_()
    plain = linear_cross_entropy(x, weight, labels, shard=shard)
    lesson = Teacher(teacher.detach(), weight.detach(), temperature=2.0, scale=0.2)
    taught = linear_cross_entropy(x, weight, labels, KIND, lesson, 0.3, shard)
    certainty = linear_max_probability(x, weight, shard)
    grads = [torch.autograd.grad(loss, (x, weight)) for loss in (plain.loss, taught.loss, (certainty**2).sum())]
    return {
        "loss": torch.stack((*plain[:5], *taught[:5])).detach(), "predicted": plain.predicted,
        "x": grads[0][0], "weight": grads[0][1], "taught x": grads[1][0], "taught weight": grads[1][1],
        "certainty": certainty.detach(), "certain x": grads[2][0], "certain weight": grads[2][1],
    }  # fmt: skip


def two_ranks() -> tuple[list[dict[str, Tensor]], str, str]:
    """What each of two ranks finds; the second stops in the end, twice."""
    import deepspeed

    from offramp.train.pipeline import quiet_deepspeed  # noqa: F401

    deepspeed.init_distributed("gloo", verbose=False)
    return divided(), one_that_stops(), one_that_adds_no_tied_gradients()


def one_that_stops() -> str:
    """Rank 1 stops before the second micro-batch; returns what the other is told."""
    from offramp.train.pipeline.engine import deepspeed_config, make_engine
    from offramp.train.pipeline.exchange import Exchange
    from offramp.train.pipeline.stage_module import StageModule

    case = Case(tensor=2, micro_batches=3)
    model = case.model()
    module = StageModule(model, plan_stages(model.config, model.exit_config, 1), case.tensor)
    engine = make_engine(module, deepspeed_config(), torch.optim.SGD(module.parameters(), lr=0.0))
    engine.links.limit_to(timedelta(seconds=2))
    engine.objective = case.run_objective().evaluated
    forward = engine._forward

    def stop(micro_batch: int, exchange: Exchange) -> None:
        if micro_batch == 1 and dist.get_rank() == 1:
            threading.Event().wait(5)  # longer than the other has patience
            raise OfframpError("stopped")
        forward(micro_batch, exchange)

    engine._forward = stop
    try:
        engine.eval_batch(case.batch(0).split(case.micro_batches))
    except OfframpError as fault:
        return str(fault)
    return ""


def one_that_adds_no_tied_gradients() -> str:
    """Rank 1 stops before gradients of tied weights are added up; returns what the other is told."""
    from offramp.train.pipeline.engine import deepspeed_config, make_engine
    from offramp.train.pipeline.stage_module import StageModule

    case = Case()
    model = case.model()
    module = StageModule(model, plan_stages(model.config, model.exit_config, 2))
    engine = make_engine(module, deepspeed_config(), torch.optim.SGD(module.parameters(), lr=0.0))
    assert module.get_tied_weights_and_groups(), "or there is nothing to wait for"
    engine.links.limit_to(timedelta(seconds=2))
    engine.objective = case.run_objective().evaluated
    batch = case.batch(0)
    reduce = engine._reduce_shared_gradients

    def stop() -> None:
        if dist.get_rank() == 1:
            threading.Event().wait(5)
            raise OfframpError("stopped")
        reduce()

    engine._reduce_shared_gradients = stop
    try:
        engine.train_batch(batch.split(case.micro_batches), engine.objective.counts(batch))
    except OfframpError as fault:
        return str(fault)
    return ""


def divided() -> list[dict[str, Tensor]]:
    """In each rank: its answers for every vocabulary and type."""
    assert dist.group.WORLD is not None
    ranks = TensorGroup(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
    answers = []
    for vocab in VOCABULARIES:
        shard = VocabularyShard(ranks, *share_of(vocab, ranks.rank, ranks.size), vocab)
        for dtype in (torch.float64, torch.float32):
            x, weight, labels, teacher = case(vocab, dtype)
            answers.append(measured(x, weight[shard.start : shard.stop], labels, teacher, shard))
    return answers


@pytest.fixture(scope="module")
def found() -> Found:
    return run_processes(two_ranks, 2, timeout_s=300)


def test_a_rank_that_stops_is_said_by_those_that_share_its_stage(found: Found) -> None:
    (_, told, _), (_, stopped, _) = found
    assert stopped == "stopped"
    assert told.startswith(
        "stage 0 (rank 0) waited 0.0333333 minutes (timeout_minutes) for sums among the tensor ranks in micro-batch 2 "
        "and another rank of the stage did not answer; "
    )


def test_tied_weights_wait_no_longer_than_all_else(found: Found) -> None:
    (_, _, told), (_, _, stopped) = found
    assert stopped == "stopped"
    assert "waited 0.0333333 minutes (timeout_minutes) for sums of gradients over all processes" in told


def test_a_divided_vocabulary_is_the_whole_one(found: Found) -> None:
    answers = [answer for answer, *_ in found]
    cases = [(vocab, dtype) for vocab in VOCABULARIES for dtype in (torch.float64, torch.float32)]
    for index, (vocab, dtype) in enumerate(cases):
        expected = measured(*case(vocab, dtype))
        first, second = (answer[index] for answer in answers)
        close: dict[str, Any] = (
            {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-4}
        )
        for name in NAMES:
            assert torch.equal(first[name], second[name]), "ranks must not drift apart"
            torch.testing.assert_close(first[name], expected[name], **close)
        for name in ("weight", "taught weight", "certain weight"):
            torch.testing.assert_close(torch.cat((first[name], second[name])), expected[name], **close)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_number_is_written_once(ranks: int, tmp_path: Path) -> None:
    """With four ranks, two hold each of the two key/value heads; three divide nothing evenly."""
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3} if ranks == 3 else {}
    shape: dict[str, Any] = {"model_type": "qwen2", "vocab_size": 301, "intermediate_size": 65, "head_dim": 8, **heads}
    model = tiny_model(ExitConfig((1,), head="block", tied=False), **shape)
    stage = Stage(model, plan_stages(model.config, model.exit_config, 1), 0)
    expected = {name: tensor.clone() for name, tensor in stage.state_dict().items()}
    for rank in range(ranks):
        own = slices(stage, model.config, rank, ranks)
        tensors = {
            name: (own[name].of(tensor) if name in own else tensor).contiguous()
            for name, tensor in expected.items()
            if (own[name].owned if name in own else rank == 0)
        }
        save_file(tensors, tmp_path / f"stage_00{rank_suffix(rank)}.safetensors", metadata=slice_metadata(tensors, own))
    found, saved = read_stages(tmp_path), find_stages(tmp_path)
    assert found.keys() == saved.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    for others in {2, ranks - 1, heads.get("num_key_value_heads", 2)}:
        for rank in range(others):
            for name, own in slices(stage, model.config, rank, others).items():
                part = saved[name].read(own)
                assert torch.equal(part, own.of(expected[name]))
                assert part.untyped_storage().nbytes() == 4 * part.numel(), "nothing else stays in memory"
    (tmp_path / "stage_00_rank_01.safetensors").unlink()
    with pytest.raises(OfframpError, match=r"is incomplete: .* is there up to \d+ of \d+"):
        read_stages(tmp_path)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "possible"),
    [(9, 3, {1, 2, 3, 9}), (8, 2, {1, 2, 4, 8}), (4, 1, {1, 2, 4}), (6, 6, set(range(1, 7)))],
)
def test_how_heads_can_be_divided(heads: int, kv_heads: int, possible: set[int]) -> None:
    config = replace(tiny_model().config, num_heads=heads, num_kv_heads=kv_heads)
    for size in range(1, 12):
        if size in possible:
            check_tensor_parallel(config, size)
        else:
            with pytest.raises(OfframpError, match=f"tensor is {size}, but {heads} query heads"):
                check_tensor_parallel(config, size)
