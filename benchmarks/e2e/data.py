"""The public CSV files of E2E NLG -> JSON lines: prompts, completions, and every reference of an MR.

No MR is in two files: the devset is divided by MR into train and validation, the test set into calibration and test.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.texts.rows import write_rows

Texts = dict[str, list[str]]
"""MR -> its references."""


def read_csv(path: Path) -> Texts:
    """MRs in the file's order, with all references of each."""
    texts: Texts = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            texts.setdefault(row["mr"], []).append(" ".join(row["ref"].split()))
    return texts


def prompt_for(mr: str) -> str:
    """What the model is asked, in training as in serving."""
    return f"{mr}\nText:"


def divide(texts: Texts, shares: Mapping[str, int], rest: str, seed: int) -> dict[str, Texts]:
    """Some MRs for each of `shares` (name -> how many), drawn at random, and what is left under `rest`."""
    mrs = sorted(texts)
    random.Random(seed).shuffle(mrs)
    parts: dict[str, Texts] = {}
    for name, count in shares.items():
        parts[name] = {mr: texts[mr] for mr in mrs[:count]}
        mrs = mrs[count:]
    return {**parts, rest: {mr: texts[mr] for mr in mrs}}


def one_row_each(texts: Texts) -> list[dict[str, Any]]:
    """A row for every MR, with all references: to generate for and to compare with."""
    return [{"mr": mr, "prompt": prompt_for(mr), "references": references} for mr, references in texts.items()]


def training_rows(texts: Texts) -> list[dict[str, Any]]:
    """A row for every reference. The completion starts with its space."""
    return [
        {"prompt": prompt_for(mr), "completion": f" {reference}"}
        for mr, references in texts.items()
        for reference in references
    ]


def write_data(devset: Path, testset: Path, out: Path, counts: Mapping[str, int], seed: int = 0) -> None:
    """Write `train`, `validation`, `calibration` and `test`.

    Args:
        devset: CSV to train on.
        testset: CSV to calibrate and test on.
        out: folder.
        counts: MRs of `validation`, `calibration` and `test`.
        seed: of the draw.
    """
    learn = divide(read_csv(devset), {"validation": counts["validation"]}, "train", seed)
    judge = divide(read_csv(testset), {name: counts[name] for name in ("test", "calibration")}, "unused", seed)
    write_rows(out / "train.jsonl", training_rows(learn["train"]))
    write_rows(out / "validation.jsonl", training_rows({mr: refs[:2] for mr, refs in learn["validation"].items()}))
    write_rows(out / "train_mrs.jsonl", one_row_each(learn["train"]))
    write_rows(out / "validation_mrs.jsonl", one_row_each(learn["validation"]))
    for name in ("calibration", "test"):
        write_rows(out / f"{name}.jsonl", one_row_each(judge[name]))
