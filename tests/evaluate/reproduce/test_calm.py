"""The whole experiment, tiny: every stage, the report, and a second run that does nothing again."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from helpers.restaurants import write_restaurants
from offramp.evaluate.reproduce.calm import main
from offramp.evaluate.reproduce.conclusions import conclude
from offramp.evaluate.reproduce.paper import TECHNIQUES


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calm")
    write_restaurants(folder)
    assert main(["calm", str(folder / "out"), "--size", "tiny", "--data", str(folder)]) == 0
    return folder / "out"


@pytest.fixture(scope="module")
def results(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text())


@pytest.mark.slow
def test_a_second_run_does_nothing_again(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = str(out.parent)
    before = {file: file.stat().st_mtime_ns for file in out.glob("*/result.json")}
    assert len(before) == 8
    assert main(["calm", str(out), "--size", "tiny", "--data", data]) == 0
    assert "running" not in capsys.readouterr().out
    assert {file: file.stat().st_mtime_ns for file in out.glob("*/result.json")} == before


@pytest.mark.slow
def test_the_report_has_the_papers_table_beside_ours(out: Path, results: dict[str, Any]) -> None:
    page, text = (out / "report.html").read_text(), (out / "report.md").read_text()
    for words in ("0.7670", "53.82%", "Figure 2", "softmax margin, regroup"):
        assert words in page
        assert words in text
    for name in re.findall(r"\]\((\w+\.png)\)", text):
        assert (out / name).stat().st_size > 1000
    assert len(results["conclusions"]) == 11


@pytest.mark.slow
def test_parts_of_time_are_all_of_it(results: dict[str, Any]) -> None:
    batch = str(results["speed"]["figure_batch"])
    for one in results["speed"]["batches"][batch]["contestants"].values():
        spent = sum(one["parts_us_per_token"].values())
        assert 0.5 * one["wall_us_per_token"] < spent <= one["wall_us_per_token"]


@pytest.mark.slow
def test_rows_of_the_table_are_what_their_names_say(results: dict[str, Any]) -> None:
    rows = results["quality"]["rows"]
    assert rows["full"]["exit_rate"] == 0.0
    assert rows["full"]["to_full"]["value"] == 1.0
    assert 0.4 < rows["static half"]["exit_rate"] <= 0.5, "but for first tokens"
    assert results["full"]["decoder_layers"] == 2 * results["shallow"]["decoder_layers"]
    assert results["full"]["best_step"] in (10, 20)


@pytest.mark.slow
def test_conclusions_follow_the_figures(results: dict[str, Any]) -> None:
    planted = deepcopy(results)
    contestants = planted["speed"]["batches"][str(planted["speed"]["figure_batch"])]["contestants"]
    for technique in TECHNIQUES:
        contestants[technique]["speedup"] = {"value": 2.0, "low": 1.9, "high": 2.1}
        contestants[technique]["latency_ratio"] = {"value": 2.1, "low": 2.0, "high": 2.2}
        gap = planted["positions"]["techniques"][technique]["filled_less_exact"]
        gap["to_label"] = {"value": -0.1, "low": -0.2, "high": -0.01}
    contestants["state"]["speedup"] = {"value": 3.0, "low": 2.9, "high": 3.1}
    found = {" ".join(one.question.split()[:3]): one for one in conclude(planted)}
    assert found["Which measure is"].verdict == "same"
    assert found["Does early exit"].verdict == "same"
    assert found["Does inner-token latency"].verdict == "differs"
    assert "beyond chance for softmax margin, classifier, state similarity" in found["Is filling sound:"].here
    for technique in TECHNIQUES:
        contestants[technique]["speedup"] = {"value": 0.9, "low": 0.8, "high": 1.0}
    found = {" ".join(one.question.split()[:3]): one for one in conclude(planted)}
    assert found["Does early exit"].verdict == "differs"
    planted["quality"]["rows"]["full"]["to_label"]["value"] = 0.0
    assert conclude(planted)[0].verdict != "same", "a model that has learnt nothing keeps nothing"
