"""The tasks: texts to learn from, prompts to write about, and prompts to be judged on.

Each writes five files of JSON lines: `train` and `validation` (prompt, completion) for the model's first training;
`ask_train` and `ask_validation` (prompt), about which it then writes itself; `test` (prompt, references), of which
neither has seen anything.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from benchmarks.e2e.data import prompt_for, read_csv
from benchmarks.e2e.data import write_data as write_e2e_data
from benchmarks.e2e.meaning import known_values, synthetic_mrs
from benchmarks.texts.rows import read_rows, write_rows

from offramp.train.data.docstrings import DocstringOptions, Split, load_docstrings

VALIDATION = 40
"""Prompts whose loss is logged."""

_SAME_PACKAGE = 30
"""Test docstrings of one package at most: some have hundreds, all in one style."""


def write_e2e(devset: Path, testset: Path, out: Path, prompts: int, test_rows: int) -> None:
    """E2E NLG: meaning representations to sentences. Synthetic ones are written about too; see `benchmarks.e2e`.

    Args:
        devset: CSV to train on.
        testset: CSV to test on.
        out: folder.
        prompts: of `ask_train`.
        test_rows: of `test`.
    """
    write_e2e_data(devset, testset, out, {"validation": VALIDATION, "calibration": 0, "test": test_rows})
    learn, validate = ([row["mr"] for row in read_rows(out / f"{name}_mrs.jsonl")] for name in ("train", "validation"))
    learn = learn[:prompts]
    avoid = [*learn, *validate, *read_csv(testset)]
    synthetic = synthetic_mrs(known_values(learn), prompts - len(learn), avoid, seed=1)
    _write_prompts(out / "ask_train.jsonl", map(prompt_for, [*learn, *synthetic]))
    _write_prompts(out / "ask_validation.jsonl", map(prompt_for, validate))


def write_docstrings(out: Path, cache: Path, prompts: int, test_rows: int) -> None:
    """Docstrings of the installed packages: details to the summary line. No package is in two splits.

    Args:
        out: folder.
        cache: where collected docstrings are kept.
        prompts: of `ask_train`, at most.
        test_rows: of `test`, at most.
    """

    def rows(split: Split) -> list[dict[str, str]]:
        options = DocstringOptions(
            split=split, pairs=True, max_files=4000, max_details=500, max_summary=120, test_share=0.1, seed=2
        )
        found = [
            {"package": row["package"], "prompt": f"{row['details']}\nSummary:", "summary": row["summary"]}
            for row in load_docstrings(options, cache)
        ]
        random.Random(0).shuffle(found)
        return found

    learn, validate = rows("train"), rows("validation")[:VALIDATION]
    for name, mine in (("train", learn), ("validation", validate)):
        write_rows(
            out / f"{name}.jsonl", ({"prompt": row["prompt"], "completion": f" {row['summary']}"} for row in mine)
        )
    _write_prompts(out / "ask_train.jsonl", (row["prompt"] for row in learn[:prompts]))
    _write_prompts(out / "ask_validation.jsonl", (row["prompt"] for row in validate))
    seen: Counter[str] = Counter()
    test: list[dict[str, object]] = []
    for row in rows("test"):
        seen[row["package"]] += 1
        if seen[row["package"]] <= _SAME_PACKAGE:
            test.append({"prompt": row["prompt"], "references": [row["summary"]]})
    write_rows(out / "test.jsonl", test[:test_rows])


def _write_prompts(path: Path, prompts: Iterable[str]) -> None:
    write_rows(path, ({"prompt": prompt} for prompt in prompts))
