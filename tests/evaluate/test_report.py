"""`offramp report`: everything measured is on the page, and what is not understood is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from offramp.common.errors import OfframpError
from offramp.evaluate.cli.report import main
from offramp.evaluate.results import circumstances, write_results


def figure(value: float) -> dict[str, float]:
    return {"value": value, "low": value - 0.1, "high": value + 0.1}


def setting(name: str, layers: float, policy: dict[str, Any] | None = None) -> dict[str, Any]:
    figures = {
        "f1": figure(0.5),
        "f1_ratio": figure(1.0),
        "layers_per_token": figure(layers),
        "same_tokens": figure(0.7),
    }
    return {
        **{"name": name, "model": "model", "kv_policy": "fill", "static_layer": None, "policy": policy, "engine": {}},
        **{"figures": {**figures, "tokens_per_second": {"value": None, "low": None, "high": None}}},
        **{"depths": {"2": 3, "4": 1} if policy else {"4": 4}},
    }


def evaluation(folder: Path, **changed: Any) -> Path:
    policy = {"measure": "margin", "thresholds": {"2": 0.5}, "min_layer": 0, "decay": 2.0, "shortlist": None}
    results = {
        "task": {"name": "qa", "kind": "write", "main": "f1", "chat": False, "max_tokens": 8, "stop": []},
        "data": {"path": "<data>.json", "sha256": "ab" * 32, "examples": 7, "examples_sha256": "cd" * 32},
        "models": {"model": {"path": "/some/model", "layers": 4, "exits": [2], "sha256": {}}},
        "settings": [setting("full depth", 4.0), setting("fill > 0.5", 2.5, {**policy, "shortlist_only": False})],
        **changed,
    }
    return write_results(folder, "evaluation", {**circumstances(["offramp", "evaluate", "a b"]), **results})


def study(folder: Path) -> Path:
    series = {"name": "fill", "x": [1, 2, 3], "y": [1.0, None, 0.5], "low": [0.9, None, 0.4], "high": [1.1, None, 0.6]}
    table = {"title": "A table", "columns": ["x", "y"], "rows": [["1", "1.00"]], "note": ""}
    found = {
        **{"question": "Does it drift?", "about": ["It says."], "tables": [table]},
        "curves": [{"title": "Drift", "x": "position", "y": "agreement", "log": "x", "series": [series]}],
    }
    return write_results(folder, "study", {**circumstances(["offramp", "study", "position"]), **found})


def test_everything_is_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    evaluation(tmp_path / "a")
    out = tmp_path / "new" / "report.html"
    assert main([str(tmp_path / "a"), str(study(tmp_path / "b")), "-o", str(out), "--title", "T&T"]) == 0
    page = out.read_text(encoding="utf-8")
    for wanted in (
        *("T&amp;T", "qa, model", "offramp evaluate &#39;a b&#39;", "fill &gt; 0.5", "margin &gt; 2: 0.5; decay 2.0"),
        *("75.0%", "&lt;data&gt;.json", "Does it drift?", "It says.", "A table", "torch", "exits at 2"),
    ):
        assert wanted in page, wanted
    assert page.count("<svg") == 4 + 1
    assert "<data>" not in page


def test_what_is_no_result_is_refused(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps({"schema_version": 1, "kind": "guess"}))
    with pytest.raises(OfframpError, match="kind 'guess' in version 1, and this reads evaluation, study in version 1"):
        main([str(tmp_path), "-o", str(tmp_path / "report.html")])
    with pytest.raises(OfframpError, match="cannot be read as results"):
        main([str(tmp_path / "nothing"), "-o", str(tmp_path / "report.html")])
    evaluation(tmp_path / "a", settings=[{"name": "half"}])
    with pytest.raises(OfframpError, match="lacks 'figures'"):
        main([str(tmp_path / "a"), "-o", str(tmp_path / "report.html")])
    assert not (tmp_path / "report.html").exists()


def test_mlflow_gets_the_page(
    tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert main([str(study(tmp_path / "b")), "-o", "report.html"]) == 0
    run = capsys.readouterr().err.split()[-1]
    assert [one.path for one in MlflowClient(uri).list_artifacts(run)] == ["report.html"]
