"""The benchmark of GPUs, on a tiny model without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import gpu
from offramp.common.checkpoint import load_checkpoint
from offramp.common.model.config import ModelConfig


@pytest.mark.parametrize("shape", gpu.SHAPES)
def test_shapes_are_models(shape: str) -> None:
    assert ModelConfig.from_hf(gpu.config(shape)).num_layers == gpu.SHAPES[shape][0]


def test_all_of_it_runs_where_there_is_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = ["--batch", "2", "--prompt-tokens", "6", "--new-tokens", "3", "--repeat", "1"]
    assert gpu.run(["--device", "cpu", "--shape", "tiny", *sizes]) == 0
    shown = capsys.readouterr().out
    for graphs in (False, True):
        assert f"full depth, cuda_graphs {graphs}, device cpu" in shown
        assert f"fill, all at 1, regroup, cuda_graphs {graphs}, device cpu" in shown
    assert (tmp_path / "build/bench/gpu-tiny/results.csv").is_file()
    assert load_checkpoint(tmp_path / "build/bench/random-tiny").config.num_layers == 3


def test_a_gpu_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu.run(["--shape", "tiny", "--batch", "1", "--new-tokens", "2", "--repeat", "1"]) != 0
    assert "device 'cuda' is asked for" in capsys.readouterr().out
