"""The demo's own code, all of its steps, on a tiny model: what `make demo` runs cannot rot unseen."""

from __future__ import annotations

import io
import json
from pathlib import Path

import demo.__main__
import demo.steps
import pytest
from demo.__main__ import Settings, closing_words, run
from rich.console import Console

from helpers.tiny import tiny_checkpoint

pytestmark = pytest.mark.slow

RECIPE = """
vars: {save_every: 2}
trainer: {max_steps: 4, val_check_interval: 4}
"""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "small.yaml").write_text(RECIPE)
    # As deep as the real one needs, since recipes name the exit layers.
    source = tiny_checkpoint(tmp_path / "tiny", num_hidden_layers=22, max_position_embeddings=512)
    return Settings(
        source=str(source),
        train_rows=120,
        validation_rows=4,
        calibration_rows=6,
        test_rows=6,
        alone_rows=2,
        max_tokens=12,
        rounds=1,
        recipe=tmp_path / "small.yaml",
    )


def test_the_demo_runs_and_goes_on_where_it_stopped(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_offramp: Path
) -> None:
    work, said = tmp_path / "work", io.StringIO()
    for module in (demo.steps, demo.__main__):
        monkeypatch.setattr(module, "SCRIPT", quick_offramp)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "replaced by the demo")  # and put back after the test
    results = run(settings, work, Console(file=said, width=200))

    full = results[0]
    assert full.name == "full, alone"
    assert set(full.layers) == {22}
    assert {len(one.answers) for one in results} == {settings.alone_rows, settings.test_rows}
    exits = json.loads((work / "calibrate" / "model" / "exits.json").read_text())
    assert exits["exits"]["layers"] == [10, 20]
    assert exits["calibration"]["prompts"] == settings.calibration_rows
    assert len(exits["policy"]["shortlist"]) > 2

    stamps = {path: path.stat().st_mtime_ns for path in work.glob("*.done.json")}
    again = run(settings, work, Console(file=io.StringIO()))
    assert again == results
    assert {path: path.stat().st_mtime_ns for path in work.glob("*.done.json")} == stamps

    closing_words(settings, work, results, Console(file=said, width=200), 1.0)
    assert "full, alone" in said.getvalue()
    assert (work / "exit_depth.png").read_bytes().startswith(b"\x89PNG")
