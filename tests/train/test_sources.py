from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from offramp.common.errors import OfframpError
from offramp.train.data.docstrings import SPLITS, DocstringOptions, load_docstrings, split_docstring
from offramp.train.data.sources import SourceConfig, load_rows


@pytest.fixture(autouse=True)
def _private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


def texts(source: SourceConfig, tmp_path: Path) -> list[str]:
    return [row["text"] for row in load_rows(source, tmp_path)]  # pyright: ignore[reportCallIssue, reportArgumentType]


def test_every_local_format_gives_the_same_rows(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    want = ["one", "two, three", "four"]
    records = [{"text": text} for text in want]
    (tmp_path / "a.txt").write_text("\n".join(want) + "\n")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "a.json").write_text(json.dumps(records))
    (tmp_path / "a.csv").write_text('text\none\n"two, three"\nfour\n')
    pq.write_table(pa.table({"text": want}), tmp_path / "a.parquet")
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as stream:
        stream.write("".join(json.dumps(record) + "\n" for record in records))
    for name in ("a.txt", "a.jsonl", "a.json", "a.csv", "a.parquet", "b.jsonl.gz"):
        for streaming in (False, True):
            assert texts(SourceConfig(path=str(tmp_path / name), streaming=streaming), tmp_path) == want, name


def test_globs_are_read_in_order_and_once(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.txt").write_text(f"from {name}\n")
    source = SourceConfig(path=[str(tmp_path / "*.txt"), str(tmp_path / "a.txt")])
    assert texts(source, tmp_path) == ["from a", "from b"]


def test_slices_and_limit(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"{i}\n" for i in range(10)))
    path = str(tmp_path / "a.txt")
    assert texts(SourceConfig(path=path, split="train[:50%]"), tmp_path) == list("01234")
    assert texts(SourceConfig(path=path, limit=3), tmp_path) == list("012")
    assert texts(SourceConfig(path=path, limit=3, streaming=True), tmp_path) == list("012")
    assert len(texts(SourceConfig(path=path, limit=99), tmp_path)) == 10


def test_generator_rows_and_options(tmp_path: Path) -> None:
    source = SourceConfig(kind="generator", path="helpers.rows:counted", options={"count": 4, "start": 7})
    for streaming in (False, True):
        rows = list(load_rows(SourceConfig(**{**vars(source), "streaming": streaming}), tmp_path))
        assert [row["answer"] for row in rows] == [f"it is {n}" for n in (7, 8, 9, 10)]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"path": "nothing/*.txt"}, "no file matches 'nothing/*.txt'"),
        ({"path": "data.xyz"}, "cannot tell the format"),
        ({"path": "broken.jsonl"}, "cannot be read"),
        ({"path": "empty.jsonl"}, "has no rows"),
        ({"kind": "generator", "path": "helpers.rows"}, "'module:function'"),
        ({"kind": "generator", "path": "helpers.rows:nope"}, "'helpers.rows:nope' cannot be imported"),
        ({"kind": "docstrings", "options": {"splt": "train"}}, "unknown option 'splt'"),
    ],
)
def test_what_cannot_be_read_is_said_in_a_sentence(
    settings: dict[str, str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.xyz").write_text("?")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "broken.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    with pytest.raises(OfframpError, match=words.replace("*", r"\*")):
        load_rows(SourceConfig(**settings), tmp_path)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"path": "a", "text": "t", "prompt": "p", "completion": "c"}, "text and prompt"),
        ({"path": "a", "prompt": "p"}, "needs 'completion'"),
        ({"path": "a", "completion": "p"}, "needs 'prompt'"),
        ({"path": "a", "labels": "p"}, "input_ids"),
        ({"kind": "hub"}, "needs a 'path'"),
        ({"path": "a", "limit": 0}, "at least 1"),
    ],
)
def test_contradictions_are_refused_before_anything_is_read(settings: dict[str, str], words: str) -> None:
    with pytest.raises(OfframpError, match=words):
        SourceConfig(**settings)  # pyright: ignore[reportArgumentType]


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    root = tmp_path / "site"
    for number in range(40):
        folder = root / f"package{number}"
        folder.mkdir(parents=True)
        long = f"Explains what number {number} does at length. " * 4
        (folder / "__init__.py").write_text(f'"""Alone {number}."""\nraise SystemExit("imported")\n')
        (folder / "module.py").write_text(
            f'def f():\n    """Do the thing number {number}.\n\n    {long}\n    """\n\n\n'
            'class C:\n    """The same in every package.\n\n    ' + "Copied text. " * 10 + '\n    """\n'
        )
        (folder / "broken.py").write_text('"""Not Python""" (\n')
        (folder / "tests").mkdir()
        (folder / "tests" / "test_x.py").write_text('"""From a test."""\n')
    return root


def test_docstrings_of_packages_never_overlap_between_splits(packages: Path, tmp_path: Path) -> None:
    splits = {
        split: load_docstrings(
            DocstringOptions(split=split, roots=[str(packages)], validation_share=0.25, test_share=0.25), tmp_path
        )
        for split in SPLITS
    }
    names = {split: {row["package"] for row in rows} for split, rows in splits.items()}
    assert all(names.values())
    assert not names["train"] & names["validation"]
    assert not names["train"] & names["test"]
    assert not names["validation"] & names["test"]
    rows = [row for part in splits.values() for row in part]
    assert len({row["text"] for row in rows}) == len(rows)
    assert sum("The same in every package" in row["text"] for row in rows) == 1
    assert not any("From a test" in row["text"] for row in rows)


def test_docstring_pairs_are_a_summary_and_its_details(packages: Path, tmp_path: Path) -> None:
    rows = load_docstrings(DocstringOptions(pairs=True, roots=[str(packages)]), tmp_path)
    mine = [row for row in rows if row["name"].endswith(".module.f")]
    assert mine
    assert all(row["summary"].startswith("Do the thing number") for row in mine)
    assert all(row["details"].startswith("Explains what number") for row in mine)
    assert not any(row["text"].startswith("Alone") for row in rows)


def test_docstrings_are_limited_by_files_and_equal_on_every_run(packages: Path, tmp_path: Path) -> None:
    few = DocstringOptions(roots=[str(packages)], max_files=10)
    first = load_docstrings(few, tmp_path / "a")
    assert 0 < len({row["name"].split(".")[0] for row in first}) <= 10
    assert first == load_docstrings(few, tmp_path / "a") == load_docstrings(few, tmp_path / "b")


def test_docstring_time_limit_is_said(packages: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="max_seconds=0 after 0 of"):
        assert load_docstrings(DocstringOptions(roots=[str(packages)], max_seconds=0.0), tmp_path) == []


def test_docstring_split() -> None:
    assert split_docstring("Make\n  it.\n\nAnd more\nof it.\n\nEnd.") == ("Make it.", "And more of it. End.")
    assert split_docstring("Only a summary.") == ("", "")
    assert split_docstring(">>> 1 + 1\n2\n\nExplained.") == ("", "")
