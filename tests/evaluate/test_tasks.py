"""Tasks: from files to examples, and from answers to scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from offramp.common.errors import OfframpError
from offramp.evaluate.examples import Example, merged, sampled, sha256_of
from offramp.evaluate.tasks import TaskOptions, task_named


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_qa(tmp_path: Path) -> None:
    qas = [
        {"question": "Who?", "answers": [{"text": "Ada", "answer_start": 0}, {"text": "Ada"}, {"text": "Lovelace"}]},
        {"question": "Where?", "answers": []},
    ]
    path = tmp_path / "squad.json"
    path.write_text(json.dumps({"data": [{"paragraphs": [{"context": "Ada Lovelace wrote.", "qas": qas}]}]}))
    task = task_named("qa")
    who, where = task.load(TaskOptions(path))
    assert who == Example("Ada Lovelace wrote.\n\nQuestion: Who?\nAnswer:", ("Ada", "Lovelace"))
    assert where.references == ("",)
    assert task.score is not None
    assert task.score(["the Ada", "nowhere"], [who, where]) == {"exact_match": [1, 0], "f1": [1, 0]}
    assert task.score(["Ada who", ""], [who, where]) == {"exact_match": [0, 1], "f1": [pytest.approx(2 / 3), 1]}
    path.write_text('{"data": [{"paragraphs": 3}]}')
    with pytest.raises(OfframpError, match="not in SQuAD's format"):
        task.load(TaskOptions(path))


def test_gsm8k(tmp_path: Path) -> None:
    rows = [{"question": f"{number}?", "answer": f"so\n#### {number},000"} for number in range(4)]
    path = lines(tmp_path / "a.jsonl", *rows)
    task = task_named("gsm8k")
    examples = task.load(TaskOptions(path, shots=2))
    assert [example.prompt for example in examples] == [
        f"Question: 0?\nAnswer: so\n#### 0,000\n\nQuestion: 1?\nAnswer: so\n#### 1,000\n\nQuestion: {number}?\nAnswer:"
        for number in (2, 3)
    ]
    assert task.score is not None
    assert task.score(["#### 2000", "it is 3000.0"], examples) == {"exact_match": [1, 0], "last_number": [1, 1]}
    with pytest.raises(OfframpError, match="line 1, has an answer without a number"):
        task.load(TaskOptions(lines(tmp_path / "b.jsonl", {"question": "?", "answer": "four"})))


def test_multiple_choice(tmp_path: Path) -> None:
    row = {"question": "Which?", "choices": ["this", "that"], "answer": "that"}
    task = task_named("multiple-choice")
    wanted = Example("Question: Which?\nAnswer:", choices=(" this", " that"), answer=1)
    assert task.load(TaskOptions(lines(tmp_path / "a.jsonl", row, {**row, "answer": 1}))) == [wanted, wanted]
    for wrong in ({"answer": 2}, {"answer": "neither"}, {"answer": True}, {"choices": ["alone"]}, {"choices": "ab"}):
        with pytest.raises(OfframpError, match="line 1"):
            task.load(TaskOptions(lines(tmp_path / "b.jsonl", {**row, **wrong})))


def test_summarisation(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"text": "A {b}.", "by": "C", "short": ["one", "two"], "title": "three"})
    task = task_named("summarisation")
    (example,) = task.load(TaskOptions(path, prompt="{by}: {text}\nTL;DR:", reference="short"))
    assert example == Example("C: A {b}.\nTL;DR:", ("one", "two"))
    (example,) = task.load(TaskOptions(path, prompt="text", reference="title"))
    assert example == Example("A {b}.", ("three",))
    assert task.score is not None
    found = task.score(["three\nfour"], [example])
    assert set(found) == {"rouge1", "rouge2", "rougeL", "rougeLsum"}
    with pytest.raises(OfframpError, match="no 'references' in a row"):
        task.load(TaskOptions(path, prompt="text"))


def test_texts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Two\nlines.", encoding="utf-8")
    task = task_named("perplexity")
    assert task.load(TaskOptions(tmp_path / "a.txt")) == [Example("Two\nlines.")]
    path = lines(tmp_path / "b.jsonl", {"text": "a"}, {"text": "b"}, {"text": "c"})
    assert task.load(TaskOptions(path, limit=2)) == [Example("a"), Example("b")]


def test_docstrings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        "offramp.train.data.docstrings._default_roots", lambda: [Path(json.__file__).parents[1] / "email"]
    )
    examples = task_named("docstrings").load(TaskOptions())
    assert examples
    assert all(example.prompt.endswith("\nSummary:") and example.references[0] for example in examples)


def test_what_cannot_be_asked(tmp_path: Path) -> None:
    with pytest.raises(OfframpError, match="task 'chess' is unknown; choose one of summarisation"):
        task_named("chess")
    with pytest.raises(OfframpError, match="needs data"):
        task_named("qa").load(TaskOptions())
    with pytest.raises(OfframpError, match="brings its own data"):
        task_named("docstrings").load(TaskOptions(tmp_path))
    with pytest.raises(OfframpError, match="limit 0"):
        task_named("perplexity").load(TaskOptions(tmp_path / "x", limit=0))
    with pytest.raises(OfframpError, match="cannot be read as text"):
        task_named("perplexity").load(TaskOptions(tmp_path / "x"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(OfframpError, match="holds no example"):
        task_named("perplexity").load(TaskOptions(tmp_path / "empty.jsonl"))
    for text, complaint in (
        ("{", "line 1, is no JSON object"),
        ("[]", "is no JSON object"),
        ("{}", "has no text 'text'"),
    ):
        (tmp_path / "bad.jsonl").write_text(text)
        with pytest.raises(OfframpError, match=complaint):
            task_named("perplexity").load(TaskOptions(tmp_path / "bad.jsonl"))


def test_the_hash_tells_examples_apart() -> None:
    assert sha256_of([Example("a", ("b",))]) == sha256_of([Example("a", ("b",))])
    assert sha256_of([Example("a", ("b",))]) != sha256_of([Example("a", (), ("b",))])


def test_a_prompt_is_asked_once_with_all_its_references() -> None:
    rows = [Example("a", ("x",)), Example("b", ("y",)), Example("a", ("z", "x"))]
    assert merged(rows) == [Example("a", ("x", "z")), Example("b", ("y",))]


def test_examples_are_drawn_by_seed_or_taken_from_the_front() -> None:
    rows = [Example(str(number)) for number in range(20)]
    assert sampled(rows, 3, None) == rows[:3]
    assert sampled(rows, None, None) == sampled(rows, 30, 1) == rows
    drawn = sampled(rows, 6, 1)
    assert drawn == sampled(rows, 6, 1) != sampled(rows, 6, 2)
    assert drawn == sorted(drawn, key=rows.index)
    assert len(set(drawn)) == 6
