"""What a process makes of a model at the start: its own part, number for number, and nothing else at any time."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from benchmarks.live_bytes import LiveBytes
from torch import Tensor

from helpers.fitting import Numbers
from helpers.processes import run_processes
from helpers.tiny import tiny_config, tiny_model
from offramp.common.checkpoint import Checkpoint, load_checkpoint, save_checkpoint, write_record
from offramp.common.exits.config import ExitConfig
from offramp.common.hf import SINGLE, write_weights
from offramp.train.module import MultiExitModule
from offramp.train.stage_files import Slice

LAYERS = 8


class Part(NamedTuple):
    """Of one process: what it keeps, of what that are slices, and the most bytes that it ever had."""

    kept: dict[str, Tensor]
    slices: dict[str, Slice]
    peak: int


class Counted(MultiExitModule):
    def configure_model(self) -> None:
        if self.stages is not None:
            return
        with LiveBytes() as live:
            super().configure_model()
        stages: Any = self.stages
        kept = {name: parameter.detach().clone() for name, parameter in stages.stage.named_parameters()}
        self.part = Part(kept, dict(stages.slices), live.peak)


def parts(cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[Part]:
    """In each process: its part for each strategy and module."""
    from offramp.train.pipeline import strategy

    warnings.filterwarnings("ignore")
    strategy.matrix_speed = lambda *_: 1e12  # measured with matrices that are none of the model's
    found = []
    for layout, settings in cases:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=4,
            strategy=strategy.DeepSpeedPipelineStrategy(**layout),
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = Counted(**settings)
        trainer.validate(module, datamodule=Numbers(), verbose=False)
        found.append(module.part)
    return found


def saved(path: Path, exits: ExitConfig, dtype: torch.dtype = torch.float32, **shape: Any) -> str:
    """A directory with weights in several files."""
    model = tiny_model(exits, num_hidden_layers=LAYERS, **shape).to(dtype)
    checkpoint = Checkpoint(model, tiny_config(num_hidden_layers=LAYERS, **shape))
    save_checkpoint(path, checkpoint)
    backbone = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("exits.")}
    (path / SINGLE).unlink()
    write_weights(path, backbone, max_shard_size="50KB")
    write_record(path, checkpoint)
    return str(path)


def test_each_process_makes_its_own_part_and_nothing_else(tmp_path: Path) -> None:
    tied = saved(tmp_path / "tied", ExitConfig((2, 5)), torch.bfloat16, tie_word_embeddings=True)
    own = saved(tmp_path / "own", ExitConfig((2, 4), "adapter", tied=False), model_type="qwen2", vocab_size=301)
    drawn = saved(tmp_path / "drawn", ExitConfig((3,), "block"), vocab_size=101)
    cases = [
        ({"pipe": 4}, {"checkpoint": tied}),
        ({"pipe": 2, "tensor": 2}, {"checkpoint": own}),
        ({"pipe": 2, "tensor": 2}, {"checkpoint": drawn, "from_scratch": True, "seed": 3}),
    ]
    wholes = [load_checkpoint(path, dtype=torch.float32).model for path in (tied, own, drawn)]
    wholes[2].reset_parameters(seed=3)
    answers = run_processes(parts, 4, cases, timeout_s=300)
    for case, whole in enumerate(wholes):
        expected = whole.state_dict()
        seen: set[str] = set()
        for kept, slices, peak in (answer[case] for answer in answers):
            for name, tensor in kept.items():
                part = slices[name].of(expected[name]) if name in slices else expected[name]
                assert torch.equal(tensor, part), name
                assert tensor.dtype == torch.float32
            seen |= kept.keys()
            # Where a slice of a matrix is drawn, there is the whole of that one.
            room = 4 * max(tensor.numel() for tensor in expected.values()) if case == 2 else 0
            assert peak <= 4 * sum(tensor.numel() for tensor in kept.values()) + room + 4096
            assert peak < 4 * sum(tensor.numel() for tensor in expected.values()) / 2, "or this shows nothing"
        assert seen == expected.keys()


def test_a_parameter_is_drawn_the_same_whatever_else_there_is() -> None:
    big = tiny_model(ExitConfig((1, 3), "mlp"), num_hidden_layers=6, tie_word_embeddings=True)
    small = tiny_model(ExitConfig((3,), "mlp"))
    for model in (big, small):
        model.reset_parameters(seed=5)
    shared = big.state_dict().keys() & small.state_dict().keys()
    assert {"embed_tokens.weight", "layers.3.mlp.up_proj.weight", "exits.3.mlp.down_proj.weight"} <= shared
    assert all(torch.equal(big.get_parameter(name), small.get_parameter(name)) for name in shared)
    first, other, next_layer = (
        big.get_parameter(f"layers.{name}.weight") for name in ("0.mlp.up_proj", "0.mlp.gate_proj", "1.mlp.up_proj")
    )
    assert not torch.equal(first, other)
    assert not torch.equal(first, next_layer)
    once = big.embed_tokens.weight.clone()
    assert once.std().item() == pytest.approx(0.02, rel=0.05)
    big.reset_parameters(seed=6)
    assert not torch.equal(big.embed_tokens.weight, once)
