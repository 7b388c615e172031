"""The E2E NLG benchmark on a tiny model: data, distillation, calibration and tables. Training has its own tests."""

from __future__ import annotations

import csv
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from benchmarks.e2e import calibrate as calibration
from benchmarks.e2e.data import prompt_for, write_data
from benchmarks.e2e.evaluate import draw_curve, evaluate
from benchmarks.e2e.meaning import known_values, parse, render, synthetic_mrs
from benchmarks.texts.distil import own_texts
from benchmarks.texts.outcome import outcome
from benchmarks.texts.rows import read_rows, write_table

from helpers.tiny import tiny_checkpoint
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy
from offramp.serve.engine import Engine
from offramp.serve.request.exit_options import ExitOptions

MR = "name[The Eagle], eatType[coffee shop], customer rating[3 out of 5], area[riverside]"


def write_csv(path: Path, mrs: int) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("mr", "ref"))
        for number in range(mrs):
            rows.writerows((f"name[{path.stem} {number}], area[riverside]", f"text {i}\n of it") for i in range(3))
    return path


def test_meanings_are_read_and_written() -> None:
    assert parse(MR)["customer rating"] == "3 out of 5"
    assert render(parse(MR)) == MR


def test_synthetic_meanings_are_new_different_and_repeatable() -> None:
    values = known_values([f"{MR}, priceRange[cheap], familyFriendly[yes], near[The Mill]", MR])
    first = list(islice(synthetic_mrs(values, 300, [], seed=1), 300))
    again = list(synthetic_mrs(values, 200, first[:100], seed=1))
    assert len({frozenset(parse(mr).items()) for mr in first}) == 300
    assert not set(again) & set(first[:100])
    assert again[:100] == first[100:200]
    assert {len(parse(mr)) for mr in first} == {3, 4, 5, 6, 7, 8}
    assert all("name" in parse(mr) for mr in first)


def test_no_meaning_is_in_two_files(tmp_path: Path) -> None:
    dev, judge = write_csv(tmp_path / "dev.csv", 9), write_csv(tmp_path / "judge.csv", 9)
    write_data(dev, judge, tmp_path, {"validation": 2, "calibration": 3, "test": 4})
    rows = {path.stem: read_rows(path) for path in tmp_path.glob("*.jsonl")}
    assert {name: len(found) for name, found in rows.items()} == {
        "train": 21,
        "train_mrs": 7,
        "validation": 4,
        "validation_mrs": 2,
        "calibration": 3,
        "test": 4,
    }
    prompts = [{row["prompt"] for row in rows[name]} for name in ("train", "validation", "calibration", "test")]
    assert len(set.union(*prompts)) == sum(map(len, prompts))
    assert rows["train"][0]["completion"] == " text 0 of it"
    assert rows["test"][0]["references"] == ["text 0 of it", "text 1 of it", "text 2 of it"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = tmp_path_factory.mktemp("tiny") / "tiny"
    return Engine.from_checkpoint(tiny_checkpoint(path, exits=ExitConfig((1, 3), "norm")))


def judged_by_full_depth(engine: Engine) -> list[dict[str, Any]]:
    """Rows whose reference is what the full model says, so that quality is how much of that is kept."""
    rows = [{"prompt": prompt, "references": ["x"]} for prompt in ("one", "two", "a third prompt")]
    full = outcome("full", engine, rows, ExitOptions("full"), 12)
    return [{**row, "references": [one.text]} for row, one in zip(rows, full.completions, strict=True)]


def test_points_keep_their_promise_on_the_calibration_texts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = judged_by_full_depth(engine)
    template, targets = ExitPolicy("margin"), {"all": 1.0, "half": 0.5, "more": 1.01}
    points, record = calibration.calibrate(engine, rows, template, targets, "fill", 12)
    assert points["more"].thresholds == {}
    exact = outcome("full", engine, rows, ExitOptions("full"), 12)
    layers = []
    for name in ("all", "half"):
        found = outcome(name, engine, rows, ExitOptions("fill", points[name]), 12)
        assert found.ratio(exact) >= targets[name]
        layers.append(found.mean_layers)
    assert layers[1] <= layers[0]
    assert record["points"]["all"] == {str(layer): value for layer, value in points["all"].thresholds.items()}


def test_own_texts_are_those_of_full_depth_and_end_by_themselves(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, done = [prompt_for(f"name[{number}]") for number in range(12)], []
    asked = [{"prompt": prompt, "references": ["x"]} for prompt in prompts]
    # A random model hardly ever ends a text; let what it says in the middle of the first one be the end.
    end = outcome("full", engine, asked[:1], ExitOptions("full"), 30).completions[0].token_ids[15]
    monkeypatch.setattr(type(engine.checkpoint), "eos_token_ids", (end,))
    full = outcome("full", engine, asked, ExitOptions("full"), 30).completions
    rows = own_texts(engine, prompts, 30, lambda ready, total: done.append((ready, total)))
    assert done[-1] == (12, 12)
    ended = [one.finish_reason == "stop" for one in full]
    assert True in ended
    assert rows == [
        {"prompt": row["prompt"], "completion": one.text}
        for row, one, stopped in zip(asked, full, ended, strict=True)
        if stopped
    ]
    assert own_texts(engine, prompts, 1, lambda ready, total: None) == []


def test_table_and_picture(engine: Engine, tmp_path: Path) -> None:
    points = {"half": ExitPolicy("margin", {1: 0.5, 3: 0.5}), "none": ExitPolicy("margin")}
    outcomes = evaluate(engine, judged_by_full_depth(engine), points, ExitPolicy("margin"), 12)
    rows = [one.row(outcomes[0]) for one in outcomes]
    assert [row["name"] for row in rows[:4]] == ["full depth", "static 1", "static 3", "half, fill"]
    assert "none, fill" not in {row["name"] for row in rows}
    assert rows[0]["identical"] == rows[0]["ratio"] == 1.0
    assert rows[0]["layers"] == 4.0
    assert rows[1]["share_1"] > 0.8
    write_table(tmp_path / "results.csv", rows)
    draw_curve(tmp_path / "quality.png", rows, "tiny")
    assert len((tmp_path / "results.csv").read_text().splitlines()) == len(rows) + 1
    assert (tmp_path / "quality.png").stat().st_size > 5000
