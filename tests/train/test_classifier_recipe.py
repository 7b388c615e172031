"""The recipe for classifiers of a decoder-only model, for two steps on a few rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from helpers.tiny import tiny_checkpoint
from offramp.common.checkpoint import load_checkpoint
from offramp.common.exits.config import ExitConfig
from offramp.train.cli import run
from offramp.train.export import export_checkpoint

RECIPE = Path(__file__).parents[2] / "configs" / "train" / "classifiers.yaml"
SAVES = {
    "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
    "init_args": {"every_n_train_steps": 2},
}


def test_classifiers_are_added_and_the_rest_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    start = tiny_checkpoint(tmp_path / "start", ExitConfig((1, 2), "norm"))
    details = "It takes the number as it is and gives back a new one, larger than the first by what its name says. "
    functions = [
        f'def add_{n}(x):\n    """Add {n} to a whole number.\n\n    {details}It adds {n}.\n    """\n' for n in range(12)
    ]
    Path("src/sums").mkdir(parents=True)
    Path("src/sums/__init__.py").write_text("\n".join(functions))
    # One small package, and all of it in both splits.
    options = {"roots": ["src"], "validation_share": 0.0, "test_share": 0.0, "split": "train"}
    rows = {
        "sequence_length": 128,
        "batch_size": 2,
        "cache_directory": "cache",
        "train": {"options": options},
        "validation": {"options": options},
    }
    small = {
        "data": {"init_args": {"batch_size": 16, "data": {"init_args": rows}}},
        "trainer": {"max_steps": 2, "logger": False, "enable_progress_bar": False, "callbacks": [SAVES]},
    }
    Path("small.yaml").write_text(yaml.safe_dump(small))
    assert run("fit", ["-c", str(RECIPE), "-c", "small.yaml", f"--vars.checkpoint={start}"]) == 0
    (trained,) = Path("runs/small/checkpoints").glob("*.ckpt")
    before, after = (load_checkpoint(path).model for path in (start, export_checkpoint(trained, "out")))
    assert (after.exit_config.layers, after.exit_config.classifier) == ((1, 2), True)
    old, new = before.state_dict(), after.state_dict()
    assert {name for name in new if name not in old} == {
        f"exits.{layer}.classifier.{part}" for layer in (1, 2) for part in ("weight", "bias")
    }
    assert all(torch.equal(new[name], weight) for name, weight in old.items()), "the model stays as it is"
    assert new["exits.1.classifier.weight"].abs().sum() > 0, "nothing was learned"
