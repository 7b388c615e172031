"""The recipes for encoder-decoder models, for two steps on a few rows."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch

from helpers.tiny import tiny_tokenizer
from helpers.tiny_t5 import load_t5, t5_directory
from offramp.common.exits.config import ExitConfig
from offramp.common.importing import NewExits, import_model
from offramp.train.cli import run
from offramp.train.export import export_checkpoint

RECIPES = Path(__file__).parents[2] / "configs" / "t5"
SHORT = [
    "--trainer.max_steps=2",
    "--trainer.val_check_interval=2",
    "--trainer.callbacks.0.init_args.every_n_train_steps=2",
]
QUIET = ["--trainer.logger=false", "--trainer.enable_progress_bar=false", "--data.cache_directory=cache"]


def test_e2e_trains_from_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_tokenizer(chat_template=False).save_pretrained("model")
    for file in (RECIPES / "models" / "small").iterdir():
        shutil.copy(file, "model")
    for name in ("trainset.csv", "devset.csv"):
        with open(name, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(
                [("mr", "ref"), *((f"name[{n}], area[riverside]", f"{n} it is.") for n in range(9))]
            )
    settings = ["--vars.model=model", "--vars.data=.", "--data.batch_size=1", *SHORT, *QUIET]
    assert run("fit", ["-c", str(RECIPES / "e2e.yaml"), *settings]) == 0
    (trained,) = Path("runs/e2e/checkpoints").glob("*.ckpt")
    model = load_t5(export_checkpoint(trained, "out")).model
    assert (model.exit_layers, model.output_scale) == ((1, 2, 3, 4, 5, 6, 7, 8), 192**-0.5)


def test_cnn_dailymail_tunes_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    v1_1 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    t5_directory(tmp_path / "hf", **v1_1)
    import_model("hf", Path("start"), exits=NewExits(ExitConfig((1, 2, 3), "final")))
    rows = [{"article": "word " * (3 + 200 * (n % 2)), "highlights": f"news {n}"} for n in range(8)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [f"--data.{split}.{key}" for split in ("train", "validation") for key in ("kind=files", "path=rows.jsonl")]
    other = [
        f"--data.{split}.{key}" for split in ("train", "validation") for key in ("config_name=null", "split=train")
    ]
    cpu = ["--trainer.accelerator=cpu", "--trainer.strategy=auto", "--data.batch_size=2", "--data.num_workers=0"]
    settings = ["--vars.checkpoint=start", *files, *other, *cpu, *SHORT, *QUIET]
    assert run("fit", ["-c", str(RECIPES / "cnn_dailymail.yaml"), *settings]) == 0
    (trained,) = Path("runs/cnn_dailymail/checkpoints").glob("*.ckpt")
    before, after = load_t5(Path("start")).model, load_t5(export_checkpoint(trained, "out")).model
    assert not torch.equal(before.encoder.norm.weight, after.encoder.norm.weight)
