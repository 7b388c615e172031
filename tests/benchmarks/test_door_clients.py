"""What the table of clients is made of: the access log, and what clients say themselves."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
from benchmarks.door.client_commands import schemathesis
from benchmarks.door.fitting_requests import fitting
from benchmarks.door.servers import Door
from benchmarks.door_clients import Row, differences, visit

FINE = "Test cases:\n  1,200 generated, 1,200 passed\n"
SAYS = "Failures:\n  ❌ ST108 SSE event violates schema: 2\n\nTest cases:\n  1,200 generated, 2 found\n"


@pytest.fixture
def door(tmp_path: Path) -> Door:
    (tmp_path / "access.log").write_text(json.dumps({"status": 500}) + "\n")
    return Door(1, "key", "m", {}, access_log=tmp_path / "access.log")


def command(folder: Path, *, says: str, code: int) -> list[str]:
    """What asks twice each time it is called."""
    lines = "".join(json.dumps({"status": status}) + "\n" for status in (200, 503))
    (folder / "asks.py").write_text(
        f"import sys\nopen({str(folder / 'access.log')!r}, 'a').write({lines!r})\n"
        f"sys.stdout.buffer.write({says!r}.encode())\nsys.exit({code})\n"
    )
    return [sys.executable, str(folder / "asks.py")]


def test_schemathesis_goes_on_until_there_were_enough_cases(door: Door, tmp_path: Path) -> None:
    done = schemathesis(command(tmp_path, says=FINE, code=0), door, tmp_path / "a", vocabulary=9, cases=2000, seed=5)
    assert [ran.what for ran in done] == [
        "seed 5: examples, coverage, stateful; 1200 cases",
        "seed 6: fuzzing near to what can be answered; 1200 cases",
    ]
    assert [ran.faults for ran in done] == [[], []]


def test_what_schemathesis_finds_is_a_fault(door: Door, tmp_path: Path) -> None:
    [ran] = schemathesis(command(tmp_path, says=SAYS, code=1), door, tmp_path / "a", vocabulary=9, cases=1, seed=0)
    assert ran.faults == [f"exit code 1, see {tmp_path / 'a' / '0.log'}", "ST108 SSE event violates schema: 2"]
    [ran] = schemathesis(command(tmp_path, says="?", code=0), door, tmp_path / "b", vocabulary=9, cases=9, seed=0)
    assert ran.faults == ["it does not say how many cases there were"]


def test_requests_are_counted_where_the_door_has_written_them(door: Door, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 9}')
    asks = " ".join(command(tmp_path, says=SAYS, code=0))
    options = argparse.Namespace(schemathesis=asks, directory=tmp_path, cases=2400, seed=0)
    row = visit("schemathesis", "asgi", door, tmp_path / "a", options)
    assert row.statuses == {200: 2, 503: 2}
    assert row.of_the_server == 2
    assert row.line() == "| schemathesis | asgi | 4 | 2 × 200, 2 × 503 | 2 | 2 |"


def test_a_request_that_is_made_to_fit_stays_right_or_wrong() -> None:
    right = {"model": "x", "n": 100, "max_tokens": 9e9, "prompt": [[5, 300]], "logit_bias": {"301": 1}, "stop": "a"}
    fits = {"model": "m", "n": 2, "max_tokens": 8, "prompt": [[5, 0]], "logit_bias": {"1": 1}, "stop": "a"}
    assert fitting(right, model="m", vocabulary=300) == fits
    wrong = {
        "model": 5,
        "n": 129,
        "max_tokens": True,
        "prompt": [-1, "a", 0.5],
        "logit_bias": {"a": 1, "301": 1},
        "stop_token_ids": [2**63],
    }
    assert fitting(wrong, model="m", vocabulary=300) == wrong
    assert fitting("no object", model="m", vocabulary=300) == "no object"


def test_backends_that_say_different_things_are_told() -> None:
    def row(backend: str, value: float) -> Row:
        return Row(backend, "lm-eval", [], 1.0, {}, figures={"acc": value})

    assert differences([row("asgi", 0.5), row("torchserve", 0.5001)]) == []
    [fault] = differences([row("asgi", 0.5), row("torchserve", 0.51)])
    assert fault == "lm-eval: acc is 0.51 at torchserve, 0.5 at asgi"
