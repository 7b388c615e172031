"""The benchmark of training recipes on a tiny model: data, recipes, curves and speed. Training has its own tests."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from benchmarks.recipes import curve as curves
from benchmarks.recipes import tasks
from benchmarks.recipes.__main__ import recipe_files
from benchmarks.recipes.curve import at_ratio, at_speed
from benchmarks.recipes.picture import draw
from benchmarks.recipes.settings import Settings, Timing
from benchmarks.recipes.speed import Decoding, LayerCost, Speed
from benchmarks.texts.outcome import outcome
from benchmarks.texts.rows import read_rows

from helpers.tiny import tiny_checkpoint
from offramp.common.exits.config import ExitConfig
from offramp.serve.config import EngineConfig
from offramp.serve.engine import Engine
from offramp.serve.measures.iteration_clock import PARTS
from offramp.serve.measures.records import Gauges, IterationRecord, SegmentRun
from offramp.serve.request.exit_options import ExitOptions
from offramp.train.data.docstrings import DocstringOptions
from offramp.train.recipe import load_recipe

FILES = ("train", "validation", "ask_train", "ask_validation", "test")


def test_e2e_writes_about_training_and_synthetic_meanings_but_no_test_ones(tmp_path: Path) -> None:
    same = "eatType[pub], priceRange[cheap], customer rating[low], area[riverside], familyFriendly[no], near[X]"
    for name, mrs in (("dev", 120), ("judge", 18)):
        with (tmp_path / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(("mr", "ref"))
            rows.writerows((f"name[{name} {number}], food[Thai], {same}", "A text.") for number in range(mrs))
    tasks.write_e2e(tmp_path / "dev.csv", tmp_path / "judge.csv", tmp_path, prompts=300, test_rows=5)
    rows = {name: read_rows(tmp_path / f"{name}.jsonl") for name in FILES}
    asked = [row["prompt"] for row in rows["ask_train"]]
    assert len(asked) == len(set(asked)) == 300
    assert {row["prompt"] for row in rows["train"]} <= set(asked)
    assert not {row["prompt"] for row in rows["test"]} & set(asked)
    assert len(rows["test"]) == 5
    assert len(rows["ask_validation"]) == tasks.VALIDATION


def test_docstrings_keep_packages_apart_and_none_rules_the_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def collected(options: DocstringOptions, cache: Path) -> list[dict[str, str]]:
        names = {"train": ("a", "b"), "validation": ("c",), "test": ("d", "e")}[options.split]
        counts = {"a": 50, "b": 5, "c": 60, "d": 500, "e": 12}
        return [
            {"package": name, "summary": f"{name} {number}", "details": f"More of {name} {number}."}
            for name in names
            for number in range(counts[name])
        ]

    monkeypatch.setattr(tasks, "load_docstrings", collected)
    tasks.write_docstrings(tmp_path, tmp_path, prompts=40, test_rows=120)
    rows = {name: read_rows(tmp_path / f"{name}.jsonl") for name in FILES}
    assert [len(rows[name]) for name in FILES] == [55, 40, 40, 40, 42]
    assert {row["prompt"] for row in rows["ask_train"]} < {row["prompt"] for row in rows["train"]}
    assert rows["train"][0]["completion"].startswith((" a ", " b "))
    mine = [row["references"][0] for row in rows["test"]]
    assert (sum(text.startswith("d") for text in mine), sum(text.startswith("e") for text in mine)) == (30, 12)


@pytest.mark.parametrize("task", ["e2e", "docstrings"])
def test_joint_variants_differ_in_what_is_frozen_alone(task: str) -> None:
    places = [(f"vars.{name}", "x") for name in ("checkpoint", "data", "out")]
    filled, exact, first, prime = (
        load_recipe(recipe_files(task, *names), places)
        for names in (("joint",), ("joint", "exact_kv"), ("finetune",), ("prime",))
    )
    assert filled["model"]["init_args"].pop("fill_aware")
    assert exact["model"]["init_args"].pop("fill_aware") is None
    assert filled == exact
    for recipe in (filled, first, prime):
        (callback,) = recipe["trainer"]["callbacks"]
        assert recipe["trainer"]["max_steps"] % callback["init_args"]["every_n_train_steps"] == 0


def record(rows: dict[tuple[int, int], int], layer_s: float, waiting: int, **parts: float) -> IterationRecord:
    segments = tuple(SegmentRun(start, stop, n, (stop - start) * layer_s) for (start, stop), n in rows.items())
    seconds: dict[Any, float] = {**dict.fromkeys(PARTS, 0.0), **parts, "layers": sum(run.seconds for run in segments)}
    return IterationRecord(0, seconds, segments, decode_rows=8, new_tokens=8, after=Gauges(waiting=waiting))


def test_speed_takes_medians_of_layers_and_leaves_out_what_stood_still() -> None:
    # A layer takes 1 second on 8 rows and half of that on 4. Now and then the machine is stopped.
    full = [record({(0, 4): 8}, 1.0, 3, head=2.0, sampling=1.0) for _ in range(19)]
    full += [record({(0, 4): 8}, 50.0, 3, head=90.0, sampling=1.0)]
    early = [record({(0, 2): 8}, 1.0, 3, head=1.0, sampling=1.0, exit_test=1.0) for _ in range(20)]
    # Seats were empty: it tells what a layer takes, and counts for nothing else.
    tail = [record({(0, 2): 4}, 0.5, 0, head=70.0) for _ in range(20)]
    prompts = [IterationRecord(0, dict.fromkeys(PARTS, 9.0), prefill_rows=3, new_tokens=1, after=Gauges(waiting=3))]
    mine, base = Decoding.of([*early, *tail, *prompts]), Decoding.of(full)
    assert (mine.tokens, base.tokens) == (160, 160)
    assert dict(mine.layer_calls) == {8: 40}
    cost = LayerCost([mine, base])
    assert [cost.of(rows) for rows in (1, 4, 6, 8, 20)] == [0.5, 0.5, 0.75, 1.0, 1.0]
    speed = Speed.between(mine, base, cost)
    # Full depth: 4 + 2 + 1 seconds; leaving saves 2 of layers and 1 of the head, and its test takes 1.
    assert speed.ideal == pytest.approx(7 / 4)
    assert speed.whole == pytest.approx(7 / 5)
    assert speed.us["layers"] == pytest.approx(2e6 / 8)
    assert Speed.between(base, base, cost).whole == 1.0
    again = Decoding.from_json(mine.to_json())
    assert Speed.between(again, base, LayerCost([again, base])) == speed


def test_a_curve_is_read_where_it_first_falls_below_the_target() -> None:
    line: list[dict[str, Any]] = [
        {"ratio": 1.0, "speedup": 1.0},
        {"ratio": 0.99, "speedup": 1.4},
        {"ratio": 0.97, "speedup": 1.8},
        {"ratio": 1.0, "speedup": 2.0},  # luck
    ]
    assert at_ratio(line, "speedup") == pytest.approx(1.6)
    assert at_ratio(line[:2], "speedup") == 1.4
    assert at_speed(line, "speedup") == pytest.approx(0.98)
    assert at_speed(line[:2], "speedup") is None


def test_curves_of_a_tiny_model(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "tiny", exits=ExitConfig((1, 3), "norm"))
    settings = Settings(
        test_rows=6,
        max_tokens=10,
        thresholds=(2.0, 0.5, 0.05),
        engine=EngineConfig(max_model_len=64),
        timings=(Timing("regroup", 2), Timing("quorum", 2, deep_quorum=1.0), Timing("alone", 1, prompts=2)),
    )
    rows = [{"prompt": f"prompt {number}", "references": ["x"]} for number in range(6)]
    full = outcome("full", Engine.from_checkpoint(model), rows, ExitOptions("full"), 10)
    rows = [{**row, "references": [one.text]} for row, one in zip(rows, full.completions, strict=True)]
    points = curves.measure(settings, model, rows, [0.5] * 6, lambda name, done, total: None)
    curves.write_points(tmp_path / "points.json", points)
    assert curves.read_points(tmp_path / "points.json") == points
    table = curves.table({"one": points, "two": points})
    assert len(table) == 2 * (1 + 2 * 3)
    assert table[0]["ratio"] == table[0]["regroup_speedup"] == table[0]["alone_speedup"] == 1.0
    assert table[0]["over_start"] == 2.0
    for kv in curves.KV_POLICIES:
        line = curves.curve(table, "one", kv)
        assert line[1]["ratio"] == line[1]["identical"] == 1.0  # nothing is that sure
        layers = [row["layers"] for row in line]
        assert layers[0] == layers[1] == 4.0
        assert layers[2] > layers[3]
        assert line[3]["quorum_speedup"] > 0
    found = curves.summary(table)
    assert [(one["variant"], one["kv"]) for one in found] == [
        (variant, kv) for variant in ("one", "two") for kv in curves.KV_POLICIES
    ]
    draw(tmp_path / "quality.png", table, "tiny")
    assert (tmp_path / "quality.png").stat().st_size > 5000
