"""`offramp evaluate` on tiny models: what its results say, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny import tiny_checkpoint
from offramp.common.cli import main as offramp
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.operating_point import OperatingPoint, OperatingPoints
from offramp.common.exits.policy import ExitPolicy
from offramp.evaluate.cli.evaluate import main
from offramp.evaluate.figures import same_share
from offramp.evaluate.results import read_results
from offramp.evaluate.tables import cell

POLICY = ExitPolicy("margin", {1: 0.3, 2: 0.3, 3: 0.3})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    tiny_checkpoint(folder / "model", ExitConfig((1, 2, 3)), POLICY)
    record = json.loads((folder / "model" / "exits.json").read_text())
    points = OperatingPoints({"safe": OperatingPoint("recompute", POLICY.with_threshold(0.6, (1, 2, 3)))})
    (folder / "model" / "exits.json").write_text(json.dumps({**record, "points": points.to_json()}))
    tiny_checkpoint(folder / "shallow", num_hidden_layers=2)
    tiny_checkpoint(folder / "exits", ExitConfig((2,)))
    questions = ("Tiny models", "random weights", "drawn wider")
    rows: dict[str, list[dict[str, Any]]] = {
        "summaries": [{"prompt": one, "references": [one, "weights"]} for one in questions],
        "choices": [{"question": one, "choices": ["the", "weights are", "no"], "answer": 1} for one in questions],
        "texts": [{"text": one * 9} for one in questions],
    }
    for name, some in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    return folder


def evaluate(folder: Path, out: Path, *arguments: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    assert main([str(folder / "model"), "--out", str(out), *arguments]) == 0
    results = read_results(out, ["evaluation"])
    return results, {setting["name"]: setting for setting in results["settings"]}


def values(setting: dict[str, Any]) -> dict[str, float]:
    return {name: figure["value"] for name, figure in setting["figures"].items()}


def test_answers(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = folder / "summaries.jsonl"
    results, settings = evaluate(
        *(folder, tmp_path / "out", "--task", "summarisation", "--data", str(data), "--max-tokens", "12"),
        *("--threshold", "own,1", "--kv-policy", "fill,verify", "--baseline", str(folder / "shallow")),
        *("--point", "safe"),
    )
    assert list(settings) == ["full depth", "safe", "fill", "verify", "fill > 1", "verify > 1", "baseline"]
    assert results["data"]["examples"] == 3
    assert results["models"]["baseline"]["layers"] == 2
    assert results["command"].startswith("offramp evaluate ")
    assert results["versions"]["torch"]
    full = values(settings["full depth"])
    for name in ("same_texts", "same_tokens", "rougeL_to_full", "speedup", "latency_ratio"):
        assert full[name] == 1
    for name in ("verify", "fill > 1", "verify > 1"):  # the same words, whatever it cost
        mine = values(settings[name])
        assert {key: mine[key] for key in mine if "rouge" in key or "same" in key} == {
            key: full[key] for key in full if "rouge" in key or "same" in key
        }
    fill = values(settings["fill"])
    assert fill["same_tokens"] < 1
    assert 1 < fill["layers_per_token"] < full["layers_per_token"] == 4
    assert settings["safe"]["kv_policy"] == "recompute"
    assert settings["safe"]["policy"]["thresholds"] == {"1": 0.6, "2": 0.6, "3": 0.6}
    depths = settings["fill"]["depths"]
    assert sum(depths.values()) == 3 * 11
    assert fill["early_tokens"] == pytest.approx(1 - depths["4"] / 33)
    assert fill["layers_per_token"] == pytest.approx(sum(int(layer) * n for layer, n in depths.items()) / 33)
    assert settings["fill > 1"]["depths"] == {"4": 33}
    assert settings["baseline"]["depths"] == {"2": 33}
    assert settings["fill"]["policy"] == POLICY.to_json()
    rows = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]
    assert len(rows) == 7 * 3
    assert rows[0]["scores"].keys() == {"rouge1", "rouge2", "rougeL", "rougeLsum"}
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("fill > 1")][-1].endswith("no token left early")


def test_choices(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = folder / "choices.jsonl"
    results, settings = evaluate(
        folder, tmp_path / "out", "--task", "multiple-choice", "--data", str(data), "--threshold", "0.2", "--json"
    )
    assert list(settings) == ["full depth", "exit 1", "exit 2", "exit 3", "recompute > 0.2"]
    assert json.loads(capsys.readouterr().out) == results
    assert values(settings["full depth"])["same_choice"] == 1
    assert values(settings["exit 2"])["layers_per_token"] == 2
    assert set(values(settings["exit 2"])) >= {"accuracy", "accuracy_per_character", "calibration_error", "agreement"}


def test_perplexity(folder: Path, tmp_path: Path) -> None:
    data = folder / "texts.jsonl"
    _, settings = evaluate(
        *(folder, tmp_path / "out", "--task", "perplexity", "--data", str(data), "--window", "16"),
        *("--baseline", str(folder / "shallow")),
    )
    assert list(settings) == ["full depth", "exit 1", "exit 2", "exit 3", "recompute", "baseline"]
    full, mixed = values(settings["full depth"]), values(settings["recompute"])
    assert full["perplexity_ratio"] == full["agreement"] == 1
    assert mixed["perplexity"] / full["perplexity"] == pytest.approx(mixed["perplexity_ratio"])
    assert settings["recompute"]["figures"]["perplexity"]["low"] < mixed["perplexity"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["model", "--task", "chess"], "task 'chess' is unknown"),
        (["model", "--task", "perplexity", "--data", "texts.jsonl", "--kv-policy", "fill"], "leave --kv-policy out"),
        (
            ["shallow", "--task", "perplexity", "--data", "texts.jsonl", "--threshold", "0.5"],
            "--threshold needs early exits",
        ),
        (["model", "--task", "perplexity", "--data", "texts.jsonl", "--threshold", "1,1"], "names of their own"),
        (["model", "--task", "perplexity", "--data", "texts.jsonl", "--point", "fast"], "'fast'"),
        (["model", "--task", "summarisation", "--data", "summaries.jsonl", "--batch", "0"], "max_num_seqs"),
    ],
)
def test_what_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], complaint: str
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(OfframpError, match=complaint):
        main([*arguments, "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_results_are_not_lost(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "results.json").write_text("{}")
    asked = [
        str(folder / "exits"),
        "--task",
        "perplexity",
        "--data",
        str(folder / "texts.jsonl"),
        "--out",
        str(tmp_path),
    ]
    with pytest.raises(OfframpError, match="is there already"):
        main(asked)
    assert main([*asked, "--overwrite", "--limit", "1"]) == 0
    assert "no exit policy, so nothing leaves early" in capsys.readouterr().err
    for text, complaint in (
        ("{", "cannot be read"),
        ('{"kind": "x"}', "kind 'x' in version None"),
        ("[]", "kind None"),
    ):
        (tmp_path / "results.json").write_text(text)
        with pytest.raises(OfframpError, match=complaint):
            read_results(tmp_path, ["evaluation"])


def test_shares_and_cells() -> None:
    assert same_share([1, 2, 3], [1, 2, 4, 5]) == 0.5
    assert same_share([], []) == same_share([7], [7]) == 1
    assert same_share([], [1]) == 0
    assert cell({"value": 0.12345, "low": 0.1, "high": 0.15}) == "0.12 [0.10, 0.15]"
    assert cell({"value": 0.005, "low": 0.0049, "high": 0.0051}, "inner_token_latency_s") == "5.00 [4.90, 5.10]"
    assert cell({"value": 0.5, "low": 0.4, "high": 0.6}, "same_texts") == "50% [40, 60]"
    assert cell({"value": None, "low": None, "high": None}) == cell(None) == "-"


def test_the_tasks_have_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("summarisation")
    with pytest.raises(SystemExit):
        main(["--task", "qa"])
    assert offramp(["--version"]) == 0
