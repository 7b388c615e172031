"""`offramp bench engine` as a whole, and its peers."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

from helpers.tiny import tiny_checkpoint
from offramp.common.cli import main
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy
from offramp.serve.bench import measure
from offramp.serve.bench.measure import Measured, Note, compare
from offramp.serve.bench.peer import Peer
from offramp.serve.bench.plan import Choices, Workload
from offramp.serve.bench.prompts import RandomTokens
from offramp.serve.bench.run import Bench, Settings

ROOT = Path(__file__).parents[2]


_ENDS = ("gap_full_depth_us", "gap_by_layers_us", "gap_realised_us")


WORKER = """
import sys, time
sys.path.insert(0, {peers!r})
from worker import serve

def load(options):
    def generate(prompts, new_tokens, ignore_eos, in_flight):
        print("a library prints")
        if in_flight > 2:
            raise ValueError("too many")
        starts = [time.perf_counter() + 100 * (index // in_flight) for index in range(len(prompts))]
        return starts, [[start + 0.5 * step for step in range(new_tokens)] for start in starts]
    return f"fake {{options.dtype}} {{options.max_tokens}} {{options.small}}", generate

serve(load, [("--small", "an option of this one alone")])
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    policy = ExitPolicy("margin", {1: 0.3, 2: 0.3})
    return tiny_checkpoint(tmp_path_factory.mktemp("bench") / "model", ExitConfig((1, 2), "norm"), policy)


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "REST_S", 0.0)


@pytest.fixture
def worker(tmp_path: Path) -> str:
    script = tmp_path / "fake_worker.py"
    script.write_text(WORKER.format(peers=str(ROOT / "benchmarks" / "peers")), encoding="utf-8")
    return f"{sys.executable} {script} --small"


def test_a_peer_answers_by_lines_and_its_faults_are_notes(worker: str, tmp_path: Path) -> None:
    loads = [Workload(2, 3, 4), Workload(3, 3, 4)]
    peer = Peer("fake", worker, tmp_path, "fp32", loads)
    try:
        assert peer.what == "fake fp32 7 True"
        (found,) = compare("x", [peer], loads[0], RandomTokens(10), repetitions=1)
        assert isinstance(found, Measured)
        assert found.rates == [pytest.approx(4.0)]  # two tokens every half second
        (note,) = compare("x", [peer], loads[1], RandomTokens(10), repetitions=1)
        assert note == Note("fake", "fake failed: ValueError: too many.")
        (found,) = compare("x", [peer], Workload(2, 3, 5, requests=6), RandomTokens(10), repetitions=1)
        assert isinstance(found, Measured)
        # From the end of the first two (2) to the start of the last two (200): one pair begins and ends.
        assert found.rates == [pytest.approx(10 / 198 + 2 / 198, rel=0.2)]
        assert found.request_rates == [pytest.approx(2 / 198, rel=0.01)]
        assert found.prefill == []
    finally:
        peer.close()
    with pytest.raises(OfframpError, match="cannot be started"):
        Peer("none", str(tmp_path / "nowhere"), tmp_path, "fp32", loads)
    with pytest.raises(OfframpError, match="has ended"):
        Peer("none", f"{sys.executable} -c pass", tmp_path, "fp32", loads)


def test_the_command_measures_everybody_and_writes_what_it_found(
    directory: Path, worker: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    sizes = ["--batch", "1,3", "--prompt-tokens", "4", "--new-tokens", "5", "--repeat", "2", "--exit-at", "1"]
    beside = ["--against", "transformers", "--peer", f"fake={worker}", "--peer", f"missing={tmp_path}/nowhere"]
    command = ["bench", "engine", str(directory), *sizes, *beside]
    assert main([*command, "--json", "--out", str(out), "--plots"]) == 0
    captured = capsys.readouterr()
    rows = [json.loads(line) for line in captured.out.splitlines()]
    assert [(row["batch"], row["contestant"], row["mean_layers"]) for row in rows] == [
        (1, "full depth", 4),
        (1, "fill, all at 1, regroup", 1),
        (1, "fill, all at 1, all", 1),
        (1, "transformers", None),
        (1, "fake", None),
        (3, "full depth", 4),
        (3, "fill, all at 1, regroup", 1),
        (3, "fill, all at 1, all", 1),
        (3, "transformers", None),
    ]
    for row in rows:
        low, middle, high = (row[f"tokens_per_s{end}"] for end in ("_lowest", "", "_highest"))
        assert 0 < low <= middle <= high
        assert row["prefill_tokens_per_s"] > 0
    early = rows[1]
    assert early["exit_layers"] == {"1": 8}  # four tokens after the first, twice
    assert {(run["start"], run["stop"], run["rows"]) for run in early["segments"]} == {(0, 1, 1)}
    assert early["speedup"] > 0
    assert early["layers_us_per_token"] > 0
    assert early["fill_us_per_token"] > 0
    assert early["ideal_speedup"] > 0
    assert early["kernels"] in ("native", "packed", "plain")
    assert rows[0]["fill_us_per_token"] == 0
    steps = [value for name, value in early.items() if name.startswith("gap_") and name not in _ENDS]
    assert early["gap_by_layers_us"] + sum(steps) == pytest.approx(early["gap_realised_us"], rel=1e-3)
    assert "missing: not measured" in captured.err
    assert "fake: not measured: fake failed: ValueError: too many" in captured.err

    with (out / "results.csv").open(encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert [row["contestant"] for row in table] == [row["contestant"] for row in rows]
    details = [json.loads(line) for line in (out / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    assert details[0]["threads"] >= 1
    assert details[1 : 1 + len(rows)] == rows
    names = {file.name for file in out.glob("*.png")}
    assert names == {f"quick-{name}.png" for name in ("decode", "prefill", "latency", "breakdown", "gap", "speedup")}


def test_hard_sequences_run_at_full_depth(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--batch", "4", "--prompt-tokens", "4", "--new-tokens", "3", "--repeat", "1", "--exit-at", "1"]
    shares = ["--hard-share", "0,0.5", "--sync-policy", "regroup"]
    assert main(["bench", "engine", str(directory), *sizes, *shares, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["hard_share"], row["mean_layers"]) for row in rows] == [(0, 4), (0, 1), (0.5, 4), (0.5, 2.5)]
    assert rows[3]["exit_layers"] == {"1": 4, "4": 4}


def test_what_does_not_fit_the_model_is_a_note_and_the_rest_goes_on(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--batch", "2", "--prompt-tokens", "253,4", "--new-tokens", "5", "--repeat", "1"]
    assert main(["bench", "engine", str(directory), *sizes, "--sync-policy", "regroup", "--json"]) == 0
    captured = capsys.readouterr()
    rows = [json.loads(line) for line in captured.out.splitlines()]
    assert [(row["contestant"], row["prompt_tokens"]) for row in rows] == [("full depth", 4), ("fill, regroup", 4)]
    assert captured.err.count("more than the 256 that the model takes") == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--new-tokens", "1"], "give at least 2"),
        (["--hard-share", "1.5"], "no share"),
        (["--kv-policy", "full"], "none of"),
        (["--peer", "vllm"], "NAME=COMMAND"),
        (["--plots"], "--out"),
        (["--closed-loop", "--requests", "20"], "give at least 96"),
        (["--engine", "nonsense=1"], "is not FIELD=X"),
        (["--engine", "dtype=bf16"], "is not FIELD=X"),
        (["--policy", "measure"], "is not FIELD=X"),
    ],
)
def test_options_that_make_no_sense(
    directory: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "engine", str(directory), *options])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine", "deep_quorum=abc"], "deep_quorum 'abc' must be a number from 0"),
        (["--engine", "deep_quorum=0.5,2"], "deep_quorum 2 must be a number from 0"),
        (["--engine", "deep_quorum=0.5", "--sync-policy", "all"], "deep_quorum 0.5 needs sync policy 'regroup'"),
        (["--engine", "quantization=int8,int2"], "'int2'"),
        (["--engine", "max_parked_iterations=100000"], "max_parked_iterations 100000 must be in 1..256"),
        (["--engine", "max_model_len=100000"], "max_model_len 100000 is more than the 256 tokens the model takes"),
        (["--engine", 'quantile={"a":1}'], "quantile {'a': 1} must be a number"),
        (["--policy", "min_layer=abc"], "min_layer 'abc' must be a whole number"),
        (["--policy", "measure=margin,nothing"], "confidence measure 'nothing' is unknown"),
        (["--threshold", "nan"], "an exit threshold is NaN"),
        (["--static-layer", "1,3"], "static_layer 3 is no exit of this model"),
        (["--exit-at", "3"], "thresholds name layers [3]"),
    ],
)
@pytest.mark.parametrize("plan", ["quick", "full"])
def test_a_value_that_cannot_be_is_told_before_anything_is_measured(
    directory: Path, plan: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "engine", str(directory), "--batch", "2", "--plan", plan, *options]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("offramp: error: ")
    assert captured.err.count("\n") == 1
    assert not captured.out


def test_a_value_that_means_nothing_without_exits_is_checked_as_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = tiny_checkpoint(tmp_path / "model", ExitConfig(()))
    assert main(["bench", "engine", str(plain), "--batch", "2", "--engine", "deep_quorum=abc"]) == 1
    assert "deep_quorum 'abc' must be a number from 0" in capsys.readouterr().err


def test_a_value_that_does_not_go_with_another_is_a_note(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--batch", "2", "--prompt-tokens", "4", "--new-tokens", "3", "--repeat", "1"]
    assert main(["bench", "engine", str(directory), *sizes, "--engine", "deep_quorum=0,0.5", "--json"]) == 0
    captured = capsys.readouterr()
    names = [json.loads(line)["contestant"] for line in captured.out.splitlines()]
    assert names == [
        "full depth",
        "fill, regroup, deep_quorum 0",
        "fill, all, deep_quorum 0",
        "fill, regroup, deep_quorum 0.5",
    ]
    assert captured.err.count("needs sync policy 'regroup'") == 1


def test_any_batch_is_measured(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # More than an engine lets wait by default.
    options = ["--batch", "300", "--prompt-tokens", "1", "--new-tokens", "2", "--repeat", "1", "--sync-policy", "all"]
    assert main(["bench", "engine", str(directory), *options, "--json"]) == 0
    assert [json.loads(line)["batch"] for line in capsys.readouterr().out.splitlines()] == [300, 300]


def test_quality_is_told_beside_speed_in_a_closed_loop(
    directory: Path, worker: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    references = tmp_path / "references.jsonl"
    lines = [{"prompt": "ab cd"[: 2 + index], "references": ["a b", "cd"]} for index in range(3)]
    references.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    sizes = ["--batch", "1,2", "--prompt-tokens", "8", "--new-tokens", "5", "--repeat", "1"]
    what = ["--closed-loop", "--requests", "7", "--references", str(references), "--out", str(tmp_path), "--plots"]
    rules = ["--sync-policy", "regroup,all", "--policy", "min_layer=2", "--against", "transformers"]
    command = ["bench", "engine", str(directory), *sizes, *what, *rules, "--peer", f"fake={worker}"]
    assert main([*command, "--json"]) == 0
    captured = capsys.readouterr()
    rows = [json.loads(line) for line in captured.out.splitlines()]
    names = ["full depth", "fill, regroup, min_layer 2", "fill, all, min_layer 2", "fake"]
    assert [(row["batch"], row["contestant"]) for row in rows] == [(n, name) for n in (1, 2) for name in names]
    assert captured.err.count("transformers: not measured: starts all its sequences together") == 2
    for row in rows:
        assert row["closed_loop"] is True
        assert row["sequences"] == 7
        assert row["tokens_per_s"] > 0
        assert row["requests_per_s"] > 0
        assert row["prefill_tokens_per_s"] is None
    for row in rows[:3] + rows[4:7]:
        # On average over the run, so its start and its end weigh in: on a busy machine they are much of seven requests.
        assert row["batch"] - 1 < row["in_flight"] <= row["batch"] + 1e-9
        assert row["quality_prompts"] == 3
        assert 0 <= row["quality_same_texts"] <= 1
        assert set(row["exit_layers"]) <= {"2", "4"}  # layer 1 is closed
    for row in (rows[0], rows[4]):
        assert row["quality_same_texts"] == 1
    assert (tmp_path / "quick-gap.png").is_file()
    assert main(command) == 0
    told = capsys.readouterr().out
    assert "closed loop, 2 in flight, 7 in all" in told
    assert "of the time in prefill" in told
    assert "identical to full depth" in told


def test_references_longer_than_the_seats(directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "references.jsonl"
    file.write_text('{"prompt": "a long prompt", "references": "a"}', encoding="utf-8")
    with pytest.raises(OfframpError, match="raise --prompt-tokens"):
        Bench(directory, "quick", Choices(prompt_tokens=(2,)), Settings(references=file))
