"""What the experiment is run on: each data set in one description, and its parts without a source in common."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from offramp.common.errors import OfframpError
from offramp.train.data.sources import SourceConfig, load_rows

Part = Literal["train", "validation", "calibration", "test"]
"""`train` and `validation` are for training; thresholds are chosen on `calibration`, and all figures are of `test`."""
PARTS: tuple[Part, ...] = get_args(Part)

Sources = dict[str, list[str]]
"""A text that the encoder reads -> all texts that a person wrote for it."""


@dataclass(frozen=True)
class Task:
    """A data set of sources and targets.

    Attributes:
        name: short, for files.
        title: what it is, in a few words.
        parts: where the rows of each part come from; their `prompt` and `completion` are names of columns. Without
            `validation` some sources of `train` are held out for it, and `calibration` takes half the sources of
            `test`.
        source_tokens: tokens of a source that are read; longer ones are cut.
        max_source_tokens: longer sources are left out, before any is cut; None: none is.
        target_tokens: N, most tokens that are generated.
        pretrained: size -> Hugging Face model that training starts from. Others start from random weights, with a
            tokenizer of their own.
        budget: what it takes otherwise than the sizes say, by the names of `Size`.
    """

    name: str
    title: str
    parts: Mapping[Part, SourceConfig]
    source_tokens: int
    target_tokens: int
    max_source_tokens: int | None = None
    pretrained: Mapping[str, str] = field(default_factory=dict)
    budget: Mapping[str, Any] = field(default_factory=dict)


class Parts(NamedTuple):
    """The sources of each part; none is in two of them."""

    train: Sources
    validation: Sources
    calibration: Sources
    test: Sources


def find_task(data: str | None, size: str) -> Task:
    """The task that `--data` names.

    Args:
        data: a directory with the E2E challenge's files, `cnn_dailymail`, or None: docstrings of installed packages.
        size: `tiny` reads few docstrings.

    Raises:
        OfframpError: there is no such directory, or the files are not in it.
    """
    if data is None:
        return docstrings(max_files=300 if size == "tiny" else 4000)
    if data == "cnn_dailymail":
        return cnn_dailymail()
    return e2e_nlg(Path(data))


def e2e_nlg(directory: Path) -> Task:
    """The E2E NLG challenge (Novikova et al., 2017): a restaurant's attributes -> a sentence about it.

    `devset.csv` is trained on, and `trainset.csv` too if it is there.
    """
    if not directory.is_dir():
        raise OfframpError(f"--data {directory} is no directory; give the one with devset.csv, or cnn_dailymail.")
    test, seen = "testset_w_refs.csv", [name for name in ("trainset.csv", "devset.csv") if (directory / name).is_file()]
    if not seen or not (directory / test).is_file():
        raise OfframpError(f"{directory} must hold devset.csv and {test} of the E2E NLG challenge, and does not.")
    read: Any = {"kind": "files", "prompt": "mr", "completion": "ref"}
    return Task(
        "e2e_nlg",
        "E2E NLG (attributes of a restaurant to a sentence)",
        {
            "train": SourceConfig(path=[str(directory / name) for name in seen], **read),
            "test": SourceConfig(path=str(directory / test), **read),
        },
        source_tokens=96,
        target_tokens=96,
    )


def docstrings(max_files: int) -> Task:
    """Docstrings of installed packages: the explanation -> its one-line summary. Packages are in one part only."""

    def read(split: str) -> SourceConfig:
        shares = {"validation_share": 0.1, "test_share": 0.2}
        options: Any = {"pairs": True, "split": split, "max_files": max_files, "max_details": 600, **shares}
        return SourceConfig("docstrings", options=options, prompt="details", completion="summary")

    return Task(
        "docstrings",
        "docstrings of installed packages (explanation to summary)",
        {"train": read("train"), "validation": read("validation"), "test": read("test")},
        source_tokens=192,
        target_tokens=64,
    )


def cnn_dailymail() -> Task:
    """The paper's own (Hermann et al., 2015): articles of less than 1,024 tokens, of which 512 are read."""

    def read(split: str) -> SourceConfig:
        columns: Any = {"prompt": "article", "completion": "highlights"}
        return SourceConfig("hub", "abisee/cnn_dailymail", config_name="3.0.0", split=split, **columns)

    return Task(
        "cnn_dailymail",
        "CNN/DailyMail (article to highlights)",
        {"train": read("train"), "calibration": read("validation"), "test": read("test")},
        source_tokens=512,
        target_tokens=128,
        max_source_tokens=1023,
        pretrained={"small": "google/t5-v1_1-small", "base": "google/t5-v1_1-base"},
        budget={
            "steps": 20_000,
            "rows": 64,
            "learning_rate": 5.0e-4,
            "validate_every": 1000,
            "classifier_states": 200_000,
            "classifier_steps": 2000,
            "training_pairs": None,
            "calibration_prompts": 500,
            "test_prompts": 2000,
        },
    )


def read_parts(task: Task, cache_directory: Path) -> Parts:
    """All parts of a task. A source that two parts have stays in the later one, so what is tested was never trained on.

    Raises:
        OfframpError: rows cannot be read, or a part is left without any.
    """
    found: dict[Part, Sources] = {name: _read(source, cache_directory) for name, source in task.parts.items()}
    if "validation" not in found:
        held = max(1, len(found["train"]) // 100, min(40, len(found["train"]) // 10))
        found["validation"], found["train"] = _split(found["train"], held)
    if "calibration" not in found:
        found["calibration"], found["test"] = _split(found["test"], len(found["test"]) // 2)
    taken: set[str] = set()
    for name in reversed(PARTS):
        found[name] = {source: targets for source, targets in found[name].items() if source not in taken}
        taken |= found[name].keys()
        if not found[name]:
            raise OfframpError(f"{task.title} leaves nothing for {name}; give more data.")
    return Parts(**found)


def _read(source: SourceConfig, cache_directory: Path) -> Sources:
    rows: Any = load_rows(source, cache_directory)
    grouped: Sources = {}
    for row in rows:
        prompt, completion = str(row[source.prompt]).strip(), str(row[source.completion]).strip()
        if prompt and completion:
            grouped.setdefault(prompt, []).append(completion)
    return grouped


def _split(sources: Sources, count: int) -> tuple[Sources, Sources]:
    """`count` sources, drawn with a fixed seed, and the rest."""
    names = sorted(sources)
    drawn = set(random.Random(0).sample(names, count))
    return {n: sources[n] for n in names if n in drawn}, {n: sources[n] for n in names if n not in drawn}


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Rows as JSON, one a line."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Inverse of `write_rows`."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
