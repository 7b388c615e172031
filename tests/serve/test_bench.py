from __future__ import annotations

import csv
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from helpers.tiny import tiny_checkpoint, tiny_tokenizer
from offramp.common.cli import main
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy
from offramp.serve.bench import measure
from offramp.serve.bench.contestants import Peer, Trial
from offramp.serve.bench.measure import Measured, Note, compare
from offramp.serve.bench.plan import Choices, Variant, Workload, full_plan, quick_plan
from offramp.serve.bench.prompts import PromptLines, RandomTokens, TextStretches, read_prompts
from offramp.serve.measures.iteration_clock import PARTS
from offramp.serve.measures.records import IterationRecord

ROOT = Path(__file__).parents[2]
WORKER = """
import sys, time
sys.path.insert(0, {peers!r})
from worker import serve

def load(options):
    def generate(prompts, new_tokens, ignore_eos):
        print("a library prints")
        if len(prompts) > 2:
            raise ValueError("too many")
        now = time.perf_counter()
        return [[now + 0.5 * step for step in range(new_tokens)] for _ in prompts]
    return f"fake {{options.dtype}} {{options.max_tokens}}", generate

serve(load)
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
    return f"{sys.executable} {script}"


def test_figures_are_made_of_the_times_of_tokens() -> None:
    trial = Trial([[1.0, 1.5, 2.0, 3.0], [2.0, 3.0, 4.0]])
    assert trial.first_all_s == 2.0
    assert trial.decode_tokens == 3  # 3.0 of the first, 3.0 and 4.0 of the second: 2.0 is not after 2.0
    assert trial.decode_rate == 1.5
    assert trial.num_tokens == 7
    assert trial.gaps == [0.5, 0.5, 1.0, 1.0, 1.0]
    assert Trial([[1.0], [2.0]]).decode_rate is None


def test_the_ideal_speedup_leaves_only_the_layers() -> None:
    def measured(variant: Variant, layers: float, head: float, fill: float, depth: int) -> Measured:
        one = Measured("x", "one", "fp32", variant, "plain", Workload(1, 1, 3))
        record = IterationRecord(
            0, {**dict.fromkeys(PARTS, 0.0), "layers": layers, "head": head, "fill": fill}, new_tokens=1
        )
        trial = Trial([[1.0, 2.0]], exit_layers=[depth], iterations=[record])
        one.add(Trial([[1.0]]), trial, num_prompt_tokens=1)
        return one

    base = measured(Variant(), layers=8.0, head=2.0, fill=0.0, depth=4)
    early = measured(Variant(kv_policy="fill"), layers=3.0, head=2.5, fill=0.5, depth=1)
    early.full_depth = base
    early.decode, base.decode = [3.0, 8.0], [2.0, 4.0]
    assert early.ideal is not None
    assert early.proportional is not None
    assert early.realised is not None
    assert early.ideal.median == pytest.approx(10 / (3 + 2))
    assert early.proportional.median == pytest.approx(10 / (2 + 2))
    assert early.realised.median == pytest.approx((10 / 6) / (10 / 5))
    assert early.speedup is not None
    assert (early.speedup.median, early.speedup.low, early.speedup.high) == (1.75, 1.5, 2.0)
    assert base.ideal is None
    assert early.exit_layers == Counter({1: 1})


def test_plans() -> None:
    choices = Choices(batches=(1, 4), exit_at=2, static_layers=(2,), thresholds=(None,))
    (quick,) = quick_plan(choices)
    assert [variant.name for variant in quick.variants] == [
        "full depth", "static at 2", "fill, all at 2, regroup", "fill, all at 2, all",
    ]  # fmt: skip
    assert [(load.batch, load.new_tokens) for load in quick.workloads] == [(1, 64), (4, 64)]
    # Without a policy or an exit to force there is nothing to be sure of.
    assert [variant.name for variant in quick_plan(Choices())[0].variants] == ["full depth"]
    names = [experiment.name for experiment in full_plan(Choices(has_policy=True))]
    assert names == ["batch", "prompt", "output", "hard", "threshold", "kernels"]
    for experiment in full_plan(Choices(has_policy=True)):
        assert len(set(experiment.variants)) == len(experiment.variants)
        for variant in experiment.variants:
            assert variant.baseline in experiment.variants


def test_prompts_are_the_same_each_time(tmp_path: Path) -> None:
    for prompts in (RandomTokens(300), TextStretches(list(range(100)))):
        drawn = prompts.draw(3, 7)
        assert [len(prompt) for prompt in drawn] == [7] * 3
        assert prompts.draw(3, 7) == drawn
        assert len({tuple(prompt) for prompt in drawn}) == 3
    with pytest.raises(OfframpError, match="longer text"):
        TextStretches([1, 2]).draw(1, 3)
    assert PromptLines([[1, 2, 3], [4]]).draw(3, 2) == [[2, 3], [4], [2, 3]]

    tokenizer = tiny_tokenizer()
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "ab"}\n\n"cd"\n', encoding="utf-8")
    assert [tokenizer.decode(ids) for ids in read_prompts(lines, tokenizer).draw(2, 99)] == ["ab", "cd"]
    text = tmp_path / "text.txt"
    text.write_text("a long text " * 20, encoding="utf-8")
    assert [len(ids) for ids in read_prompts(text, tokenizer).draw(2, 5)] == [5, 5]
    lines.write_text('{"prompt": "ab"}\n{"text": "cd"}\n', encoding="utf-8")
    with pytest.raises(OfframpError, match="line 2"):
        read_prompts(lines, tokenizer)


def test_a_peer_answers_by_lines_and_its_faults_are_notes(worker: str, tmp_path: Path) -> None:
    loads = [Workload(2, 3, 4), Workload(3, 3, 4)]
    peer = Peer("fake", worker, tmp_path, "fp32", loads, until_eos=False)
    try:
        assert peer.what == "fake fp32 7"
        (found,) = compare("x", [peer], loads[0], RandomTokens(10), repetitions=1)
        assert isinstance(found, Measured)
        assert found.decode == [pytest.approx(4 - 1 / 0.5 + 2)]  # two tokens every half second
        (note,) = compare("x", [peer], loads[1], RandomTokens(10), repetitions=1)
        assert note == Note("fake", "fake failed: ValueError: too many.")
    finally:
        peer.close()
    with pytest.raises(OfframpError, match="cannot be started"):
        Peer("none", str(tmp_path / "nowhere"), tmp_path, "fp32", loads, until_eos=False)
    with pytest.raises(OfframpError, match="has ended"):
        Peer("none", f"{sys.executable} -c pass", tmp_path, "fp32", loads, until_eos=False)


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
        low, middle, high = (row[f"decode_tokens_per_s{end}"] for end in ("_lowest", "", "_highest"))
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
    assert "missing: not measured" in captured.err
    assert "fake: not measured: fake failed: ValueError: too many" in captured.err

    with (out / "results.csv").open(encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert [row["contestant"] for row in table] == [row["contestant"] for row in rows]
    details = [json.loads(line) for line in (out / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    assert details[0]["threads"] >= 1
    assert details[1 : 1 + len(rows)] == rows
    names = {file.name for file in out.glob("*.png")}
    assert names == {f"quick-{name}.png" for name in ("decode", "prefill", "latency", "breakdown", "speedup")}


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
    ],
)
def test_options_that_make_no_sense(
    directory: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "engine", str(directory), *options])
    assert message in capsys.readouterr().err


def test_any_batch_is_measured(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # More than an engine lets wait by default.
    options = ["--batch", "300", "--prompt-tokens", "1", "--new-tokens", "2", "--repeat", "1", "--sync-policy", "all"]
    assert main(["bench", "engine", str(directory), *options, "--json"]) == 0
    assert [json.loads(line)["batch"] for line in capsys.readouterr().out.splitlines()] == [300, 300]
