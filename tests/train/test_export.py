"""`offramp export`: what it writes, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.fitting import fit
from helpers.tiny import tiny_checkpoint
from offramp.common.checkpoint import load_checkpoint
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.train.export import export_checkpoint, main
from offramp.train.stage_files import read_stages


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    exits = ExitConfig((1, 2), head="adapter")
    return tiny_checkpoint(tmp_path_factory.mktemp("start") / "model", exits, tie_word_embeddings=True)


def test_export_refuses_what_is_no_training_checkpoint(tmp_path: Path, checkpoint: Path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    for source, message in (
        (tmp_path / "other.ckpt", "not written by a run of Offramp"),
        (tmp_path / "none.ckpt", "does not exist"),
        (checkpoint / "config.json", "cannot be read.*something else, or cut short"),
        (checkpoint, "has no offramp.json"),
    ):
        with pytest.raises(OfframpError, match=message):
            export_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_stage_cut_short_is_named(tmp_path: Path) -> None:
    (tmp_path / "stage_00.safetensors").write_bytes(b"\x10")
    with pytest.raises(OfframpError, match=r"stage_00\.safetensors cannot be read.*cut short"):
        read_stages(tmp_path)


def test_export_command(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(str(checkpoint), str(tmp_path / "x.ckpt"), max_steps=1)
    assert main([str(tmp_path / "x.ckpt"), str(tmp_path / "out"), "--dtype", "bf16"]) == 0
    assert str(tmp_path / "out") in capsys.readouterr().out
    assert load_checkpoint(tmp_path / "out").model.norm.weight.dtype == torch.bfloat16
    with pytest.raises(OfframpError, match="already exists"):
        main([str(tmp_path / "x.ckpt"), str(tmp_path / "out")])
    assert main([str(tmp_path / "x.ckpt"), str(tmp_path / "out"), "--overwrite"]) == 0
