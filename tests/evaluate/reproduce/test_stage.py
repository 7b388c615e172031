"""Stages are skipped while what went into them holds, and never else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offramp.common.errors import OfframpError
from offramp.evaluate.reproduce.stage import Stage, record_of, result_of, run_stages


class Log:
    """Two stages that note when they run."""

    def __init__(self, out: Path) -> None:
        self.out, self.ran = out, []
        self.fails = False

    ran: list[str]

    def stages(self, first: Any = 1, second: Any = 1) -> list[Stage]:
        def make(name: str) -> Any:
            def run(folder: Path) -> str:
                assert not list(folder.iterdir()), "a stage starts in an empty folder"
                (folder / "left").touch()
                if self.fails and name == "second":
                    raise RuntimeError
                self.ran.append(name)
                return f"of {name}"

            return run

        return [Stage("first", make("first"), (), first), Stage("second", make("second"), ("first",), second)]

    def run(self, *selected: str, **settings: Any) -> list[str]:
        self.ran.clear()
        run_stages(self.stages(**settings), self.out, selected, tell=lambda sentence: None)
        return list(self.ran)


def test_what_has_not_changed_is_not_done_again(tmp_path: Path) -> None:
    log = Log(tmp_path)
    assert log.run() == ["first", "second"]
    assert log.run() == []
    assert result_of(tmp_path, "second") == "of second"
    assert record_of(tmp_path, "second")["cpu_s"] >= 0


def test_a_change_reaches_all_that_stands_on_it(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.run()
    assert log.run(second=2) == ["second"]
    assert log.run(first=2, second=2) == ["first", "second"]


def test_another_version_makes_all_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(tmp_path)
    log.run()
    monkeypatch.setattr("offramp.evaluate.reproduce.stage.version", lambda name: "9")
    assert log.run() == ["first", "second"]


def test_what_was_cut_off_starts_again(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.fails = True
    with pytest.raises(RuntimeError):
        log.run()
    log.fails = False
    assert log.run() == ["second"]


def test_selected_stages_stand_on_results_that_hold(tmp_path: Path) -> None:
    log = Log(tmp_path)
    with pytest.raises(OfframpError, match="let --stages name first"):
        log.run("second")
    assert log.run("first") == ["first"]
    assert log.run("second") == ["second"]
    with pytest.raises(OfframpError, match="names third; the stages are first, second"):
        log.run("third")
