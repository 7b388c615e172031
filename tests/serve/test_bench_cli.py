from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.tiny import tiny_checkpoint
from offramp.common.cli import main


def test_any_batch_is_measured_and_one_token_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = str(tiny_checkpoint(tmp_path / "plain"))
    # More than an engine lets wait by default.
    options = {"--batch": 300, "--prompt-tokens": 1, "--new-tokens": 2, "--repeat": 1}
    words = [word for pair in options.items() for word in map(str, pair)]
    assert main(["bench", "engine", plain, *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["batch"] == 300
    with pytest.raises(SystemExit):
        main(["bench", "engine", plain, "--new-tokens", "1"])
    assert "give at least 2" in capsys.readouterr().err
